"""What a plan had promised, beside what the run has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launch.plans import checkpoint, written_run
from tests.runs.made_records import made_beat
from tests.runs.test_ledger import at, beat, write
from tuner.files import write_json
from tuner.runs import ledger, promises
from tuner.runs.beats import Phase
from tuner.runs.directory import RunDirectory
from tuner.runs.promises import Promise
from tuner.runs.records import Planned, RankPace, RanksPace, RunStatus

GIB = 2**30
PLANNED = {"peak_bytes": 30 * GIB, "step_s": 2.0, "tokens_per_second": 50.0, "hours": 20 / 3600}


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of ten steps of 2.1 s that was done after 60 s, 30 of which were spent on validation."""
    run = written_run(tmp_path / "run")
    spent = {"startup": 5.0, "steps": 21.0, "saves": 3.0, "validation": 30.0, "finish": 1.0}
    of_rank_0 = beat(60.0, 10, Phase.FINISH, [], **spent)
    ended = RunStatus(state="done", exit_code=0, step=10, ended=at(60.0), peak_bytes=31 * GIB)
    write(run, run.path, of_rank_0, ended, started=at(0.0), planned=PLANNED)
    run.metrics.write_text(json.dumps({"step": 10, "loss": 1.0, "num_tokens": 1050}) + "\n")
    return run


def kept(run: RunDirectory) -> dict[str, Promise]:
    return {promise.quantity: promise for promise in ledger.read_ledger(run).promises}


def test_each_promise_stands_beside_what_was_measured_and_is_missed_from_ten_per_cent_on(run: RunDirectory) -> None:
    found = kept(run)

    assert found["peak_bytes"].measured == 31 * GIB and not found["peak_bytes"].is_missed
    assert found["step_s"].measured == pytest.approx(2.1) and not found["step_s"].is_missed
    assert found["tokens_per_second"].measured == pytest.approx(50.0)
    assert found["hours"].ratio == pytest.approx(3.0) and found["hours"].is_missed
    assert found["hours"].term == promises.PARTS["validation"]
    assert ledger.read_ledger(run).to_json()["promises"][0]["planned"] == 30 * GIB


def test_tokens_of_a_checkpoint_from_another_directory_were_not_trained_here(run: RunDirectory) -> None:
    of_rank_0 = beat(60.0, 20, Phase.FINISH, [], startup=39.0, steps=21.0)
    write(run, run.path, of_rank_0, run.read_status(), started=at(0.0), planned=PLANNED, resume_step=10)
    run.metrics.write_text(json.dumps({"step": 20, "loss": 1.0, "num_tokens": 2100}) + "\n")

    assert kept(run)["tokens_per_second"].measured == pytest.approx(50.0)


def test_the_memory_is_that_of_the_rank_with_the_most(run: RunDirectory) -> None:
    other = made_beat(1, 8, "node-0", 9, "", 0.0, 0.0, peak_bytes=40 * GIB)
    (run.ranks / "1.beat").write_bytes(other.to_bytes())

    assert kept(run)["peak_bytes"].measured == 40 * GIB


@pytest.mark.parametrize(
    ("data_s", "waiting_s", "term"),
    [(0.8, 0.1, "reading rows"), (0.1, 0.9, "waiting for other ranks"), (0.1, 0.1, None)],
)
def test_a_slow_step_names_what_the_ranks_waited_for(
    run: RunDirectory, data_s: float, waiting_s: float, term: str | None
) -> None:
    write(run, run.path, None, run.read_status(), planned={**PLANNED, "step_s": 1.0})
    pace = [RankPace(rank=0, host="", data_s=data_s, computing_s=0.3, waiting_s=waiting_s)]
    write_json(run.pace, RanksPace(step=10, ranks=pace, slow=[]).to_json())

    assert kept(run)["step_s"].term == term


def test_the_room_on_the_disk_counts_true_sizes_and_names_what_differs(run: RunDirectory) -> None:
    saved = checkpoint(run.path, 10)
    (run.final).mkdir(exist_ok=True)
    (run.final / "model.safetensors").write_bytes(b"x" * 500)
    (run.final / "tokenizer.json").write_bytes(b"x" * 5000)
    checkpoint_bytes = sum(
        file.stat().st_size for file in saved.rglob("*") if file.suffix in (".safetensors", ".bin", ".pt")
    )
    sizes = {"checkpoint_bytes": checkpoint_bytes + 1, "result_bytes": 1000, "num_checkpoints": 2}
    write(run, run.path, None, run.read_status(), planned=sizes)
    found = kept(run)

    assert [*found] == ["disk_bytes"]
    assert found["disk_bytes"].planned == 2 * (checkpoint_bytes + 1) + 1000
    assert found["disk_bytes"].measured == 2 * checkpoint_bytes + 500
    assert found["disk_bytes"].term == "the result"
    (run.final / "model-2.safetensors").symlink_to("moved-away")
    assert "disk_bytes" not in kept(run)


def test_nothing_is_said_of_what_was_not_planned(run: RunDirectory) -> None:
    write(run, run.path, None, run.read_status(), planned=None)

    assert ledger.read_ledger(run).promises == () and promises.line(()) == ""


def test_a_line_names_each_promise_and_only_a_missed_one_its_term(run: RunDirectory) -> None:
    line = promises.line(ledger.read_ledger(run).promises)

    assert line.count("%") == 1 and "+200%" in line and promises.PARTS["validation"] in line


def test_the_room_is_not_known_without_each_of_its_sizes() -> None:
    assert Planned(checkpoint_bytes=1, result_bytes=1).disk_bytes is None
