"""Which phase of a run a rank is in, and what its steps and saves took."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.machine.topology import Rank
from tuner.runs import beats
from tuner.runs.beats import Phase
from tuner.runs.directory import RunDirectory
from tuner.runs.time_limits import TimeLimits
from tuner.worker import heartbeat
from tuner.worker.heartbeat import Heartbeat


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


@pytest.fixture
def heart(tmp_path: Path, clock: Clock) -> Heartbeat:
    return Heartbeat(RunDirectory(tmp_path), Rank(0, 0, 2, supervised=True))


def test_the_first_step_is_part_of_the_start_and_not_measured(heart: Heartbeat, clock: Clock) -> None:
    heart.beat("in step 1", Phase.STEPS)
    clock.now_s += 500
    assert heart.limit_s == heart.limits.of(Phase.STARTUP)

    heart.end_step()

    assert heart.phase is Phase.STEPS
    assert (heart.limits.num_steps, heart.limits.longest_s[Phase.STEPS]) == (0, 0)


def test_saves_validations_and_generations_are_no_part_of_a_step(heart: Heartbeat, clock: Clock) -> None:
    heart.end_step()
    clock.now_s += 3
    for phase in (Phase.SAVES, Phase.VALIDATION):
        heart.enter(phase)
        clock.now_s += 70
    heart.enter(Phase.STEPS)
    with heart.within(Phase.GENERATION):
        clock.now_s += 500
    clock.now_s += 4

    heart.end_step()

    assert heart.limits.longest_s == {Phase.STEPS: 7, Phase.SAVES: 70}


def test_a_generation_within_a_validation_returns_to_it(heart: Heartbeat) -> None:
    heart.enter(Phase.VALIDATION)

    with heart.within(Phase.GENERATION):
        assert heart.phase is Phase.GENERATION

    assert heart.phase is Phase.VALIDATION


def test_the_time_of_one_phase_does_not_count_in_the_next(heart: Heartbeat) -> None:
    """A generation of 400 s was followed by a step whose limit is 300 s: the run ended as hung."""
    with heart.within(Phase.GENERATION):
        before = heart._signs()
    assert heart._moved(before, heart._signs())


def test_the_other_ranks_see_at_once_that_a_save_has_a_limit_of_its_own(tmp_path: Path, clock: Clock) -> None:
    run = RunDirectory(tmp_path)
    run.ranks.mkdir()
    heart = Heartbeat(run, Rank(0, 0, 2, supervised=True))
    heart.limits, heart._is_watched = TimeLimits(), True
    for _ in range(12):
        heart.end_step()
    heart.open()

    heart.beat("saving step 12", Phase.SAVES)  # within a second of the last one

    assert beats.read_beats(run)[0].limit_s == heart.limits.of(Phase.SAVES) > heart.limits.of(Phase.STEPS)


def test_a_rank_that_waits_in_a_step_has_the_limit_of_one_that_saves(tmp_path: Path, clock: Clock) -> None:
    run = RunDirectory(tmp_path)
    run.ranks.mkdir()
    waits, saves = (Heartbeat(run, Rank(rank, rank, 2, supervised=True)) for rank in (0, 1))
    for heart, phase in ((waits, Phase.STEPS), (saves, Phase.SAVES)):
        heart.limits, heart._is_watched = TimeLimits(), True
        for _ in range(12):
            heart.end_step()
        heart.enter(phase)
        heart.open()

    assert {rank: beat.limit_s for rank, beat in beats.read_beats(run).items()} == {0: 300, 1: 1800}
    assert waits._limit_of_all() == 1800
