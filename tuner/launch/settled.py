"""What a recipe becomes on some machines: compute type, batch, level, final DeepSpeed config, and whether it fits.

It looks at no machine and no disk beyond the JSON that was chosen, and starts nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.fit.advice import Fit
from tuner.launch import fitting
from tuner.machine.hardware import Hardware
from tuner.machine.topology import Batch, Topology
from tuner.recipes.recipe import Recipe
from tuner.zero import choice, merge, precision
from tuner.zero.jsonfile import Document


@dataclass(frozen=True)
class Settled:
    """A recipe on machines; `level_reason` says why `auto` took this level, None where it was named."""

    recipe: Recipe
    topology: Topology
    hardware: Hardware
    batch: Batch
    precision: precision.Precision
    document: Document
    final: merge.FinalConfig
    level: str
    level_reason: str | None
    fit: Fit | None

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user must be told of the recipe, the config and the memory."""
        return (*self.recipe.warnings, *self.final.warnings, *filter(None, [fitting.warning(self.fit)]))


def settle(
    loaded: Recipe, deepspeed: str | None, topology: Topology, hardware: Hardware, *, ignore_fit: bool = False
) -> Settled:
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
    decided = precision.decide(config.optim_wrapper.dtype, hardware)
    reason = None
    if choice.chosen(loaded, deepspeed)[0] == choice.AUTO:
        found = fitting.choose(config, topology, hardware, decided, ignore=ignore_fit)
        deepspeed, reason = found.level, found.reason
    document = choice.open_chosen(loaded, deepspeed)
    final = merge.merge(loaded, document, batch, decided, hardware)
    level = document.preset or document.name
    loaded = fitting.settle_loss(loaded, final.config, topology, hardware, decided)
    fit = fitting.judge(loaded.config, final.config, topology, hardware, decided, level)
    return Settled(loaded, topology, hardware, batch, decided, document, final, level, reason, fit)
