"""Print a run before its start, values with their origins, and the differences between two sets of values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from tuner.cli.say import say, wrapped
from tuner.files import ReadOnlyJson
from tuner.recipes.merging import DEFAULT, Difference, Origin, leaves

if TYPE_CHECKING:
    from tuner.launch.resolved_run import ResolvedRun


def announce(run: ResolvedRun, warnings: tuple[str, ...]) -> None:
    """Print the run that is about to start, and all warnings about it and the machine, on standard error."""
    from tuner.launch.announcement import announcement

    for line in announcement(run, warnings):
        say(wrapped(line, "  ", err=True), err=True)


def with_origins(
    values: ReadOnlyJson,
    origins: Mapping[str, Origin],
    *,
    width: int = 44,
    columns: int | None = None,
    options: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """Yield `key = value  # origin, over the overridden values`, one line for each leaf.

    Args:
        width: The column in which origins begin.
        columns: The terminal's width; an origin that does not fit stands below its value. None: there is no terminal.
        options: The option that sets each key; it is printed after the key's origin.
    """
    for key, value in leaves(values):
        text, origin = f"{key} = {value!r}", _origin_text(origins.get(key, DEFAULT))
        if key in options and not origin.startswith(f"{options[key]} "):
            origin += f" ({options[key]})"
        line = f"{text:<{width}}  # {origin}"
        if columns is None or len(line) <= columns:
            yield line
        else:
            from textwrap import wrap  # a pipe has no width

            yield text
            yield from wrap(
                f"# {origin}", columns - 2, initial_indent="    ", subsequent_indent="    # ", break_on_hyphens=False
            )


def differing(differences: Iterable[Difference]) -> Iterator[tuple[str, str | None]]:
    """Yield the lines of each difference, its key and then both sides, with the colour they are printed in."""
    for difference in differences:
        yield difference.key, None
        for sign, side, colour in (("-", difference.left, "red"), ("+", difference.right, "green")):
            value = f"  {sign} {side.value!r}" if side else f"  {sign} (absent)"
            yield f"{value:<24}  # {_origin_text(side.origin)}" if side else value, colour


def _origin_text(origin: Origin) -> str:
    return origin.text + "".join(f", over {old.value!r} ({old.place})" for old in origin.overridden)
