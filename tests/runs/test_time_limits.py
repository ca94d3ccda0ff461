"""What a phase's time limit is, and when that of a step is learned."""

from __future__ import annotations

import pytest

from tuner.runs.beats import Phase
from tuner.runs.time_limits import TimeLimits


def _after(limits: TimeLimits, *steps_s: float) -> list[str]:
    """Let a run take steps; return what it says."""
    return [text for seconds in steps_s if (text := limits.learn(Phase.STEPS, seconds))]


def test_before_anything_is_learned_every_phase_has_half_an_hour() -> None:
    assert {phase: TimeLimits().of(phase) for phase in Phase} == dict.fromkeys(Phase, 1800)


def test_a_users_limit_holds_for_every_phase_and_nothing_is_learned() -> None:
    limits = TimeLimits(20)

    assert _after(limits, *[90] * 20) == []
    assert {limits.of(phase) for phase in Phase} == {20}


@pytest.mark.parametrize(("slowest_s", "limit_s"), [(0.2, 300), (30, 300), (45, 450), (400, 4000)])
def test_a_step_has_ten_times_the_slowest_and_at_least_five_minutes(slowest_s: float, limit_s: float) -> None:
    limits = TimeLimits()

    assert len(_after(limits, slowest_s, *[0.1] * 9)) == 1

    assert limits.of(Phase.STEPS) == limit_s
    assert limits.of(Phase.STARTUP) == limits.of(Phase.VALIDATION) == limits.of(Phase.GENERATION) == 1800


def test_it_is_said_once_and_not_before_ten_steps() -> None:
    limits = TimeLimits()

    assert _after(limits, *[1.0] * 9) == []
    assert limits.of(Phase.STEPS) == 1800
    assert len(_after(limits, *[1.0] * 30)) == 1


def test_a_later_step_that_is_slower_raises_the_limit() -> None:
    limits = TimeLimits()

    _after(limits, *[1.0] * 10, 60.0)

    assert limits.of(Phase.STEPS) == 600


def test_a_save_has_ten_times_the_slowest_and_at_least_half_an_hour() -> None:
    limits = TimeLimits()

    limits.learn(Phase.SAVES, 20)
    assert limits.of(Phase.SAVES) == 1800
    limits.learn(Phase.SAVES, 400)
    assert limits.of(Phase.SAVES) == 4000


def test_where_a_late_step_may_compile_a_step_keeps_half_an_hour() -> None:
    limits = TimeLimits(learns_steps=False)

    assert _after(limits, *[1.0] * 30) == []
    assert limits.of(Phase.STEPS) == 1800
