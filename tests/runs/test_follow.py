from __future__ import annotations

import os
import pty
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launch.processes import read_exactly, wait_until
from tuner.runs.follow import Follower

Start = Callable[..., Follower]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "0.log"


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    return tmp_path / "shown"


@pytest.fixture
def follow(log: Path, shown: Path) -> Iterator[Callable[[Callable[[], int | None]], Follower]]:
    """Return how to follow the log into the file `shown`."""
    handles = []

    def started(end: Callable[[], int | None] = lambda: None) -> Follower:
        handles.append(os.open(shown, os.O_WRONLY | os.O_CREAT))
        follower = Follower(log, handles[-1], end)
        follower.start()
        return follower

    yield started
    for handle in handles:
        os.close(handle)


def test_lines_are_shown_as_they_come(log: Path, shown: Path, follow: Start) -> None:
    follower = follow()
    with log.open("w") as stream:
        for line in ("one\n", "two\n"):
            stream.write(line)
            stream.flush()
            wait_until(lambda line=line: shown.read_text().endswith(line))  # type: ignore[misc]

    follower.stop()

    assert shown.read_text() == "one\ntwo\n"


def test_the_rest_is_shown_at_the_end_with_its_unfinished_line(log: Path, shown: Path, follow: Start) -> None:
    follower = follow()
    text = "x" * 3_000_000 + "\nunfinished"
    log.write_text(text)

    follower.stop()

    assert shown.read_text() == text


def test_what_is_written_after_the_end_is_left_to_the_log(log: Path, shown: Path, follow: Start) -> None:
    failed: list[int] = []
    follower = follow(lambda: failed[0] if failed else None)
    log.write_text("step 1\n")
    wait_until(lambda: shown.read_text() == "step 1\n")

    failed.append(len("step 1\n"))
    with log.open("a") as stream:
        stream.write("Traceback ...\n")
    follower.stop()

    assert shown.read_text() == "step 1\n"


def test_the_lines_just_before_the_end_are_shown(log: Path, shown: Path, follow: Start) -> None:
    log.write_text("step 1\nstep 2\nTraceback ...\n")

    follow(lambda: len("step 1\nstep 2\n")).stop()

    assert shown.read_text() == "step 1\nstep 2\n"


def test_a_log_that_never_comes_is_none(shown: Path, follow: Start) -> None:
    follow().stop()

    assert shown.read_text() == ""


def test_a_reader_that_went_away_stops_nothing(log: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    follower = Follower(log, writer, lambda: None)
    follower.start()
    log.write_text("nobody reads this\n")

    follower.stop()

    assert not follower._thread.is_alive()
    os.close(writer)


def test_a_reader_that_does_not_read_is_not_waited_for(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.runs.follow._LAST_S", 0.2)
    reader, writer = os.pipe()
    follower = Follower(log, writer, lambda: None)
    follower.start()
    log.write_text("x" * 1_000_000 + "\n")
    began = time.monotonic()

    follower.stop()

    assert time.monotonic() - began < 10
    os.close(reader)  # it ends now: nobody will ever read
    follower._thread.join(20)
    os.close(writer)


def test_lines_replace_the_bar_that_stands_on_a_terminal(log: Path) -> None:
    master, slave = pty.openpty()
    follower = Follower(log, slave, lambda: None)
    follower.start()
    log.write_text("a line\n")

    follower.stop()

    shown = b"\r\x1b[Ka line\r\n\r\x1b[K\x1b[?25h"
    assert read_exactly(master, len(shown)) == shown, "and a bar of a killed rank is taken away"
    os.close(master)
    os.close(slave)
