"""The verdict on a run: an outcome for each course of its losses, and the option that its numbers call for."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tuner.runs.verdict import Outcome, Trained, Verdict, judge


def trained(**changes: Any) -> Trained:
    known = {"result_step": 0, "planned_steps": 0, "epochs": 3, "learning_rate": 2e-4, "num_trained": 1_000}
    return Trained(**known | changes)


def verdict(
    validation: dict[int, float], training: list[float] | None = None, *, every: int = 1, **changes: Any
) -> Verdict:
    """Judge a run by its validation losses, each at its step, and by the training losses of steps 1, 2 ..."""
    lines: list[dict[str, Any]] = [
        {"step": every * place, "loss": loss} for place, loss in enumerate(training or [], 1)
    ]
    lines += [{"step": step, "eval_loss": loss} for step, loss in validation.items()]
    last = max(line["step"] for line in lines)
    found = judge(lines, trained(**{"result_step": last, "planned_steps": last, **changes}))
    assert found
    return found


def course(start: float, end: float, steps: int, noise: float = 0.0) -> list[float]:
    """Return losses that fall evenly from `start` to `end`, with noise that is always the same."""
    drawn = np.random.default_rng(0).normal(0, noise, steps)
    return list(np.linspace(start, end, steps) + drawn)


def test_a_loss_that_still_falls_at_the_end_calls_for_more_epochs() -> None:
    found = verdict({0: 4.52, 4: 4.2, 8: 3.9, 12: 3.7})

    assert found.outcome is Outcome.FALLING
    assert str(found) == "validation loss 4.52 -> 3.70 in 12 steps; it was still falling: --epochs 10"
    assert found.brief == "validation loss 4.52 -> 3.70, still falling"
    assert found.advice_in_python == "it was still falling: epochs=10"


@pytest.mark.parametrize(
    ("steps", "epochs", "option"),
    [
        (12, 3, "--epochs 10"),
        (60, 3, "--epochs 10"),
        (400, 3, "--epochs 6"),
        (30, 12, "--epochs 24"),
        (40, None, "--set max_steps=200"),
        (400, None, "--set max_steps=800"),
    ],
)
def test_a_run_is_to_be_at_least_twice_as_long_and_a_short_one_longer(
    steps: int, epochs: int | None, option: str
) -> None:
    found = verdict({0: 4.0, steps // 2: 3.0, steps: 2.0}, epochs=epochs)

    assert found.advice == f"it was still falling: {option}"


@pytest.mark.parametrize(
    ("validation", "text"),
    [
        ({0: 4.52, 35: 3.3, 70: 3.09, 105: 3.08}, "validation loss 4.52 -> 3.08 in 105 steps"),
        ({0: math.log(2), 30: 0.41, 60: 0.32, 90: 0.318}, "validation loss 0.693 -> 0.318 in 90 steps"),
        ({10: 3.0, 20: 2.5, 30: 2.49}, "validation loss 3.00 -> 2.49 in 30 steps; 3.00 is of step 10"),
    ],
    ids=["of texts", "of pairs, which begins at chance", "without one before training"],
)
def test_a_loss_that_levels_off_is_learned(validation: dict[int, float], text: str) -> None:
    found = verdict(validation)

    assert (found.outcome, str(found)) == (Outcome.LEARNED, text)


def test_frequent_validations_are_compared_over_a_third_of_the_run() -> None:
    falling = {0: 4.0, **{step: 4.0 - step / 100 for step in range(1, 101)}}
    level = {0: 4.0, **{step: 3.0 for step in range(1, 101)}}

    assert verdict(falling).outcome is Outcome.FALLING, "each validation is less than one per cent lower than the last"
    assert verdict(level).outcome is Outcome.LEARNED


@pytest.mark.parametrize(("end", "outcome"), [(3.0, Outcome.FALLING), (4.0, Outcome.LEARNED)])
def test_with_one_validation_at_the_end_the_training_loss_says_whether_it_still_fell(
    end: float, outcome: Outcome
) -> None:
    losses = course(4.0, end, 40, noise=0.05)

    found = verdict({0: 4.5, 40: 3.9}, losses, epochs=1)

    assert found.outcome is outcome
    assert (found.advice == "the training loss was still falling: --epochs 5") is (outcome is Outcome.FALLING)


LEVELS_OFF = [*course(4.0, 2.0, 40), *course(2.0, 2.0, 40, noise=0.05)]
COURSES: dict[str, tuple[dict[int, float], list[float], Outcome]] = {
    "steep rise after the lowest: no noise of the fall": ({0: 7.5, 1: 5.5, 2: 8.1, 3: 8.9}, [], Outcome.OVERFIT),
    "near zero, rises by less than a hundredth": ({0: 0.69, 10: 0.002, 20: 0.004, 30: 0.006}, [], Outcome.LEARNED),
    "a training loss that levels off": ({}, LEVELS_OFF, Outcome.LEARNED),
    "a training loss that falls less than its noise": ({}, course(4.0, 3.8, 20, noise=0.6), Outcome.FLAT),
    "a training loss that rises more than its noise": ({}, course(4.0, 6.0, 20, noise=0.6), Outcome.ROSE),
}


@pytest.mark.parametrize("name", COURSES)
def test_a_course_has_its_outcome(name: str) -> None:
    validation, training, outcome = COURSES[name]

    assert verdict(validation, training).outcome is outcome


def test_early_stopping_is_not_told_to_go_on() -> None:
    assert verdict({0: 4.0, 5: 3.5, 10: 3.0}, planned_steps=40).outcome is Outcome.LEARNED


def test_a_loss_that_rises_after_its_lowest_names_that_step_and_what_keeps_it() -> None:
    found = verdict({0: 4.52, 40: 3.21, 80: 3.3, 120: 3.4})

    assert found.outcome is Outcome.OVERFIT
    assert str(found) == (
        "validation loss 4.52 -> 3.40 in 120 steps; "
        "it was lowest at step 40 (3.21): --epochs 1, or --set save_best=eval_loss"
    )


def test_the_loss_is_that_of_the_weights_that_the_result_has() -> None:
    found = verdict({0: 4.52, 40: 3.21, 80: 3.3, 120: 3.4}, result_step=40)

    assert found.outcome is Outcome.OVERFIT
    assert str(found) == ("validation loss 4.52 -> 3.21 in 40 steps; after that it rose, to 3.40 at step 120")


@pytest.mark.parametrize(
    ("validation", "training", "outcome", "parts"),
    [
        ((2.0, 2.6, 3.1), (2.0, 3.0, 20), Outcome.ROSE, ["it rose: lower the learning rate", "--set lr=2e-05"]),
        ((2.0, 2.1, 2.3), (2.0, 0.5, 20), Outcome.ROSE, ["fell from 1.88 to 0.618", "learned by heart"]),
        ((4.52, 4.52, 4.51), (4.5, 4.5, 220), Outcome.FLAT, ["raise the learning rate", "--set lr=0.002", "460,800"]),
        ((4.52, 4.52, 4.51), (4.5, 4.5, 12), Outcome.FLAT, ["train longer (--epochs 10)"]),
    ],
    ids=["too high a rate", "learned by heart", "too low a rate", "too few steps"],
)
def test_a_loss_that_rises_or_does_not_move_gets_the_advice_that_its_numbers_call_for(
    validation: tuple[float, ...], training: tuple[float, float, int], outcome: Outcome, parts: list[str]
) -> None:
    steps = (0, training[-1] // 2, training[-1])

    found = verdict(dict(zip(steps, validation, strict=True)), course(*training), num_trained=460_800)

    assert found.outcome is outcome
    assert [part for part in parts if part not in found.advice] == []


def test_rows_that_the_model_knew_are_named_as_such() -> None:
    found = verdict({0: 0.031, 12: 0.012})

    assert (found.outcome, found.brief) == (Outcome.KNOWN, "validation loss 0.031 -> 0.012, already known")


def test_without_validation_the_means_of_the_first_and_last_steps_are_compared() -> None:
    found = verdict({}, course(4.0, 2.0, 50, noise=0.05))

    assert (found.measure, found.outcome) == ("training", Outcome.FALLING)
    assert (found.before, found.after) == (pytest.approx(3.82, abs=0.05), pytest.approx(2.18, abs=0.05))
    assert str(found).startswith("training loss 3.8") and "no rows were held out (--val-split 0.05)" in str(found)


def test_of_a_step_that_was_taken_again_the_last_line_counts() -> None:
    lines = [{"step": 5, "eval_loss": 9.0}, {"step": 0, "eval_loss": 4.0}, {"step": 5, "eval_loss": 3.0}]

    found = judge(lines, trained(result_step=5, planned_steps=5))

    assert found and (found.before, found.after) == (4.0, 3.0)


@pytest.mark.parametrize("lines", [[], [{"step": 1, "loss": 2.0}], [{"step": 0, "eval_loss": None}, {"step": 1}]])
def test_fewer_than_two_losses_are_no_verdict(lines: list[dict[str, Any]]) -> None:
    assert judge(lines, trained()) is None


@pytest.mark.parametrize(
    ("rewards", "outcome", "line"),
    [
        (course(0.1, 0.6, 50, 0.02), Outcome.LEARNED, "training reward 0.148 -> 0.572"),
        (course(0.6, 0.1, 50, 0.02), Outcome.FELL, "it fell: lower the learning rate"),
        (course(0.3, 0.3, 50), Outcome.FLAT, "When the reward stays flat"),
    ],
)
def test_a_run_of_rewards_is_judged_by_its_rewards(rewards: list[float], outcome: Outcome, line: str) -> None:
    lines = [{"step": step, "loss": 0.0, "reward": reward} for step, reward in enumerate(rewards, 1)]

    found = judge(lines, trained(result_step=50, planned_steps=50))

    assert found and found.outcome == outcome
    assert line in str(found)


def test_rewards_of_a_validation_come_first() -> None:
    lines: list[dict[str, Any]] = [{"step": step, "loss": 0.0, "reward": 0.5} for step in range(1, 9)]
    lines += [{"step": 0, "eval_loss": -0.1, "eval_reward": 0.1}, {"step": 8, "eval_loss": -0.4, "eval_reward": 0.4}]

    found = judge(lines, trained(result_step=8, planned_steps=8))

    assert str(found) == "validation reward 0.100 -> 0.400 in 8 steps"


def noisy(course: Any, deviation: float, seed: int) -> dict[int, float]:
    """Return validations at every tenth step, with normal noise."""
    drawn = np.random.default_rng(seed).normal(0, deviation, len(course))
    return {10 * place: float(loss) for place, loss in enumerate(course + drawn, 1)}


def share(outcome: Outcome, course: Any, deviation: float, start: float) -> float:
    """Return the part of 100 runs with this outcome."""
    runs = [verdict({0: start, **noisy(np.asarray(course), deviation, seed)}) for seed in range(100)]
    return sum(run.outcome is outcome for run in runs) / len(runs)


@pytest.mark.parametrize("validations", [10, 20, 60])
@pytest.mark.parametrize("deviation", [0.002, 0.02, 0.05])
def test_the_noise_of_a_level_validation_loss_is_neither_a_fall_nor_a_rise(validations: int, deviation: float) -> None:
    level = np.full(validations, 2.0)

    assert share(Outcome.LEARNED, level, deviation, start=3.5) >= 0.8
    assert share(Outcome.FLAT, level, deviation, start=2.0) >= 0.9


@pytest.mark.parametrize("validations", [3, 5, 10, 20, 60])
@pytest.mark.parametrize(("first", "deviation"), [(2.3, 0.004), (3.0, 0.02)])
def test_a_slow_fall_is_found_in_noise(validations: int, first: float, deviation: float) -> None:
    assert share(Outcome.FALLING, np.linspace(first, 2.0, validations), deviation, start=first + 0.2) >= 0.97


@pytest.mark.parametrize("validations", [5, 10, 20, 60])
def test_a_rise_after_the_lowest_is_found_in_noise(validations: int) -> None:
    half = validations // 2
    course = [*np.linspace(3.0, 2.0, validations - half), *np.linspace(2.05, 2.6, half)]

    assert share(Outcome.OVERFIT, course, 0.02, start=3.5) >= 0.95


@pytest.mark.parametrize("losses", [(0.03, 0.02, 0.015), (0.012, 0.008, 0.005), (0.02, 0.004, 0.0001)])
def test_a_loss_near_zero_has_nothing_left_to_fall(losses: tuple[float, ...]) -> None:
    by_validation = verdict({0: 0.69, **{10 * place: loss for place, loss in enumerate(losses, 1)}})
    by_training = verdict({}, [*course(0.69, losses[0], 20), *course(losses[0], losses[-1], 20)])

    assert by_validation.outcome is Outcome.LEARNED
    assert by_training.outcome is Outcome.LEARNED


def test_a_resumed_run_without_a_step_left_gets_no_advice() -> None:
    validation, losses = {0: 2.0, 10: 2.0, 20: 2.001}, course(2.0, 2.0, 20)
    without = verdict(validation, losses, planned_steps=15, first_step=20)
    went_on = verdict(validation, losses, planned_steps=20, first_step=10)

    assert (without.outcome, without.advice) == (Outcome.FLAT, "")
    assert went_on.advice
