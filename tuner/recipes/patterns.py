"""Names by pattern and by beginning: what 'qwen3*_lora_alpaca*' means, and what may follow 'qwen3_8b_q'.

It composes names of the names of parts, and opens no part itself.
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
"""Of a pattern that says nothing of them."""

Suits = Callable[[str, str], bool]
"""Whether (objective, data set) belong together."""


class Expansion(NamedTuple):
    """The first names that match, models in order, and how many match in all."""

    names: tuple[str, ...]
    total: int


def expand(pattern: str, limit: int, suits: Suits) -> Expansion:
    """Return the names that a glob matches, without or with their `_eN`: the pattern's own number, or 3."""
    matching = _matching(pattern.lower(), suits)
    names = (*islice(matching, limit),)
    return Expansion(names, len(names) + sum(1 for _ in matching))


def complete(start: str, suits: Suits) -> list[str]:
    """Return what a shell may offer for a name that begins with `start`: names up to the end of their next part.

    Never just one name that must go on: a shell would put a space after it.
    """
    offered = sorted({*_next_parts(start, suits)})
    while len(offered) == 1 and offered[0].endswith("_"):
        offered = sorted({*_next_parts(offered[0], suits)})
    return offered


def _matching(pattern: str, suits: Suits) -> Iterator[str]:
    matches, epochs = re.compile(translate(pattern)).match, catalog.with_epochs(pattern)[1] or _EPOCHS
    open_end = pattern.endswith("*")  # it matches no name without its epochs that it does not match with them
    recipes = {name: None for name in catalog.names("recipes") if matches(name)}
    yield from recipes
    literal = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    word = "" if "[" in pattern else max(re.split(r"[*?_]+", pattern), key=len)
    after_model = [f"{training}_{dataset}" for _, training, dataset in _after_model(suits)]
    holding = [rest for rest in after_model if word in f"{rest}_e{epochs}"]
    for model in catalog.names("models"):
        # All names are nearly a million: those of a model that the pattern does not begin with, or whose parts all
        # lack its longest word, are not made.
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
    """Yield (objective, what a name says of objective and method, data set) of all that belong together."""
    known = catalog.names("datasets")
    learned = {kind: [name for name in known if suits(kind, name)] for kind in catalog.names("objectives")}
    for training, (objective, _) in catalog.trainings().items():
        for dataset in learned[objective]:
            yield objective, training, dataset
