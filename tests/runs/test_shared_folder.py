"""A run directory that hangs on one node: a blocked look stands for a mount that no longer answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.processes import wait_until
from tuner.errors import DiskError
from tuner.runs import shared_folder


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let every look at a folder wait until the event is set."""
    answers = threading.Event()
    monkeypatch.setattr(shared_folder, "_ask", lambda _: answers.wait())
    yield answers
    answers.set()
    for thread in threading.enumerate():  # its error is this test's, and not the next one's
        if thread.name == "shared-folder":
            thread.join(10)


def test_a_folder_that_hangs_is_said_and_ends_the_ranks_and_this_node(
    hangs: threading.Event, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ended: list[object] = []
    with shared_folder.watched(
        tmp_path, 0.4, lambda: ended.append("ranks"), leave=ended.append, look_s=0.01, say_s=0.05
    ):
        wait_until(lambda: len(ended) == 2)

    assert ended == ["ranks", DiskError.exit_code]
    told = capfd.readouterr().err
    assert "WARNING" in told and str(tmp_path) in told and f"error[{DiskError.code}]" in told


def test_a_log_in_the_folder_that_hangs_holds_nothing_up(
    hangs: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_folder, "_TELL_S", 0.1)
    ended: list[object] = []

    def hanging(_: str) -> None:
        hangs.wait()

    with shared_folder.watched(
        tmp_path, 0.4, lambda: ended.append("ranks"), leave=ended.append, tell=hanging, look_s=0.01, say_s=0.2
    ):
        wait_until(lambda: len(ended) == 2)

    assert ended == ["ranks", DiskError.exit_code]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ranks_that_cannot_be_killed_do_not_keep_the_node(hangs: threading.Event, tmp_path: Path) -> None:
    ended: list[object] = []

    def failing() -> None:
        raise RuntimeError("Set changed size during iteration")

    with shared_folder.watched(tmp_path, 0.1, failing, leave=ended.append, look_s=0.01):
        wait_until(lambda: bool(ended))

    assert ended == [DiskError.exit_code]


def test_a_folder_that_answers_again_ends_nothing_and_that_is_said(
    hangs: threading.Event, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    ended: list[object] = []

    def text() -> str:
        told.append(capfd.readouterr().err)
        return "".join(told)

    with shared_folder.watched(tmp_path, 60, lambda: None, leave=ended.append, look_s=0.01, say_s=0.05):
        wait_until(lambda: "WARNING" in text())
        hangs.set()
        wait_until(lambda: "answers again" in text())

    assert ended == []


def test_a_folder_that_answers_is_not_spoken_of(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ended: list[object] = []
    with shared_folder.watched(tmp_path / "gone", 0.05, lambda: None, leave=ended.append, look_s=0.01):
        threading.Event().wait(0.3)

    assert ended == [] and capfd.readouterr().err == ""
