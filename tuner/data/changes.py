"""What became of the samples that training does not see whole: each with its place and reason, and how many there are.

It decides nothing about a sample, and keeps none: lines go to a file as they come.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from tuner.files import load_json

What = Literal["bad", "dropped", "truncated", "split", "changed"]
MAX_LISTED = 10_000
"""Lines of one reason: the counts are of all, and a file of any size of data stays small."""
_MAX_TOLD = 5


@dataclass(frozen=True)
class Change:
    """One sample: where its row is, what happened to it and why, and its tokens before and after where they are known.

    `bad` rows cannot be read or used; a sample that is `split` loses no token, only what its parts see of each other.
    """

    where: str
    what: What
    reason: str
    tokens_before: int | None = None
    tokens_after: int | None = None


@dataclass(frozen=True)
class Total:
    """How many samples share a reason, and the tokens that training does not see because of it."""

    what: What
    reason: str
    samples: int
    tokens: int

    def __str__(self) -> str:
        lost = f" ({self.tokens:,} tokens)" if self.tokens else ""
        return f"{self.samples:,} {self.what}: {self.reason}{lost}"


@dataclass
class Changes:
    """Counts changes by reason, and writes the first `MAX_LISTED` of each to `stream`."""

    stream: TextIO | None = None
    found: dict[tuple[What, str], list[int]] = field(default_factory=dict)

    def add(self, change: Change) -> None:
        """Count a change, and write it down."""
        counted = self.found.setdefault((change.what, change.reason), [0, 0])
        counted[0] += 1
        counted[1] += (change.tokens_before or 0) - (change.tokens_after or 0)
        if self.stream and counted[0] <= MAX_LISTED:
            self.stream.write(f"{json.dumps(asdict(change))}\n")

    def totals(self) -> list[Total]:
        """Return the counts, the greatest first."""
        totals = [Total(what, reason, *counted) for (what, reason), counted in self.found.items()]
        return sorted(totals, key=lambda total: -total.samples)


def read(file: Path) -> Iterator[dict[str, Any]]:
    """Yield what a file of changes lists, in the order of reading."""
    with file.open(encoding="utf-8") as stream:
        for line in stream:
            yield load_json(line)


def warning(totals: Mapping[str, tuple[Total, ...]]) -> str | None:
    """Return what a run says of samples, by split, that it does not train on as they are; None where there is none."""
    told = [f"{split}: {total}" for split, some in totals.items() for total in some if total.what != "split"]
    if not told:
        return None
    more = f"; and {len(told) - _MAX_TOLD} more reasons" if len(told) > _MAX_TOLD else ""
    return (
        f"not all of the data is trained on as it is: {'; '.join(told[:_MAX_TOLD])}{more}. data_report.jsonl lists it."
    )
