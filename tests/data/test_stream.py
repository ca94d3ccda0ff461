"""Rows of a data set of any size: made block by block ahead of training, in one order, and never read twice."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.conftest import Write, conversation
from tests.refused import refused
from tuner.data import blocks, readers
from tuner.data.blocks import BlockStart, Maker
from tuner.data.pipeline import Pipeline
from tuner.data.prepare import prepare
from tuner.data.readers.text_files import Cursor
from tuner.data.stream import Stream, StreamedRows, spans
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, MachineError, TunerError
from tuner.recipes.schema import Dataset

GLOBAL_BATCH, BEGIN = 4, BlockStart()


def block_of(path: object, **more: Any) -> Dataset:
    values = {"path": str(path), "format": "messages", "max_length": 64, "packing": False, "streaming": True}
    return Dataset.model_validate({**values, **more})


def rows_of(count: int) -> list[dict[str, Any]]:
    return [conversation(f"question {at}?", f"answer {at} " * (1 + at % 5)) for at in range(count)]


def objective_of(dataset: Dataset) -> str:
    return "pretrain" if dataset.format == "text" else "sft"


class Trained:
    """A stream as one rank sees it that takes `GLOBAL_BATCH` rows a step."""

    def __init__(
        self, home: Path, dataset: Dataset, tokenizer: Any, start: BlockStart = BEGIN, *, first: int = 0, most: int = 10
    ) -> None:
        home.mkdir()
        objective = objective_of(dataset)
        self.pipeline = Pipeline(dataset, objective)
        self.files = blocks.opened(self.pipeline)
        how = {"max_rows": most, "ahead": 2 * GLOBAL_BATCH, "num_rows": 10_000}
        self.maker = Maker(self.pipeline, TextEncoder(tokenizer), home, start, **how)
        self.maker.passed(first)
        self.ticks = 0
        rows, go_on = StreamedRows(home, 10_000, 7, objective), self.maker.go_on
        try:
            self.stream = Stream(rows, first, go_on, is_over=lambda: False, tick=self._tick)
        except BaseException:
            self.maker.end()
            raise
        self.home, self.number, self.most_blocks = home, first, 0

    def _tick(self) -> None:
        self.ticks += 1

    def take(self, count: int) -> list[list[int]]:
        """Return the tokens of the next rows, in steps."""
        taken = []
        for _ in range(count):
            self.stream.wait_for(self.number)
            taken.append(self.stream.rows[self.number]["input_ids"].tolist())
            self.number += 1
            self.most_blocks = max(self.most_blocks, len(spans(self.home)))
            if self.number % GLOBAL_BATCH == 0:
                self.maker.passed(self.number)
        return taken


@pytest.fixture
def started(tmp_path: Path, tokenizer: Any) -> Iterator[Callable[..., Trained]]:
    """Return what opens a stream; all of them are ended, and leave no process."""
    before, open_ones = set(psutil.Process().children()), list[Trained]()

    def start(dataset: Dataset, *given: Any, **named: Any) -> Trained:
        open_ones.append(Trained(tmp_path / f"home-{len(open_ones)}", dataset, tokenizer, *given, **named))
        return open_ones[-1]

    yield start
    for opened in open_ones:
        opened.maker.end()
    assert set(psutil.Process().children()) == before


def whole(dataset: Dataset, tokenizer: Any) -> list[list[int]]:
    rows = prepare(dataset, TextEncoder(tokenizer), objective=objective_of(dataset)).dataset
    return list(rows["input_ids"])


def test_an_epoch_holds_every_row_once_in_blocks_of_the_files_order_that_are_shuffled_anew_each_time(
    jsonl: Write, started: Callable[..., Trained], tokenizer: Any
) -> None:
    dataset = block_of(jsonl(rows_of(34)))
    rows = whole(dataset, tokenizer)

    first, second = (lambda stream: (stream.take(34), stream.take(34)))(started(dataset))

    for start in range(0, 34, 10):
        block = slice(start, start + 10)
        assert sorted(first[block]) == sorted(rows[block]) == sorted(second[block])
    assert first != second and first[:10] != rows[:10]


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow", "txt"])
def test_a_run_goes_on_with_the_very_rows_that_would_have_followed(
    kind: str, tmp_path: Path, started: Callable[..., Trained], tokenizer: Any
) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(2):
        _write(folder / f"{number}.{kind}", rows_of(17), kind)
    dataset = block_of(folder / f"*.{kind}", format="text" if kind == "txt" else "messages")
    undisturbed = started(dataset)
    rows = undisturbed.take(80)
    assert sorted(rows[:34]) == sorted(rows[34:68]) == sorted(whole(dataset, tokenizer))

    for step in (1, 6, 12) if kind == "jsonl" else (6, 12):  # 12: in the second epoch
        stopped = started(dataset)
        stopped.take(step * GLOBAL_BATCH)
        start, sha256 = stopped.maker.at(step * GLOBAL_BATCH)
        start = BlockStart(**json.loads(json.dumps(start._asdict())))
        resumed = started(dataset, start, first=step * GLOBAL_BATCH)

        assert resumed.take(80 - step * GLOBAL_BATCH) == rows[step * GLOBAL_BATCH :], (step, start)
        assert sha256 in (None, resumed.stream.first.sha256)


def _write(path: Path, rows: list[dict[str, Any]], kind: str) -> None:
    table = pa.Table.from_pylist(rows)
    if kind == "parquet":
        plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
        pq.write_table(table, path, row_group_size=4, **plain)
    elif kind == "arrow":
        with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    elif kind == "txt":
        path.write_text("".join(f"{row['messages'][1]['content']}\n\n" for row in rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_no_more_than_two_blocks_are_there_at_any_time(jsonl: Write, started: Callable[..., Trained]) -> None:
    stream = started(block_of(jsonl(rows_of(100))))  # ten whole blocks: beside a short one a third is made
    for _ in range(5):  # however much time there is
        stream.take(24)
        until = time.monotonic() + 0.2
        while time.monotonic() < until:
            stream.maker.go_on(0.05)
            time.sleep(0.01)
            assert len(spans(stream.home)) <= 2

    assert stream.most_blocks == 2
    assert stream.ticks > 0


def test_a_step_may_need_more_rows_than_two_blocks_hold(jsonl: Write, started: Callable[..., Trained]) -> None:
    stream = started(block_of(jsonl(rows_of(30))), most=1)

    assert len(stream.take(60)) == 60
    assert stream.most_blocks <= 2 * GLOBAL_BATCH + 1


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "arrow"])
def test_what_lies_before_the_block_of_the_next_row_is_not_read(
    kind: str, tmp_path: Path, started: Callable[..., Trained], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_END_BYTES", 500)
    path, texts = tmp_path / f"rows.{kind}", [f"answer-{at:03}-" for at in range(60)]
    _write(path, [conversation("why?", f"{text} and so on" * 5) for text in texts], kind)
    undisturbed = started(block_of(path))
    undisturbed.take(44)
    start, _ = undisturbed.maker.at(44)
    assert start.row == 40
    content = path.read_bytes()
    for text in texts[10:40]:  # the first ones are among the bytes by which the file is known
        assert content.count(text.encode()) == 5
        content = content.replace(text.encode(), b"\xff" * len(text))
    other = path.with_suffix(".new")  # the maker of the undisturbed stream has the old file mapped
    other.write_bytes(content)
    other.replace(path)
    with pytest.raises(DataError):
        list(readers.rows_of_file(path))

    resumed = started(block_of(path), start, first=44)

    assert resumed.files == undisturbed.files
    assert resumed.take(16) == undisturbed.take(16)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_reading_on_takes_no_more_bytes_than_what_follows(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.{kind}"
    rows = [{"text": f"{at} {os.urandom(2_000).hex()}"} for at in range(4_000)]
    _write(path, rows, kind)
    at = Cursor()
    for _ in readers.rows_of_file(path, at=at):
        if at.row == 3_950:
            break
    _forget(path)

    before = _bytes_read(path)
    rest = [place for place, _ in readers.rows_of_file(path, at=at)]
    assert len(rest) == 50 and rest[0].endswith("3951")

    assert _bytes_read(path) - before < path.stat().st_size / 10


def _forget(path: Path) -> None:
    """Drop a file's pages from memory, so that what is read of it, mapped or not, is read from the disk."""
    handle = os.open(path, os.O_RDONLY)
    os.fdatasync(handle)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def _bytes_read(path: Path) -> int:
    """Return the bytes that this process has asked for, and those of the file that are in memory."""
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(io["rchar"]) + int(io["read_bytes"])


def test_a_row_of_a_later_block_is_named_by_its_line_before_training_needs_it_and_after_a_seek(
    jsonl: Write, started: Callable[..., Trained]
) -> None:
    path = jsonl(rows_of(60))
    lines = path.read_text().splitlines()
    lines[47] = lines[47][:15]
    path.write_text("\n".join(lines))

    stream = started(block_of(path))
    with refused(DataError, f"{path}:48") as caught:
        stream.take(60)

    assert "To go on without it: --resume auto --set train_dataloader.dataset.bad_rows=1" in str(caught.value)
    assert stream.number <= 40

    at = stream.maker._next
    assert at.row == 40
    with refused(DataError, f"{path}:48"):
        started(block_of(path), at, first=40)


def test_bad_rows_are_counted_over_an_epoch_and_across_a_resume(jsonl: Write, started: Callable[..., Trained]) -> None:
    path = jsonl(rows_of(60))
    lines = path.read_text().splitlines()
    for at in (3, 4, 27, 59):
        lines[at] = lines[at][:15]
    path.write_text("\n".join(lines))

    enough = started(block_of(path, bad_rows=4))
    assert len(enough.take(150)) == 150, "the second epoch meets the same ones"

    few = started(block_of(path, bad_rows=3))
    few.take(24)
    start, _ = few.maker.at(24)
    assert (start.epoch, start.bad) == (0, 2)
    with refused(DataError, f"{path.name}:60", "dataset.bad_rows = 3"):
        started(block_of(path, bad_rows=3), start, first=24).take(60)


def test_rows_that_teach_nothing_make_no_block_and_an_epoch_of_them_is_refused(
    jsonl: Write, started: Callable[..., Trained]
) -> None:
    empty = [conversation("a question?")] * 30
    stream = started(block_of(jsonl([*rows_of(10), *empty, *rows_of(10)])))
    assert len(stream.take(40)) == 40

    with pytest.raises(DataError, match=r"none of the .* rows has a token to train on"):
        started(block_of(jsonl(empty, "empty.jsonl")))


@pytest.mark.parametrize(("count", "more"), [(60, {"max_rows": 23}), (10, {"packing": True})])
def test_an_epoch_is_what_is_prepared_whole(
    jsonl: Write, started: Callable[..., Trained], tokenizer: Any, count: int, more: dict[str, Any]
) -> None:
    dataset = block_of(jsonl(rows_of(count)), **more)
    rows = whole(dataset, tokenizer)

    taken = started(dataset).take(2 * len(rows))

    assert sorted(taken[: len(rows)]) == sorted(taken[len(rows) :]) == sorted(rows)


def test_a_killed_process_is_told_in_one_message(jsonl: Write, started: Callable[..., Trained]) -> None:
    stream = started(block_of(jsonl(rows_of(60))))
    stream.maker._worker._process.kill()

    with pytest.raises(MachineError, match="with code -9"):
        stream.take(60)


def test_signals_that_ask_the_rank_to_stop_leave_its_next_rows_to_come(
    jsonl: Write, started: Callable[..., Trained]
) -> None:
    stream = started(block_of(jsonl(rows_of(60))))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        os.kill(stream.maker._worker._process.pid or 0, number)
    time.sleep(0.2)

    assert len(stream.take(60)) == 60


def test_who_waits_for_a_rank_that_has_failed_says_so(tmp_path: Path) -> None:
    with pytest.raises(TunerError, match="has failed"):
        Stream(StreamedRows(tmp_path, 10, 7, "sft"), 0, None, is_over=lambda: True, tick=lambda: None)


@pytest.mark.parametrize(
    ("name", "fix"),
    [("rows.csv", "Save its rows as .jsonl"), ("rows.json", "Save its rows"), ("rows.jsonl.gz", "Unpack it")],
)
def test_a_file_that_is_read_from_its_beginning_alone_is_refused(name: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("[]")

    with pytest.raises(DataError, match="cannot be streamed") as caught:
        blocks.opened(Pipeline(block_of(tmp_path / name), "sft"))

    assert fix in str(caught.value) and "streaming=False" in str(caught.value)


def test_files_are_others_when_their_number_size_or_ends_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_END_BYTES", 8)
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_text("x" * 40)

    def told() -> dict[str, Any]:
        return blocks.opened(Pipeline(block_of(folder / "*.jsonl"), "sft"))

    before = told()
    assert before == told() and (before["files"], before["bytes"]) == (1, 40)
    for change in ("y" + "x" * 39, "x" * 39 + "y", "x" * 41):
        (folder / "a.jsonl").write_text(change)
        assert told() != before
    (folder / "a.jsonl").write_text("x" * 40)
    (folder / "b.jsonl").write_text("x")
    assert told() != before
