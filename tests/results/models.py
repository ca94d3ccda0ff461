"""Small random models and adapters on them, as others would have saved them: by transformers and PEFT alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from tests.data.conftest import make_tokenizer
from tuner.recipes import catalog

SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = LlamaConfig(hidden_size=32, intermediate_size=48, num_key_value_heads=2, pad_token_id=0, **SMALL)
TIED = LlamaConfig(hidden_size=32, intermediate_size=48, tie_word_embeddings=True, **SMALL)
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64, bos_token_id=1, eos_token_id=2)
MIXTURE = Qwen3MoeConfig(
    hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, **SMALL
)
MIXTRAL = MixtralConfig(
    hidden_size=32, intermediate_size=48, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, **SMALL
)
"""PEFT puts adapters on its experts, which transformers fuses."""
CHATML = catalog.chat_template("chatml")
TOKENS = torch.tensor([[1, 5, 9, 33, 70, 2, 11]])


def with_tokenizer(folder: Path) -> Path:
    """Save a small tokenizer with ChatML beside a model's weights."""
    make_tokenizer(CHATML).save_pretrained(folder)
    return folder


def write_base(folder: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> Path:
    """Save a random model of a config, in several files."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def write_adapter(folder: Path, base: Path, *, scores: bool = False, **settings: Any) -> Path:
    """Save an adapter whose every tensor is random, so that each of them counts."""
    kind = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    more = {"num_labels": 1} if scores else {}
    model = kind.from_pretrained(base, **more)
    asked = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear"} | settings
    lora = LoraConfig(task_type="SEQ_CLS" if scores else "CAUSAL_LM", **asked)
    adapted = get_peft_model(model, lora)
    generator = torch.Generator().manual_seed(1)
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            noise = torch.randn(weight.shape, generator=generator)
            drawn = asked.get("init_lora_weights") in ("pissa", "olora")  # they begin with something
            weight.data = weight.data * (1 + 0.1 * noise) if "magnitude" in name or drawn else 0.2 * noise
    adapted.save_pretrained(folder)
    return folder
