"""What the schema refuses, said in a recipe's words: the key, the value and where it stands.

It changes no value.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from tuner.errors import RecipeError, did_you_mean
from tuner.recipes.layers import Merged
from tuner.recipes.overrides import schema_keys
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.source import Keys


def validate(merged: Merged) -> RecipeConfig:
    """Return the merged values as a checked recipe.

    Raises:
        RecipeError: values that do not fit the schema, each with its key and where it stands.
    """
    try:
        return RecipeConfig.model_validate(merged.values)
    except ValidationError as error:
        found: dict[Keys, RecipeError] = {}
        for detail in error.errors(include_url=False):
            keys = _keys(dict(detail), merged)
            # A union says once for each of its branches that one value is wrong.
            found.setdefault(keys, _explain(dict(detail), keys, merged))
    first, *others = found.values()
    fix = "\n".join([first.fix or "Also:", *map(str, others)]) if others else first.fix
    raise RecipeError(first.what, where=first.where, fix=fix)


def key_hint(key: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown key."""
    known = list(known)
    return did_you_mean(key, known) or f"Known here: {', '.join(known)}."


def short(value: Any) -> str:
    """Return a value's text, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _keys(detail: dict[str, Any], merged: Merged) -> Keys:
    keys = tuple(str(key) for key in detail["loc"])
    if keys[:1] == ("objective",) and len(keys) > 1:
        keys = (keys[0], *keys[2:])  # ('objective', 'dpo', 'beta'): the second names the branch of the union
    if detail["type"] in ("missing", "extra_forbidden"):
        return keys
    # A union's branch names and a list's indices end the location ('target_modules', 'str'): keep the recipe's keys.
    while not _holds(merged.values, keys):
        keys = keys[:-1]
    return keys


def _explain(detail: dict[str, Any], keys: Keys, merged: Merged) -> RecipeError:
    dotted, where = ".".join(keys), merged.source_of(keys)
    if detail["type"] == "extra_forbidden":
        siblings = (known[-1] for known in schema_keys() if known[:-1] == keys[:-1])
        return RecipeError(f"no key {dotted!r}", where=where, fix=key_hint(keys[-1], siblings))
    if detail["type"] == "missing":
        return RecipeError(f"{dotted} is missing", where=where, fix=f"Set {dotted}.")
    message = detail["msg"].removeprefix("Value error, ")
    return RecipeError(f"{dotted} = {short(detail['input'])}: {message[:1].lower()}{message[1:]}", where=where)


def _holds(values: Any, keys: Keys) -> bool:
    for key in keys:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True
