"""What becomes of the rows and samples of a data set: counted, and each that is not trained on whole told with why.

It decides nothing about a sample, and keeps none: lines go to a file as they come.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TextIO

from tuner.data import copies
from tuner.data.copies import Seen
from tuner.data.readers.text_files import OnError
from tuner.data.sample import IGNORED, Owner
from tuner.errors import DataError
from tuner.runs.records import DataCounts, Total, Unread

if TYPE_CHECKING:
    from tuner.data.encoder import Labelled

What = Literal["bad", "dropped", "truncated", "split", "changed", "copied"]
"""`bad` rows cannot be read or used; a sample that is `split` loses no token, only what its parts see of each other.

Rows that are `copied` are trained on as they are, and counted alone.
"""
COPIED = "they have the question and answer of another row, apart from case and spaces"
MAX_LISTED = 10_000
"""Lines of one reason: the counts are of all, and a file of any size of data stays small."""
_MAX_REASONS = 5


_OWNERS: dict[str, str] = {
    "column": "the column {!r}",
    "loss column": "the column {!r}, by which no row is weighed",
    "turn": "the key {!r} of turns",
    "part": "the key {!r} of parts of a turn",
    "call": "the key {!r} of tool calls",
    "conversation": "the turns {}",
}
_MAX_UNREAD = 200
_OTHERS = "..."
"""What the keys are counted under that come after `_MAX_UNREAD` others: a file may have any number."""


_SUMS = ("read", "kept", "dropped", "truncated", "split", "tokens", "trained_tokens", "truncated_tokens")
"""Of `DataCounts`; which rows are bad, and how many the result has, the whole alone can say."""


@dataclass
class Tally:
    """Counts while rows go by, and writes to `stream` the first `MAX_LISTED` samples of each reason.

    `max_bad` is how many rows may be left out, `bad_before` of them already were; `read_of_set` the rows read of each
    data set, by its number.
    `kept_back`, of a part: what is told in its order when the part is added to the whole.
    """

    counts: DataCounts
    max_bad: int = 0
    stream: TextIO | None = None
    kept_back: list[DataError | tuple[Any, ...]] | None = None
    bad_before: int = 0
    read_of_set: Counter[int] = field(default_factory=Counter)
    _unread: dict[tuple[Owner, str], tuple[int, str]] = field(default_factory=dict)
    row_keys: list[Seen] = field(default_factory=list)
    _bad_places: set[str] = field(default_factory=set)
    _reasons: dict[tuple[What, str], list[int]] = field(default_factory=dict)

    def part(self) -> Tally:
        """Return a tally of some rows for `add`, which refuses none."""
        counts = DataCounts(self.counts.max_length, self.counts.packing, pack_length=self.counts.pack_length)
        return Tally(counts, kept_back=[])

    def add(self, part: Tally, on_error: OnError) -> None:
        """Count what a part has counted, as if it had been met here; `on_error` is called for its bad rows."""
        for name in _SUMS:
            setattr(self.counts, name, getattr(self.counts, name) + getattr(part.counts, name))
        self.read_of_set += part.read_of_set
        for (owner, key), (rows, first) in part._unread.items():
            self.ignore(owner, key, first, rows)
        self.row_keys += part.row_keys
        for outcome in part.kept_back or ():
            if isinstance(outcome, DataError):
                on_error(outcome)
            else:
                self._list(*outcome)

    def read(self, number: int) -> None:
        """Count one row of data set `number` as read."""
        self.counts.read += 1
        self.read_of_set[number] += 1

    def ignore(self, owner: Owner, key: str, place: str, rows: int = 1) -> None:
        """Count rows, the first of them at `place`, with a key that nothing is made of."""
        if (owner, key) not in self._unread and len(self._unread) >= _MAX_UNREAD:
            key = _OTHERS
        before, first = self._unread.get((owner, key), (0, place))
        self._unread[owner, key] = before + rows, first

    def unread(self) -> list[Unread]:
        """Return the keys that nothing is made of, those of most rows first."""
        keys = [Unread(owner, key, rows, first) for (owner, key), (rows, first) in self._unread.items()]
        return sorted(keys, key=lambda unread: -unread.rows)

    def refuse(self, error: DataError) -> None:
        """Leave a row out; a mixture may meet it more than once.

        Raises:
            DataError: it is one more than may be left out.
        """
        if self.kept_back is not None:
            self.kept_back.append(error)
            return
        place = str(error.where)
        if place in self._bad_places:
            return
        if self.bad_before + len(self._bad_places) >= self.max_bad:
            if not self.max_bad:
                raise error
            problem = f"more than dataset.bad_rows = {self.max_bad} rows are bad. The next one: {error.what}"
            raise DataError(
                problem, where=place, fix="Correct them (`tuner data NAME --all` lists them), or allow more."
            )
        self._bad_places.add(place)
        self.counts.bad += 1
        self._list(place, "bad", error.what)

    def drop(self, place: str, reason: str, sides: Sequence[Labelled] | None = None) -> None:
        """Count one sample that is dropped, of these sequences where it has come so far."""
        self.counts.dropped += 1
        self._list(place, "dropped", reason, *(() if sides is None else (_num_tokens(sides), 0)))

    def change(self, place: str, reason: str) -> None:
        """Count one conversation with a text that differs from its row."""
        self._list(place, "changed", reason)

    def keep(self, place: str, before: Sequence[Labelled], after: Sequence[Labelled]) -> None:
        """Count one sample that is kept: its sequences as they were, and cut; what is longer yet will be split."""
        counts, max_length = self.counts, self.counts.max_length
        num_before, num_after = _num_tokens(before), _num_tokens(after)
        cut, split = num_before > num_after, any(len(ids) > max_length for ids, _ in after)
        counts.kept += 1
        counts.truncated += cut
        counts.split += split
        counts.truncated_tokens += num_before - num_after
        counts.tokens += num_after
        counts.trained_tokens += num_trained(after)
        if cut or split:
            change: What = "truncated" if cut else "split"
            self._list(place, change, f"longer than max_length = {max_length}", num_before, num_after)

    def _list(
        self, where: str, change: What, reason: str, tokens_before: int | None = None, tokens_after: int | None = None
    ) -> None:
        """Count one sample under its reason, and write it down; its tokens where they are known."""
        if self.kept_back is not None:
            self.kept_back.append((where, change, reason, tokens_before, tokens_after))
            return
        counted = self._reasons.setdefault((change, reason), [0, 0])
        counted[0] += 1
        counted[1] += (tokens_before or 0) - (tokens_after or 0)
        if self.stream and counted[0] <= MAX_LISTED:
            line = {"where": where, "what": change, "reason": reason}
            tokens = {"tokens_before": tokens_before, "tokens_after": tokens_after}
            self.stream.write(f"{json.dumps(line | tokens)}\n")

    def copied(self) -> list[Total]:
        """Return the number of rows that have the question and answer of another row; [] if no row has."""
        num = copies.count(self.row_keys)
        return [Total("copied", COPIED, num, 0)] if num else []

    def totals(self) -> list[Total]:
        """Return the counts by reason, the greatest first; without copies."""
        totals = [Total(change, reason, *counted) for (change, reason), counted in self._reasons.items()]
        return sorted(totals, key=lambda total: -total.samples)


def _num_tokens(sides: Sequence[Labelled]) -> int:
    return sum(len(ids) for ids, _ in sides)


def num_trained(sides: Sequence[Labelled]) -> int:
    """Return how many tokens of some sequences carry loss."""
    return sum(int((labels != IGNORED).sum()) for _, labels in sides)


def unread_text(keys: Sequence[Unread]) -> str:
    """Return the first of some keys that nothing is made of as one text."""
    more = f"; and {len(keys) - _MAX_REASONS} more" if len(keys) > _MAX_REASONS else ""
    return "; ".join(map(_key_text, keys[:_MAX_REASONS])) + more


def _key_text(unread: Unread) -> str:
    rows = f"{unread.rows:,} row{'s' * (unread.rows != 1)}, first {unread.first}"
    return f"{_OWNERS[unread.owner].format(unread.key)} ({rows})"


def unread_warning(keys: Mapping[str, Sequence[Unread]]) -> str | None:
    """Return the line about keys that may say how a row is to be trained, by split; None without such keys."""
    ambiguous = {
        split: [key for key in keys_of_split if key.owner != "column"] for split, keys_of_split in keys.items()
    }
    parts = [f"{split}: {unread_text(keys_of_split)}" for split, keys_of_split in ambiguous.items() if keys_of_split]
    return f"parts of the rows are not read: {'; '.join(parts)}." if parts else None


def warning(totals: Mapping[str, Sequence[Total]]) -> str | None:
    """Return the line about samples that are changed or dropped, by split; None without such samples."""
    lost = [
        f"{split}: {total}"
        for split, totals_of_split in totals.items()
        for total in totals_of_split
        if total.what not in ("split", "copied")
    ]
    if not lost:
        return None
    more = f"; and {len(lost) - _MAX_REASONS} more reasons" if len(lost) > _MAX_REASONS else ""
    reasons = "; ".join(lost[:_MAX_REASONS])
    return f"some data is dropped or changed: {reasons}{more}. data_report.jsonl lists it."
