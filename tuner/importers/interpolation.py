"""`${...}` in YAML: a value of the same file in another's place, as OmegaConf does it for torchtune and ROLL.

Environment variables are looked at nowhere: a config must mean the same on every machine.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from tuner.importers.document import MAX_DEPTH, MAX_VALUES, Document, Keys
from tuner.recipes.merging import lookup

_MAX_TEXT = 16_000
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def resolved(document: Document, *, whole: bool = True) -> Document:
    """Return the document with every `${a.b}` replaced by the value at a.b.

    Args:
        whole: Nothing is added to the document from elsewhere: a name that it has not is wrong, else it stays.

    Raises:
        RecipeError: a circle, nothing at that place, or values without end.
    """
    resolver = _Resolver(document, whole)
    values = resolver.value(document.values, (), ())
    return replace(document, values=values, used=document.used | resolver.used)


class _Resolver:
    def __init__(self, document: Document, whole: bool) -> None:
        self.document, self.whole, self.count = document, whole, 0
        self.used: set[str] = set()

    def value(self, value: Any, keys: Keys, open_: tuple[str, ...]) -> Any:
        self.count += 1
        if self.count > MAX_VALUES or len(open_) > MAX_DEPTH:
            raise self.document.wrong(f"the ${{...}} make more than {MAX_VALUES:,} values", keys, "Write them out.")
        if isinstance(value, dict):
            return {key: self.value(inner, (*keys, key), open_) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, (*keys, str(number)), open_) for number, inner in enumerate(value)]
        return self.text(value, keys, open_) if isinstance(value, str) else value

    def text(self, text: str, keys: Keys, open_: tuple[str, ...]) -> Any:
        if whole := _REFERENCE.fullmatch(text):
            return self.of(whole[1], keys, open_)
        made = _REFERENCE.sub(lambda match: str(self.of(match[1], keys, open_)), text)
        if len(made) > _MAX_TEXT:
            raise self.document.wrong(f"the ${{...}} make a text of {len(made):,} characters", keys, "Write it out.")
        return made

    def of(self, name: str, keys: Keys, open_: tuple[str, ...]) -> Any:
        kind, colon, rest = name.partition(":")
        if colon:
            default = rest.partition(",")[2].strip() if kind.strip() == "oc.env" and "," in rest else None
            return f"${{{name}}}" if default is None else default
        if name in open_:
            circle = " -> ".join((*open_, name))
            raise self.document.wrong(f"${{...}} in a circle: {circle}", keys, "Write one of the values out.")
        found = lookup(self.document.values, name.split("."), ...)
        if found is ...:
            if not self.whole:
                return f"${{{name}}}"
            raise self.document.wrong(f"${{{name}}} names nothing in this file", keys, "Write the value out.")
        self.used.add(name.partition(".")[0])
        return self.value(found, keys, (*open_, name))
