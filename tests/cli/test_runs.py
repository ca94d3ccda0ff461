"""`tuner runs` as a shell sees it; tests/runs/test_listing.py has the states."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.command import Tuner
from tests.launch.plans import checkpoint, written_run
from tests.runs.made_records import made_beat
from tuner.runs import beats
from tuner.runs.beats import Phase
from tuner.runs.records import RunStatus
from tuner.runs.verdict import Outcome, Verdict


def test_the_table_has_a_line_for_each_run(tuner: Tuner) -> None:
    run = written_run(Path("work_dirs/mine/first").absolute())
    run.log_metrics({"step": 1200, "loss": 1.23456, "tokens_per_second": 4321.0})
    run.write_status(RunStatus(state="stopped", exit_code=75, message="stopped: at step 1200 on request."))
    checkpoint(run.path, 1200)
    written_run(Path("work_dirs/[red]odd/second").absolute()).write_status(RunStatus(state="done"))

    result = tuner("runs")

    assert result.code == 0
    first = next(line for line in result.out.splitlines() if line.startswith("mine/first"))
    assert first.split()[1:5] == ["stopped", "1,200", "1.2346", "4,321"]
    assert "stopped: at step 1200 on request. Resumes from step 1,200" in first
    assert "[red]odd/second" in result.out
    as_json = {run["name"]: run["tokens_per_second"] for run in json.loads(tuner("runs", "--json").out)}
    assert as_json == {"mine/first": 4321.0, "[red]odd/second": None}


def test_the_tokens_a_second_of_the_steps_that_count_stand_beside_the_last_ones(tuner: Tuner) -> None:
    run = written_run(Path("work_dirs/first").absolute())
    run.log_metrics({"step": 8, "loss": 1.5, "tokens_per_second": 4321.0, "num_tokens": 80_000})
    spent = {each.value: 20.0 if each is Phase.STEPS else 0.0 for each in Phase}
    beats.path_of(run, 0).parent.mkdir(exist_ok=True)
    of_rank_0 = made_beat(0, 7, "node-0", 9, "", 0.0, 0.0, step=8, phase=Phase.FINISH, seconds=spent, progress_at=1.0)
    beats.path_of(run, 0).write_bytes(of_rank_0.to_bytes())
    run.write_status(RunStatus(state="done", step=8))

    head, line = tuner("runs").out.splitlines()

    assert re.split(r"  +", head)[3:6] == ["loss", "tokens/s", "useful tokens/s"]
    assert re.split(r"  +", line)[3:6] == ["1.5000", "4,321", "4,000"]
    assert json.loads(tuner("runs", "--json").out)[0]["ledger"]["useful_tokens_per_second"] == 4000.0


def test_the_attempts_that_ended_otherwise_than_done_are_counted(tuner: Tuner) -> None:
    for name, ends in {"a": ["failed", "stopped", "done"], "b": ["done"], "c": ["failed", "running"]}.items():
        run = written_run(Path(f"work_dirs/{name}").absolute())
        *before, last = (RunStatus.model_validate({"state": end}) for end in ends)
        for number, status in enumerate(before, start=1):
            run.write_status(status)
            attempt = run.attempts / str(number)
            attempt.mkdir(parents=True)
            for file in (run.run_json, run.status):
                shutil.copy(file, attempt)
        run.write_status(last)

    head, *lines = tuner("runs").out.splitlines()

    end = head.index("interruptions") + len("interruptions")
    assert [line[:end].split()[2:] for line in sorted(lines)] == [["2"], [], ["1"]]
    counted = {run["name"]: run["ledger"]["interruptions"] for run in json.loads(tuner("runs", "--json").out)}
    assert counted == {"a": 2, "b": 0, "c": 1}


def test_a_figure_that_no_run_has_takes_no_room_in_the_table(tuner: Tuner) -> None:
    written_run(Path("work_dirs/first").absolute()).log_metrics({"step": 8, "loss": 1.5})

    head, _ = tuner("runs").out.splitlines()

    assert re.split(r"  +", head) == ["run", "state", "step", "loss", "seen", "outcome"]


def test_a_run_that_is_done_has_its_verdict_there(tuner: Tuner) -> None:
    brief = "validation loss 4.52 -> 3.70, still falling"
    run = written_run(Path("work_dirs/first").absolute())
    verdict = Verdict(Outcome.FALLING, "validation", 4.52, 3.70, 12, "train longer")
    run.write_status(RunStatus(state="done", step=12, verdict=verdict))

    assert brief in tuner("runs").out
    assert json.loads(tuner("runs", "--json").out)[0]["verdict"] == brief


@pytest.mark.parametrize(
    "arguments", ["report ./rum", "export ./rum out", "eval ./rum", "train tiny_full_sample_e1 --resume ./rum"]
)
def test_a_run_that_does_not_exist_has_one_error_code_in_every_command(tuner: Tuner, arguments: str) -> None:
    result = tuner(*arguments.split())

    assert (result.code, result.out, len(result.messages)) == (2, "", 1)
    assert result.messages[0].startswith("error[bad-run-directory]: ")


def test_a_run_whose_name_is_misspelled_is_told_the_nearest(tuner: Tuner) -> None:
    written_run(Path("work_dirs/first").absolute())

    told = [tuner(*words).messages[0] for words in (["report", "work_dirs/frist"], ["export", "work_dirs/frist", "x"])]

    assert all("'work_dirs/frist' does not exist" in message and "Did you mean 'first'?" in message for message in told)


def test_what_a_run_holds_moves_no_cursor(tuner: Tuner) -> None:
    run = written_run(Path("work_dirs/odd").absolute())
    run.write_status(RunStatus(state="failed", diagnosis={"cause": "odd", "what": "row \x1b]0;title\x07"}))
    run.path.rename("work_dirs/odd\x1b[2J")

    assert "\x1b" not in (out := tuner("runs").out) and "odd\\x1b[2J" in out


def test_an_empty_place_is_said_to_be_empty_and_a_wrong_one_is_refused(tuner: Tuner) -> None:
    assert tuner("runs").out == "No runs below work_dirs.\n"
    assert tuner("runs", "nowhere").code == 2
    assert tuner("runs", "--watch", "--json").code == 2
    assert "needs a terminal" in tuner("runs", "--watch").err


def test_watch_shows_what_changes_until_ctrl_c(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    with watched(tmp_path, num_lines=30) as (process, terminal):
        assert shown(terminal, "running")
        run.write_status(RunStatus(state="done"))
        assert shown(terminal, "done")
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_watch_shows_the_end_of_a_table_that_is_longer_than_the_terminal(tmp_path: Path) -> None:
    run = written_run(tmp_path / "a")
    for name in "bcdefgh":
        shutil.copytree(run.path, tmp_path / name)
        (tmp_path / name / "lock").unlink()
    os.utime(run.recipe, (2**32, 2**32))  # the one at work wrote last, and stands at the end
    with watched(tmp_path, num_lines=6) as (_, terminal):
        assert shown(terminal, "running")


@contextmanager
def watched(folder: Path, num_lines: int) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start `tuner runs --watch` in a terminal of its own; yield its process, and the descriptor of the terminal."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "tuner", "runs", str(folder), "--watch"]
    environment = {**os.environ, "COLUMNS": "120", "LINES": str(num_lines)}
    process = subprocess.Popen(command, stdout=slave, stderr=slave, env=environment)
    os.close(slave)
    try:
        yield process, master
    finally:
        process.kill()
        process.wait()
        os.close(master)


def shown(terminal: int, word: str) -> bool:
    text, deadline = "", time.monotonic() + 30
    while word not in text and time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.2)[0]:
            text += os.read(terminal, 4096).decode(errors="replace")
    return word in text
