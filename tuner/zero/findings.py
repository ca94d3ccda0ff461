"""What a check of a DeepSpeed config found: problems and warnings, each with its place in the file.

It knows no key and no rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tuner.errors import DeepSpeedConfigError, together
from tuner.zero.jsonfile import Document, Keys

Found = list[tuple[Keys, DeepSpeedConfigError]]
"""The key, and what is wrong with it; a warning is an error that nobody raises."""


@dataclass
class Findings:
    """Problems and warnings of one document, collected so that a user sees all of them at once."""

    document: Document
    _warnings: Found = field(default_factory=list)
    _problems: Found = field(default_factory=list)

    def warn(self, keys: Keys, what: str, fix: str | None = None) -> None:
        """Add a warning about the key at `keys`."""
        self._warnings.append((keys, DeepSpeedConfigError(what, where=self.document.where(keys), fix=fix)))

    @property
    def _notes(self) -> Found:
        return [((), note) for note in self.document.notes]

    def problem(self, keys: Keys, what: str, fix: str | None = None) -> None:
        """Add a problem with the key at `keys`."""
        error = DeepSpeedConfigError(what, where=self.document.where(keys), fix=fix or "Remove it.")
        self._problems.append((keys, error))

    def has_problem_at(self, keys: Keys) -> bool:
        """Return whether a problem is with this very key."""
        return any(keys == at for at, _ in self._problems)

    @property
    def warnings(self) -> list[DeepSpeedConfigError]:
        """The warnings, in the order of the file."""
        return self._in_order([*self._notes, *self._warnings])

    @property
    def problems(self) -> list[DeepSpeedConfigError]:
        """The problems, in the order of the file."""
        return self._in_order(self._problems)

    def raise_problems(self) -> None:
        """Raise all problems as one error, in the order of the file.

        Raises:
            DeepSpeedConfigError: there is a problem.
        """
        if self._problems:
            raise together(self.problems)

    def _in_order(self, findings: Found) -> list[DeepSpeedConfigError]:
        return [error for _, error in sorted(findings, key=self._place)]

    def _place(self, finding: tuple[Keys, DeepSpeedConfigError]) -> tuple[int, int]:
        place = self.document.place(finding[0])
        return place.line or 0, place.column or 0
