"""Recipes in Python calls: overrides from keyword arguments. `loading` checks the values."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from numbers import Integral, Real

from tuner.errors import RecipeError, brief_repr
from tuner.files import JsonObject
from tuner.recipes.recipe import Overrides

ROWS = ("data", "val")
"""The overrides that may be rows instead of a path; the API writes those to a file first."""
_PATHS = ("model", "data", "adapter", "val", "nvme")
_FLAGS = (*_PATHS, "seed", "val_split", "epochs", "method")
"""The overrides that have a flag."""
_BLOCKS = ("model", "adapter")
"""The overrides that are also blocks of the recipe: a dict or None is that block."""


def overrides_of(arguments: Mapping[str, object]) -> Overrides:
    """Return the overrides that keyword arguments mean: `lr=1e-5`, `train_cfg={"max_steps": 3}`, `data="rows.jsonl"`.

    Raises:
        RecipeError: a value that is not plain data.
        UsageError: as `Overrides`.
    """
    plain: JsonObject = {key: _plain(key, value) for key, value in arguments.items()}
    blocks = {key for key in _BLOCKS if isinstance(plain.get(key), dict | None)}
    flags = {key: plain.pop(key) for key in _FLAGS if key in plain and key not in blocks}
    for key in _PATHS:
        several = key == "data" and isinstance(flags.get(key), list) and all(isinstance(x, str) for x in flags[key])
        if not several and not isinstance(flags.get(key), str | None):
            rows = ", or the rows: a list of dicts, a datasets.Dataset or a pandas.DataFrame" if key in ROWS else ""
            fix = f"Give a path or an id on the hub{rows}."
            raise RecipeError(f"{key} = {brief_repr(flags[key])} is not a path or a name", fix=fix)
    changes = plain.pop("ds", None) or {}
    if not isinstance(changes, dict):
        fix = 'Use a dict: ds={"overlap_comm": True}.'
        raise RecipeError(f"ds = {brief_repr(changes)} is not a dict of DeepSpeed's keys", fix=fix)
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in changes.items()}
    return Overrides(**flags, ds=tuple(map("=".join, texts.items())), values=plain)


def both(first: Overrides, second: Overrides) -> Overrides:
    """Return two overrides as one; the second wins where both set a value."""
    first_values, second_values = vars(first), vars(second)
    single = {key: second_values[key] if second_values[key] is not None else first_values[key] for key in _FLAGS}
    only_first = {key: value for key, value in first.values.items() if key not in second.values}
    return Overrides(
        **single,
        pairs=(*first.pairs, *second.pairs),
        ds=(*first.ds, *second.ds),
        rewards=second.rewards or first.rewards,
        values={**only_first, **second.values},  # in this order, so that of two spellings of one key the second wins
    )


def _plain(key: str, value: object) -> object:
    """Return a value as plain data of a recipe file: NumPy's numbers as Python's, paths as texts."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        if not math.isfinite(value):
            raise RecipeError(f"{key} = {value} is not a finite number", fix="Use a number such as 2e-4.")
        return float(value)
    if isinstance(value, list | tuple):
        items = [_plain(key, item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: _plain(f"{key}.{name}", item) for name, item in value.items()}
    message = f"{key} = {brief_repr(value)} is of type {type(value).__name__}, which a recipe cannot hold"
    raise RecipeError(message, fix="Use a number, a string, a list or a dict.")
