"""What a recipe becomes on some machines: compute type, batch, level, final DeepSpeed config, and whether it fits.

It looks at no machine and no disk beyond the JSON that was chosen, and starts nothing.
"""

from __future__ import annotations

from tuner.launch import fitting, kernels
from tuner.launch.run import ResolvedRecipe
from tuner.machine.hardware import Hardware
from tuner.machine.topology import Batch, Topology
from tuner.recipes.recipe import Recipe
from tuner.zero import choice, merge, precision


def resolve_recipe(
    loaded: Recipe, deepspeed: str | None, topology: Topology, hardware: Hardware, *, ignore_fit: bool = False
) -> ResolvedRecipe:
    """Decide all that a recipe leaves to the machines.

    Args:
        deepspeed: What `--deepspeed` says; None where the recipe decides.
        ignore_fit: Take a level also where none fits.

    Raises:
        DeepSpeedConfigError: no such preset or file, or a config that does not hold.
        MachineError: the recipe or the config asks for what is not there, or nothing fits.
    """
    config = loaded.config
    batch = Batch(config.train_dataloader.batch_size, config.optim_wrapper.accumulative_counts, topology.world_size)
    dtype = precision.decide(config.optim_wrapper.dtype, hardware)
    loaded = kernels.choose(loaded, hardware, dtype.dtype)
    config = loaded.config
    reason = None
    if choice.chosen(loaded, deepspeed)[0] == choice.AUTO:
        deepspeed, reason = fitting.choose(config, topology, hardware, dtype, ignore=ignore_fit)
    document = choice.open_chosen(loaded, deepspeed)
    final = merge.merge(loaded, document, batch, dtype, hardware)
    level = document.preset or document.name
    loaded = fitting.choose_loss(loaded, final.config, topology, hardware, dtype)
    fit = fitting.judge(loaded.config, final.config, topology, hardware, dtype, level)
    warnings = (*loaded.warnings, *final.warnings, *filter(None, [fitting.warning(fit)]))
    return ResolvedRecipe(loaded, topology, hardware, batch, dtype, document, final, level, reason, fit, warnings)
