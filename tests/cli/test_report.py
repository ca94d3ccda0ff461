from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.command import Tuner
from tests.report import made


def test_one_run_gets_its_report_inside_it_and_several_one_here(tuner: Tuner) -> None:
    made.trained(Path("runs/a").absolute(), num_steps=3)
    made.failed(Path("runs/b").absolute())

    assert tuner("report", "runs/a", "runs/a/").code == 0
    assert "Machine and versions" in Path("runs/a/report.html").read_text()
    assert tuner("report", "runs/a", "runs/b").out == "report.html\n"
    assert "2 runs" in Path("report.html").read_text()
    assert tuner("report", "runs/a", "runs/b").code == 0, "an older report is written over"
    assert tuner("report", "runs/b", "-o", "mine.html").out == "mine.html\n" and Path("mine.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "error[bad-run-directory]: RUN: 'nowhere' does not exist"),
        (["run/ranks"], "'run/ranks' is not a run directory"),
        (["run", "-o", "mine.txt"], "mine.txt exists and is not a report"),
        (["run", "-o", "run"], "run is a folder"),
        (["run", "-o", "pipe"], "pipe is not a file"),
        (["run", "-o", "no/such/report.html"], "no folder 'no/such'"),
        (["run", "--watch", "-o", "x.html"], "--output with --watch"),
        (["run", "--port", "9"], "--port without --watch"),
    ],
)
def test_a_mistake_is_one_message_and_writes_nothing(arguments: list[str], message: str, tuner: Tuner) -> None:
    made.failed(Path("run").absolute())
    Path("mine.txt").write_text("mine")
    os.mkfifo("pipe")

    result = tuner("report", *arguments)

    assert result.code == 2 and len(result.messages) == 1 and message in result.err
    assert Path("mine.txt").read_text() == "mine" and not Path("run/report.html").exists()
