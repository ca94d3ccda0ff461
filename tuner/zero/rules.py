"""Contradictions between several keys of a DeepSpeed config, as tables.

A rule only looks; `conflicts` tells what it found.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from tuner.recipes.merging import lookup

Config = dict[str, Any]

ZERO = "zero_optimization"
AUTO, NONE = "auto", "none"
"""In the place of a value that tuner works out; in the place of a config, stage 0."""
STEPPING = (1, 2, 3)


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
    value = lookup(config, (ZERO, "stage"), 0)
    return value if isinstance(value, int) else 0


def is_on(config: Config, *keys: str) -> bool:
    return lookup(config, keys) is True


def is_off(setting: Any, off: tuple[Any, ...] = ()) -> bool:
    """Return whether a setting switches its feature off: a false value, or a block not enabled anywhere."""
    if isinstance(setting, dict):
        return not setting["enabled"] if "enabled" in setting else all(is_off(item) for item in setting.values())
    return not setting or setting in off


def device(config: Config, block: str) -> str:
    return str(lookup(config, (ZERO, block, "device"), "none"))


def _no_path(config: Config, block: str) -> bool:
    return device(config, block) == "nvme" and not lookup(config, (ZERO, block, "nvme_path"))


def _masters_without_zero(config: Config, block: str) -> bool:
    return is_on(config, block, f"{block}_master_weights_and_grads") and stage(config) not in STEPPING


def has_zenflow(config: Config) -> bool:
    return isinstance(lookup(config, (ZERO, "zenflow")), dict)


def needs_cpu_adam(config: Config, block: str) -> bool:
    """Return whether masters in 16 bits are asked for without the one optimizer that takes them."""
    wanted = is_on(config, block, f"{block}_master_weights_and_grads") and stage(config) in STEPPING
    has_it = device(config, "offload_optimizer") != "none" and config.get("zero_force_ds_cpu_optimizer", True)
    return wanted and not has_it and not (block == "bf16" and is_on(config, "bf16", "bf16_optimizer_states"))


_SHORT = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}


def short(dtype: Any) -> str:
    """Return "fp16", "bf16" or "fp32" for any of the names that DeepSpeed has for it."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def computes_in(config: Config) -> str:
    """Return the compute type of a final config."""
    return next((dtype for dtype in ("bf16", "fp16") if is_on(config, dtype, "enabled")), "fp32")


def accumulates_in(config: Config) -> str:
    named = lookup(config, ("data_types", "grad_accum_dtype"))
    return short(named) if named else computes_in(config)


def autocasts_to(config: Config) -> str | None:
    on = is_on(config, "torch_autocast", "enabled")
    return short(lookup(config, ("torch_autocast", "dtype"))) if on else None


_AFTERWARDS = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}


def _scales_before(config: Config, key: str) -> bool:
    """Return whether gradients are to be scaled before a reduction that does not take it."""
    scatters = stage(config) in (2, 3) and lookup(config, (ZERO, "reduce_scatter"), True)
    return bool(scatters) and not _sums(config) and config.get(key, _AFTERWARDS[key]) != _AFTERWARDS[key]


def _sums(config: Config) -> bool:
    return str(config.get("gradient_allreduce_op")).lower() == "sum"


RULES: tuple[Rule, ...] = (
    Rule(
        ("bf16", "enabled"),
        lambda config: is_on(config, "fp16", "enabled") and is_on(config, "bf16", "enabled"),
        "fp16.enabled and bf16.enabled are both true",
        "Keep one of the two.",
    ),
    *(
        Rule(
            (ZERO, block, "device"),
            partial(_no_path, block=block),
            f'{block}.device is "nvme" without nvme_path',
            "Add nvme_path, a folder on the NVMe disk.",
        )
        for block in ("offload_optimizer", "offload_param")
    ),
    Rule(
        (ZERO, "offload_optimizer", "ratio"),
        lambda config: stage(config) != 3 and lookup(config, (ZERO, "offload_optimizer", "ratio"), 1) < 1,
        "offload_optimizer.ratio below 1 needs ZeRO stage 3",
        "Remove ratio or set stage to 3.",
    ),
    Rule(
        (ZERO, "offload_optimizer", "super_offload"),
        lambda config: stage(config) != 3 and is_on(config, ZERO, "offload_optimizer", "super_offload"),
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
        ("gradient_allreduce_op",),
        lambda config: _sums(config) and stage(config) == 3,
        'gradient_allreduce_op = "sum" does not work with ZeRO stage 3',
        'Write "mean".',
    ),
    Rule(
        ("gradient_allreduce_op",),
        lambda config: _sums(config) and (has_zenflow(config) or is_on(config, "compile", "deepcompile")),
        'gradient_allreduce_op = "sum" does not work with zenflow or compile.deepcompile',
        'Write "mean".',
    ),
    *(
        Rule(
            (block, f"{block}_master_weights_and_grads"),
            partial(_masters_without_zero, block=block),
            f"{block}.{block}_master_weights_and_grads needs ZeRO stage 1, 2 or 3",
            "Set zero_optimization.stage.",
        )
        for block in ("fp16", "bf16")
    ),
    *(
        Rule(
            (block, f"{block}_master_weights_and_grads"),
            partial(needs_cpu_adam, block=block),
            f"{block}.{block}_master_weights_and_grads needs the optimizer on the CPU, with DeepSpeed's own CPU Adam",
            'Add "offload_optimizer": {"device": "cpu"} and "zero_force_ds_cpu_optimizer": true'
            + (", or set bf16.bf16_optimizer_states." if block == "bf16" else "."),
            "runtime/zero/stage_1_and_2.py, _enforce_cpu_offload; stage3.py, _enforce_optimizer_offload",
        )
        for block in ("fp16", "bf16")
    ),
    Rule(
        ("bf16", "bf16_optimizer_states"),
        lambda config: (
            is_on(config, "bf16", "bf16_optimizer_states")
            and not (is_on(config, "bf16", "bf16_master_weights_and_grads") and stage(config) in STEPPING)
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
        ("torch_autocast", "dtype"),
        lambda config: autocasts_to(config) == "int8",
        "torch_autocast.dtype = int8 would send gradients between ranks as whole numbers",
        'Write "bfloat16".',
        "runtime/torch_autocast.py, get_comm_dtype",
    ),
    Rule(
        ("torch_autocast", "lower_precision_safe_modules"),
        lambda config: any(
            "." not in str(name) for name in lookup(config, ("torch_autocast", "lower_precision_safe_modules")) or ()
        ),
        "torch_autocast.lower_precision_safe_modules names a class without its module",
        'Write the whole path, such as "torch.nn.Linear".',
        "runtime/torch_autocast.py, init_autocast_params",
    ),
    Rule(
        ("data_types", "grad_accum_dtype"),
        lambda config: accumulates_in(config) == "int8",
        "data_types.grad_accum_dtype = int8 would add gradients up as whole numbers",
        'Write "fp32" or "bf16".',
        "runtime/zero/stage_1_and_2.py, gradient_accumulation_dtype",
    ),
    Rule(
        ("torch_autocast", "enabled"),
        lambda config: autocasts_to(config) is not None and is_on(config, ZERO, "zero_quantized_weights"),
        "torch_autocast does not work with zero_quantized_weights",
        "Keep one of the two.",
        "runtime/torch_autocast.py, _validate_auto_cast_settings",
    ),
    *(
        Rule(
            (key,),
            partial(_scales_before, key=key),
            f"{key} does not work with reduce_scatter at ZeRO stage 2 and 3, where it is on by default",
            "Remove it, or set zero_optimization.reduce_scatter to false.",
            "runtime/zero/stage_1_and_2.py and stage3.py, __init__",
        )
        for key in _AFTERWARDS
    ),
    Rule(
        (ZERO, "legacy_stage1"),
        lambda config: is_on(config, ZERO, "legacy_stage1") and stage(config) in STEPPING,
        "zero_optimization.legacy_stage1 was removed from DeepSpeed, which fails at start",
        "Remove it.",
        "runtime/engine.py, _configure_zero_optimizer",
    ),
    Rule(
        ("checkpoint", "load_universal"),
        lambda config: is_on(config, "checkpoint", "load_universal"),
        "checkpoint.load_universal reads only universal checkpoints, and runs save ordinary ones: no run could resume",
        "Remove it.",
    ),
)
