"""The rows of a data set of any size in blocks, made by a process of their own while others are trained on.

A block is what `prepare` makes of the next rows of the files: a folder that is there, whole, once it has its name. Who
reads the blocks is `stream`'s to say.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tuner.data import limits, packing, sources
from tuner.data.pipeline import NumberedRow, Pipeline
from tuner.data.prepare import DONE, build, require_rows
from tuner.data.prepared import Prepared
from tuner.data.processes import Worker
from tuner.data.readers import Unreadable
from tuner.data.readers.text_files import Cursor
from tuner.data.stream import folder_of
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, Key, Option, Text, marked, options
from tuner.files import disk_errors, open_regular, scratch_folder, sha256
from tuner.progress import POLL_S

ROWS = packing.SAMPLES_PER_CHUNK
"""Rows of the files in a block, where a recipe gives no number: as many as are packed together."""
_MAX_BYTES = 256 * 1024**2
"""Of their text, for rows may be long: about 64 million tokens, half a gigabyte on the disk."""
_READY = 2
"""Blocks: the one that is trained on, and the next."""
_END_BYTES = 64 * 1024


class BlockStart(NamedTuple):
    """Where a block begins: with row `first` of the run, which is read in pass `epoch` over the files.

    There, `file`, `row`, `offset` and `taken` are those of a `Cursor`; `bad` rows of the pass were left out before.
    """

    first: int = 0
    epoch: int = 0
    bad: int = 0
    file: int = 0
    row: int = 0
    offset: int = 0
    taken: int = 0


class RowBlock(NamedTuple):
    """Rows `start.first` to `end` of the run, less that, in `folder`; `sha256` is of their values, in their order."""

    start: BlockStart
    end: int
    folder: Path
    sha256: str


def opened(pipeline: Pipeline) -> dict[str, Any]:
    """Return what tells the files of a stream from others: how many, their bytes, a hash of their sizes and their ends.

    It reads the ends alone: a stream may be larger than what can be read before each start.

    Raises:
        DataError: a file, or the data set, cannot be read from any row on.
    """
    (data_set,) = pipeline.mixture.sets
    files, sizes, ends = data_set.source.files, [], hashlib.sha256()
    sources.check_stream(data_set.place, files)
    for file in files:
        try:
            with open_regular(file) as stream:
                sizes.append(os.fstat(stream.fileno()).st_size)
                ends.update(stream.read(_END_BYTES))
                stream.seek(max(0, sizes[-1] - _END_BYTES))
                ends.update(stream.read())
        except OSError as error:
            problem = f"the file cannot be read: {error.strerror}"
            raise DataError(problem, where=file, fix="Correct the path or the file's permissions.") from error
    return {"files": len(files), "bytes": sum(sizes), "sha256": sha256(f"{sizes}{ends.hexdigest()}".encode())}


class Maker:
    """Has blocks made ahead of training, and removes those that it has passed; `end` it.

    Each method raises what is wrong with the rows, once it is known: DataError, MachineError where the process was
    killed, or DiskError.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        encoder: TextEncoder,
        home: Path,
        start: BlockStart,
        *,
        max_rows: int,
        ahead: int,
        num_rows: int,
    ) -> None:
        """Begin.

        Args:
            pipeline: Of one data set; its files are `opened`.
            home: An empty folder for the blocks.
            max_rows: Rows of the files in a block.
            ahead: How many rows after the last one that is passed must be there, or training would wait for ever.
            num_rows: Of the run.
        """
        self.home, self.ready = home, list[RowBlock]()
        self._start = self._next = start
        self._num_rows, self._ahead = num_rows, ahead
        self._num_proc: Any = pipeline.dataset.num_proc
        self._signs, self._seen = mmap.mmap(-1, 8), b""
        self._worker = Worker(_Make(pipeline, encoder, home, max_rows, self._signs))
        self._is_making = False
        self.passed(start.first)

    def go_on(self, wait_s: float = 0.0) -> bool:
        """Take a block that is done within so long, and have the next made; return if there is a sign of work."""
        done = self._is_making and self._worker.is_done(wait_s)
        if done:
            self._is_making = False
            block, self._next = self._worker.result()
            self.ready.append(block)
        if not self._is_making and self._wants_more():
            self._worker.begin((self._next, self._num_proc))
            self._is_making = True
            # While others train, all cores are theirs; a single process makes more tokens than most steps take.
            self._num_proc = 1 if self._num_proc == "auto" else self._num_proc
        before, self._seen = self._seen, self._signs[:]
        return done or before != self._seen

    def _wants_more(self) -> bool:
        is_needed = len(self.ready) < _READY or self._next.first < self._passed + self._ahead
        return is_needed and (self._next.first < self._num_rows or self._next == self._start)

    def passed(self, number: int) -> None:
        """Remove the blocks of rows before `number`, which are read no more."""
        self._passed = number
        while self.ready and self.ready[0].end <= number:
            shutil.rmtree(self.ready.pop(0).folder)
        self.go_on()

    def at(self, number: int) -> tuple[BlockStart, str | None]:
        """Return where the block of a row begins, and its hash; None where it is not made yet."""
        while self._is_making and number > self._next.first:  # it is there, and read; word of it is on its way
            self.go_on(POLL_S)
        ready = next((block for block in self.ready if block.start.first <= number < block.end), None)
        return (ready.start, ready.sha256) if ready else (self._next, None)

    def end(self) -> None:
        """End the process; the blocks stay, for a rank may be reading them."""
        self._worker.end()


class _Part:
    """The next rows of a pass, `max_rows` of them or as much text as a block may hold.

    `is_last`, once they are taken: there are no more.
    """

    def __init__(self, rows: Iterable[NumberedRow | DataError], max_rows: int) -> None:
        self._rows, self._max_rows, self.is_last = rows, max_rows, False

    def __iter__(self) -> Iterator[NumberedRow | DataError]:
        num_bytes = 0
        for number, row in enumerate(self._rows, 1):
            yield row
            if isinstance(row, DataError):  # the row that follows it has been read
                continue
            num_bytes += limits.size(row)
            if number >= self._max_rows or num_bytes > _MAX_BYTES:
                return
        self.is_last = True


class _Make:
    """What the process does: it makes the next block that holds rows, and says where the one after it begins.

    It reads on where the last block ended; elsewhere it seeks.
    """

    def __init__(self, pipeline: Pipeline, encoder: TextEncoder, home: Path, max_rows: int, signs: mmap.mmap) -> None:
        self.pipeline, self.encoder, self.home, self.max_rows, self.signs = pipeline, encoder, home, max_rows, signs
        self._after: BlockStart | None = None

    def __call__(self, order: tuple[BlockStart, Any]) -> tuple[RowBlock, BlockStart]:
        start, num_proc = order
        block: RowBlock | None = None
        try:
            with disk_errors(self.home):
                while block is None:
                    block, start = self._made(start, num_proc)
        except DataError as error:
            if start.first and not isinstance(error, Unreadable):
                # Who corrects the row has other files, in which the run cannot go on.
                allowed = Key("train_dataloader.dataset.bad_rows", self.pipeline.dataset.bad_rows + 1)
                without = f"To go on without it: {options(Option('resume', 'auto'), allowed)}"
                error.fix = Text(f"{marked(error.fix or '')} {without}".strip())
            raise
        return block, start

    def _made(self, start: BlockStart, num_proc: Any) -> tuple[RowBlock | None, BlockStart]:
        """Return the block of the next rows (None if training takes no row of it) and the start of the next block."""
        if start != self._after:
            self._at = Cursor(start.file, start.row, start.offset, start.taken)
            self._rows = self.pipeline.rows(self._at)
        at, part = self._at, _Part(self._rows, self.max_rows)
        with scratch_folder(self.home, "making-") as scratch:
            work = (self.pipeline, self.encoder, part, self._sign)
            tally = build(scratch, *work, num_proc=num_proc, bad_before=start.bad)
            end, bad = start.first + tally.counts.packed_rows, start.bad + tally.counts.bad
            if part.is_last and not end:
                require_rows(self.pipeline, tally)
            if part.is_last:
                after, self._after = BlockStart(end, start.epoch + 1), None
            else:
                after = self._after = BlockStart(end, start.epoch, bad, at.file, at.row, at.offset, at.taken)
            if end == start.first:
                return None, after
            folder = folder_of(self.home, start.first, end)
            (scratch / DONE).replace(folder)
        return RowBlock(start, end, folder, Prepared.load(folder, self.pipeline.objective).sha256), after

    def _sign(self) -> None:
        self.signs[:] = (int.from_bytes(self.signs[:]) + 1).to_bytes(len(self.signs))
