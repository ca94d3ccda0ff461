"""Contradictions between several keys of a DeepSpeed config, as tables.

A rule only looks; `conflicts` tells what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tuner.zero.findings import lookup

Config = dict[str, Any]

ZERO = "zero_optimization"
_STEPPING = (1, 2, 3)


class Rule(NamedTuple):
    """A contradiction: where it is told, when it holds, what is wrong, and what to do.

    `source` is the place in DeepSpeed 0.19.8 that says so.
    """

    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    what: str
    fix: str
    source: str = ""


def stage(config: Config) -> int:
    """Return the ZeRO stage as DeepSpeed will see it."""
    found = lookup(config, (ZERO, "stage"), 0)
    return found if isinstance(found, int) else 0


def _true(config: Config, *keys: str) -> bool:
    return lookup(config, keys) is True


def device(config: Config, block: str) -> str:
    return str(lookup(config, (ZERO, block, "device"), "none"))


def _no_path(block: str) -> Callable[[Config], bool]:
    return lambda config: device(config, block) == "nvme" and not lookup(config, (ZERO, block, "nvme_path"))


def _zenflow(config: Config, key: str, default: Any = "auto") -> Any:
    return lookup(config, (ZERO, "zenflow", key), default)


def _has_zenflow(config: Config) -> bool:
    return isinstance(lookup(config, (ZERO, "zenflow")), dict)


def needs_cpu_adam(config: Config, block: str) -> bool:
    """Return whether masters in 16 bits are asked for without the one optimizer that takes them."""
    wanted = _true(config, block, f"{block}_master_weights_and_grads") and stage(config) in _STEPPING
    has_it = device(config, "offload_optimizer") != "none" and config.get("zero_force_ds_cpu_optimizer", True)
    return wanted and not has_it and not (block == "bf16" and _true(config, "bf16", "bf16_optimizer_states"))


def _sums(config: Config) -> bool:
    return str(config.get("gradient_allreduce_op")).lower() == "sum"


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


RULES: tuple[Rule, ...] = (
    Rule(
        ("bf16", "enabled"),
        lambda config: _true(config, "fp16", "enabled") and _true(config, "bf16", "enabled"),
        "fp16.enabled and bf16.enabled are both true",
        "Keep one of the two.",
    ),
    Rule(
        (ZERO, "offload_optimizer", "device"),
        _no_path("offload_optimizer"),
        'offload_optimizer.device is "nvme" without nvme_path',
        "Add nvme_path, a folder on the NVMe disk.",
    ),
    Rule(
        (ZERO, "offload_param", "device"),
        _no_path("offload_param"),
        'offload_param.device is "nvme" without nvme_path',
        "Add nvme_path, a folder on the NVMe disk.",
    ),
    Rule(
        (ZERO, "offload_optimizer", "ratio"),
        lambda config: stage(config) != 3 and lookup(config, (ZERO, "offload_optimizer", "ratio"), 1) < 1,
        "offload_optimizer.ratio below 1 needs ZeRO stage 3",
        "Remove ratio or set stage to 3.",
    ),
    Rule(
        (ZERO, "offload_optimizer", "super_offload"),
        lambda config: stage(config) != 3 and _true(config, ZERO, "offload_optimizer", "super_offload"),
        "offload_optimizer.super_offload needs ZeRO stage 3",
        "Remove super_offload or set stage to 3.",
    ),
    Rule(
        (ZERO, "compute_grad_norm"),
        lambda config: lookup(config, (ZERO, "compute_grad_norm")) is False and stage(config) not in (1, 2),
        "compute_grad_norm = false needs ZeRO stage 1 or 2",
        "Remove compute_grad_norm.",
    ),
    Rule(
        (ZERO, "zenflow", "select_interval"),
        lambda config: _zenflow(config, "select_strategy") == "auto" and _whole(_zenflow(config, "select_interval")),
        'zenflow.select_interval is a number, but select_strategy "auto" sets it by itself',
        'Remove select_interval or set select_strategy to "step".',
    ),
    Rule(
        (ZERO, "zenflow"),
        lambda config: (
            _zenflow(config, "select_strategy") in ("step", "epoch") and not _whole(_zenflow(config, "select_interval"))
        ),
        'zenflow.select_strategy "step" and "epoch" need a number as select_interval',
        "Set select_interval.",
    ),
    Rule(
        (ZERO, "zenflow", "select_interval"),
        lambda config: (
            _zenflow(config, "select_strategy") == "step"
            and _whole(_zenflow(config, "update_interval"))
            and _whole(_zenflow(config, "select_interval"))
            and _zenflow(config, "select_interval") < _zenflow(config, "update_interval")
        ),
        "zenflow.select_interval is smaller than update_interval",
        "Make select_interval at least update_interval.",
    ),
    Rule(
        (ZERO, "zenflow", "steps_per_epoch"),
        lambda config: _zenflow(config, "steps_per_epoch", None) is not None,
        "zenflow.steps_per_epoch is set by DeepSpeed itself",
        "Remove it.",
    ),
    Rule(
        ("gradient_allreduce_op",),
        lambda config: _sums(config) and stage(config) == 3,
        'gradient_allreduce_op = "sum" does not work with ZeRO stage 3',
        'Write "mean".',
    ),
    Rule(
        ("gradient_allreduce_op",),
        lambda config: _sums(config) and (_has_zenflow(config) or _true(config, "compile", "deepcompile")),
        'gradient_allreduce_op = "sum" does not work with zenflow or compile.deepcompile',
        'Write "mean".',
    ),
    Rule(
        ("fp16", "fp16_master_weights_and_grads"),
        lambda config: _true(config, "fp16", "fp16_master_weights_and_grads") and stage(config) not in _STEPPING,
        "fp16.fp16_master_weights_and_grads needs ZeRO stage 1, 2 or 3",
        "Set zero_optimization.stage.",
    ),
    Rule(
        ("bf16", "bf16_master_weights_and_grads"),
        lambda config: _true(config, "bf16", "bf16_master_weights_and_grads") and stage(config) not in _STEPPING,
        "bf16.bf16_master_weights_and_grads needs ZeRO stage 1, 2 or 3",
        "Set zero_optimization.stage.",
    ),
    *(
        Rule(
            (block, f"{block}_master_weights_and_grads"),
            partial(needs_cpu_adam, block=block),
            f"{block}.{block}_master_weights_and_grads needs the optimizer on the CPU, and as DeepSpeed's own CPU Adam",
            'Add "offload_optimizer": {"device": "cpu"} and "zero_force_ds_cpu_optimizer": true'
            + (", or set bf16.bf16_optimizer_states." if block == "bf16" else "."),
            "runtime/zero/stage_1_and_2.py, _enforce_cpu_offload; stage3.py, _enforce_optimizer_offload",
        )
        for block in ("fp16", "bf16")
    ),
    Rule(
        ("bf16", "bf16_optimizer_states"),
        lambda config: (
            _true(config, "bf16", "bf16_optimizer_states")
            and not (_true(config, "bf16", "bf16_master_weights_and_grads") and stage(config) in _STEPPING)
        ),
        "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads and ZeRO stage 1, 2 or 3",
        "Set both, or remove bf16_optimizer_states.",
    ),
    Rule(
        ("checkpoint", "writer"),
        lambda config: lookup(config, ("checkpoint", "writer")) is not None,
        "checkpoint.writer works only under the deepspeed launcher: it crashes at the first checkpoint here",
        "Remove it.",
    ),
    Rule(
        (ZERO, "legacy_stage1"),
        lambda config: _true(config, ZERO, "legacy_stage1") and stage(config) in _STEPPING,
        "zero_optimization.legacy_stage1 is gone from DeepSpeed, which ends at its start",
        "Remove it.",
        "runtime/engine.py, _configure_zero_optimizer",
    ),
    Rule(
        ("checkpoint", "load_universal"),
        lambda config: _true(config, "checkpoint", "load_universal"),
        "checkpoint.load_universal reads universal checkpoints alone, a run saves ordinary ones: no run could resume",
        "Remove it.",
    ),
)

# DeepSpeed has these features; a run of tuner would end in the middle, or in weights that nothing loads. Each was run.
UNRUNNABLE: tuple[Rule, ...] = (
    Rule(
        ("tensor_parallel", "autotp_size"),
        lambda config: lookup(config, ("tensor_parallel", "autotp_size"), 0) > 1,
        "tensor_parallel.autotp_size above 1 trains, and then each rank saves its own part of the weights, which "
        "nothing loads",
        "Remove it; ZeRO stage 3 shards the weights too.",
    ),
    Rule(
        ("sequence_parallel_size",),
        lambda config: config.get("sequence_parallel_size", 1) > 1,
        "sequence_parallel_size above 1 needs a model that splits its sequences",
        "Remove it.",
    ),
    Rule(
        ("autotuning", "enabled"),
        lambda config: _true(config, "autotuning", "enabled"),
        "autotuning ends the process after the few steps that it measures",
        "Remove it; tuner plan compares the levels.",
    ),
    Rule(
        ("torch_autocast", "dtype"),
        lambda config: (
            _true(config, "torch_autocast", "enabled")
            and stage(config) in _STEPPING
            and str(lookup(config, ("torch_autocast", "dtype"))).removeprefix("torch.") in ("fp16", "float16", "half")
        ),
        "torch_autocast.dtype = fp16 clips gradients with the loss scale still in them at ZeRO stage 1, 2 and 3, which "
        "trains wrong without an error",
        'Write "bfloat16", or take fp16 for all: --set dtype=fp16.',
        "runtime/zero/stage_1_and_2.py and stage3.py, unscale_and_clip_grads",
    ),
    Rule(
        ("expert_parallel", "enabled"),
        lambda config: _true(config, "expert_parallel", "enabled"),
        "expert_parallel.enabled (AutoEP) fails on the output recorders of transformers 5, and would leave each rank "
        "with its own experts to save",
        "Remove it; ZeRO stage 3 shards the experts too.",
        "module_inject/auto_ep_presets/base.py, _install_instance_transformers_output_recorders",
    ),
    Rule(
        (ZERO, "zenflow"),
        _has_zenflow,
        "zero_optimization.zenflow builds its own AdamW and decides by itself which micro-batches update the weights, "
        "and here the recipe decides both",
        'Remove it; offload_optimizer {"device": "cpu"} works without it.',
        "runtime/zenflow/engine.py, configure_zenflow and is_zenflow_update_boundary",
    ),
    Rule(
        ("datastates_ckpt",),
        # Whatever is not false switches it on, null too.
        lambda config: config.get("datastates_ckpt", False) is not False,
        "datastates_ckpt writes with a package that no registry has, after a run has taken its checkpoint for whole",
        "Remove it.",
        "datastates/config.py, DeepSpeedDataStatesConfig; runtime/checkpoint_engine/datastates_checkpoint_engine.py",
    ),
)

# As UNRUNNABLE, on some numbers of ranks.
RANKS: tuple[tuple[tuple[str, ...], Callable[[Config, int], bool], str, str], ...] = (
    (
        (ZERO, "zero_hpz_partition_size"),
        lambda config, ranks: (
            stage(config) == 3 and ranks % min(lookup(config, (ZERO, "zero_hpz_partition_size"), 1), ranks) != 0
        ),
        "does not divide the number of ranks",
        "Write the number of GPUs of a node.",
    ),
)

# Read by parts of DeepSpeed that a run does not go through: why, and what to do.
INERT: dict[tuple[str, ...], tuple[str, str]] = {
    ("compile", "deepcompile"): ("no trainer asks DeepSpeed to compile the model", "Remove it."),
    ("activation_checkpointing",): (
        "models of transformers checkpoint by themselves",
        "The recipe's train_cfg.gradient_checkpointing decides.",
    ),
    ("dataloader_drop_last",): ("samples are drawn by Hugging Face's loader", "Remove it."),
    ("pipeline",): ("no model is cut into stages", "Remove it."),
}

# As INERT, but DeepSpeed fails on them, or writes into them what nobody asked for; so they are dropped.
DROPPED: dict[tuple[str, ...], tuple[str, str]] = {
    ("data_efficiency", "data_sampling"): ("samples are drawn by Hugging Face's loader", "Remove it."),
    ("data_efficiency", "data_routing"): ("it needs layers that a model's own code makes", "Remove it."),
}
