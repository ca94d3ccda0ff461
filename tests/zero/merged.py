"""A config merged with a recipe on a machine, as a plan does it."""

from __future__ import annotations

from tests.machine.gpus import CPU
from tuner.fit.splits import possible_splits
from tuner.launch.batch_size import with_split
from tuner.machine.hardware import Hardware, decide_precision
from tuner.machine.topology import Batch
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides, Recipe
from tuner.zero import merge
from tuner.zero.config import Document, FinalConfig
from tuner.zero.jsonfile import parse

TINY = "tiny_full_sample_e1"


def recipe_of(*sets: str, name: str = TINY) -> Recipe:
    """Return a recipe with KEY=VALUE texts laid over it, in the split with the least memory."""
    loaded = loading.load(name, Overrides(pairs=[("--set", text) for text in sets]))
    return with_split(loaded, possible_splits(loaded.config, 1)[0], "derived: the least memory")


def merged(
    config: str | Document,
    *sets: str,
    hardware: Hardware = CPU,
    ranks: int = 1,
    name: str = TINY,
    swap_buffer: int | None = None,
) -> FinalConfig:
    """Return the final config of a document, or of the text of a file `my.json`."""
    recipe = recipe_of(*sets, name=name)
    document = parse(config, "my.json") if isinstance(config, str) else config
    batch = Batch(*recipe.config.split[:2], ranks)
    precision = decide_precision(recipe.config.optim_wrapper.dtype, hardware)
    return merge.merge(recipe, document, batch, precision, hardware, swap_buffer=swap_buffer)
