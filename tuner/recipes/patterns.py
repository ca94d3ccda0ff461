"""Names by pattern and by beginning: what 'qwen3*_lora_alpaca*' means, and what may follow 'qwen3_8b_q'.

It goes through a name part by part, never through the product of all parts, and opens no part itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import translate
from functools import cache
from itertools import chain, islice

from tuner.recipes import catalog

WILDCARDS = frozenset("*?[")
_EPOCHS = 3
"""Of a pattern that says nothing of them."""

Suits = Callable[[str, str], bool]
"""Whether (objective, data set) belong together."""


@dataclass(frozen=True)
class Expansion:
    """The first names that match, models in order, and how many match in all."""

    names: tuple[str, ...]
    total: int


def expand(pattern: str, limit: int, suits: Suits) -> Expansion:
    """Return the names that a glob matches, without or with their `_eN`: the pattern's own number, or 3."""
    glob, epochs = _Glob(pattern), catalog.with_epochs(pattern)[1] or _EPOCHS
    groups = _composed(glob, epochs, suits)
    total = sum(len(datasets) for _, datasets in groups)
    recipes = [
        name for name in catalog.names("recipes") if glob.matches(name) and not _is_composed(name, epochs, suits)
    ]
    return Expansion((*islice(chain(recipes, _names(groups, epochs)), limit),), len(recipes) + total)


def complete(start: str, suits: Suits) -> list[str]:
    """Return what a shell may offer for a name that begins with `start`: names up to the end of their next part.

    Never just one name that must go on: a shell would put a space after it.
    """
    found = sorted({*_steps(start, suits)})
    while len(found) == 1 and found[0].endswith("_"):
        found = sorted({*_steps(found[0], suits)})
    return found


def _objectives() -> Iterable[str]:
    return (name for name in catalog.names("objectives") if name != catalog.DEFAULT_OBJECTIVE)


def _trainings() -> Iterable[tuple[str, str]]:
    for method in catalog.names("methods"):
        yield catalog.DEFAULT_OBJECTIVE, method
        yield from ((objective, f"{objective}_{method}") for objective in _objectives())


class _Glob:
    """A glob as a machine that reads a name piece by piece. A state is a set of positions in the glob, as bits."""

    def __init__(self, pattern: str) -> None:
        tokens = re.findall(r"\*+|\[!?[^]]+\]|.", pattern.lower(), re.DOTALL)
        self._tokens = [re.compile(translate(token)) for token in tokens]
        self._stars = sum(1 << place for place, token in enumerate(tokens) if token[0] == "*")
        self._hits: dict[str, int] = {}
        self._end = 1 << len(tokens)
        self.start = self._skipping_stars(1)

    def after(self, state: int, text: str) -> int:
        for character in text:
            state = self._skipping_stars((state & self._hit_by(character)) << 1 | (state & self._stars))
        return state

    def is_end(self, state: int) -> bool:
        return bool(state & self._end)

    def matches(self, text: str) -> bool:
        return self.is_end(self.after(self.start, text))

    def _skipping_stars(self, state: int) -> int:
        return state | (state & self._stars) << 1

    def _hit_by(self, character: str) -> int:
        if character not in self._hits:
            hits = (bool(token.match(character)) << place for place, token in enumerate(self._tokens))
            self._hits[character] = sum(hits)
        return self._hits[character]


def _composed(glob: _Glob, epochs: int, suits: Suits) -> list[tuple[str, list[str]]]:
    """Return (MODEL_TRAINING, its data sets) of the composed names that a glob matches.

    Most names bring the glob into a state that it was in before, and equal states go on alike: each is looked at once.
    """

    @cache
    def datasets(objective: str, state: int) -> list[str]:
        return [name for name in catalog.names("datasets") if ends(state, name) and suits(objective, name)]

    def ends(state: int, dataset: str) -> bool:
        here = glob.after(state, dataset)
        return glob.is_end(glob.after(here, f"_e{epochs}")) or glob.is_end(here)

    @cache
    def trainings(state: int) -> list[tuple[str, list[str]]]:
        states = ((objective, name, glob.after(state, f"_{name}_")) for objective, name in _trainings())
        found = ((name, datasets(objective, here)) for objective, name, here in states if here)
        return [(name, names) for name, names in found if names]

    states = ((model, glob.after(glob.start, model)) for model in catalog.names("models"))
    return [(f"{model}_{name}", names) for model, state in states if state for name, names in trainings(state)]


def _is_composed(name: str, epochs: int, suits: Suits) -> bool:
    """Say whether a recipe's name is one that parts compose to as well."""
    return catalog.with_epochs(name)[1] == epochs and name in _names(_composed(_Glob(name), epochs, suits), epochs)


def _names(groups: Iterable[tuple[str, list[str]]], epochs: int) -> Iterator[str]:
    return (f"{before}_{dataset}_e{epochs}" for before, datasets in groups for dataset in datasets)


def _steps(start: str, suits: Suits) -> Iterator[str]:
    yield from (name for name in catalog.names("recipes") if name.startswith(start))
    for model in catalog.names("models"):
        here = f"{model}_"
        if start.startswith(here):
            yield from _objective_steps(start, here, suits)
        elif here.startswith(start):
            yield here


def _objective_steps(start: str, model: str, suits: Suits) -> Iterator[str]:
    yield from _method_steps(start, model, catalog.DEFAULT_OBJECTIVE, suits)
    for objective in _objectives():
        here = f"{model}{objective}_"
        if start.startswith(here):
            yield from _method_steps(start, here, objective, suits)
        elif here.startswith(start):
            yield here


def _method_steps(start: str, before: str, objective: str, suits: Suits) -> Iterator[str]:
    for method in catalog.names("methods"):
        here = f"{before}{method}_"
        if start.startswith(here):
            names = ((f"{here}{dataset}_e{_EPOCHS}", dataset) for dataset in catalog.names("datasets"))
            yield from (name for name, dataset in names if name.startswith(start) and suits(objective, dataset))
        elif here.startswith(start):
            yield here
