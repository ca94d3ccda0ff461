"""What the time of a run's attempts went into, from files as its attempts leave them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.launch.plans import written_run
from tests.runs.made_records import made_beat
from tuner.files import dump_json
from tuner.runs import beats, ledger
from tuner.runs.beats import Beat, Phase
from tuner.runs.directory import RunDirectory
from tuner.runs.records import DiagnosisRecord, RunStatus

BEGAN_AT = 1_800_000_000.0
KILLED = DiagnosisRecord(cause="killed", what="rank 1 was killed", rank=1, step=8)


def at(seconds: float) -> str:
    return datetime.fromtimestamp(BEGAN_AT + seconds, UTC).isoformat()


def beat(at_s: float, step: int, phase: Phase, begun: list[tuple[int, float]], **seconds: float) -> Beat:
    all_seconds = {each_phase.value: seconds.get(each_phase, 0.0) for each_phase in Phase}
    return made_beat(
        0, 7, "node-0", 9, "", 0.0, 0.0, step=step, phase=phase, seconds=all_seconds, progress_at=BEGAN_AT + at_s,
        saves=begun,
    )  # fmt: skip


def write(run: RunDirectory, folder: Path, of_rank_0: Beat | None, status: RunStatus, **facts: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = json.loads(run.run_json.read_text())
    (folder / "run.json").write_text(json.dumps({**known, **facts}))
    (folder / "status.json").write_text(dump_json(status.to_json()))
    (folder / "ranks").mkdir(exist_ok=True)
    if of_rank_0:
        (folder / "ranks" / "0.beat").write_bytes(of_rank_0.to_bytes())


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run whose rank 1 was killed in step 8, and that tuner restarted from step 4.

    Attempt 1: its process began 2 s after the command and worked to 60 s; its end was written at 65 s. Attempt 2 began
    at 75 s with a process at 76 s and was done at 110 s.
    """
    run = written_run(tmp_path / "run")
    first = beat(
        60.0, 7, Phase.STEPS, [(2, 12.0), (4, 22.0)], startup=10.0, waiting=3.0, steps=40.0, saves=4.0, validation=1.0
    )
    status = RunStatus(state="failed", exit_code=137, diagnosis=KILLED, ended=at(65.0))
    write(run, run.path / "attempts" / "1", first, status, started=at(0.0))
    of_rank_1 = made_beat(1, 8, "node-3", 9, "", 0.0, 0.0)
    (run.path / "attempts" / "1" / "ranks" / "1.beat").write_bytes(of_rank_1.to_bytes())
    second = beat(109.0, 8, Phase.FINISH, [(8, 20.0)], startup=8.0, waiting=2.0, steps=20.0, saves=1.0, finish=2.0)
    earlier = [{"cause": "killed", "deepspeed": "zero2", "micro_batch": 1, "accumulation": 1}]
    facts = {"started": at(75.0), "resume_step": 4, "attempts": earlier}
    write(run, run.path, second, RunStatus(state="done", exit_code=0, step=8, ended=at(110.0)), **facts)
    return run


def test_each_second_of_all_attempts_has_a_part(run: RunDirectory) -> None:
    told = ledger.read_ledger(run)

    assert told.seconds == {
        "useful": 22.0 + 20.0,  # up to the save of step 4, and all of the second attempt
        "lost": 18.0,
        "startup": 10.0 + 2.0 + 8.0 + 1.0,
        "saves": 5.0,
        "validation": 1.0,
        "waiting": 3.0 + 2.0 + 10.0,  # also from the end of the first to the start of the second
        "stalled": 5.0,
        "finish": 2.0 + 1.0,
    }
    assert told.wall_s == 110.0
    assert told.goodput == round(42 / 110, 4)
    assert told.seconds_per_step == round(60 / 11, 4)


def test_an_interruption_has_its_cause_its_machine_and_the_time_until_a_new_step(run: RunDirectory) -> None:
    told = ledger.read_ledger(run)
    (killed,) = told.interruptions

    assert (killed.cause, killed.rank, killed.host, killed.step, killed.lost_steps) == ("killed", 1, "node-3", 7, 3)
    assert killed.recovered_s == told.mean_recovery_s == 5.0 + 9.0 + 12.0
    assert json.loads(dump_json(told.to_json()))["attempts"][0]["cause"] == "killed"


def test_time_in_which_nobody_had_started_the_run_is_not_counted(run: RunDirectory) -> None:
    record = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**record, "attempts": []}))  # resumed by hand

    assert ledger.read_ledger(run).wall_s == 100.0


def test_the_tokens_a_second_are_those_of_the_steps_that_count(run: RunDirectory) -> None:
    assert ledger.read_ledger(run).useful_tokens_per_second is None

    run.log_metrics({"step": 7, "loss": 2.0, "num_tokens": 700})
    run.log_metrics({"step": 8, "loss": 1.0, "num_tokens": 840})

    assert ledger.read_ledger(run).useful_tokens_per_second == 840 / (22.0 + 20.0)
    assert ledger.read_ledger(run).to_json()["useful_tokens_per_second"] == 20.0


def test_where_an_attempt_left_no_times_the_tokens_a_second_are_not_known(run: RunDirectory) -> None:
    run.log_metrics({"step": 8, "loss": 1.0, "num_tokens": 840})
    beats.path_of(RunDirectory(run.path / "attempts" / "1"), 0).unlink()

    told = ledger.read_ledger(run)

    assert (told.useful_tokens_per_second, told.goodput, told.attempts[0].recovered_s) == (None, None, 9.0 + 12.0)
    assert [bool(attempt.seconds) for attempt in told.attempts] == [False, True]


def test_of_a_checkpoint_before_the_last_two_saves_the_steps_count_alike(run: RunDirectory) -> None:
    record = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**record, "resume_step": 1}))

    assert ledger.read_ledger(run).attempts[0].seconds["useful"] == round(40 / 7, 2)
    assert ledger.read_ledger(run).attempts[0].lost_steps == 6


def test_an_attempt_that_ended_before_its_rank_began_is_start_up(run: RunDirectory) -> None:
    first = run.path / "attempts" / "1"
    (first / "ranks" / "0.beat").unlink()
    write(
        run,
        first,
        None,
        RunStatus(state="failed", exit_code=3, ended=at(65.0)),
        started=at(0.0),
        resume_step=0,
        attempts=[],
    )

    told = ledger.read_ledger(run).attempts[0]

    assert (told.seconds["startup"], told.wall_s, told.step) == (65.0, 65.0, 0)


@pytest.mark.parametrize("damage", [{"seconds": None}, {"seconds": {"steps": "x"}}, {"phase": "x"}, {"saves": [1]}])
def test_a_damaged_beat_is_no_beat(run: RunDirectory, damage: dict[str, object]) -> None:
    file = beats.path_of(run, 0)
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))

    assert beats.of_rank(run, 0) is None
    assert ledger.read_ledger(run).goodput is None


def test_an_attempt_that_does_not_say_where_it_began_takes_no_step_away(run: RunDirectory) -> None:
    lost = ledger.read_ledger(run).attempts[0].lost_steps
    (run.path / "attempts" / "2").mkdir()
    (run.path / "attempts" / "2" / "run.json").write_text("torn")

    assert ledger.read_ledger(run).attempts[0].lost_steps == lost == 3


def test_an_attempt_that_logged_steps_and_left_no_times_was_not_all_start_up(run: RunDirectory) -> None:
    first = RunDirectory(run.path / "attempts" / "1")
    beats.path_of(first, 0).unlink()
    write(run, first.path, None, RunStatus(state="running"), started=at(0.0))
    first.log_metrics({"step": 6, "loss": 1.0})

    attempt = ledger.read_ledger(run).attempts[0]

    assert (attempt.state, attempt.step, attempt.lost_steps, attempt.seconds) == ("died", 6, 2, {})
