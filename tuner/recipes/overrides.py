"""`--set KEY=VALUE`: a key by its full path or any unique tail, a value in the type of the schema's field.

It turns texts into one nested layer; laying it over a recipe is `recipe`'s work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from tuner.errors import RecipeError, did_you_mean
from tuner.recipes import aliases
from tuner.recipes.merging import lookup
from tuner.recipes.origin import Keys
from tuner.recipes.recipe_file import read_value
from tuner.recipes.schema import RecipeConfig, schema_keys

_NOTHING = {"none", "null"}
_TRUTHS = {"true": True, "false": False}
_SPECIALS = {"nan", "inf", "+inf", "-inf", "infinity", "-infinity"}


def parse_override(text: str, flag: str, present: Mapping[str, Any]) -> tuple[Keys, Any]:
    """Return the keys and the value of one `KEY=VALUE`; another tool's word means the key that `aliases` says.

    Args:
        text: What the user typed.
        flag: The flag it was typed after, for messages.
        present: The recipe so far; a tail is unique when one key of this recipe ends in it.

    Raises:
        RecipeError: no `=`, an unknown or ambiguous key, one that has no counterpart, or a value that is no data.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise RecipeError(f"{text!r} has no '='", where=flag, fix=f"Use {flag} KEY=VALUE.")
    return read_pair(key, value, f"{flag} {text}", present)


def read_pair(key: str, value: str, where: str, present: Mapping[str, Any]) -> tuple[Keys, Any]:
    """Return the keys and the value of a key and a value as texts.

    Args:
        where: What stands before them in messages.
        present: As for `parse_override`.

    Raises:
        RecipeError: as `parse_override`.
    """
    key, value = _translated(key.strip(), value, where)
    keys, annotation = _find(key, where, present)
    return keys, _convert(value, annotation, where)


def find_key(key: str, where: str, present: Mapping[str, Any]) -> Keys:
    """Return the keys that a key of a recipe means, by its full path or any unique tail.

    Raises:
        RecipeError: an unknown or ambiguous key.
    """
    return _find(key if tuple(key.split(".")) in schema_keys() else aliases.bare(key), where, present)[0]


def _translated(key: str, value: str, where: str) -> tuple[str, str]:
    alias = aliases.find(key, value)
    if alias is None or alias.flag:
        bare = aliases.bare(key)
        return (key if tuple(key.split(".")) in schema_keys() else bare), value
    if alias.key is None:
        raise RecipeError(f"tuner has no {key!r}", where=where, fix=alias.instead)
    ours = alias.value(value)
    if ours is None:
        raise RecipeError(f"{key} = {value.strip()!r} has no counterpart", where=where, fix=alias.instead)
    return alias.key, ours


def _find(key: str, where: str, present: Mapping[str, Any]) -> tuple[Keys, Any]:
    known = schema_keys()
    wanted = tuple(key.split("."))
    if wanted in known:
        return wanted, known[wanted]
    matches = [keys for keys in known if keys[-len(wanted) :] == wanted]
    here = [keys for keys in matches if lookup(present, keys, ...) is not ...] or matches
    if len(here) == 1:
        return here[0], known[here[0]]
    if here:
        dotted = [".".join(keys) for keys in here]
        raise RecipeError(f"{key!r} could be {' or '.join(dotted)}", where=where, fix="Use a longer part of the key.")
    if inside := _inside(wanted, where, present):
        return inside
    # What a model is made of is nobody's typo of a setting: `lora_rank` is near to its `q_lora_rank` alone.
    settings = [".".join(keys) for keys in known if keys[0] != "architecture" or key.startswith("architecture")]
    tails = [tail for path in settings for tail in _tails(path)]
    hint = (
        did_you_mean(key, [*tails, *aliases.table()])
        or "Known top-level keys: " + ", ".join(RecipeConfig.model_fields) + "."
    )
    raise RecipeError(f"no key {key!r}", where=where, fix=f"{hint} See: tuner show NAME")


def _inside(wanted: Keys, where: str, present: Mapping[str, Any]) -> tuple[Keys, Any] | None:
    """Return a new key of a mapping whose keys the user chooses (`dataset.columns`), and the type of its values."""
    *outer, name = wanted
    mappings = [keys for keys, annotation in schema_keys().items() if _values_of(annotation)]
    if not outer or not any(keys[-len(outer) :] == tuple(outer) for keys in mappings):
        return None
    keys, annotation = _find(".".join(outer), where, present)
    return (*keys, name), _values_of(annotation)


def _values_of(annotation: Any) -> Any:
    """Return the type of the values where an annotation is or may be a dict, None where it is none."""
    dicts = (one for one in (annotation, *get_args(annotation)) if get_origin(one) is dict)
    return next((get_args(one)[1] for one in dicts), None)


def _convert(text: str, annotation: Any, where: str) -> Any:
    options = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    word = text.strip().lower()
    if word in _NOTHING and (type(None) in options or str not in options):
        return None
    if str in options:
        return _text_or_container(text, options, where) if _containers(options) else text
    words = [
        one for option in options if get_origin(option) is Literal for one in get_args(option) if isinstance(one, str)
    ]
    is_word = text.strip() in words or all(get_origin(option) is Literal or option is type(None) for option in options)
    if words and (is_word or _containers(options)):
        return _text_or_container(text.strip(), options, where) if _containers(options) else text.strip()
    if word in _SPECIALS:
        raise RecipeError(f"{text.strip()!r} is not a finite number", where=where, fix="Use a number such as 2e-4.")
    value = _TRUTHS[word] if word in _TRUTHS else _data(text, where)
    return _words(value) if isinstance(value, str) and _holds_words(options) else value


def _text_or_container(text: str, options: Iterable[Any], where: str) -> Any:
    stripped = text.strip()
    value = _data(stripped, where) if stripped[:1] in {"[", "(", "{"} else text
    if isinstance(value, list | tuple | dict):
        return value
    # The shell eats the quotes of ['q_proj', 'v_proj']; PEFT would read what is left as one regular expression.
    return _words(stripped) if stripped[:1] + stripped[-1:] == "[]" and _holds_words(options) else text


def _data(text: str, where: str) -> Any:
    try:
        return read_value(text, where)
    except RecipeError:
        return text.strip()


def _holds_words(options: Iterable[Any]) -> bool:
    inner = [get_args(option)[0] for option in _containers(options) if get_origin(option) is not dict]
    return any(kind is str or get_origin(kind) is Literal for kind in inner)


def _containers(options: Iterable[Any]) -> list[Any]:
    return [option for option in options if get_origin(option) in (list, tuple, dict)]


def _words(text: str) -> list[str]:
    words = (word.strip(" '\"") for word in text.strip(" []").split(","))
    return [word for word in words if word]


def _tails(path: str) -> Iterable[str]:
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]
