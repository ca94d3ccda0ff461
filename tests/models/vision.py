"""Small vision-language models with random weights: the package's LLaVA, and a Qwen2.5-VL made here."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tuner import assets
from tuner.models import compat
from tuner.models.load import CACHE, make_tiny

KINDS = ("llava", "qwen2_5_vl")
_ASSET = "package:tiny_vision"
_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_PART = "<|vision_start|><|image_pad|><|vision_end|>"


def make(kind: str, folder: Path) -> Path:
    """Return a folder with a small model of this kind, as it would be published."""
    if kind == "llava":
        shutil.copytree(make_tiny(Path(assets.asset(_ASSET)), CACHE), folder)
    else:
        _make_qwen(folder)
    return folder


def processor(folder: Path) -> Any:
    """Return the processor of a model, with a token of padding."""
    return compat.processor(str(folder))


def _make_qwen(folder: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tiny = assets.asset("package:tiny")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_special_tokens({"additional_special_tokens": [*_TOKENS]})
    start, end, image, video = tokenizer.convert_tokens_to_ids([*_TOKENS])
    words = "{%- for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '" + _PART + "' }}"
    content = (
        "{%- if message['content'] is string %}{{ message['content'] }}{%- else %}"
        + words
        + "{%- endfor %}{%- endif %}"
    )
    text = (Path(tiny) / "chat_template.jinja").read_text(encoding="utf-8")
    plain = "{{- message['content'] + '<|im_end|>' }}\n    {%- endif"
    tokenizer.chat_template = text.replace(plain, content + "{{- '<|im_end|>' }}\n    {%- endif")
    assert tokenizer.chat_template != text
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2_5_VLConfig(
        text_config={
            **heads,
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": tokenizer.bos_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "out_hidden_size": 64,
            "window_size": 32,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=8, min_pixels=16 * 16, max_pixels=64 * 64).save_pretrained(folder)
