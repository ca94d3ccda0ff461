"""Recipe names that match a pattern ('qwen3*_lora_alpaca*') or continue a beginning ('qwen3_8b_q').

It composes names from the names of parts and opens no part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fnmatch import translate
from itertools import islice
from typing import NamedTuple

from tuner.recipes import catalog

WILDCARDS = frozenset("*?[")
_EPOCHS = 3
"""The epochs of names for a pattern without epochs."""

Suits = Callable[[str, str], bool]
"""Return whether an objective and a data set belong together."""


class Expansion(NamedTuple):
    """The first names that match, models in order, and how many match in all."""

    names: tuple[str, ...]
    total: int


def expand(pattern: str, limit: int, suits: Suits) -> Expansion:
    """Return the names that match a glob, with or without `_eN`; N is the pattern's own number, or 3."""
    matching = _matching(pattern.lower(), suits)
    names = (*islice(matching, limit),)
    return Expansion(names, len(names) + sum(1 for _ in matching))


def complete(start: str, suits: Suits) -> list[str]:
    """Return the completions of a name that begins with `start`: each name up to the end of its next part.

    A single unfinished name is never returned, because a shell adds a space after it.
    """
    offered = sorted({*_next_parts(start, suits)})
    while len(offered) == 1 and offered[0].endswith("_"):
        offered = sorted({*_next_parts(offered[0], suits)})
    return offered


def _matching(pattern: str, suits: Suits) -> Iterator[str]:
    matches, epochs = re.compile(translate(pattern)).match, catalog.with_epochs(pattern)[1] or _EPOCHS
    open_end = pattern.endswith("*")  # then a name without its epochs matches only if the whole name does
    recipes = {name: None for name in catalog.names("recipes") if matches(name)}
    yield from recipes
    literal = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    word = "" if "[" in pattern else max(re.split(r"[*?_]+", pattern), key=len)
    after_model = [f"{training}_{dataset}" for _, training, dataset in _after_model(suits)]
    holding = [rest for rest in after_model if word in f"{rest}_e{epochs}"]
    for model in catalog.names("models"):
        # There are nearly a million names. Those of a model that cannot match the beginning, or without the
        # pattern's longest word, are not composed.
        if not (model.startswith(literal) or literal.startswith(model)):
            continue
        for rest in after_model if word in model else holding:
            stem = f"{model}_{rest}"
            name = f"{stem}_e{epochs}"
            if (matches(name) or (not open_end and matches(stem))) and name not in recipes:
                yield name


def _next_parts(start: str, suits: Suits) -> Iterator[str]:
    yield from (name for name in catalog.names("recipes") if name.startswith(start))
    for model in catalog.names("models"):
        here = f"{model}_"
        if not start.startswith(here):
            yield from [here] if here.startswith(start) else []
            continue
        for objective, training, dataset in _after_model(suits):
            name = f"{here}{training}_{dataset}_e{_EPOCHS}"
            ends = (f"{here}{objective}_", f"{here}{training}_", name)
            end = next((end for end in ends if name.startswith(end) and not start.startswith(end)), name)
            if end.startswith(start):
                yield end


def _after_model(suits: Suits) -> Iterator[tuple[str, str, str]]:
    """Yield (objective, training word of a name, data set) for all that belong together."""
    known = catalog.names("datasets")
    learned = {kind: [name for name in known if suits(kind, name)] for kind in catalog.names("objectives")}
    for training, (objective, _) in catalog.trainings().items():
        for dataset in learned[objective]:
            yield objective, training, dataset
