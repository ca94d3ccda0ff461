"""The two hooks by which side rooms join a run. The rooms that train a model call them and import no side room.

Each hook is the import path of a function, which is loaded when the hook is called.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from tuner.runs.directory import RunDirectory

RUN_HAS_ENDED = "tuner.report.end:follow_up"
"""Called once when a run has ended: by the launcher, or by a rank that Slurm, MPI or torchrun has started."""
START_HAS_FAILED = "tuner.report.end:notify"
"""Called if a run ends before its ranks start."""
OTHER_TOOLS_CONFIG = "tuner.importers.direct:recipe_of"
"""Called with a name that ends as a file of another tool may, where a recipe is expected."""


class Converted(NamedTuple):
    """The recipe made of another tool's config: its file, and one line that says what was changed."""

    path: Path
    summary: str


def run_has_ended(run: RunDirectory, exit_code: int) -> Callable[[], None]:
    """Write the report, push the result and start the user's command; return the function that waits for them."""
    follow_up: Callable[[RunDirectory, int], Callable[[], None]] = pkgutil.resolve_name(RUN_HAS_ENDED)
    return follow_up(run, exit_code)


def start_has_failed(run: RunDirectory, exit_code: int) -> None:
    """Run the user's command for a run without ranks."""
    notify: Callable[[RunDirectory, int], None] = pkgutil.resolve_name(START_HAS_FAILED)
    notify(run, exit_code)


def recipe_of_other_tool(name: str, environ: Mapping[str, str]) -> Converted | None:
    """Return the recipe of another tool's config, or None if the file is not one.

    Args:
        name: The text in a recipe's place.
        environ: Says where tuner's cache is.

    Raises:
        TunerError: the config is wrong, or its recipe would train something else.
    """
    if not name.endswith((".yaml", ".yml", ".json", ".py", ".sh")):
        return None
    convert: Callable[[str, Mapping[str, str]], Converted | None] = pkgutil.resolve_name(OTHER_TOOLS_CONFIG)
    return convert(name, environ)
