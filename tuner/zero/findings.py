"""What a check of a DeepSpeed config found: problems and warnings, each with its place in the file.

It knows no key and no rule.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tuner.errors import DeepSpeedConfigError, together
from tuner.zero.jsonfile import Document, Keys

_MAX_SHOWN = 60
Found = tuple[Keys, str, str]
"""The key, what is wrong with it, and what to do: an imperative sentence, a question, or nothing."""


@dataclass
class Findings:
    """Problems and warnings of one document, collected so that a user sees all of them at once."""

    document: Document
    warnings: list[Found] = field(default_factory=list)
    problems: list[Found] = field(default_factory=list)

    def warn(self, keys: Keys, what: str, fix: str = "") -> None:
        """Add a warning about the key at `keys`."""
        self.warnings.append((keys, what, fix))

    def problem(self, keys: Keys, what: str, fix: str = "") -> None:
        """Add a problem with the key at `keys`."""
        self.problems.append((keys, what, fix))

    def lines(self, found: list[Found]) -> list[str]:
        """Return problems or warnings as messages, in the order of the file."""
        return [self._line(*one) for one in self.in_order(found)]

    def in_order(self, found: list[Found]) -> list[Found]:
        """Return problems or warnings in the order of the file."""
        return sorted(found, key=self._place)

    def raise_problems(self) -> None:
        """Raise all problems as one error, in the order of the file.

        Raises:
            DeepSpeedConfigError: there is a problem.
        """
        if errors := self.errors():
            raise together(errors)

    def errors(self) -> list[DeepSpeedConfigError]:
        """Return each problem as an error, in the order of the file."""
        found = self.in_order(self.problems)
        return [
            DeepSpeedConfigError(what, where=self.document.where(keys), fix=fix or "Remove it.")
            for keys, what, fix in found
        ]

    def _place(self, problem: Found) -> tuple[int, int]:
        keys = problem[0]
        while keys and keys not in self.document.positions:
            keys = keys[:-1]
        return self.document.positions.get(keys, (0, 0))

    def _line(self, keys: Keys, what: str, fix: str) -> str:
        return f"{what}. In {self.document.where(keys)}. {fix}".strip()


def lookup(value: Any, keys: Keys, default: Any = None) -> Any:
    """Return what stands at `keys` in nested dicts, or `default` where the way there is no dict."""
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            return default
        value = value[key]
    return value


def show(value: Any) -> str:
    """Return a value as JSON, cut to fit into a message."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def named(keys: Keys, value: Any) -> str:
    """Return `a.b = value` for a message."""
    return f"{'.'.join(map(str, keys))} = {show(value)}"
