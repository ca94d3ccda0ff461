"""Small vision-language models with random weights: the package's LLaVA, and one of each other family, made here."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner import assets
from tuner.models import compat
from tuner.models.load import CACHE, make_tiny

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Values = dict[str, Any]

KINDS = ("llava", "qwen2_5_vl")
"""The families of most tests."""
FAMILIES = ("llava_next", "qwen3_vl", "internvl", "gemma3", "gemma4", "smolvlm")
"""The others."""
_ASSET = "package:tiny_vision"


class Family(NamedTuple):
    """What `make` needs of a family.

    `tokens` are the special tokens by the attribute of the tokenizer that names them, if one does. `image` is the text
    of an image in the chat template.
    """

    tokens: dict[str, str]
    image: str
    write: Callable[[Path, PreTrainedTokenizerBase, Values], None]


def make(kind: str, folder: Path) -> Path:
    """Return a folder with a small model of this kind, as it would be published."""
    if kind == "llava":
        shutil.copytree(make_tiny(Path(assets.asset(_ASSET)), CACHE), folder)
        return folder
    import torch
    from transformers import AutoTokenizer

    family = _FAMILIES[kind]
    tiny = assets.asset("package:tiny")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.add_special_tokens({"additional_special_tokens": [*family.tokens.values()]})
    template = (Path(tiny) / "chat_template.jinja").read_text(encoding="utf-8")
    plain = "{{- message['content'] + '<|im_end|>' }}\n    {%- endif"
    assert plain in template
    tokenizer.chat_template = template.replace(plain, _content(family.image) + "{{- '<|im_end|>' }}\n    {%- endif")
    tokenizer.save_pretrained(folder)
    if named := {name: token for name, token in family.tokens.items() if name.endswith("_token")}:
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"extra_special_tokens": named}))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = {name: getattr(tokenizer, name) for name in ("pad_token_id", "eos_token_id", "bos_token_id")}
    torch.manual_seed(0)
    family.write(folder, tokenizer, {**_LLM, **ends, "vocab_size": len(tokenizer)})
    return folder


def processor(folder: Path) -> Any:
    """Return the processor of a model, with a token of padding."""
    return compat.processor(str(folder))


def image_text(kind: str) -> str:
    """Return the text of an image in the chat template of `make`, before the processor repeats its token."""
    # The LLaVA has the chat template of an LLM, which reads texts alone: an image stands on a line, as in LLaVA's rows.
    return "<image>\n" if kind == "llava" else _FAMILIES[kind].image


def _content(image: str) -> str:
    parts = "{%- for part in message['content'] %}{{ part['text'] if part['type'] == 'text' else '" + image + "' }}"
    return (
        "{%- if message['content'] is string %}{{ message['content'] }}{%- else %}"
        + parts
        + "{%- endfor %}{%- endif %}"
    )


_LLM = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
_TOWER_OF_QWEN = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
}
_ROPE_OF_QWEN = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
_SQUARE = {"height": 32, "width": 32}


def _ids(tokenizer: PreTrainedTokenizerBase, tokens: dict[str, str]) -> dict[str, int]:
    return {name: int(tokenizer.convert_tokens_to_ids(token)) for name, token in tokens.items()}


_TOKENS_OF_QWEN = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}


def _write_qwen(kind: str, of_tower: Values, folder: Path, tokenizer: PreTrainedTokenizerBase, llm: Values) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    text = {**llm, "rope_parameters": _ROPE_OF_QWEN}
    halves = {"text_config": text, "vision_config": _TOWER_OF_QWEN | of_tower}
    config = AutoConfig.for_model(kind, **halves, **_ids(tokenizer, _TOKENS_OF_QWEN))
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    Qwen2VLImageProcessorPil(patch_size=8, min_pixels=16 * 16, max_pixels=64 * 64).save_pretrained(folder)


_write_qwen2_5 = partial(_write_qwen, "qwen2_5_vl", {"window_size": 32, "fullatt_block_indexes": [1]})
_write_qwen3 = partial(_write_qwen, "qwen3_vl", {"deepstack_visual_indexes": [0], "num_position_embeddings": 64})


def _write_llava_next(folder: Path, tokenizer: PreTrainedTokenizerBase, llm: Values) -> None:
    from transformers import LlavaNextConfig, LlavaNextForConditionalGeneration, LlavaNextProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil

    config = LlavaNextConfig(
        text_config={**llm, "model_type": "mistral"},
        vision_config={**_TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        image_grid_pinpoints=[[32, 64], [64, 32]],
        image_seq_length=16,
        **_ids(tokenizer, {"image_token_index": "<image>"}),
    )
    LlavaNextForConditionalGeneration(config).save_pretrained(folder)
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size=_SQUARE, image_grid_pinpoints=config.image_grid_pinpoints
    )
    LlavaNextProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)


def _write_internvl(folder: Path, tokenizer: PreTrainedTokenizerBase, llm: Values) -> None:
    from transformers import InternVLConfig, InternVLForConditionalGeneration
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    tower = {**_TOWER, "image_size": [32, 32], "patch_size": [8, 8]}
    config = InternVLConfig(
        text_config={**llm, "model_type": "qwen2"},
        vision_config=tower,
        image_seq_length=4,
        **_ids(tokenizer, {"image_token_id": "<IMG_CONTEXT>"}),
    )
    InternVLForConditionalGeneration(config).save_pretrained(folder)
    GotOcr2ImageProcessorPil(size=_SQUARE, max_patches=2, crop_to_patches=True).save_pretrained(folder)
    _write_processor(folder, "InternVLProcessor", image_seq_length=4)


def _write_gemma3(folder: Path, tokenizer: PreTrainedTokenizerBase, llm: Values) -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3Processor
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    ids = {
        "image_token_id": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    }
    config = Gemma3Config(
        text_config={**llm, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
        vision_config={**_TOWER, "model_type": "siglip_vision_model"},
        mm_tokens_per_image=4,
        **_ids(tokenizer, ids),
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    Gemma3Processor(Gemma3ImageProcessorPil(size=_SQUARE), tokenizer, image_seq_length=4).save_pretrained(folder)


def _write_gemma4(folder: Path, tokenizer: PreTrainedTokenizerBase, llm: Values) -> None:
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    text = {
        **llm,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 64,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": llm["vocab_size"],
        "use_bidirectional_attention": "vision",
    }
    tower = {
        **{key: value for key, value in _TOWER.items() if key != "image_size"},
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "patch_size": 4,
        "pooling_kernel_size": 2,
    }
    sound = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "output_proj_dims": 32,
        "subsampling_conv_channels": [8, 4],
    }
    ids = {
        "image_token_id": "<|image|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
        "video_token_id": "<|video|>",
        "audio_token_id": "<|audio|>",
        "boa_token_id": "<|audio>",
        "eoa_token_index": "<audio|>",
    }
    halves = {"text_config": text, "vision_config": tower, "audio_config": sound}
    config = Gemma4Config(**halves, vision_soft_tokens_per_image=70, **_ids(tokenizer, ids))
    Gemma4ForConditionalGeneration(config).save_pretrained(folder)
    images = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70).to_json_string()
    sounds = Gemma4AudioFeatureExtractor().to_json_string()
    videos = {"video_processor_type": "Gemma4VideoProcessor", "num_frames": 4}
    parts = {"image_processor": json.loads(images), "feature_extractor": json.loads(sounds), "video_processor": videos}
    _write_processor(folder, "Gemma4Processor", image_seq_length=70, **parts)


def _write_smolvlm(folder: Path, tokenizer: PreTrainedTokenizerBase, llm: Values) -> None:
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    config = SmolVLMConfig(
        text_config={**llm, "model_type": "llama"},
        vision_config=_TOWER,
        scale_factor=2,
        pad_token_id=llm["pad_token_id"],
        **_ids(tokenizer, {"image_token_id": "<image>"}),
    )
    SmolVLMForConditionalGeneration(config).save_pretrained(folder)
    SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    ).save_pretrained(folder)
    _write_processor(folder, "SmolVLMProcessor", image_seq_len=4)


def _write_processor(folder: Path, name: str, **values: object) -> None:
    """Write what `save_pretrained` does of a processor that needs torchvision for videos."""
    text = json.dumps({"processor_class": name, **values})
    (folder / "processor_config.json").write_text(text, encoding="utf-8")


_OF_QWEN = {"start": "<|vision_start|>", "end": "<|vision_end|>", "image": "<|image_pad|>", "video": "<|video_pad|>"}
_PART_OF_QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
_FAMILIES = {
    "qwen2_5_vl": Family(_OF_QWEN, _PART_OF_QWEN, _write_qwen2_5),
    "qwen3_vl": Family(_OF_QWEN, _PART_OF_QWEN, _write_qwen3),
    "llava_next": Family({"image_token": "<image>"}, "<image>", _write_llava_next),
    "internvl": Family(
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>",
        _write_internvl,
    ),
    "gemma3": Family(
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
        _write_gemma3,
    ),
    "gemma4": Family(
        {
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "video": "<|video|>",
        },
        "<|image|>",
        _write_gemma4,
    ),
    "smolvlm": Family(
        {
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        "<image>",
        _write_smolvlm,
    ),
}
