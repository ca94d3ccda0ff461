"""What a job knows of itself, and how it asks Slurm: a small script stands in for scontrol and sbatch."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.machine.fake_slurm import FakeSlurm
from tests.refused import refused
from tuner.errors import MachineError
from tuner.machine import slurm
from tuner.machine.slurm import Job

TASK = {"SLURM_JOB_ID": "8", "SLURM_STEP_ID": "0", "TUNER_MAX_REQUEUES": "3"}


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", made.path)
    return made


def test_a_task_of_a_job_that_may_requeue_knows_its_job() -> None:
    assert Job.of(TASK) == Job("8", 0, 3)
    assert Job.of(TASK | {"SLURM_RESTART_COUNT": "2"}) == Job("8", 2, 3)
    assert Job.of(TASK | {"TUNER_MAX_RESTARTS": "4"}) == Job("8", 0, 3, max_restarts=4)


def test_a_task_of_an_array_requeues_itself_and_not_the_array() -> None:
    assert Job.of(TASK | {"SLURM_ARRAY_JOB_ID": "8", "SLURM_ARRAY_TASK_ID": "5"}) == Job("8_5", 0, 3)


@pytest.mark.parametrize("name", ["TUNER_MAX_REQUEUES", "SLURM_STEP_ID"])
def test_nothing_requeues_itself_unasked_or_outside_of_srun(name: str) -> None:
    assert Job.of({key: value for key, value in TASK.items() if key != name}) is None


@pytest.mark.parametrize("state", ["RUNNING", "CANCELLED", "COMPLETING", "PENDING"])
def test_only_a_running_job_runs(fake: FakeSlurm, state: str) -> None:
    fake.says(f"JobId=8 JobState={state} Reason=None")

    assert slurm.not_running("8") == (None if state == "RUNNING" else f"Slurm says that it is {state}")


def test_a_refusal_of_slurm_is_told_in_its_words(fake: FakeSlurm) -> None:
    fake.fails("sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission failed")

    with refused(MachineError, "Slurm", "invalid partition specified: x"):
        slurm.submit(["script"], {"PATH": fake.path})


def test_without_slurm_there_is_no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with refused(MachineError, "Slurm", "scontrol"):
        slurm.requeue("8")


def test_the_id_of_a_job_is_what_sbatch_prints_without_the_cluster(fake: FakeSlurm) -> None:
    fake.says("812;other")

    assert slurm.submit(["--nice", "script"], {"PATH": fake.path}) == "812"
    assert fake.calls() == [["sbatch", "--parsable", "--nice", "script"]]


def test_an_sbatch_that_submits_nothing_is_no_job(fake: FakeSlurm) -> None:
    fake.says("Usage: sbatch [OPTIONS] script")

    with refused(MachineError, "Slurm", "sbatch"):
        slurm.submit(["--help", "script"], {"PATH": fake.path})


def test_an_answer_that_is_not_utf_8_is_an_answer(fake: FakeSlurm) -> None:
    (fake.folder / "scontrol").write_text("#!/bin/sh\nprintf 'JobName=\\374 JobState=RUNNING'\n")

    assert slurm.not_running("8") is None


@pytest.mark.parametrize(
    ("said", "over"),
    [
        ("JobId=8 JobState=TIMEOUT Reason=x", True),
        ("JobId=8 JobState=RUNNING", False),
        ("JobId=8 JobState=COMPLETING", False),
        ("JobId=8 JobState=PENDING", False),
        ("JobId=9 ArrayJobId=8 JobState=COMPLETED\nJobId=8 ArrayJobId=8 JobState=RUNNING", False),
        ("", False),
    ],
)
def test_a_job_has_ended_when_slurm_says_so(fake: FakeSlurm, said: str, over: bool) -> None:
    fake.says(said)

    assert slurm.has_ended("8") is over


@pytest.mark.parametrize(
    ("error", "over"),
    [("slurm_load_jobs error: Invalid job id specified", True), ("Unable to contact slurmctld", False)],
)
def test_a_job_that_slurm_has_forgotten_has_ended(fake: FakeSlurm, error: str, over: bool) -> None:
    fake.fails(error)

    assert slurm.has_ended("8") is over


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 1), (signal.SIGUSR2, 7)])
def test_a_task_that_is_no_rank_yet_hides_no_code_and_loses_no_stop(number: int, code: int) -> None:
    act = f"slurm.prepare_for_signals(); os.kill(os.getpid(), {int(number)}); sys.exit(7)"
    program = f"import os, sys; from tuner.machine import slurm; {act}"

    assert subprocess.run([sys.executable, "-c", program], timeout=120).returncode == code


def test_nodes_on_which_nothing_starts_are_named_with_their_state(fake: FakeSlurm) -> None:
    fake.says("n1 mixed\nn1 mixed\nn2 down*\nn3 allocated\nn4 draining\nn5 idle*\nn7 mixed-\nn8 allocated$")

    assert slurm.unwell(["n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"]) == {
        "n2": "down*", "n4": "draining", "n5": "idle*", "n6": "gone"
    }  # fmt: skip


def test_an_array_of_which_a_task_waits_is_waiting(fake: FakeSlurm) -> None:
    fake.says("8 PENDING Resources\n8 RUNNING None\n9 RUNNING None")

    assert slurm.queued() == {"8": "PENDING Resources", "9": "RUNNING None"}


@pytest.mark.parametrize(
    ("answer", "left_s"),
    [
        *(("3:05", 185), ("0:00", 0), ("2-03:00:10", 183_610), ("INVALID", 0)),
        *(("UNLIMITED", None), ("NOT_SET", None), ("", None)),
    ],
)
def test_the_time_that_a_job_has_left_is_read_in_all_forms(fake: FakeSlurm, answer: str, left_s: int | None) -> None:
    fake.says(answer)

    assert slurm.seconds_left("8_5") == left_s
    assert "--jobs=8_5" in fake.calls()[0]


@pytest.mark.parametrize(
    ("before", "nodes", "away"), [("(null)", [], ""), ("n[7-9]", ["n2", "n3"], "ExcNodeList=n[7-9],n2,n3")]
)
def test_a_requeued_job_keeps_away_from_some_nodes_and_from_those_of_before(
    fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, before: str, nodes: list[str], away: str
) -> None:
    monkeypatch.setattr(slurm.signal, "signal", lambda *_: None)
    fake.says(f"JobId=8 JobState=RUNNING ReqNodeList=(null) ExcNodeList={before} NumNodes=2")

    slurm.requeue_without("8", nodes)

    updated = [["scontrol", "update", "JobId=8", away]] if away else []
    assert fake.calls()[1:] == [["scontrol", "requeue", "8"], *updated]
