"""Whether a run has learned, from the losses that it logged: before and after, how they moved, and what would help.

It reads no file. A rank stores the verdict in status.json; the terminal, the report, `tuner runs` and the Python API
show it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from enum import StrEnum
from statistics import fmean, median
from typing import NamedTuple

from pydantic import ConfigDict, Field, computed_field
from pydantic.dataclasses import dataclass

from tuner.errors import Key, Option, Text, marked
from tuner.files import JsonObject, ReadOnlyJson

_CHANGED = 0.01
"""A loss has moved if it differs by more than this part of what it was."""
_FLOOR = 0.01
"""Nats: a loss has moved if it differs by more than this too. So much changes the perplexity by one per cent."""
_KNOWN = 0.1
"""Nats a token: the model gives the right token nine times of ten before it has trained on any row."""
_LEARNED_BY_HEART = 0.05
"""A training loss that fell by this part while the validation loss did not is of rows learned by heart."""
_MOST_EPOCHS = 10
"""More are not suggested to a run of few steps: they are worth less and less (Muennighoff et al., arXiv:2305.16264)."""
_SHORT_RUN = 200
"""A run of fewer steps may have stopped too early: the first advice is to train longer."""
_DEVIATIONS = 2.0
"""Two losses, or means of losses, differ if they are this many standard errors apart."""

_ENOUGH_FOR_NOISE = 8
"""Of fewer losses a bend of the course cannot be told from noise."""
_USE_OTHERS = "the model knew these rows before training: use others"

REWARD = "reward"
"""The key of the mean reward in metrics.jsonl; a validation adds `eval_` before it."""

Point = tuple[int, float]


class Outcome(StrEnum):
    """What became of the loss."""

    LEARNED = "learned"
    FALLING = "still falling"
    OVERFIT = "overfit"
    ROSE = "rose"
    FLAT = "flat"
    KNOWN = "already known"
    FELL = "fell"
    """The reward, which a run of rewards is judged by."""


class Trained(NamedTuple):
    """How a run was trained.

    Args:
        result_step: The step at which the result's weights were saved.
        planned_steps: The planned number of steps; early stopping may end the run before.
        epochs: None if the recipe gives a number of steps.
        first_step: The step that this start resumed from; 0 for a new run.
    """

    result_step: int
    planned_steps: int
    epochs: float | None
    learning_rate: float
    num_trained: int
    first_step: int = 0


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False, defer_build=True))
class Verdict:
    """The loss or the reward of a run before and after training, and what to do next. status.json holds it.

    Args:
        measure: "validation" or "training".
        before: Before the first step; of a training loss the mean over the first steps.
        after: Of the result's weights; of a training loss the mean over the last steps.
        steps: After which `after` was measured.
        advice: What the numbers say beyond before and after, with the option that helps; may be empty.
        quantity: The loss, or `REWARD`.
        advice_in_python: The advice with arguments in place of flags; empty without advice.
    """

    outcome: Outcome
    measure: str
    before: float
    after: float
    steps: int
    advice: str
    quantity: str = "loss"
    advice_in_python: str = Field(default="", exclude_if=operator.not_)

    def __str__(self) -> str:
        """Return it in one line."""
        steps = f"{self.steps:,} step{'s' * (self.steps != 1)}"
        line = f"{self.measure} {self.quantity} {short_number(self.before)} -> {short_number(self.after)} in {steps}"
        return f"{line}; {self.advice}" if self.advice else line

    @computed_field  # type: ignore[prop-decorator]
    @property
    def brief(self) -> str:
        """What fits a table: the loss or the reward before and after, and the outcome."""
        return (
            f"{self.measure} {self.quantity} {short_number(self.before)} -> {short_number(self.after)}, {self.outcome}"
        )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def line(self) -> str:
        """It in one line."""
        return str(self)

    def for_python(self) -> JsonObject:
        """Return its values, `brief` and `line`, with arguments in place of flags."""
        spoken = replace(self, advice=self.advice_in_python or self.advice)
        values = {key.name: getattr(spoken, key.name) for key in fields(spoken) if key.name != "advice_in_python"}
        return {**values, "outcome": str(self.outcome), "brief": spoken.brief, "line": spoken.line}


def judge(lines: Iterable[ReadOnlyJson], trained: Trained) -> Verdict | None:
    """Return the verdict on a run, by its validation loss if it has two, else by its training loss.

    A run that learns from rewards is judged by them in the same order: its loss is near zero whatever it learns.

    Args:
        lines: As in metrics.jsonl; of several lines with a loss of the same step the last one counts.
        trained: If it resumed without a step left, there is no advice: nothing was trained with these settings.

    Returns:
        None if there are no two losses or rewards to compare.
    """
    verdict = _judge(list(lines), trained)
    if verdict and trained.first_step and trained.first_step >= trained.planned_steps:
        return replace(verdict, advice="")
    advice = Text(verdict.advice) if verdict else Text("")
    return verdict and replace(verdict, advice=advice, advice_in_python=advice.in_python)


def _judge(lines: Sequence[ReadOnlyJson], trained: Trained) -> Verdict | None:
    for measure, key in (("validation", f"eval_{REWARD}"), ("training", REWARD)):
        if len(rewards := _points(lines, key)) > 1:
            return _by_rewards(rewards, measure, trained)
    training, validation = _points(lines, "loss"), _points(lines, "eval_loss")
    if len(validation) > 1:
        return _by_validation(validation, training, trained)
    if len(training) > 1:
        return _by_training(training, trained)
    return None


def _points(lines: Iterable[ReadOnlyJson], key: str) -> list[Point]:
    values = {line["step"]: line[key] for line in lines if isinstance(line.get(key), int | float)}
    return sorted((step, value) for step, value in values.items() if math.isfinite(value))


def _by_validation(points: Sequence[Point], training: Sequence[Point], trained: Trained) -> Verdict:
    (first, before), (last, at_end) = points[0], points[-1]
    best_index, (best_step, best) = min(enumerate(points[1:]), key=lambda indexed: indexed[1][1])
    after = dict(points).get(trained.result_step, at_end)
    steps = trained.result_step if trained.result_step in dict(points) else last
    since = f"{short_number(before)} is of step {first}; " if first else ""

    def verdict(outcome: Outcome, advice: str = "") -> Verdict:
        return Verdict(outcome, "validation", before, after, steps, f"{since}{advice}".removesuffix("; "))

    if 0 <= before < _KNOWN:
        return verdict(Outcome.KNOWN, _USE_OTHERS)
    by_heart = _learned_by_heart(training)
    values = [value for _, value in points[1:]]
    # After a clear minimum the course rises: those moves are no noise of the fall before it.
    chance = _noise_of_rise(values, best_index) * _lowest_of(len(values))
    if _fell(before, best, chance):
        if best_step != last and _fell(at_end, best, chance):
            return verdict(Outcome.OVERFIT, _overfit(best_step, best, last, at_end, trained))
        if trained.planned_steps > last:
            return verdict(Outcome.LEARNED)
        if len(points) == 2:
            advice = f"the training loss was still falling: {_longer(trained, last)}"
            falls = _trend(training) < 0
        else:
            advice = f"it was still falling: {_longer(trained, last)}"
            falls = _falls_at_end(points[1:])
        return verdict(Outcome.FALLING, advice) if falls else verdict(Outcome.LEARNED)
    if _fell(at_end, before, _DEVIATIONS * math.sqrt(2) * _noise_of_rise(values)):
        return verdict(Outcome.ROSE, by_heart or f"it rose: {_lower(trained)}")
    return verdict(Outcome.FLAT, by_heart or _flat(trained, last))


def _falls_at_end(points: Sequence[Point]) -> bool:
    """Return whether a validation loss fell over the last third of a run, by more than its noise.

    Of many validations the means of the last fifth and of as many before the last third are compared.
    """
    last, width = points[-1][0], max(1, len(points) // 5)
    earlier = [value for step, value in points if step <= 0.7 * last][-width:] or [points[0][1]]
    later = [value for _, value in points[-width:]]
    noise = _noise_of_fall([value for step, value in points if step > 0.4 * last])
    apart = _DEVIATIONS * noise * math.sqrt(1 / len(earlier) + 1 / len(later))
    return _fell(fmean(earlier), fmean(later), apart)


def _lowest_of(num_values: int) -> float:
    """Return how many deviations may lie between a loss and the lowest of some without any change.

    The lowest of n normal values lies about sqrt(2 ln n) deviations below their mean.
    """
    return _DEVIATIONS * math.sqrt(2) + math.sqrt(2 * math.log(num_values))


def _by_training(points: Sequence[Point], trained: Trained) -> Verdict:
    last = points[-1][0]
    before, after, has_moved = _change([value for _, value in points])
    has_moved = has_moved and abs(after - before) > _FLOOR

    def verdict(outcome: Outcome, advice: str = "") -> Verdict:
        note = f"no rows were held out ({Option('val_split', 0.05)}){'; ' * bool(advice)}"
        return Verdict(outcome, "training", before, after, last, f"{note}{advice}")

    if 0 <= before < _KNOWN:
        return verdict(Outcome.KNOWN, _USE_OTHERS)
    if not has_moved:
        return verdict(Outcome.FLAT, _flat(trained, last))
    if after > before:
        return verdict(Outcome.ROSE, f"it rose: {_lower(trained)}")
    if _trend(points) < 0:
        return verdict(Outcome.FALLING, f"it was still falling: {_longer(trained, last)}")
    return verdict(Outcome.LEARNED)


def _by_rewards(points: Sequence[Point], measure: str, trained: Trained) -> Verdict:
    last = points[-1][0]
    before, after, has_moved = _change([value for _, value in points])
    if measure == "validation":  # it has no noise of batches
        before, after = points[0][1], points[-1][1]
        has_moved = abs(after - before) > _CHANGED * abs(before)

    def verdict(outcome: Outcome, advice: str = "") -> Verdict:
        return Verdict(outcome, measure, before, after, last, advice, REWARD)

    if not has_moved:
        return verdict(Outcome.FLAT, f"{_flat(trained, last)}; see docs/grpo.md, When the reward stays flat")
    if after < before:
        return verdict(Outcome.FELL, f"it fell: {_lower(trained)}")
    return verdict(Outcome.LEARNED)


def _change(values: Sequence[float]) -> tuple[float, float, bool]:
    """Return the means of the first and the last fifth of values of training, and whether they differ beyond noise."""
    width = max(1, len(values) // 5)
    before, after = fmean(values[:width]), fmean(values[-width:])
    apart = _DEVIATIONS * _noise(values) * math.sqrt(2 / width)
    return before, after, abs(before - after) > max(apart, _CHANGED * abs(before))


def _fell(before: float, after: float, noise: float = 0.0) -> bool:
    return before - after > max(_CHANGED * abs(before), _FLOOR, noise)


def _noise(values: Sequence[float]) -> float:
    """Return the standard deviation of a loss around its course, from the differences of neighbours."""
    squares = [(later - earlier) ** 2 for later, earlier in zip(values[1:], values[:-1], strict=True)]
    return math.sqrt(fmean(squares) / 2)


def _noise_of_fall(values: Sequence[float]) -> float:
    """Return the standard deviation of validation losses around a falling course.

    Neighbours that rise show noise alone, so a few losses that all fall have none, however steep they are.
    """
    rises = [later - earlier for earlier, later in itertools.pairwise(values) if later > earlier]
    noise = math.sqrt(fmean([rise**2 for rise in rises]) / 2) if rises else 0.0
    return max(noise, _bends(values))


def _bends(values: Sequence[float]) -> float:
    """Return the standard deviation of eight values or more around any course, from the mean of the two neighbours.

    The difference has 3/2 of the variance of one value (Gasser, Sroka and Jennen-Steinmetz, Residual variance and
    residual pattern in nonlinear regression, 1986). The median of all leaves out a bend of the course; 1.4826 times
    the median of absolute normal values is their standard deviation.
    """
    if len(values) < _ENOUGH_FOR_NOISE:
        return 0.0
    around = [abs(at - (left + right) / 2) for left, at, right in zip(values, values[1:], values[2:], strict=False)]
    return 1.4826 * median(around) / math.sqrt(1.5)


def _noise_of_rise(values: Sequence[float], lowest: int = 0) -> float:
    """Return the same around a course that rises from the place `lowest` on."""
    rising = _noise_of_fall([-value for value in values[lowest:]])
    return max(rising, _noise_of_fall(values[: lowest + 1]), _bends(values))


def _trend(points: Sequence[Point]) -> int:
    """Return -1 if a training loss still falls in the second half of a run, 1 if it rises, 0 if that is not sure."""
    values = [value for _, value in points]
    quarter = len(values) // 4
    if quarter < 2:
        return 0
    earlier, later = fmean(values[-2 * quarter : -quarter]), fmean(values[-quarter:])
    apart = max(_DEVIATIONS * _noise(values) * math.sqrt(2 / quarter), _CHANGED * abs(earlier), _FLOOR)
    return 0 if abs(later - earlier) <= apart else 1 if later > earlier else -1


def _learned_by_heart(training: Sequence[Point]) -> str:
    """Return what to say if the training loss fell where the validation loss did not, else nothing."""
    values = [value for _, value in training]
    width = max(1, len(values) // 5)
    if len(values) < 2 or fmean(values[:width]) - fmean(values[-width:]) <= _LEARNED_BY_HEART * fmean(values[:width]):
        return ""
    fell = (
        f"the training loss fell from {short_number(fmean(values[:width]))} to {short_number(fmean(values[-width:]))}"
    )
    return f"{fell}, so the rows are learned by heart: train on more rows, or on rows more like those of the validation"


def _longer(trained: Trained, steps: int) -> Option:
    """Return the option that trains longer: twice as long, and a short run up to 200 steps or 10 epochs."""
    factor = max(2, math.ceil(_SHORT_RUN / steps))
    if trained.epochs is None:
        return Key("max_steps", factor * steps)
    epochs = min(factor * trained.epochs, max(_MOST_EPOCHS, 2 * trained.epochs))
    return Option("epochs", math.ceil(epochs))


def _lower(trained: Trained) -> str:
    rate = trained.learning_rate
    return f"lower the learning rate, which was {rate:g} ({Key('lr', float(f'{rate / 10:g}'))})"


def _flat(trained: Trained, steps: int) -> str:
    rate = trained.learning_rate
    raised = f"raise the learning rate, which was {rate:g} ({Key('lr', float(f'{10 * rate:g}'))})"
    if steps < _SHORT_RUN:
        return f"that is hardly a change: train longer ({_longer(trained, steps)}), or {raised}"
    return f"that is hardly a change: {raised}, or train more weights than these {trained.num_trained:,}"


def _overfit(best_step: int, best: float, last: int, at_end: float, trained: Trained) -> str:
    if trained.result_step == best_step:
        return f"after that it rose, to {short_number(at_end)} at step {last:,}"
    ways: list[Option] = [Key("save_best", "eval_loss")]
    epochs = round(best_step / last * trained.epochs) if trained.epochs else 0
    if trained.epochs and 1 <= epochs < trained.epochs:
        ways.insert(0, Option("epochs", epochs))
    return f"it was lowest at step {best_step:,} ({short_number(best)}): {', or '.join(map(marked, ways))}"


def short_number(loss: float) -> str:
    """Return a loss with three digits that count."""
    return f"{loss:.2f}" if abs(loss) >= 1 else f"{loss:.3f}"
