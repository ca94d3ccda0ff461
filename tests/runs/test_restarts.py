"""A run starts again as long as it gets further; preemptions do not count, and there is a cap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.runs import restarts
from tuner.runs.directory import RunDirectory
from tuner.runs.records import EndedAttempt
from tuner.runs.restarts import MAX_RESTARTS, PREEMPTED, TIME_LIMIT

JOB = "8"


def killed(step: int | None, *, began: int = 5, saved: int = 5, cause: str = "killed") -> EndedAttempt:
    return EndedAttempt(cause=cause, step=step, began=began, saved=saved)


PREEMPTION = killed(None, cause=PREEMPTED)


EARLY, UNKNOWN = killed(None, began=0, saved=0), EndedAttempt(cause=None, step=None, began=0, saved=0)
FUTILE, FURTHER = [killed(6), killed(7), killed(8)], killed(12, saved=10)

# The attempts so far, the limit, and what the refusal says; None: the run may start again.
CASES: dict[str, tuple[list[EndedAttempt], int, str | None]] = {
    "the first restart needs no progress": ([killed(7)], 3, None),
    "nor does it before the first step": ([EARLY], 3, None),
    "nor after a preemption": ([PREEMPTION], 3, None),
    "as many as the limit without a newer checkpoint": (FUTILE, 3, None),
    "one more than the limit": ([*FUTILE, killed(9)], 3, "restarted 3 times"),
    "a newer checkpoint": ([*FUTILE, FURTHER], 3, None),
    "a newer checkpoint starts the count anew": ([*FUTILE, FURTHER, killed(13), killed(14), killed(15)], 3, None),
    "the same step and cause twice": ([killed(7)] * 2, 100, "twice in step 7"),
    "the same step for another cause": ([killed(7), killed(7, cause="hang")], 100, None),
    "the step after the newest checkpoint again": ([FURTHER, killed(12, began=10, saved=10)], 100, "twice in step 12"),
    "that step with a newer checkpoint": ([FURTHER, killed(12, began=10, saved=12)], 100, None),
    "an end before the newest checkpoint": ([EARLY, FURTHER, killed(None, began=10, saved=10)], 3, None),
    "two ends before the first step": ([EARLY] * 2, 3, "twice before its first step"),
    "two unknown causes are not the same one": ([UNKNOWN] * 2, 3, None),
    "unknown causes count": ([UNKNOWN] * 4, 3, "restarted 3 times"),
    "preemptions do not count": ([PREEMPTION] * 20, 1, None),
    "preemptions around a failure": ([PREEMPTION, killed(7), PREEMPTION, PREEMPTION], 1, None),
    "a preemption between two failures": ([killed(7), PREEMPTION, killed(7)], 3, "twice in step 7"),
    "as many restarts as there may be": ([PREEMPTION] * MAX_RESTARTS, 3, None),
    "more of them, whatever their causes": ([PREEMPTION] * (MAX_RESTARTS + 1), 3, f"{MAX_RESTARTS} times"),
    "more of them that all got further": ([killed(7, saved=10)] * (MAX_RESTARTS + 1), 3, f"{MAX_RESTARTS} times"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_may_start_again_as_long_as_it_gets_further_or_was_preempted(name: str) -> None:
    ended, limit, said = CASES[name]

    refusal = restarts.refusal(ended, limit)

    assert refusal is None if said is None else refusal is not None and said in refusal


# Slurm


def requeue(
    run: RunDirectory, ended: EndedAttempt, *, job: str = JOB, limit: int = 3, num_restarts: int = 0
) -> str | None:
    refusal = restarts.requeue_refusal(run, job, ended, limit, num_restarts)
    if refusal is None:
        restarts.note_requeue(run, job, ended)
    return refusal


def test_a_job_remembers_its_requeues_and_another_job_begins_anew(tmp_path: Path) -> None:
    run, ended = RunDirectory(tmp_path), killed(None, began=0, saved=0, cause=TIME_LIMIT)

    assert requeue(run, PREEMPTION) is None
    assert requeue(run, ended) is None
    assert "twice before its first step" in str(requeue(run, ended))
    assert requeue(run, ended, job="9") is None


def test_no_requeue_is_asked_for_and_the_cap_counts_what_slurm_restarted_itself(tmp_path: Path) -> None:
    assert requeue(RunDirectory(tmp_path), PREEMPTION, limit=0)
    assert requeue(RunDirectory(tmp_path), PREEMPTION, num_restarts=MAX_RESTARTS)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 99}', '{"job": 3}'])
def test_a_damaged_list_of_requeues_is_taken_for_none(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path)
    run.requeues.write_text(text)

    assert requeue(run, killed(7)) is None
