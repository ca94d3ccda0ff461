"""The DeepSpeed config of a run: opened as it was chosen, and merged with the recipe and the machine.

This is the one place that loads the room `zero`. A run at stage 0 without a config of its own needs two modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.recipes.recipe_file import YAML
from tuner.zero.config import BASE, NONE, Document, FinalConfig, stage_0
from tuner.zero.recipe_values import chosen, final_stage_0, is_stage_0

if TYPE_CHECKING:
    from tuner.machine.hardware import Hardware, Precision
    from tuner.machine.topology import Batch, LaunchFlags
    from tuner.recipes.recipe import Recipe


def launch_flags(recipe: Recipe, flag: str | None) -> LaunchFlags | None:
    """Return where the chosen accelerate config says that a run starts; None for other configs.

    Args:
        flag: The value of `--deepspeed`; None if the recipe decides.

    Raises:
        DeepSpeedConfigError: as `open_document`.
    """
    choice, where = chosen(recipe, flag)
    file = choice.get(BASE) if isinstance(choice, dict) else choice
    if not isinstance(file, str) or not file.endswith(YAML):
        return None
    from tuner.zero.choice import open_config  # as in `open_document`

    return open_config(file, where).launch


def open_document(recipe: Recipe, flag: str | None) -> Document:
    """Return the chosen config with the changes of `--ds`.

    Raises:
        DeepSpeedConfigError: no such preset or file, or a file that cannot be read.
    """
    if chosen(recipe, flag)[0] == NONE and not recipe.ds:
        return stage_0()
    from tuner.zero import choice  # with what it imports 2,000 lines, which stage 0 does not need

    return choice.open_chosen(recipe, flag)


def merged(recipe: Recipe, document: Document, batch: Batch, precision: Precision, hardware: Hardware) -> FinalConfig:
    """Return the config that training uses.

    Raises:
        DeepSpeedConfigError, MachineError: as `zero.merge.merge`.
    """
    if is_stage_0(recipe, document):
        return final_stage_0(recipe, batch, precision)
    from tuner.zero.merge import merge  # as in `open_document`

    return merge(recipe, document, batch, precision, hardware)
