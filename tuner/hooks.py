"""The hooks by which side rooms join a run. The rooms that train a model call them and import no side room.

Each hook imports the side room's module when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tuner.files import JsonObject
from tuner.runs.directory import RunDirectory

if TYPE_CHECKING:
    from tuner.importers.direct import Converted
    from tuner.recipes.schema import Model
    from tuner.recipes.schema.architecture import Architecture


class Meaning(NamedTuple):
    """What another tool's word with its value is here: a key and its value, or a flag; else what to do `instead`."""

    key: str | None
    value: str | None
    flag: str | None
    instead: str | None


class Measurement(NamedTuple):
    """The facts of a model with what was measured of it, and how; or None, and why nothing was measured."""

    architecture: Architecture | None
    text: str


class Trial(NamedTuple):
    """The attention with which a model keeps the samples of a row apart, and how that was found; or None, and why."""

    attention: str | None
    text: str


class NameWord(NamedTuple):
    """Another tool's word in a recipe's name: its text, the values that it sets, and a warning about what is lost."""

    text: str
    values: JsonObject
    loses: str | None


class OtherTools(Protocol):
    """All that whoever reads a recipe asks about the words of other tools; no other room knows one."""

    def meaning(self, key: str, value: str) -> Meaning | None:
        """Return what a key and its value are here; None for a recipe's own key and for an unknown word."""

    def bare(self, key: str) -> str:
        """Return a key without the block in which another tool keeps it."""

    def known_words(self) -> Collection[str]:
        """Return the words that `meaning` knows."""

    def key_hint(self, key: str, known: Iterable[str]) -> str:
        """Return what to write instead of an unknown key of a recipe file; `known` are the keys of its block."""

    def instead_of_objective(self, name: str) -> str | None:
        """Return what to use if tuner has no objective with another tool's name; None for other names."""

    def owners(self, keys: Iterable[str]) -> list[str]:
        """Return the tools with the most identifying keys among a file's top-level keys; several in a tie."""

    def num_marks(self, keys: Iterable[str]) -> int:
        """Return how many of these keys only the files of one tool have."""

    def owner_of_python(self, beginning: str) -> str | None:
        """Return the tool of a Python config that begins so; None: it may be a recipe."""

    def readings(self, name: str) -> Iterator[tuple[str, tuple[NameWord, ...]]]:
        """Yield a recipe's name with one more of another tool's words replaced each time, and these words."""

    def refusal_of_name(self, name: str) -> str | None:
        """Return why the recipe that another tool has under this name is refused, or None."""

    def has_recipe(self, name: str) -> bool:
        """Return whether another tool has a recipe of exactly this name, which keeps that tool's defaults."""

    def defaults(self) -> Path:
        """Return the file of these defaults."""


def other_tools() -> OtherTools:
    """Return what tells the words of other tools."""
    from tuner.importers import words

    return words


def run_has_ended(run_dir: RunDirectory, exit_code: int) -> Callable[[], None]:
    """Write the report, push the result and start the user's command; return the function that waits for them.

    It is called once: by the launcher, or by a rank that Slurm, MPI or torchrun has started.
    """
    from tuner.report import end

    return end.follow_up(run_dir, exit_code)


def start_has_failed(run_dir: RunDirectory, exit_code: int) -> None:
    """Run the user's command for a run that ends before its ranks start."""
    from tuner.report.end import Notice

    Notice(run_dir, exit_code).wait()


def recipe_of_other_tool(name: str, environ: Mapping[str, str]) -> Converted:
    """Return the recipe of another tool's config.

    Raises:
        TunerError: the config is wrong, or its recipe would train something else.
    """
    from tuner.importers import direct

    return direct.recipe_of(name, environ)


def measurement_of(model: Model, architecture: Architecture | None) -> Measurement:
    """Have a model measured that no formula describes; `architecture` is what is known of it."""
    from tuner.lab import measured

    return measured.measurement_of(model, architecture)


def trial_of(model: Model) -> Trial:
    """Have it tried whether a model that no test knows keeps the samples of a row apart."""
    from tuner.lab import measured

    return measured.trial_of(model)
