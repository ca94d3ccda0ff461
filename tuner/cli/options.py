"""Options that several commands share, and how they become overrides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from tuner.cli import complete
from tuner.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])


class Finite(click.FloatRange):
    """A number of a range: click's own lets NaN into every one, and infinity into one without an end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


_OVERRIDES = (
    click.option(
        "--model",
        metavar="PATH",
        shell_complete=complete.files,
        help="Train this model: a folder, or an id on the hub.",
    ),
    click.option(
        "--data",
        metavar="PATH",
        shell_complete=complete.files,
        help="Train on this data: a file, a folder, or an id on the hub.",
    ),
    click.option(
        "--set",
        "sets",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=complete.keys,
        help="Change any value, by key or by unique tail.",
    ),
    click.option(
        "--cfg-options",
        "cfg_options",
        multiple=True,
        metavar="KEY=VALUE ...",
        shell_complete=complete.keys,
        help="As --set; XTuner's word.",
    ),
    click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="The one seed of weights, data order and dropout."),
    click.option(
        "--allow-code",
        is_flag=True,
        help="Run the code that a recipe file holds, or names of an installed package, instead of refusing it.",
    ),
    click.option("--debug", is_flag=True, help="Show tracebacks of users' mistakes too."),
    click.argument("more", nargs=-1, metavar=""),
)


def override_options(command: Command) -> Command:
    """Add --model, --data, --set, --cfg-options, --seed, --allow-code and --debug to a command."""
    for option in reversed(_OVERRIDES):
        command = option(command)
    return command


def overrides(
    model: str | None,
    data: str | None,
    seed: int | None,
    sets: Sequence[str],
    cfg_options: Sequence[str],
    more: Sequence[str],
) -> Any:
    """Return the recipe overrides; `more` holds what follows the first value of --cfg-options, as XTuner allows.

    Raises:
        UsageError: an argument that belongs to nothing.
    """
    from tuner.recipes.recipe import Overrides  # imports pydantic, which --help does not need

    stray = [text for text in more if "=" not in text or not cfg_options]
    if stray:
        raise UsageError(f"unexpected argument {stray[0]!r}", fix="Values go in --set KEY=VALUE.")
    pairs = [("--set", text) for text in sets]
    pairs += [("--cfg-options", text) for text in (*cfg_options, *more)]
    return Overrides(model, data, seed, tuple(pairs))
