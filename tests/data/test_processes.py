"""Rows are worked on in several processes: the same rows, the same counts, clean ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.data.conftest import Prepare, Settings, Write, conversation
from tuner.data import encoding, processes
from tuner.data.prepare import prepare
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, MachineError


class Particular(Exception):
    """It cannot be made again from what it says."""

    def __init__(self, *, row: int) -> None:
        super().__init__(f"row {row} is particular")


def doubled(value: int) -> int:
    if value == 7:
        raise DataError("seven", where="here", of_row=True)
    if value == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    if value == 9:
        raise ZeroDivisionError("none")
    if value == 10:
        raise Particular(row=10)
    return value * 2


def children() -> list[psutil.Process]:
    return psutil.Process().children()


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    before = set(children())
    yield
    assert set(children()) == before


def test_results_come_in_the_order_of_the_values_and_from_other_processes() -> None:
    made = list(processes.in_order(lambda value: (time.sleep(0.01 * (value % 3)), value, os.getpid()), range(20), 2))

    assert [value for _, value, _ in made] == list(range(20))
    assert len({pid for *_, pid in made[1:]}) == 2
    assert os.getpid() not in {pid for *_, pid in made[1:]}


def test_few_values_start_no_process() -> None:
    assert {*processes.in_order(lambda _: os.getpid(), range(processes.ALONE), "auto")} == {os.getpid()}


def test_no_more_values_are_taken_ahead_than_two_for_each_process() -> None:
    taken = count()
    results = processes.in_order(abs, taken, 2)

    with contextlib.closing(results):  # type: ignore[type-var]
        for _ in range(5):
            next(results)
        assert next(taken) <= 5 + 2 * 2


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ((0, 7), DataError, "seven"),
        ((0, 8), MachineError, "with code -9"),
        ((0, 9), ZeroDivisionError, "none"),
        ((0, 10), RuntimeError, "Particular: row 10 is particular"),
    ],
)
def test_an_error_in_a_process_is_that_of_the_caller(values: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        list(processes.in_order(doubled, values, 2))

    if isinstance(caught.value, DataError):
        assert (caught.value.where, caught.value.of_row) == ("here", True)
    if isinstance(caught.value, ZeroDivisionError):
        assert "in doubled" in caught.value.__notes__[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_the_caller_is_ended_its_processes_end_too(number: int, tmp_path: Path) -> None:
    told = tmp_path / "pids"
    code = (
        "import os, sys, time\nfrom tuner.data import processes\n"
        "def work(value):\n"
        "    with open(sys.argv[1], 'a') as stream: stream.write(f'{os.getpid()}\\n')\n"
        "    time.sleep(value)\n"
        "list(processes.in_order(work, [0, 60, 60], 2))\n"
    )
    child = subprocess.Popen([sys.executable, "-c", code, told], stderr=subprocess.DEVNULL, start_new_session=True)
    until = time.monotonic() + 30
    while not told.exists() or told.read_text().count("\n") < 3:
        assert time.monotonic() < until
        time.sleep(0.05)

    os.killpg(child.pid, number) if number == signal.SIGINT else child.kill()

    assert child.wait(10) != 0
    gone = [psutil.Process(pid) for pid in map(int, told.read_text().split()) if psutil.pid_exists(pid)]
    assert psutil.wait_procs(gone, timeout=10)[1] == []


@pytest.fixture
def mixed_rows(jsonl: Write, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Rows of which some are torn, some of another shape, some long and some empty; in batches of 16."""
    monkeypatch.setattr(encoding, "BATCH_ROWS", 16)
    rows: list[Any] = [conversation(f"question {at}?", "one two three " * (at % 40)) for at in range(300)]
    path = jsonl(rows)
    lines = path.read_text().splitlines()
    for at in (3, 100, 101, 250):
        lines[at] = lines[at][:20]
    lines[160] = '{"messages": [{"role": "user", "content": null}]}'
    path.write_text("\n".join(lines))
    return path


def prepared_files(settings: Settings, tokenizer: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return what is kept of prepared rows, less the path that `datasets` writes beside packed ones."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder)
    rows = prepare(settings, TextEncoder(tokenizer), objective="sft").dataset.data.table.replace_schema_metadata(None)
    whole = [file for file in sorted(folder.rglob("*")) if file.suffix in (".json", ".jsonl")]
    return [
        *(file.read_bytes() for file in whole),
        rows.schema.serialize().to_pybytes(),
        repr(rows.to_pydict()).encode(),
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_the_result_is_the_same_to_the_byte_with_any_number_of_processes(
    mixed_rows: Path, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    settings = Settings(str(mixed_rows), format="messages", bad_rows=5, packing=packing)

    alone, *others = (
        prepared_files(settings.with_values({"num_proc": number}), tokenizer, tmp_path / str(number), monkeypatch)
        for number in (1, 2, 3, "auto")
    )

    assert len(alone) == 4
    assert all(other == alone for other in others)


@pytest.mark.parametrize(("bad_rows", "line"), [(0, 4), (1, 101), (3, 161), (4, 251)])
def test_the_first_row_too_many_is_the_same_with_any_number_of_processes(
    prepared: Prepare, mixed_rows: Path, bad_rows: int, line: int
) -> None:
    def refused(num_proc: int) -> tuple[str, str | None]:
        with pytest.raises(DataError) as caught:
            prepared(mixed_rows, format="messages", bad_rows=bad_rows, num_proc=num_proc)
        return caught.value.what, caught.value.where

    assert refused(1) == refused(2)
    assert refused(1)[1] == f"{mixed_rows}:{line}"


def test_the_number_of_processes_makes_no_other_rows_of_the_same_data(
    prepared: Prepare, mixed_rows: Path, cache: Path
) -> None:
    for number in (1, 2):
        prepared(mixed_rows, format="messages", bad_rows=5, num_proc=number)

    assert len(list((cache / "tuner").iterdir())) == 1
