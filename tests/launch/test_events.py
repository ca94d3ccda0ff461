"""`train --json`: one JSON object a line for each thing that happens in a run, from its directory alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import QUICK, environment
from tests.launch.plans import checkpoint, written_run
from tuner.launch.execute import Events
from tuner.runs.records import RunStatus


def _told(reader: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in os.read(reader, 1 << 16).decode().splitlines()]


def test_an_attempt_is_told_from_its_start_to_its_end_and_what_was_there_before_is_not(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    run.log_metrics({"step": 1, "loss": 9.0})
    checkpoint(run.path, 1)
    reader, writer = os.pipe()
    events = Events(run, writer)

    with events.printed():
        run.log_metrics({"step": 2, "loss": 8.0})
        run.log_metrics({"step": 2, "eval_loss": 8.5})
        checkpoint(run.path, 2)
    run.write_status(RunStatus(state="done", exit_code=0, step=2))
    events.end(0)

    told = _told(reader)
    assert [(line["event"], line.get("step")) for line in told] == [
        ("started", None),
        ("step", 2),
        ("validation", 2),
        ("checkpoint", 2),
        ("ended", 2),
    ]
    assert (told[-1]["state"], told[-1]["exit_code"], told[0]["run"]) == ("done", 0, str(run.path))


def test_a_reader_that_has_gone_ends_nothing(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    reader, writer = os.pipe()
    os.close(reader)
    events = Events(run, writer)

    with events.printed():
        run.log_metrics({"step": 1, "loss": 9.0})
    events.end(1)

    assert run.metrics.read_text().count("\n") == 1


@pytest.mark.e2e
@pytest.mark.long
def test_a_training_prints_its_events_and_nothing_else_on_standard_output(tmp_path: Path) -> None:

    (tmp_path / "quick.py").write_text(QUICK.format(method="full"))
    command = [sys.executable, "-m", "tuner", "train", "./quick.py", "--json", "--work-dir", "run"]

    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=600)

    told = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert (done.returncode, told[0], told[-1]) == (0, "started", "ended")
    assert (told.count("step"), told.count("checkpoint")) == (4, 2)
