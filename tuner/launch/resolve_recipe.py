"""What a recipe becomes on some machines: compute type, batch, level, final DeepSpeed config, and whether it fits.

It looks at no machine and no disk beyond the JSON that was chosen, and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.errors import RecipeError
from tuner.fit.sequence_parallel import data_parallel_ranks, refuse_tiles
from tuner.launch import fitting, global_batch, hold_out, kernels, splitting
from tuner.launch.resolved_run import ResolvedRecipe
from tuner.machine.hardware import Hardware
from tuner.machine.launchers import contradiction
from tuner.machine.topology import Batch, Topology
from tuner.recipes.recipe import Recipe
from tuner.zero import choice, merge, precision
from tuner.zero.rules import stage


def resolve_recipe(
    loaded: Recipe, deepspeed: str | None, topology: Topology, hardware: Hardware, *, ignore_fit: bool = False
) -> ResolvedRecipe:
    """Decide all that a recipe leaves to the machines.

    Args:
        deepspeed: What `--deepspeed` says; None where the recipe decides.
        ignore_fit: Take a level also where none fits.

    Raises:
        DeepSpeedConfigError: no such preset or file, or a config that does not hold.
        RecipeError: the ranks cannot share the global batch, or samples.
        MachineError: the recipe or the config asks for what is not there, or nothing fits.
    """
    loaded = hold_out.settle(loaded)
    ranks = data_parallel_ranks(loaded.config, topology.world_size)
    refuse_tiles(loaded.config)
    document = None if choice.is_auto(loaded, deepspeed) else choice.open_chosen(loaded, deepspeed)
    if document:
        for of_document in (splitting.with_dtype, splitting.with_compile, splitting.with_batch):
            loaded = of_document(loaded, document)
    loaded = global_batch.settle(loaded, ranks)
    dtype = precision.decide(loaded.config.optim_wrapper.dtype, hardware)
    loaded = kernels.choose(loaded, hardware, dtype.dtype)
    reason = None
    if document is None:
        light = splitting.lightest(loaded, ranks).config
        deepspeed, reason = fitting.choose(light, topology, hardware, dtype, ignore=ignore_fit)
        document = choice.open_chosen(loaded, deepspeed)
    loaded = splitting.choose_split(loaded, document, topology, hardware, dtype)
    batch = Batch(*loaded.config.split[:2], ranks)
    final = merge.merge(loaded, document, batch, dtype, hardware)
    level = document.preset or document.name
    loaded = fitting.choose_loss(loaded, final.config, topology, hardware, dtype)
    _refuse_compiled_chunks(loaded, final.config)
    fit = fitting.judge(loaded.config, final.config, topology, hardware, dtype, level)
    warnings = (
        *loaded.warnings,
        *final.warnings,
        *filter(None, [contradiction(document.launch, topology), fitting.warning(fit)]),
    )
    return ResolvedRecipe(loaded, topology, hardware, batch, dtype, document, final, level, reason, fit, warnings)


def _refuse_compiled_chunks(loaded: Recipe, deepspeed: Mapping[str, Any]) -> None:
    """Refuse TRL's head in chunks in a model that is compiled where ZeRO-3 gathers weights anew for the backward pass.

    Measured, torch 2.13 and DeepSpeed 0.19.8: the head's weight "has been modified by an inplace operation".
    """
    train_cfg, key = loaded.config.train_cfg, "train_cfg.loss"
    if train_cfg.torch_compile and train_cfg.loss == "chunked" and stage(dict(deepspeed)) == 3:
        what = "torch.compile with the loss in chunks does not work at ZeRO stage 3"
        fix = "Use --set train_cfg.loss=whole, --set torch_compile=False, or --deepspeed zero2."
        raise RecipeError(what, where=f"{key} ({loaded.origins[key].source})", fix=fix)
