"""What DeepSpeed measures where a config asks for it, and where it writes that: into the run directory.

It knows no run; a place that the user's config names stays.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

from tuner.recipes.merging import Kind, Origin, Place, lookup
from tuner.zero.final_config import FinalConfig
from tuner.zero.rules import Config, is_on

FILES = (
    ("flops_profiler", "output_file", "flops_profiler.txt"),
    ("csv_monitor", "output_path", "csv"),
    ("tensorboard", "output_path", "tensorboard"),
)
"""Blocks that write, the key that says where, and our name for it; only the first names a file.

DeepSpeed's own defaults are standard output and the folder that the user happens to be in."""


def places(config: Config) -> Iterator[tuple[tuple[str, str], Path]]:
    """Yield each key of an enabled block that names a place, with the folder that is written to."""
    for block, key, name in FILES:
        named = lookup(config, (block, key))
        if is_on(config, block, "enabled") and named:
            yield (block, key), Path(named).parent if Path(name).suffix else Path(named)


def placed(final: FinalConfig, folder: Path) -> FinalConfig:
    """Return the config in which every enabled block writes to a place, by default to `folder`."""
    config, origins = copy.deepcopy(final.config), dict(final.origins)
    for block, key, name in FILES:
        if is_on(config, block, "enabled") and not config[block].get(key):
            config[block][key] = str(folder / name)
            origins[f"{block}.{key}"] = Origin(Place(Kind.DERIVED, "derived: in the run directory"))
    return final._replace(config=config, origins=origins)
