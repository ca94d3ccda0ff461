"""What DeepSpeed has, and a run of tuner would end at or never reach, as tables; each was run, or stands in its source.

What contradicts itself in any config is `rules`; a table here only looks, and `conflicts` tells what it found.
"""

from __future__ import annotations

from tuner.recipes.merging import lookup
from tuner.zero.rules import (
    STEPPING,
    ZERO,
    Config,
    Rule,
    accumulates_in,
    autocasts_to,
    computes_in,
    has_zenflow,
    is_on,
    stage,
)

# DeepSpeed has these features; a run of tuner would end in the middle, or in weights that nothing loads. Each was run.
UNRUNNABLE: tuple[Rule, ...] = (
    Rule(
        ("tensor_parallel", "autotp_size"),
        lambda config: lookup(config, ("tensor_parallel", "autotp_size"), 0) > 1,
        "tensor_parallel.autotp_size above 1 trains, but each rank then saves its own part of the weights, and "
        "nothing can load them",
        "Remove it; ZeRO stage 3 shards the weights too.",
    ),
    Rule(
        ("sequence_parallel_size",),
        lambda config: config.get("sequence_parallel_size", 1) > 1,
        "sequence_parallel_size above 1 needs a model that splits its sequences",
        "Remove it; the recipe splits them: --set train_cfg.sequence_parallel_size=2.",
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
        'Write "bfloat16", or take fp16 for all: --set dtype=fp16.',
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
        lambda config: is_on(config, "expert_parallel", "enabled"),
        "expert_parallel.enabled (AutoEP of DeepSpeed 0.19.8) fails on the output recorders of transformers 5.23, and "
        "would leave each rank with its own experts to save",
        "Remove it; ZeRO stage 3 shards the experts too.",
        "module_inject/auto_ep_presets/base.py, _install_instance_transformers_output_recorders",
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
        # Whatever is not false switches it on, null too.
        lambda config: config.get("datastates_ckpt", False) is not False,
        "datastates_ckpt writes with a package that no registry has, after a run has taken its checkpoint for whole",
        "Remove it.",
        "datastates/config.py, DeepSpeedDataStatesConfig; runtime/checkpoint_engine/datastates_checkpoint_engine.py",
    ),
)


def _made_by_deepspeed(config: Config) -> str:
    return str(lookup(config, ("optimizer", "type"))).lower()


# Contradictions with what a recipe and the machine decide, in a final config.
FINAL: tuple[Rule, ...] = (
    Rule(
        ("gradient_clipping",),
        # 0.19.8, two ranks, loss of the fourth step: 4.494 at stages 0 to 3 without clipping; with 1.0 it is 4.494 at
        # stage 0, where the gradient is clipped, and 4.536 at the others, where Muon's update is.
        lambda config: _made_by_deepspeed(config) == "muon" and config.get("gradient_clipping", 0) > 0,
        "gradient_clipping clips Muon's update, not the gradient, at ZeRO stage 1, 2 and 3: it trains otherwise there",
        "Muon's updates are of one size by themselves: --set clip_grad=None, and no gradient_clipping in a JSON.",
        "runtime/zero/stage_1_and_2.py and stage3.py, step",
    ),
    Rule(
        (ZERO, "stage"),
        lambda config: _made_by_deepspeed(config) == "lamb" and stage(config) in STEPPING,
        "Lamb scales a layer's update by the layer's norm, and ZeRO stage 1, 2 and 3 cut layers into parts: DeepSpeed "
        "ends at its start",
        "Take --deepspeed none, or --set optimizer.type=AdamW.",
        "runtime/zero/utils.py, ZERO_SUPPORTED_OPTIMIZERS",
    ),
    Rule(
        (ZERO, "compute_grad_norm"),
        lambda config: lookup(config, (ZERO, "compute_grad_norm")) is False and config.get("gradient_clipping", 0) > 0,
        "zero_optimization.compute_grad_norm = false leaves nothing to clip gradients by",
        "Remove it, or --set clip_grad=None.",
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

# Read by parts of DeepSpeed that a run does not go through: why, and what to do.
INERT: dict[tuple[str, ...], tuple[str, str]] = {
    ("activation_checkpointing",): (
        "models of transformers checkpoint by themselves",
        "The recipe's train_cfg.gradient_checkpointing decides.",
    ),
    ("dump_state",): ("the run directory's deepspeed.json holds what it prints", "Remove it."),
    ("dataloader_drop_last",): ("samples are drawn by Hugging Face's loader", "Remove it."),
    ("pipeline",): ("no model is cut into stages", "Remove it."),
}

# As INERT, but DeepSpeed fails on them, or writes into them what nobody asked for; so they are dropped.
DROPPED: dict[tuple[str, ...], tuple[str, str]] = {
    ("data_efficiency",): (
        "samples are drawn by Hugging Face's loader, and random-LTD needs layers that a model's own code makes",
        "Remove it.",
    ),
}
