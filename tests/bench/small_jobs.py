"""Small trainings that a CPU can take for real, and `bench.simulation` on meta tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from bench.simulation import Job

RANKS = 2
_FACTS = {
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 352}
_MANY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 96}
_LORA = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}
_NF4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def _deepspeed(stage: int) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False, "reduce_bucket_size": 65536}
    if stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": 58982,
            "stage3_param_persistence_threshold": 2560,
            "stage3_max_live_parameters": 1_500_000,
            "stage3_max_reuse_distance": 1_500_000,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
    }


def _job(stage: int, model_type: str = "llama", *, is_tied: bool = False, **other: Any) -> Job:
    facts = (
        _FACTS
        | {"tie_word_embeddings": is_tied}
        | {"mixtral": _EXPERTS, "minimax": _EXPERTS, "qwen3_moe": _MANY_EXPERTS}.get(model_type, {})
    )
    config = AutoConfig.for_model(model_type, **facts)
    plain = Job(config, _deepspeed(stage), RANKS, rows=1, row_tokens=256, attention="eager")
    return replace(plain, **other)


JOBS = {
    "full at 0": _job(0),
    "full at 1": _job(1, recompute=True),
    "full at 2": _job(2),
    "full at 2, few tokens": _job(2, row_tokens=32),
    "full at 2, packed, whole logits": _job(2, rows=2, is_packed=True, loss="whole"),
    "full at 2, one weight at both ends": _job(2, is_tied=True, row_tokens=32, recompute=True),
    "full at 3": _job(3, recompute=True),
    "full at 3, all kept": _job(3),
    "lora at 0": _job(0, adapter=_LORA),
    "lora at 2": _job(2, adapter=_LORA, recompute=True),
    "lora at 3": _job(3, adapter=_LORA, recompute=True),
    "qlora at 2": _job(2, adapter=_LORA, quantization=_NF4, recompute=True),
    "qlora at 3": _job(3, adapter=_LORA, quantization=_NF4),
    "experts at 2": _job(2, "mixtral"),
    "experts at 3": _job(3, "mixtral"),
    "experts at 3, recomputed": _job(3, "mixtral", recompute=True),
    "many experts, lora at 2": _job(2, "qwen3_moe", adapter=_LORA),
    # Nothing is gathered ahead of its router, which has LoRA.
    "experts in 4 bits, qlora at 3": _job(
        3, "minimax", adapter=_LORA, quantization=_NF4, packs_experts=True, recompute=True
    ),
    "capped scores, lora at 2": _job(2, "gemma2", adapter=_LORA),
}
