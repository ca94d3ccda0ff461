"""InternLM 1 and 3 load without remote code, compute what Llama computes, and are written back as they were published.

The reference is transformers' plain Llama, given the same weights under the same names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import tuner.models  # noqa: F401  registers what is under test
from tests.models import published
from tests.models.published import HEAD_DIM, HEADS, HIDDEN, INTERMEDIATE, LAYERS, POSITIONS, VOCAB
from tests.models.test_internlm2 import TEXTS, reference_ids, same, saved_tensors, tokens
from tuner.errors import ModelError

COMMON: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": INTERMEDIATE,
    "max_position_embeddings": POSITIONS,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB,
}
INTERNLM: dict[str, Any] = COMMON | {
    "architectures": ["InternLMForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_internlm.InternLMForCausalLM"},
    "bias": True,
    "model_type": "internlm",
    "rms_norm_eps": 1e-06,
    "rotary": {"base": 10000, "type": "dynamic"},
}
INTERNLM3: dict[str, Any] = COMMON | {
    "architectures": ["InternLM3ForCausalLM"],
    "auto_map": {"AutoModelForCausalLM": "modeling_internlm3.InternLM3ForCausalLM"},
    "bias": False,
    "head_dim": 32,
    "model_type": "internlm3",
    "num_key_value_heads": 2,
    "qkv_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    "rope_theta": 50000000,
}
CONFIGS = {"internlm_7b": INTERNLM, "internlm_20b": INTERNLM | {"bias": False}, "internlm3": INTERNLM3}
ROPE = {
    "internlm": {"rope_type": "dynamic", "factor": 1.0, "rope_theta": 10000.0},
    "internlm3": {"rope_type": "dynamic", "factor": 6.0, "rope_theta": 50000000.0},
}


def weights(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return drawn weights under the published names, biases of q, k, v and o where the config has them."""
    draw = torch.Generator().manual_seed(0)
    dim, groups = config.get("head_dim", HEAD_DIM), config.get("num_key_value_heads", HEADS)
    shapes = {"self_attn.q_proj": HEADS * dim, "self_attn.k_proj": groups * dim, "self_attn.v_proj": groups * dim}
    linear = {name: (outputs, HIDDEN) for name, outputs in shapes.items()} | {
        "self_attn.o_proj": (HIDDEN, HEADS * dim),
        "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj": (HIDDEN, INTERMEDIATE),
    }
    drawn = {"model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=draw) * 0.1}
    for prefix in (f"model.layers.{layer}." for layer in range(LAYERS)):
        drawn |= {f"{prefix}{name}.weight": torch.randn(shape, generator=draw) * 0.1 for name, shape in linear.items()}
        if config["bias"]:
            biased = {name: shape[0] for name, shape in linear.items() if name.startswith("self_attn")}
            drawn |= {f"{prefix}{name}.bias": torch.randn(width, generator=draw) for name, width in biased.items()}
        drawn |= {
            f"{prefix}{name}.weight": torch.ones(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")
        }
    return drawn | {
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=draw),
    }


def write_checkpoint(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / f"modeling_{config['model_type']}.py").write_text(published.REMOTE_CODE, encoding="utf-8")
    return folder


@pytest.fixture(params=sorted(CONFIGS))
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CONFIGS[str(request.param)]


@pytest.fixture
def checkpoint(tmp_path: Path, config: dict[str, Any]) -> Path:
    return write_checkpoint(tmp_path / "published", config)


def plain_llama(config: dict[str, Any]) -> PreTrainedModel:
    known = {key: value for key, value in config.items() if key in LlamaConfig().to_dict() and key != "model_type"}
    rope = ROPE[config["model_type"]]
    model = LlamaForCausalLM(LlamaConfig(**known, attention_bias=config["bias"], rope_parameters=rope)).eval()
    model.load_state_dict(weights(config))
    return model


@pytest.mark.parametrize("length", [1, 60, POSITIONS + 70])
def test_logits_equal_plain_llamas(checkpoint: Path, config: dict[str, Any], length: int) -> None:
    model, llama = AutoModelForCausalLM.from_pretrained(checkpoint), plain_llama(config)

    with torch.no_grad():
        logits, expected = (each(tokens(length)).logits for each in (model, llama))

    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)


def test_saving_writes_the_published_weights_and_keys_and_points_at_no_code(
    checkpoint: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)

    model.save_pretrained(tmp_path / "saved")

    saved = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))
    assert same(saved_tensors(tmp_path / "saved"), weights(config))
    assert "auto_map" not in saved
    compared = config.keys() - {"auto_map", "rotary"}
    assert {key: saved.get(key) for key in compared} == {key: config[key] for key in compared}
    assert AutoConfig.from_pretrained(tmp_path / "saved").to_diff_dict() == model.config.to_diff_dict()


@pytest.mark.parametrize(
    ("rotary", "rope"),
    [
        (None, ROPE["internlm"]),
        ({"base": 10000, "type": "dynamic"}, ROPE["internlm"]),
        (
            {"base": 5000, "type": "dynamic", "scaling_factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 5000.0},
        ),
        ({"base": 5000, "type": "origin"}, {"rope_type": "default", "rope_theta": 5000.0}),
    ],
    ids=["missing", "published", "scaled", "origin"],
)
def test_internlms_rotary_embedding_is_read_and_written_back(
    tmp_path: Path, rotary: dict[str, Any] | None, rope: dict[str, Any]
) -> None:
    folder = write_checkpoint(tmp_path / "published", INTERNLM | {"rotary": rotary})

    config = AutoConfig.from_pretrained(folder)
    config.save_pretrained(tmp_path / "saved")

    saved = json.loads((tmp_path / "saved" / "config.json").read_text(encoding="utf-8"))["rotary"]
    assert config.rope_parameters == rope
    assert {**saved, **(rotary or {})} == saved
    assert AutoConfig.from_pretrained(tmp_path / "saved").rope_parameters == rope


def test_an_internlm_3_that_llama_cannot_compute_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "published", INTERNLM3 | {"qkv_bias": True})

    with pytest.raises(ModelError, match="qkv_bias = True and bias = False is not supported"):
        AutoConfig.from_pretrained(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_equal_sentencepieces(checkpoint: Path, config: dict[str, Any], text: str) -> None:
    published.write_tokenizer(checkpoint)
    theirs = published.tokenizer_config() | {
        "tokenizer_class": config["architectures"][0].replace("ForCausalLM", "Tokenizer")
    }
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(theirs), encoding="utf-8")

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    assert tokenizer(text).input_ids == reference_ids(checkpoint, text)


def test_a_reward_model_starts_from_the_published_weights_and_reloads(
    checkpoint: Path, config: dict[str, Any], tmp_path: Path
) -> None:
    reward = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
    reward.save_pretrained(tmp_path / "reward")

    saved = load_file(tmp_path / "reward" / "model.safetensors")
    head = saved.pop("score.weight")
    assert same(saved, {name: tensor for name, tensor in weights(config).items() if name != "lm_head.weight"})
    assert head.shape == (1, HIDDEN)
    assert same(
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").state_dict(), reward.state_dict()
    )
