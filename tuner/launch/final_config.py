"""The DeepSpeed config of a run: opened as it was chosen, and merged with the recipe and the machine.

This is the one place of the launch that opens and merges it.
"""

from __future__ import annotations

from tuner.machine.hardware import Hardware, Precision
from tuner.machine.topology import Batch, LaunchFlags
from tuner.recipes.recipe import Recipe
from tuner.recipes.recipe_file import YAML
from tuner.zero import choice
from tuner.zero.config import BASE, Document, FinalConfig
from tuner.zero.merge import merge
from tuner.zero.recipe_values import chosen


def launch_flags(recipe: Recipe, flag: str | None) -> LaunchFlags | None:
    """Return where the chosen accelerate config says that a run starts; None for other configs.

    Args:
        flag: The value of `--deepspeed`; None if the recipe decides.

    Raises:
        DeepSpeedConfigError: as `open_document`.
    """
    value, where = chosen(recipe, flag)
    file = value.get(BASE) if isinstance(value, dict) else value
    if not isinstance(file, str) or not file.endswith(YAML):
        return None
    return choice.open_config(file, where).launch


def open_document(recipe: Recipe, flag: str | None) -> Document:
    """Return the chosen config with the changes of `--ds`.

    Raises:
        DeepSpeedConfigError: no such preset or file, or a file that cannot be read.
    """
    return choice.open_chosen(recipe, flag)


def merged(recipe: Recipe, document: Document, batch: Batch, precision: Precision, hardware: Hardware) -> FinalConfig:
    """Return the config that training uses.

    Raises:
        DeepSpeedConfigError, MachineError: as `zero.merge.merge`.
    """
    return merge(recipe, document, batch, precision, hardware)
