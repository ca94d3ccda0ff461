"""Keys of a DeepSpeed config that contradict each other, stop a run, have no effect, or are obsolete, as tables.

`lint` reports what these tables find in a document, `merge` what they find in a final config.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

from tuner.errors import DsKey, Key, Option
from tuner.recipes.merging import Keys, lookup
from tuner.zero.config import (
    AUTOEP,
    AUTOTP,
    OFFLOADS,
    STEPPING,
    ZERO,
    Config,
    accumulates_in,
    autocasts_to,
    computes_in,
    device,
    expert_ranks,
    has_zenflow,
    is_on,
    stage,
    swaps_nowhere,
)


class Rule(NamedTuple):
    """A contradiction: the key to report, the condition, the problem, and the fix.

    `citation` is the file of DeepSpeed 0.19.8 that shows it.
    """

    keys: tuple[str, ...]
    holds: Callable[[Config], bool]
    problem: str
    fix: str
    citation: str = ""


_IMPORTED = ("torch.", "transformers.", "deepspeed.")
"""Beginnings of the classes that a config may name: DeepSpeed imports the module of each."""


def _needs_stage_3(config: Config, key: str, without: object) -> bool:
    return stage(config) != 3 and lookup(config, (ZERO, "offload_optimizer", key), without) != without


def _masters_without_zero(config: Config, block: str) -> bool:
    return is_on(config, block, f"{block}_master_weights_and_grads") and stage(config) not in STEPPING


def needs_cpu_adam(config: Config, block: str) -> bool:
    """Return whether the config wants master weights in 16 bits without the one optimizer that supports them."""
    wanted = is_on(config, block, f"{block}_master_weights_and_grads") and stage(config) in STEPPING
    has_it = device(config, "offload_optimizer") != "none" and config.get("zero_force_ds_cpu_optimizer", True)
    return wanted and not has_it and not (block == "bf16" and is_on(config, "bf16", "bf16_optimizer_states"))


_AFTERWARDS = {"prescale_gradients": False, "gradient_predivide_factor": 1.0}


def _scales_before(config: Config, key: str) -> bool:
    """Return whether the config scales gradients before a reduction that does not support it."""
    scatters = stage(config) in (2, 3) and lookup(config, (ZERO, "reduce_scatter"), True)
    return bool(scatters) and not _sums(config) and config.get(key, _AFTERWARDS[key]) != _AFTERWARDS[key]


def _sums(config: Config) -> bool:
    return str(config.get("gradient_allreduce_op")).lower() == "sum"


def _made_by_deepspeed(config: Config) -> str:
    return str(lookup(config, ("optimizer", "type"))).lower()


# Contradictions inside of any config.
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
            partial(swaps_nowhere, block=block),
            f'{block}.device is "nvme" without nvme_path',
            f"Name a folder on the NVMe disk: {Option('nvme', 'PATH')}.",
        )
        for block in OFFLOADS
    ),
    *(
        Rule(
            (ZERO, "offload_optimizer", key),
            partial(_needs_stage_3, key=key, without=without),
            f"offload_optimizer.{key} needs ZeRO stage 3",
            f"Remove {key} or set stage to 3.",
        )
        for key, without in (("ratio", 1), ("super_offload", False))
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
            not str(name).startswith(_IMPORTED)
            for name in lookup(config, ("torch_autocast", "lower_precision_safe_modules")) or ()
        ),
        "torch_autocast.lower_precision_safe_modules names a class without its module, or outside torch and "
        "transformers; DeepSpeed would import its module, which runs the code of it",
        'Write whole paths, such as "torch.nn.Linear".',
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

# DeepSpeed has these features; a run of tuner would end in the middle, or in weights that nothing loads. Each was run.
UNRUNNABLE: tuple[Rule, ...] = (
    Rule(
        ("sequence_parallel_size",),
        lambda config: config.get("sequence_parallel_size", 1) > 1,
        "sequence_parallel_size above 1 needs a model that splits its sequences",
        f"Remove it; the recipe splits them: {Key('train_cfg.sequence_parallel_size', 2)}.",
    ),
    Rule(
        ("autotuning", "enabled"),
        lambda config: is_on(config, "autotuning", "enabled"),
        "autotuning ends the process after its measurement",
        "Remove it; tuner plan compares the levels.",
    ),
    Rule(
        ("torch_autocast", "dtype"),
        lambda config: autocasts_to(config) == "fp16" and stage(config) in STEPPING,
        "torch_autocast.dtype = fp16 clips gradients with the loss scale still in them at ZeRO stage 1, 2 and 3, which "
        "trains wrong without an error",
        f'Write "bfloat16", or take fp16 for all: {Key("dtype", "fp16")}.',
        "runtime/zero/stage_1_and_2.py and stage3.py, unscale_and_clip_grads",
    ),
    Rule(
        ("managed_gradient_accumulation",),
        lambda config: config.get("managed_gradient_accumulation") is False,
        "managed_gradient_accumulation = false does not work with Hugging Face's accelerate, which tells DeepSpeed",
        "Remove it; the recipe's optim_wrapper.accumulative_counts accumulates.",
        "runtime/engine.py, set_gradient_accumulation_boundary",
    ),
    Rule(
        ("expert_parallel", "enabled"),
        lambda config: is_on(config, "expert_parallel", "enabled") and not _divides_experts(config),
        "expert_parallel.enabled needs autoep_size, the ranks that divide the experts: with 1 each rank has all",
        f"Set it: {DsKey('autoep_size', 2)}; or remove enabled.",
        "module_inject/auto_ep_config.py, validate_autoep_config",
    ),
    # 0.19.8 ends in ZenFlowSelectiveAdamW(**None) without an optimizer block, which the recipe owns. With one it takes
    # update_interval for the accumulation and updates the heaviest columns after each micro-batch: on the tiny model,
    # two ranks of two micro-batches, the first step's loss is 7.355 and not 7.513, the fourth's 6.15 and not 5.66.
    Rule(
        (ZERO, "zenflow"),
        has_zenflow,
        "zero_optimization.zenflow builds its own AdamW and decides by itself which micro-batches update the weights, "
        "and here the recipe decides both",
        'Remove it; offload_optimizer {"device": "cpu"} works without it.',
        "runtime/zenflow/engine.py, configure_zenflow and is_zenflow_update_boundary",
    ),
    Rule(
        ("datastates_ckpt",),
        # Any value but false switches it on, null too.
        lambda config: config.get("datastates_ckpt", False) is not False,
        "datastates_ckpt writes with a package that no registry has, after a run has taken its checkpoint for whole",
        "Remove it.",
        "datastates/config.py, DeepSpeedDataStatesConfig; runtime/checkpoint_engine/datastates_checkpoint_engine.py",
    ),
)


def _splits_layers(config: Config) -> bool:
    num_ranks: int = lookup(config, AUTOTP, 0)
    return num_ranks > 1


def _divides_experts(config: Config) -> bool:
    return expert_ranks(config) > 1


def _is_beside(config: Config, is_on: Callable[[Config], bool], keys: Keys, value: object) -> bool:
    """Return whether ranks share a model so, and a key is beside it and not as it is by default."""
    return is_on(config) and lookup(config, keys, value) not in (value, None)


def _untried_beside(
    is_on: Callable[[Config], bool], switch: str, fix: str, defaults: Sequence[tuple[Keys, object]]
) -> Iterator[Rule]:
    """Yield a rule for each key, with its value without effect, that was not tried where ranks share a model so."""
    for keys, value in defaults:
        test = partial(_is_beside, is_on=is_on, keys=keys, value=value)
        yield Rule(keys, test, f"{'.'.join(keys)} is not tested with {switch}", f"Remove one of the two; {fix}")


# Not tried with tensor parallelism, or not right with it: the key, and its value without effect.
_NOT_BESIDE_AUTOTP: tuple[tuple[Keys, object], ...] = (
    *((("tensor_parallel", key), None) for key in ("partition_config", "preset_model", "injection_policy_tuple")),
    (("tensor_parallel", "tp_overlap_comm"), False),
    (("tensor_parallel", "keep_module_on_host"), False),
    (("tensor_parallel", "tp", "tp_grain_size"), 1),
    ((ZERO, "zero_hpz_partition_size"), 1),
    ((ZERO, "zero_quantized_weights"), False),
    ((ZERO, "zero_quantized_nontrainable_weights"), False),
    ((ZERO, "zero_quantized_gradients"), False),
    ((ZERO, "mics_shard_size"), -1),
    ((ZERO, "offload_param", "device"), "none"),
    ((ZERO, "offload_optimizer", "device"), "none"),
    (("expert_parallel", "enabled"), False),
    (("sequence_parallel_size",), 1),
)


# Not tried with expert parallelism: the key, and its value without effect.
_NOT_BESIDE_AUTOEP: tuple[tuple[Keys, object], ...] = (
    *((("expert_parallel", key), None) for key in ("preset_model", "moe_layer_pattern", "expert_activation", "top_k")),
    (("expert_parallel", "expert_tensor_parallel_size"), 1),
    (("expert_parallel", "comm_backend"), "comm"),
    (("use_data_before_expert_parallelism",), False),
    ((ZERO, "offload_optimizer", "device"), "none"),
)


# Contradictions with what a recipe and the machine decide, in a final config.
FINAL: tuple[Rule, ...] = (
    Rule(
        (ZERO, "stage"),
        lambda config: _divides_experts(config) and stage(config) == 3,
        "expert_parallel divides experts at ZeRO stage 0, 1 and 2 alone: at stage 3 DeepSpeed writes no whole weights",
        f"Take {Option('deepspeed', 'zero2')}; without autoep_size, zero3 shards the experts too.",
        "runtime/engine.py, _raise_if_autoep_zero3_consolidated_export",
    ),
    Rule(
        AUTOEP,
        lambda config: _divides_experts(config) and stage(config) not in STEPPING and computes_in(config) != "fp32",
        "expert_parallel.autoep_size clips gradients by a norm without those of experts at ZeRO stage 0 in 16 bits",
        f"Take {Option('deepspeed', 'zero1')}, or {Key('dtype', 'fp32')}.",
        "runtime/fp16/unfused_optimizer.py, step",
    ),
    *_untried_beside(
        _divides_experts,
        "expert_parallel.autoep_size",
        f"without autoep_size, {Option('deepspeed', 'zero3')} shards the experts too.",
        _NOT_BESIDE_AUTOEP,
    ),
    Rule(
        AUTOTP,
        # 0.19.8, two ranks in bf16: the first norm is 4.09 at stage 0, and 5.17 at the others and on one rank.
        lambda config: _splits_layers(config) and stage(config) not in STEPPING and computes_in(config) != "fp32",
        "tensor_parallel.autotp_size above 1 clips gradients by a wrong norm at ZeRO stage 0 in 16 bits",
        f"Take {Option('deepspeed', 'zero1')}, or {Key('dtype', 'fp32')}.",
        "runtime/fp16/unfused_optimizer.py, step",
    ),
    *_untried_beside(
        _splits_layers,
        "tensor_parallel.autotp_size above 1",
        f"without autotp_size, {Option('deepspeed', 'zero3')} shards the weights too.",
        _NOT_BESIDE_AUTOTP,
    ),
    Rule(
        ("gradient_clipping",),
        # 0.19.8, two ranks, loss of the fourth step: 4.494 at stages 0 to 3 without clipping; with 1.0 it is 4.494 at
        # stage 0, where the gradient is clipped, and 4.536 at the others, where Muon's update is.
        lambda config: _made_by_deepspeed(config) == "muon" and config.get("gradient_clipping", 0) > 0,
        "gradient_clipping clips Muon's update, not the gradient, at ZeRO stage 1, 2 and 3: it trains otherwise there",
        f"Muon's updates are of one size by themselves: {Key('clip_grad', None)}, and no gradient_clipping in a JSON.",
        "runtime/zero/stage_1_and_2.py and stage3.py, step",
    ),
    Rule(
        (ZERO, "stage"),
        lambda config: _made_by_deepspeed(config) == "lamb" and stage(config) in STEPPING,
        "Lamb scales a layer's update by the layer's norm, and ZeRO stage 1, 2 and 3 cut layers into parts: DeepSpeed "
        "ends at its start",
        f"Take {Option('deepspeed', 'none')}, or {Key('optimizer.type', 'AdamW')}.",
        "runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS",
    ),
    Rule(
        (ZERO, "compute_grad_norm"),
        lambda config: lookup(config, (ZERO, "compute_grad_norm")) is False and config.get("gradient_clipping", 0) > 0,
        "zero_optimization.compute_grad_norm = false leaves nothing to clip gradients by",
        f"Remove it, or {Key('clip_grad', None)}.",
        "runtime/zero/stage_1_and_2.py, __init__",
    ),
    Rule(
        ("data_types", "grad_accum_dtype"),
        lambda config: stage(config) not in STEPPING and accumulates_in(config) != computes_in(config),
        "data_types.grad_accum_dtype needs ZeRO stage 1, 2 or 3, or to be what the run computes in",
        "Remove it, or set zero_optimization.stage.",
        "runtime/engine.py, _do_optimizer_sanity_check",
    ),
    Rule(
        (ZERO, "compute_grad_norm"),
        lambda config: (
            lookup(config, (ZERO, "compute_grad_norm")) is False
            and (stage(config), computes_in(config), accumulates_in(config)) == (1, "bf16", "fp32")
        ),
        "zero_optimization.compute_grad_norm = false does not work at stage 1 in bf16 with sums in fp32",
        "Remove it, or data_types.grad_accum_dtype.",
        "runtime/engine.py, _do_optimizer_sanity_check",
    ),
)

# Read by parts of DeepSpeed that a run does not use: the reason, and the fix.
INERT: dict[tuple[str, ...], tuple[str, str]] = {
    ("activation_checkpointing",): (
        "models of transformers checkpoint by themselves",
        "The recipe's train_cfg.gradient_checkpointing decides.",
    ),
    ("dump_state",): ("the run directory's deepspeed.json holds what it prints", "Remove it."),
    ("dataloader_drop_last",): ("samples are drawn by Hugging Face's loader", "Remove it."),
    ("pipeline",): ("no model is cut into stages", "Remove it."),
}

# As INERT, but DeepSpeed fails on them, or writes into them unasked; so they are dropped.
DROPPED: dict[tuple[str, ...], tuple[str, str]] = {
    ("data_efficiency",): (
        "samples are drawn by Hugging Face's loader, and random-LTD needs layers that a model's own code makes",
        "Remove it.",
    ),
}


# Keys that older guides show and DeepSpeed 0.19.8 refuses or never read.
# removed: an error if it is on, dropped with a warning if it is off. inert: always dropped with a warning.
Kind = Literal["removed", "inert"]


class Obsolete(NamedTuple):
    """A key that DeepSpeed 0.19.8 no longer reads.

    Attributes:
        reason: Why it is refused or ignored; completes "`key` ...".
        instead: The fix, an imperative sentence.
        off: Values besides false, null, 0, "", {} and {"enabled": false} that switch it off.
    """

    kind: Kind
    reason: str
    instead: str
    off: tuple[object, ...] = ()


_REMOVED: Mapping[Keys, str] = {
    ("amp",): "Use bf16 or fp16; the recipe's optim_wrapper.dtype chooses.",
    ("compression_training",): "Quantize with the recipe's quantization instead.",
    ("curriculum_learning",): "Use data_efficiency.data_sampling.curriculum_learning instead.",
    ("eigenvalue",): "Nothing replaces it; remove it.",
    ("elasticity",): f"Remove it: a run resumes on another number of ranks by {Option('resume')}.",
    ("graph_harvesting",): "Use compile instead.",
    ("nebula",): "Remove it: checkpoints are written by the run itself.",
    ("progressive_layer_drop",): "Nothing replaces it; remove it.",
    ("quantize_training",): "Quantize with the recipe's quantization instead.",
    ("sparse_attention",): "Use the recipe's model.attn_implementation instead.",
    ("sparse_gradients",): "Remove it: embeddings built with sparse=True need no key.",
    (ZERO, "mics_hierarchical_params_gather"): "Use zero_hpz_partition_size, which shards weights within a group.",
    (ZERO, "zeropp_loco_param"): "Remove it: zero_quantized_gradients works without it.",
}
_DEPRECATED: Mapping[Keys, str] = {
    (ZERO, "cpu_offload"): 'Write "offload_optimizer": {"device": "cpu"}.',
    (ZERO, "cpu_offload_param"): 'Write "offload_param": {"device": "cpu"}.',
}
_NEVER_READ: Mapping[Keys, str] = {
    (ZERO, "stage3_max_act_size"): "Nothing replaces it.",
    ("activation_checkpointing", "enabled"): "The recipe's train_cfg.gradient_checkpointing decides.",
    ("pipeline", "micro_batch_size"): "The recipe's train_dataloader.batch_size decides.",
    ("seed",): "The recipe's randomness.seed decides.",
    ("comms_config",): "Use comms_logger to log communication.",
    ("monitor_config",): "Use tensorboard, wandb, csv_monitor or comet.",
}
_NO_LONGER_READ: Mapping[Keys, str] = {
    ("aio", "thread_count"): "Write intra_op_parallelism.",
    **{("compile", key): "The recipe's train_cfg.torch_compile decides." for key in ("disable", "backend", "kwargs")},
}


def _obsolete(kind: Kind, reason: str, keys: Mapping[Keys, str]) -> dict[Keys, Obsolete]:
    return {key: Obsolete(kind, reason, instead) for key, instead in keys.items()}


_REJECTED, _UNREAD = "was removed from DeepSpeed, which rejects the key", "is no longer read by DeepSpeed"
OBSOLETE: Mapping[Keys, Obsolete] = {
    **_obsolete("removed", _REJECTED, _REMOVED),
    (ZERO, "mics_shard_size"): Obsolete(
        "removed", _REJECTED, "Use zero_hpz_partition_size, which shards weights within a group.", off=(-1,)
    ),
    **_obsolete("removed", "is deprecated in DeepSpeed", _DEPRECATED),
    **_obsolete("removed", _UNREAD, {("fp32_allreduce",): 'Write "communication_data_type": "fp32".'}),
    **_obsolete("inert", "was never read by DeepSpeed", _NEVER_READ),
    **_obsolete("inert", _UNREAD, _NO_LONGER_READ),
    (ZERO, "cpu_offload_use_pin_memory"): Obsolete(
        "inert", "is no longer used by DeepSpeed", "Write pin_memory inside offload_optimizer or offload_param."
    ),
}
