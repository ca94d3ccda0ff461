"""Recipe names that match a pattern ('qwen3*_lora_alpaca*') or continue a beginning ('qwen3_8b_q').

It composes names from the names of parts and opens no part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from fnmatch import filter as matching
from fnmatch import fnmatchcase, translate
from functools import cache, reduce
from typing import NamedTuple

from tuner.recipes import catalog

WILDCARDS = frozenset("*?[")
_EPOCHS = 3
"""The epochs of names for a pattern without epochs."""

Learners = Callable[[str], Collection[str]]
"""Return the objectives that can learn from a data set."""


class Expansion(NamedTuple):
    """The first names that match, models in order, and how many match in all."""

    names: tuple[str, ...]
    total: int


def expand(pattern: str, limit: int, learners: Learners) -> Expansion:
    """Return the names that match a glob, with or without `_eN`; N is the pattern's own number, or 3.

    There are nearly a million names. The glob is read through each model once; models that leave it at the same places
    share what may follow, and no name behind the limit is composed.
    """
    pattern = pattern.lower()
    recipes = matching(catalog.names("recipes"), pattern)
    names, total, recipe_names = recipes[:limit], len(recipes), {*recipes}
    epochs = catalog.with_epochs(pattern)[1] or _EPOCHS
    pieces = re.findall(r"\[!?.[^]]*\]|.", pattern)
    after_model = [f"{training}_{dataset}" for _, training, dataset in _after_model(learners)]

    @cache
    def after(positions: frozenset[int], letter: str) -> frozenset[int]:
        """Return the places in the glob at which it can go on behind a letter."""
        fitting = (at for at in positions if at < len(pieces) and fnmatchcase(letter, pieces[at]))
        return _with_skipped(pieces, frozenset(at + (pieces[at] != "*") for at in fitting))

    @cache
    def endings(positions: frozenset[int]) -> Sequence[str]:
        matches = re.compile("|".join(translate("".join(pieces[at:])) for at in positions)).match
        open_end = pattern.endswith("*")  # then a name without its epochs matches only if the whole name does
        pairs = ((ending, f"{ending}_e{epochs}") for ending in after_model)
        return [name for ending, name in pairs if matches(name) or (not open_end and matches(ending))]

    start = _with_skipped(pieces, frozenset({0}))
    for model in catalog.names("models"):
        positions = reduce(after, f"{model}_", start)
        suffixes = endings(positions) if positions else ()
        if any(name.startswith(f"{model}_") for name in recipes):
            suffixes = [ending for ending in suffixes if f"{model}_{ending}" not in recipe_names]
        names += [f"{model}_{ending}" for ending in suffixes[: limit - len(names)]]
        total += len(suffixes)
    return Expansion((*names,), total)


def _with_skipped(pieces: Sequence[str], positions: frozenset[int]) -> frozenset[int]:
    """Add the places behind a `*`, which may stand for nothing; leave out those before the last `*`, which add none."""
    while behind := {at + 1 for at in positions if pieces[at : at + 1] == ["*"]} - positions:
        positions |= behind
    last = max((at for at in positions if pieces[at : at + 1] == ["*"]), default=0)
    return frozenset(at for at in positions if at >= last)


def complete(start: str, learners: Learners) -> list[str]:
    """Return the completions of a name that begins with `start`: each name up to the end of its next part.

    A single unfinished name is never returned, because a shell adds a space after it.
    """
    offered = sorted({*_next_parts(start, learners)})
    while len(offered) == 1 and offered[0].endswith("_"):
        offered = sorted({*_next_parts(offered[0], learners)})
    return offered


def _next_parts(start: str, learners: Learners) -> Iterator[str]:
    yield from (name for name in catalog.names("recipes") if name.startswith(start))
    for model in catalog.names("models"):
        beginning = f"{model}_"
        if not start.startswith(beginning):
            yield from [beginning] if beginning.startswith(start) else []
            continue
        for objective, training, dataset in _after_model(learners):
            name = f"{beginning}{training}_{dataset}_e{_EPOCHS}"
            ends = (f"{beginning}{objective}_", f"{beginning}{training}_", name)
            end = next((end for end in ends if name.startswith(end) and not start.startswith(end)), name)
            if end.startswith(start):
                yield end


def _after_model(learners: Learners) -> Iterator[tuple[str, str, str]]:
    """Yield (objective, training word of a name, data set) for all that belong together."""
    learned_by = {dataset: learners(dataset) for dataset in catalog.names("datasets")}
    for training, (objective, _) in catalog.trainings().items():
        for dataset, objectives in learned_by.items():
            if objective in objectives:
                yield objective, training, dataset
