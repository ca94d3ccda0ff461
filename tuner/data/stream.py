"""The training rows of a run that streams them, by their number in the order of training: what each rank reads.

Blocks come in the order of the files, and their rows in one of the seed's. It makes no block; `blocks` does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from torch.utils.data import Dataset, Sampler

from tuner.data.encoder import Row
from tuner.data.prepared import Prepared, in_arrays
from tuner.errors import TunerError
from tuner.progress import POLL_S

_NAME = re.compile(r"(\d+)-(\d+)")


def folder_of(home: Path, first: int, end: int) -> Path:
    """Return where the block of the rows from `first` to `end`, less that, lies."""
    return home / f"{first}-{end}"


def spans(home: Path) -> list[tuple[int, int, Path]]:
    """Return the first row of each block that is there, the row after its last, and its folder, in their order."""
    matches = ((_NAME.fullmatch(folder.name), folder) for folder in home.iterdir())
    return sorted((int(match[1]), int(match[2]), folder) for match, folder in matches if match)


class StreamedRows(Dataset[Row]):  # type: ignore[misc]
    """All rows of a run, of which those of the blocks in a folder are there; in whatever process."""

    def __init__(self, home: Path, num_rows: int, seed: int, objective: str) -> None:
        self.home, self.num_rows, self.seed, self.objective = home, num_rows, seed, objective
        self._first = self._end = 0

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, number: int) -> Row:
        if not self._first <= number < self._end:
            self.open(number)
        row: Row = self._rows[int(self._order[number - self._first])]
        return row

    def open(self, number: int) -> Prepared:
        """Return the block that holds a row, and read from it."""
        blocks = [block for block in spans(self.home) if block[0] <= number < block[1]]
        assert blocks, f"row {number} is asked for before its block is there, or after"
        self._first, self._end, folder = blocks[0]
        block = Prepared.load(folder, self.objective)
        self._rows = in_arrays(block.dataset)
        # Of the seed and the block alone, so that every rank and every run that goes on has the same order.
        self._order = np.random.default_rng((self.seed, self._first)).permutation(self._end - self._first)
        return block


class Stream(Sampler[int]):  # type: ignore[misc]
    """The rows of a run from row `start` on, as they come; it yields the number of each row, once the row is there.

    `go_on`, of the rank that has them made, waits so many seconds for a block and returns whether there is a sign of
    work, which `tick` is then called for; `is_over` says that no block will come, because another rank has failed.
    """

    def __init__(
        self,
        rows: StreamedRows,
        start: int,
        go_on: Callable[[float], bool] | None,
        *,
        is_over: Callable[[], bool],
        tick: Callable[[], None],
    ) -> None:
        self.rows, self.start = rows, start
        self._go_on, self._is_over, self._tick = go_on, is_over, tick
        self._end = 0
        """The rows before it are there, or were."""
        self.wait_for(start)
        self.first = rows.open(start)
        """The block that training begins in."""

    def wait_for(self, number: int) -> None:
        """Return when a row is there.

        Raises:
            TunerError: `go_on` raises it, or the rank has failed that has the blocks made.
        """
        while number >= self._end:
            if self._go_on and self._go_on(POLL_S):
                self._tick()
            self._end = max((end for _, end, _ in spans(self.rows.home)), default=0)
            if not self._go_on and number >= self._end:
                if self._is_over():
                    raise TunerError("the rank that prepares the rows for this one has failed")
                time.sleep(POLL_S)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[int]:
        for number in range(len(self)):
            self.wait_for(number)
            yield number
