"""Writes a small InternLM2 as its publisher does: names and layout of weights, config with auto_map, tokenizer.model.

It imports nothing of tuner, so that what it writes cannot agree with tuner's code by construction.
"""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import save_file
from sentencepiece import sentencepiece_model_pb2 as protobuf
from torch import Tensor

HIDDEN, INTERMEDIATE, LAYERS, HEADS, GROUPS, POSITIONS = 64, 128, 2, 4, 2, 128
HEAD_DIM = HIDDEN // HEADS
SPECIALS = ("<|plugin|>", "<|interpreter|>", "<|action_end|>", "<|action_start|>", "<|im_end|>", "<|im_start|>")
PIECES = 500
FIRST_SPECIAL = PIECES + 1
VOCAB = FIRST_SPECIAL + len(SPECIALS)
IM_END = VOCAB - 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
REMOTE_CODE = "raise RuntimeError('code that came with the model was run')\n"

_SENTENCES = (
    "The capital of a country is where its government sits.",
    "A river flows from the mountains down to the sea; the water is cold in winter and warm in summer.",
    "What is the name of the tallest mountain? It is more than eight thousand metres high.",
    "user asks a question and the assistant answers it in one sentence.",
    "    if value is None:\n        return [item for item in items if item]",
    "书生·浦语 是 上海人工智能实验室 的 语言 模型。",
    "Ein Zug fährt über die Brücke, während der Regen fällt.",
)


def write_checkpoint(
    directory: Path,
    *,
    shards: int = 2,
    binary: bool = False,
    dummy_prefix: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: Any,
) -> dict[str, Tensor]:
    """Write model and tokenizer to `directory` and return the weights under their published names.

    `binary` writes pytorch_model .bin shards, as the oldest repositories have; `config` adds to config.json.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = weights(seed, dtype)
    _write_weights(directory, tensors, shards, binary)
    _write_json(directory / "config.json", published_config(dtype) | config)
    _write_json(
        directory / "generation_config.json", {"bos_token_id": 1, "eos_token_id": [2, IM_END], "pad_token_id": 2}
    )
    for name in (
        "configuration_internlm2",
        "modeling_internlm2",
        "tokenization_internlm2",
        "tokenization_internlm2_fast",
    ):
        (directory / f"{name}.py").write_text(REMOTE_CODE, encoding="utf-8")
    write_tokenizer(directory, dummy_prefix=dummy_prefix)
    return tensors


def write_tokenizer(directory: Path, *, dummy_prefix: bool = False) -> None:
    """Write tokenizer.model and tokenizer_config.json; the special tokens have placeholders in the model's pieces."""
    (directory / "tokenizer.model").write_bytes(sentencepiece_model(dummy_prefix))
    _write_json(directory / "tokenizer_config.json", tokenizer_config())


def published_config(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return config.json with the publisher's keys."""
    code = "modeling_internlm2.InternLM2ForCausalLM"
    return {
        "architectures": ["InternLM2ForCausalLM"],
        "attn_implementation": "eager",
        "auto_map": {
            "AutoConfig": "configuration_internlm2.InternLM2Config",
            "AutoModel": code,
            "AutoModelForCausalLM": code,
        },
        "bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
        "model_type": "internlm2",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": GROUPS,
        "pad_token_id": 2,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "dynamic", "factor": 2.0},
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "transformers_version": "4.37.1",
        "use_cache": True,
        "vocab_size": VOCAB,
    }


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the weights, drawn from `seed`; wqkv is [groups * (queries per group + 2) * head_dim, hidden]."""
    generator = torch.Generator().manual_seed(seed)
    fused = GROUPS * (HEADS // GROUPS + 2) * HEAD_DIM
    shapes = {"model.tok_embeddings": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.attention.wqkv": (fused, HIDDEN),
            f"{prefix}.attention.wo": (HIDDEN, HIDDEN),
            f"{prefix}.feed_forward.w1": (INTERMEDIATE, HIDDEN),
            f"{prefix}.feed_forward.w3": (INTERMEDIATE, HIDDEN),
            f"{prefix}.feed_forward.w2": (HIDDEN, INTERMEDIATE),
        }
    shapes["output"] = (VOCAB, HIDDEN)
    norms = ["model.norm", *(f"model.layers.{i}.{n}" for i in range(LAYERS) for n in ("attention_norm", "ffn_norm"))]
    drawn = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}
    drawn |= {f"{name}.weight": 1 + 0.1 * torch.randn(HIDDEN, generator=generator) for name in norms}
    return {name: tensor.to(dtype) for name, tensor in drawn.items()}


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json with the publisher's keys."""
    named = {0: "<unk>", 1: "<s>", 2: "</s>"} | {FIRST_SPECIAL + i: token for i, token in enumerate(SPECIALS)}
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {
        "added_tokens_decoder": {str(index): {"content": token, **flags} for index, token in named.items()},
        "additional_special_tokens": list(reversed(SPECIALS)),
        "auto_map": {
            "AutoTokenizer": [
                "tokenization_internlm2.InternLM2Tokenizer",
                "tokenization_internlm2.InternLM2TokenizerFast",
            ]
        },
        "bos_token": "<s>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "decode_with_prefix_space": False,
        "eos_token": "</s>",
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": "</s>",
        "sp_model_kwargs": None,
        "tokenizer_class": "InternLM2Tokenizer",
        "unk_token": "<unk>",
    }


@cache
def sentencepiece_model(dummy_prefix: bool = False) -> bytes:
    """Train a byte-fallback BPE of `PIECES` pieces and append placeholders; special tokens replace all but one."""
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_SENTENCES * 4),
        model_writer=trained,
        model_type="bpe",
        vocab_size=PIECES,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        add_dummy_prefix=dummy_prefix,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    model = protobuf.ModelProto.FromString(trained.getvalue())
    for index in range(VOCAB - PIECES):
        model.pieces.add(piece=f"[UNUSED_TOKEN_{140 + index}]", score=0.0, type=4)
    return model.SerializeToString()


def _write_weights(directory: Path, tensors: dict[str, Tensor], shards: int, binary: bool) -> None:
    stem, suffix = ("pytorch_model", "bin") if binary else ("model", "safetensors")
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"{stem}-{shard + 1:05}-of-{shards:05}.{suffix}"
        part = {name: tensors[name] for name in names[shard::shards]}
        weight_map |= dict.fromkeys(part, file)
        if binary:
            torch.save(part, directory / file)
        else:
            save_file(part, directory / file, metadata={"format": "pt"})
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / f"{stem}.{suffix}.index.json", {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False), encoding="utf-8")
