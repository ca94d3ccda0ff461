"""Progress of work that takes more than two seconds: lines on a pipe, a bar on a terminal, nothing for short work."""

from __future__ import annotations

import io
import os
import pty
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tuner import progress
from tuner.progress import Work, shown, tqdm_hook


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Show work on a stream that is no terminal, on a clock that runs a hundred times as fast."""
    monkeypatch.setattr(progress, "AFTER_S", 0.02)
    monkeypatch.setattr(progress, "EVERY_S", 0.1)
    to = io.StringIO()
    progress.show_on(to)
    yield to
    progress.show_on(None)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_short_work_shows_nothing(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 60)

    with shown("tokenizing", "rows", 10):
        pass

    assert stream.getvalue() == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]


def test_long_work_writes_a_line_at_each_interval(stream: io.StringIO) -> None:
    with shown("tokenizing", "rows", 40_000) as work:
        work.advance(12_000)
        until(lambda: stream.getvalue().count("\n") == 1)
        assert list(work.counted(range(3))) == [0, 1, 2]
        until(lambda: stream.getvalue().count("\n") == 2)

    assert stream.getvalue() == "tokenizing: 12,000 of 40,000 rows\ntokenizing: 12,003 of 40,000 rows\n"


def test_it_shows_nothing_before_a_stream_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with shown("tokenizing") as work:
        work.advance()

    assert work.done == 1
    assert capfd.readouterr() == ("", "")


def test_work_inside_other_work_is_not_shown_beside_it(stream: io.StringIO) -> None:
    with shown("merging"), shown("loading"):
        until(lambda: stream.getvalue())

    assert {line.partition(":")[0] for line in stream.getvalue().splitlines()} == {"merging"}


def test_work_that_fails_is_shown_no_longer(stream: io.StringIO) -> None:
    with pytest.raises(ValueError, match="no weights"), shown("loading"):
        until(lambda: stream.getvalue())
        raise ValueError("no weights")

    assert not [thread for thread in threading.enumerate() if thread.name == "progress"]
    with shown("loading again"):
        until(lambda: "again" in stream.getvalue())


@pytest.mark.parametrize(
    ("work", "amount"),
    [
        (Work("t", "rows", 40_000, 12_000), "12,000 of 40,000 rows"),
        (Work("t", "rows", None, 12_000), "12,000 rows"),
        (Work("t", "B", 15_300_000_000, 1_200_000_000), "1.20 of 15.30 GB"),
        (Work("t", began_s=-1000), "1,012 s"),
    ],
)
def test_an_amount_names_its_unit(work: Work, amount: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 12.2)

    assert work.amount == amount


def test_bars_of_libraries_count_for_the_work_that_is_shown(stream: io.StringIO) -> None:
    with shown("loading my-model") as work:
        for _ in tqdm_hook(Forbidden, (range(4),), {"desc": "Loading weights", "mininterval": 0}):
            time.sleep(0.002)
        assert (work.title, work.done, work.total, work.unit) == ("loading weights", 4, 4, "parts")
        bar = progress.tqdm_class()(total=10, desc="model.safetensors", unit="B", name="huggingface_hub", mininterval=0)
        with bar:
            bar.update(10)
        assert (work.title, work.amount) == ("downloading model.safetensors", "0.00 of 0.00 GB")


class Forbidden:
    """The bar of a library itself, which is not to be drawn."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("drawn")


def test_a_terminal_gets_a_bar_that_is_gone_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER_S", 0.02)
    monkeypatch.setattr(progress, "_FRAME_S", 0.02)
    monkeypatch.setenv("TERM", "xterm-256color")
    outer, inner = pty.openpty()
    with os.fdopen(inner, "w") as terminal:
        progress.show_on(terminal)
        with shown("tokenizing", "rows", 8) as work:
            work.advance(4)
            time.sleep(1)
        progress.show_on(None)
        read = b""
        while b"\x1b[?25h" not in read:  # the cursor is shown again
            read += os.read(outer, 65536)
    os.close(outer)
    drawn = read.decode()

    assert re.search(r"tokenizing .*━.*4 of 8 rows", re.sub(r"\x1b\[[0-9;]*m", "", drawn))
    assert "\x1b[2K" in drawn.rpartition("rows")[2], "the line is cleared"
