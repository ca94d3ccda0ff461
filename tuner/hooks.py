"""The hooks by which side rooms join a run. The rooms that train a model call them and import no side room.

Each hook imports the side room's module when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tuner.runs.directory import RunDirectory

if TYPE_CHECKING:
    from tuner.importers.direct import Converted


def run_has_ended(run: RunDirectory, exit_code: int) -> Callable[[], None]:
    """Write the report, push the result and start the user's command; return the function that waits for them.

    It is called once: by the launcher, or by a rank that Slurm, MPI or torchrun has started.
    """
    from tuner.report import end

    return end.follow_up(run, exit_code)


def start_has_failed(run: RunDirectory, exit_code: int) -> None:
    """Run the user's command for a run that ends before its ranks start."""
    from tuner.report import end

    end.notify(run, exit_code)


def recipe_of_other_tool(name: str, environ: Mapping[str, str]) -> Converted:
    """Return the recipe of another tool's config.

    Args:
        name: The path of the config, as the user wrote it.
        environ: Says where tuner's cache is.

    Raises:
        TunerError: the config is wrong, or its recipe would train something else.
    """
    from tuner.importers import direct

    return direct.recipe_of(name, environ)
