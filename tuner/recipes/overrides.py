"""`--set KEY=VALUE`: a key by its full path or any unique tail, a value in the type of the schema's field.

It turns texts into one nested layer; laying it over a recipe is `recipe`'s work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from tuner.errors import RecipeError, did_you_mean
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.source import read_value

Keys = tuple[str, ...]
_WORDS = {"none": None, "null": None, "true": True, "false": False}
_SPECIALS = {"nan", "inf", "+inf", "-inf", "infinity", "-infinity"}


def schema_keys() -> dict[Keys, Any]:
    """Return every key of the schema, by path, with its annotation."""
    found: dict[Keys, Any] = {}

    def walk(block: type[BaseModel], prefix: Keys) -> None:
        for name, info in block.model_fields.items():
            found[(*prefix, name)] = info.annotation
            for inner in _blocks(info.annotation):
                walk(inner, (*prefix, name))

    walk(RecipeConfig, ())
    return found


def parse_override(text: str, flag: str, present: Mapping[str, Any]) -> tuple[Keys, Any]:
    """Return the keys and the value of one `KEY=VALUE`.

    Args:
        text: What the user typed.
        flag: The flag it was typed after, for messages.
        present: The recipe so far; a tail is unique when one key of this recipe ends in it.

    Raises:
        RecipeError: no `=`, an unknown or ambiguous key, or a value that is no data.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise RecipeError(f"{text!r} has no '='", where=flag, fix=f"Write {flag} KEY=VALUE.")
    keys, annotation = _find(key.strip(), f"{flag} {text}", present)
    return keys, _convert(value, annotation, f"{flag} {text}")


def _find(key: str, where: str, present: Mapping[str, Any]) -> tuple[Keys, Any]:
    known = schema_keys()
    wanted = tuple(key.split("."))
    if wanted in known:
        return wanted, known[wanted]
    matches = [keys for keys in known if keys[-len(wanted) :] == wanted]
    here = [keys for keys in matches if _reaches(present, keys)] or matches
    if len(here) == 1:
        return here[0], known[here[0]]
    dotted = [".".join(keys) for keys in here or known]
    if here:
        raise RecipeError(f"{key!r} could be {' or '.join(dotted)}", where=where, fix="Write more of the key.")
    tails = [tail for path in dotted for tail in _tails(path)]
    hint = did_you_mean(key, tails) or "Known at the top: " + ", ".join(RecipeConfig.model_fields)
    raise RecipeError(f"no key {key!r}", where=where, fix=f"{hint} See: tuner show NAME")


def _convert(text: str, annotation: Any, where: str) -> Any:
    if text.strip().lower() in _WORDS:
        return _WORDS[text.strip().lower()]
    if _is_text(annotation) and not (text[:1] in "[{" and len(get_args(annotation)) > 2):
        return text
    if _is_choice(annotation) and text.strip():
        return text.strip()
    if text.strip().lower() in _SPECIALS:
        raise RecipeError(f"{text.strip()!r} is not a finite number", where=where, fix="Write a number such as 2e-4.")
    try:
        return read_value(text, where)
    except RecipeError:
        return text


def _is_text(annotation: Any) -> bool:
    return annotation is str or (get_origin(annotation) in (Union, UnionType) and str in get_args(annotation))


def _is_choice(annotation: Any) -> bool:
    return bool(get_args(annotation)) and all(isinstance(item, str) for item in get_args(annotation))


def _blocks(annotation: Any) -> Iterable[type[BaseModel]]:
    options = (annotation, *get_args(annotation))
    return [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]


def _reaches(present: Mapping[str, Any], keys: Keys) -> bool:
    value: Any = present
    for key in keys:
        if not isinstance(value, Mapping) or key not in value:
            return False
        value = value[key]
    return True


def _tails(path: str) -> Iterable[str]:
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]
