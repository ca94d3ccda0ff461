"""A recipe file that holds code, run by mmengine. It runs only if the user allows code."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tuner.errors import RecipeError, did_you_mean
from tuner.files import read_bytes
from tuner.recipes.recipe_file import MAX_BYTES, RecipeFile
from tuner.recipes.schema import RecipeConfig

_TRIES = 5
_PAUSE = 0.2


def run_file(path: Path, shown: str) -> RecipeFile:
    """Run a file with mmengine and return its values, without their lines.

    Raises:
        RecipeError: mmengine cannot read it, or it imports a module that is not installed. Other exceptions of the
            file's own code are not caught.
    """
    config = mmengine_config()
    from mmengine.config.utils import ConfigParsingError

    # mmengine does not run the imports of a file that it takes for a lazy config: `os.sep` would be a placeholder.
    try:
        lazy = None if b"read_base" in read_bytes(path, MAX_BYTES) else False
        values = dict(config.fromfile(path, lazy_import=lazy).to_dict())
    except (OSError, SyntaxError, ConfigParsingError) as error:
        fix = "In a file with code, mmengine reads `_base_`: it must be file paths."
        raise RecipeError(f"mmengine cannot read the recipe: {error}", where=shown, fix=fix) from None
    except ImportError as error:
        fix = "Install it, or put the folder that holds it on PYTHONPATH."
        raise RecipeError(f"the recipe's code cannot import: {error}", where=shown, fix=fix) from None
    known = set(RecipeConfig.model_fields)
    return RecipeFile(shown, values, {}, helpers=frozenset(key for key in values if not did_you_mean(key, known)))


def mmengine_config() -> Any:
    """Return mmengine's Config class, also while another process imports it for the first time on this machine.

    yapf 0.43, which mmengine imports, creates its cache file before it writes to it, so a process that starts at the
    same moment (another task of Slurm) reads an empty file and fails.

    Raises:
        EOFError: yapf's cache stays empty.
    """
    for tries_left in reversed(range(_TRIES)):
        try:
            from mmengine.config import Config

            return Config
        except EOFError:
            if not tries_left:
                raise
            time.sleep(_PAUSE)
    raise AssertionError("the last try returns or raises")
