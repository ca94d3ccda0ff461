"""`${...}` in YAML: a value of the same file in another's place, as OmegaConf does it for torchtune and ROLL.

Environment variables are looked at nowhere: a config must mean the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tuner.errors import TunerError
from tuner.recipes.merging import lookup
from tuner.recipes.origin import Keys
from tuner.recipes.yaml_text import MAX_DEPTH, MAX_VALUES

Wrong = Callable[[str, Keys, str], TunerError]
"""What is wrong, at which key, and what to do -> the error to raise."""
_MAX_TEXT = 16_000
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def resolved(
    values: Mapping[str, Any], wrong: Wrong, *, at: Keys = (), whole: bool = True
) -> tuple[Any, frozenset[str]]:
    """Return the value at a key with every `${a.b}` replaced by the value at a.b, and the names at the top so used.

    Args:
        whole: Nothing is added to the values from elsewhere: a name that they have not is wrong, else it stays.

    Raises:
        TunerError: as `wrong` makes it: a circle, nothing at that place, or values without end.
    """
    resolver = _Resolver(values, wrong, whole)
    made = resolver.value(lookup(values, at), at, ())
    return made, frozenset(resolver.used)


class _Resolver:
    def __init__(self, values: Mapping[str, Any], wrong: Wrong, whole: bool) -> None:
        self.values, self.wrong, self.whole, self.count = values, wrong, whole, 0
        self.used: set[str] = set()

    def value(self, value: Any, keys: Keys, open_: tuple[str, ...]) -> Any:
        self.count += 1
        if self.count > MAX_VALUES or len(open_) > MAX_DEPTH:
            raise self.wrong(f"the ${{...}} expand to more than {MAX_VALUES:,} values", keys, "Write them out.")
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
            raise self.wrong(f"the ${{...}} expand to a text of {len(made):,} characters", keys, "Write it out.")
        return made

    def of(self, name: str, keys: Keys, open_: tuple[str, ...]) -> Any:
        kind, colon, rest = name.partition(":")
        if colon:
            default = rest.partition(",")[2].strip() if kind.strip() == "oc.env" and "," in rest else None
            return f"${{{name}}}" if default is None else default
        if name in open_:
            circle = " -> ".join((*open_, name))
            raise self.wrong(f"${{...}} in a cycle: {circle}", keys, "Write out one of the values.")
        found = lookup(self.values, name.split("."), ...)
        if found is ...:
            if not self.whole:
                return f"${{{name}}}"
            raise self.wrong(f"${{{name}}} is not defined in this file", keys, "Write out the value.")
        self.used.add(name.partition(".")[0])
        return self.value(found, keys, (*open_, name))
