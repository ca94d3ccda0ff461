"""A run starts again as long as it gets further; preemptions do not count, and there is a cap."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.runs import attempts
from tuner.runs.attempts import MAX_RESTARTS, PREEMPTED, TIME_LIMIT
from tuner.runs.directory import RunDirectory
from tuner.runs.records import EndedAttempt

JOB = "8"


def killed(step: int | None, *, began: int = 5, saved: int = 5, cause: str = "killed") -> EndedAttempt:
    return EndedAttempt(cause=cause, step=step, began=began, saved=saved)


PREEMPTION = killed(None, cause=PREEMPTED)


@pytest.mark.parametrize("first", [killed(None, began=0, saved=0), killed(7), killed(12, saved=10), PREEMPTION])
def test_the_first_restart_needs_no_progress(first: EndedAttempt) -> None:
    assert attempts.refusal([first], 3) is None


def test_the_limit_counts_restarts_without_a_newer_checkpoint() -> None:
    futile = [killed(6), killed(7), killed(8), killed(9)]

    assert attempts.refusal(futile[:3], 3) is None
    assert "restarted 3 times" in str(attempts.refusal(futile, 3))


def test_a_newer_checkpoint_starts_the_count_anew() -> None:
    futile = [killed(6), killed(7), killed(8)]
    further = killed(12, saved=10)

    assert attempts.refusal([*futile, further], 3) is None
    assert attempts.refusal([*futile, further, killed(13), killed(14), killed(15)], 3) is None


def test_the_same_step_and_cause_twice_end_a_run() -> None:
    assert "twice in step 7" in str(attempts.refusal([killed(7), killed(7)], 100))
    assert attempts.refusal([killed(7), killed(7, cause="hang")], 100) is None
    assert attempts.refusal([killed(12, saved=10), killed(12, began=10, saved=10)], 100)
    assert attempts.refusal([killed(12, saved=10), killed(12, began=10, saved=12)], 100) is None


def test_an_end_before_the_newest_checkpoint_is_not_counted_as_the_first_of_two() -> None:
    early, further = killed(None, began=0, saved=0), killed(12, began=0, saved=10)

    assert attempts.refusal([early, further, killed(None, began=10, saved=10)], 3) is None
    assert attempts.refusal([early, killed(None, began=0, saved=0)], 3)


def test_two_unknown_causes_are_not_the_same_one() -> None:
    unknown = EndedAttempt(cause=None, step=None, began=0, saved=0)

    assert attempts.refusal([unknown] * 2, 3) is None
    assert attempts.refusal([unknown] * 4, 3)


def test_preemptions_do_not_count() -> None:
    assert attempts.refusal([PREEMPTION] * 20, 1) is None
    assert attempts.refusal([PREEMPTION, killed(7), PREEMPTION, PREEMPTION], 1) is None
    assert attempts.refusal([killed(7), PREEMPTION, killed(7)], 3)


def test_a_run_ends_after_so_many_restarts_whatever_their_causes() -> None:
    assert attempts.refusal([PREEMPTION] * MAX_RESTARTS, 3) is None
    assert attempts.refusal([PREEMPTION] * (MAX_RESTARTS + 1), 3)
    assert attempts.refusal([killed(7, saved=10)] * (MAX_RESTARTS + 1), 3)


# Slurm


def requeue(run: RunDirectory, ended: EndedAttempt, *, job: str = JOB, limit: int = 3, restarts: int = 0) -> str | None:
    refusal = attempts.requeue_refusal(run, job, ended, limit, restarts)
    if refusal is None:
        attempts.note_requeue(run, job, ended)
    return refusal


def test_a_job_remembers_its_requeues_and_another_job_begins_anew(tmp_path: Path) -> None:
    run, ended = RunDirectory(tmp_path), killed(None, began=0, saved=0, cause=TIME_LIMIT)

    assert requeue(run, PREEMPTION) is None
    assert requeue(run, ended) is None
    assert "twice before its first step" in str(requeue(run, ended))
    assert requeue(run, ended, job="9") is None


def test_no_requeue_is_asked_for_and_the_cap_counts_what_slurm_restarted_itself(tmp_path: Path) -> None:
    assert requeue(RunDirectory(tmp_path), PREEMPTION, limit=0)
    assert requeue(RunDirectory(tmp_path), PREEMPTION, restarts=MAX_RESTARTS)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 99}', '{"job": 3}'])
def test_a_damaged_list_of_requeues_is_taken_for_none(tmp_path: Path, text: str) -> None:
    run = RunDirectory(tmp_path)
    run.requeues.write_text(text)

    assert requeue(run, killed(7)) is None
