"""Single values laid over a DeepSpeed config: `--ds KEY=VALUE`, and a recipe's `deepspeed = dict(base=...)`.

It spells a key as the config below has it, and leaves it to `lint` to judge the whole.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, NoReturn

from tuner.errors import DeepSpeedConfigError, RecipeError, did_you_mean
from tuner.recipes.merging import Keys, Kind, Layer, Merged, Place, nested
from tuner.recipes.recipe_file import read_value
from tuner.zero.config_schema import Field, schema, spellings
from tuner.zero.jsonfile import Document
from tuner.zero.obsolete import OBSOLETE

FLAG = "--ds"
_WORDS = {"true": True, "false": False, "none": None, "null": None}
_MAX_TOLD = 6


def laid(document: Document, layers: Iterable[Layer]) -> Document:
    """Return the document with layers over its values, each value with what it beat."""
    merged, over = Merged(), Merged()
    merged.lay(Layer(copy.deepcopy(document.value), document.place))
    over.lay(Layer.at(document.place(), document.changes))
    for layer in layers:
        values = _respelt(layer.values, merged.values, schema()["keys"])
        merged.lay(layer._replace(values=values))
        over.lay(layer._replace(values=values))
    sources = {tuple(key.split(".")): origin for key, origin in merged.origins.items()}
    return replace(document, value=merged.values, sources=document.sources | sources, changes=over.values)


def _respelt(above: Mapping[str, Any], below: Any, fields: Mapping[str, Field]) -> dict[str, Any]:
    """Return values under the spellings that the config below has, where a key has several."""
    known = spellings(fields)
    there = {known.get(key, key): key for key in below} if isinstance(below, dict) else {}
    result: dict[str, Any] = {}
    for key, value in above.items():
        name = known.get(key, key)
        written = there.get(name, key)
        inner = fields.get(name, {}).get("keys")
        if isinstance(value, dict) and inner:
            value = _respelt(value, below[written] if name in there else None, inner)
        result[written] = value
    return result


def of_flag(text: str) -> Layer:
    """Return the layer that one `KEY=VALUE` means.

    Raises:
        DeepSpeedConfigError: no `=`, or a key that DeepSpeed has not or that could be several.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise DeepSpeedConfigError(f"{text!r} has no '='", where=FLAG, fix=f"Use {FLAG} KEY=VALUE.")
    where = f"{FLAG} {text}"
    keys = _found(key.strip(), where)
    return Layer.at(Place(Kind.FLAG, where), nested(keys, _value(value, known_keys().get(".".join(keys)), where)))


@cache
def known_keys() -> dict[str, Field]:
    """Return every key of DeepSpeed's config, in its main spelling and in others, by its dotted path."""
    return dict(_walk(schema()["keys"], ""))


def _walk(fields: Mapping[str, Field], prefix: str) -> Iterator[tuple[str, Field]]:
    for spelt, name in spellings(fields).items():
        if fields.get(spelt, {}).get("deprecated"):
            continue
        yield f"{prefix}{spelt}", fields[name]
        yield from _walk(fields[name].get("keys", {}), f"{prefix}{spelt}.")


def _found(key: str, where: str) -> Keys:
    """Return a key by its full path or by a tail that one key ends in."""
    known, keys = known_keys(), tuple(key.split("."))
    if key in known or keys in OBSOLETE or _is_free(keys):
        return keys
    tails = [one for one in known if one.endswith(f".{key}")]
    if len(tails) == 1:
        return tuple(tails[0].split("."))
    if tails:
        more = "" if len(tails) <= _MAX_TOLD else f" or one of {len(tails) - _MAX_TOLD} others"
        told = f"{' or '.join(tails[:_MAX_TOLD])}{more}"
        raise DeepSpeedConfigError(f"{key!r} could be {told}", where=where, fix="Use a longer part of the key.")
    _refuse(key, where)


def _is_free(keys: Keys) -> bool:
    """Return whether a key is inside of a block whose keys depend on its type: an optimizer's params."""
    outer = (known_keys().get(".".join(keys[:end])) for end in range(1, len(keys)))
    return any(field and "object" in field["type"] and "keys" not in field for field in outer)


def _refuse(key: str, where: str) -> NoReturn:
    known = known_keys()
    hint = did_you_mean(key, [*known, *(one.rpartition(".")[2] for one in known)])
    fix = hint or f"Known top-level keys: {', '.join(schema()['keys'])}."
    raise DeepSpeedConfigError(f"DeepSpeed has no key {key!r}", where=where, fix=fix)


def _value(text: str, field: Field | None, where: str) -> Any:
    """Return what is typed as JSON or Python writes it, else as text; a field of text alone takes it as it is."""
    word = text.strip()
    if field and {*field["type"]} <= {"str", "null"}:
        return None if "null" in field["type"] and word.lower() in ("none", "null") else text
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    with suppress(ValueError, RecursionError):
        return json.loads(word, parse_constant=_not_finite)
    with suppress(ValueError, RecursionError, RecipeError):
        return read_value(word, where)
    return word


def _not_finite(_: str) -> NoReturn:
    raise ValueError
