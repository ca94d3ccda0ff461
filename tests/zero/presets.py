"""The presets that people bring along, with the values that their projects ship.

They are inputs: tuner's own presets are in `tuner/deepspeed_presets`.
"""

from __future__ import annotations

from typing import Any

AUTO_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}
_FP16 = {
    "enabled": "auto",
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_CPU = {"device": "cpu", "pin_memory": True}
_HALF = {"fp16": _FP16, "bf16": {"enabled": "auto"}}
_STAGE2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 5e8,
    "overlap_comm": False,
    "reduce_scatter": True,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "round_robin_gradients": True,
}
_STAGE3 = {
    "stage": 3,
    "overlap_comm": False,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
_DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": "auto",
        "warmup_max_lr": "auto",
        "warmup_num_steps": "auto",
        "total_num_steps": "auto",
    },
}


def _xtuner(zero: dict[str, Any]) -> dict[str, Any]:
    own = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    batch = {key: value for key, value in AUTO_BATCH.items() if key != "train_batch_size"}
    return (
        batch
        | own
        | {"zero_optimization": zero, "fp16": {"enabled": "auto", "initial_scale_power": 16}}
        | {"bf16": {"enabled": "auto"}}
    )


def _axolotl(zero: dict[str, Any], **more: Any) -> dict[str, Any]:
    half = {
        "bf16": {"enabled": "auto"},
        "fp16": _FP16 | {"auto_cast": False, "initial_scale_power": 32},
    }
    return AUTO_BATCH | half | {"zero_optimization": zero, "wall_clock_breakdown": False} | more


def _accelerate(zero: dict[str, Any]) -> dict[str, Any]:
    fp16 = {key: value for key, value in _FP16.items() if key != "enabled"} | {"enabled": True}
    return AUTO_BATCH | {
        "fp16": fp16,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": _DECAY,
        "zero_optimization": zero,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
    }


_XTUNER3 = {"stage": 3, "overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True}
_LLAMA = {"zero_allow_untested_optimizer": True}
_BOTH = {"offload_optimizer": _CPU, "offload_param": _CPU}
_SPEED = {"allgather_bucket_size": 2e8, "reduce_bucket_size": "auto", "overlap_comm": True}

PRESETS: dict[str, dict[str, Any]] = {
    "xtuner zero1": _xtuner({"stage": 1, "overlap_comm": True}),
    "xtuner zero2": _xtuner({"stage": 2, "overlap_comm": True}),
    "xtuner zero2_offload": _xtuner({"stage": 2, "overlap_comm": True, "offload_optimizer": _CPU}),
    "xtuner zero3": _xtuner(_XTUNER3),
    "xtuner zero3_offload": _xtuner(_XTUNER3 | _BOTH),
    "llama-factory z0": AUTO_BATCH | _LLAMA | _HALF | {"zero_optimization": _STAGE2 | {"stage": 0}},
    "llama-factory z2": AUTO_BATCH | _LLAMA | _HALF | {"zero_optimization": _STAGE2},
    "llama-factory z2_offload": AUTO_BATCH
    | _LLAMA
    | _HALF
    | {"zero_optimization": _STAGE2 | {"offload_optimizer": _CPU}},
    "llama-factory z3": AUTO_BATCH | _LLAMA | _HALF | {"zero_optimization": _STAGE3},
    "llama-factory z3_offload": AUTO_BATCH | _LLAMA | _HALF | {"zero_optimization": _STAGE3 | _BOTH},
    "llama-factory z3_fp8": AUTO_BATCH
    | {"bf16": {"enabled": True}, "zero_optimization": _STAGE3, "comms_config": {"verbose": False}}
    | {"monitor_config": {"enabled": False}, "zero_force_ds_cpu_optimizer": True},
    "axolotl zero1": _axolotl({"stage": 1, "overlap_comm": True}),
    "axolotl zero2": _axolotl(
        {"stage": 2, "offload_optimizer": {"device": "cpu"}, "contiguous_gradients": True, "overlap_comm": True}
    ),
    "axolotl zero3": _axolotl(
        _STAGE3
        | {"overlap_comm": True, "sub_group_size": 0, "stage3_max_live_parameters": 0}
        | {"stage3_max_reuse_distance": 0}
    ),
    "axolotl zero3 cpuoffload": _axolotl(_STAGE3 | _BOTH, zero_allow_untested_optimizer=True),
    "accelerate zero2": _accelerate({"stage": 2} | _SPEED | {"reduce_scatter": True, "contiguous_gradients": True}),
    "accelerate zero3": _accelerate(_STAGE3 | {"stage3_gather_16bit_weights_on_model_save": "auto"}),
    "accelerate zero3_offload": _accelerate(_STAGE3 | _BOTH | {"stage3_gather_16bit_weights_on_model_save": "auto"}),
    "trl zero3 as resolved": AUTO_BATCH
    | {"bf16": {"enabled": True}, "fp16": {"enabled": False}, "gradient_accumulation_steps": 1}
    | {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": True,
        }
    },
    "roll zero3": {
        "bf16": {"enabled": True},
        "fp16": {"enabled": False, "initial_scale_power": 16},
        "zero_optimization": _STAGE3 | {"overlap_comm": True},
    },
    "hugging face zero2": AUTO_BATCH
    | _HALF
    | {
        "optimizer": _ADAMW,
        "scheduler": {"type": "WarmupLR", "params": {key: "auto" for key in list(_DECAY["params"])[:3]}},
        "zero_optimization": _STAGE2 | {"offload_optimizer": _CPU, "allgather_bucket_size": 2e8},
        "steps_per_print": 2000,
    },
    "hugging face zero3 nvme": AUTO_BATCH
    | _HALF
    | {
        "zero_optimization": _STAGE3
        | {
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 4,
                "fast_init": False,
            },
            "offload_param": {
                "device": "nvme",
                "nvme_path": "/local_nvme",
                "pin_memory": True,
                "buffer_count": 5,
                "buffer_size": 1e8,
                "max_in_cpu": 1e9,
            },
        },
        "aio": {
            "block_size": 262144,
            "queue_depth": 32,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    },
}
