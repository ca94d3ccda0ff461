"""The functions that a trainer calls: a completion on which a reward fails has no reward, and the failure is listed.

The run ends if too large a share of the completions fails: see `max_failures` of a reward's block. Before a run, a
trial calls every reward on the first rows: with the right answer, and with an empty completion.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuner.errors import Option, RewardError, TunerError
from tuner.recipes.schema.rewards import (
    ContainsReward,
    EnvironmentReward,
    ExactReward,
    LengthReward,
    OwnReward,
    RewardBlock,
)
from tuner.rewards.built_in import Completion, Scores, built_in, text_of
from tuner.rewards.isolated_process import CallFailure, list_failure
from tuner.rewards.reward_process import IsolatedReward
from tuner.runs.directory import RunDirectory

_WINDOW, _LEAST = 1000, 100
"""Failures are counted among this many last completions; a run with fewer counts as if it had the second number."""
_ANSWER = "answer"
"""The column with the answer that a row was cut before."""
_TRIAL_FIX = "Correct the function: it gets lists and returns a list with one number for each completion, or None."
_SIMPLE = (ExactReward, ContainsReward, LengthReward)
"""Rewards that only compare texts: they need no process of their own."""

Call = Callable[[Mapping[str, list[Any]]], object]


def reward_functions(
    rewards: Sequence[RewardBlock], *, folder: Path, environment: Call | None = None
) -> list[RewardFunction]:
    """Return one function for each reward, in their order.

    Args:
        folder: The run directory, in which failures are listed.
        environment: Computes the reward 'environment'.

    Raises:
        RewardError: a reward cannot be loaded.
        MachineError: a library is not installed.
    """
    failures = RunDirectory(folder).reward_failures
    return [
        RewardFunction(block, name, failures, environment)
        for block, name in zip(rewards, names_of(rewards), strict=True)
    ]


def names_of(rewards: Sequence[RewardBlock]) -> list[str]:
    """Return the rewards' names in metrics; the second of the same name gets `_2`."""
    names: list[str] = []
    for block in rewards:
        count = sum(block.name == other.name for other in rewards[: len(names)])
        names.append(f"{block.name}_{count + 1}" if count else block.name)
    return names


class RewardFunction:
    """One reward, with TRL's signature."""

    def __init__(self, block: RewardBlock, name: str, failures: Path | None, environment: Call | None = None) -> None:
        self.__name__ = name
        self.block, self.weight, self._failures = block, block.weight, failures
        self._recent: deque[bool] = deque(maxlen=_WINDOW)
        self._isolated: IsolatedReward | None = None
        if isinstance(block, EnvironmentReward):
            assert environment is not None, "the schema asks for an environment"
            self._call = environment
        elif isinstance(block, _SIMPLE):
            reward = built_in(block)
            self._call = lambda call: reward(**call)
        else:
            self._isolated = IsolatedReward(block)
            self._call = self._isolated.scores

    @property
    def place(self) -> str:
        """`file:line` of a function of the user's, once it was called; before, and for others, the type."""
        return self._isolated.place if self._isolated else self.block.type

    def __call__(self, prompts: Sequence[Completion], completions: Sequence[Completion], **columns: object) -> Scores:
        """Return a number for each completion; None for no opinion, or where the reward failed.

        Args:
            columns: The other columns of the rows, each with one value for each completion. TRL's other arguments,
                such as the state of the trainer, are left out.

        Raises:
            RewardError: too large a share of the last completions failed.
        """
        count = len(completions)
        lists = {key: value for key, value in columns.items() if isinstance(value, list) and len(value) == count}
        outcomes = self.outcomes({"prompts": list(prompts), "completions": list(completions), **lists})
        for completion, outcome in zip(completions, outcomes, strict=True):
            self._recent.append(isinstance(outcome, CallFailure))
            if isinstance(outcome, CallFailure):
                self._list(outcome, completion)
        return [None if isinstance(outcome, CallFailure) else outcome for outcome in outcomes]

    def outcomes(self, call: Mapping[str, list[Any]]) -> list[float | CallFailure | None]:
        """Return for each completion its number, None, or the failure; one failure does not affect the others."""
        count = len(call["completions"])
        try:
            return self.whole_batch(call)
        except CallFailure as failure:
            if count == 1:
                return [failure]
        one_by_one = ({key: values[row : row + 1] for key, values in call.items()} for row in range(count))
        return [outcome for single in one_by_one for outcome in self.outcomes(single)]

    def whole_batch(self, call: Mapping[str, list[Any]]) -> list[float | CallFailure | None]:
        """Return what one call of the reward returns for all completions.

        Raises:
            CallFailure: the call failed, or did not return a list with a value for each completion.
        """
        return _numbers(self._call(call), len(call["completions"]), self.place)

    def _list(self, failure: CallFailure, completion: Completion) -> None:
        """List a failure, and end the run if there are too many."""
        if self._failures:
            list_failure(self._failures, {"name": self.__name__}, failure, completion=text_of(completion))
        recent, max_share = sum(self._recent), self.block.max_failures
        if recent > max_share * max(len(self._recent), _LEAST):
            problem = f"the reward {self.__name__!r} failed on {recent} of the last {len(self._recent)} completions"
            fix = (
                "Correct it: reward_failures.jsonl lists them. "
                f"Or raise its timeout or its max_failures ({max_share:g})."
            )
            raise RewardError(f"{problem}; the last time: {failure.problem}", where=failure.where, fix=fix)

    def close(self) -> None:
        if self._isolated:
            self._isolated.end()


def _numbers(scores: object, count: int, place: str) -> list[float | CallFailure | None]:
    """Return a number, None or a failure for each of `count` completions."""
    if not isinstance(scores, list):
        raise CallFailure(f"it returned {type(scores).__name__}, not a list of numbers", place)
    if len(scores) != count:
        raise CallFailure(f"it returned {len(scores)} numbers for {count} completions", place)
    return [_number(score, place) for score in scores]


def _number(score: object, place: str) -> float | CallFailure | None:
    if score is None or isinstance(score, CallFailure):
        return score
    with suppress(OverflowError):  # an integer of 400 digits
        if isinstance(score, int | float) and math.isfinite(score):
            return float(score)
    return CallFailure(f"it returned {score!r}, which is no finite number", place)


@dataclass(frozen=True)
class TrialRow:
    """A row: its prompt, a text or messages, and its other columns."""

    prompt: Completion
    columns: Mapping[str, object] = field(default_factory=dict)

    def completions(self, column: str) -> tuple[Completion, ...]:
        """Return the right answer, if the row has one in this column, and an empty completion, like the prompt."""
        answer = self.columns.get(column)
        texts = ("",) if answer is None else (answer if isinstance(answer, str) else text_of(answer), "")  # type: ignore[arg-type]
        if isinstance(self.prompt, str):
            return texts
        return tuple([{"role": "assistant", "content": text}] for text in texts)


def trial_mistakes(rewards: Sequence[RewardBlock], rows: Sequence[TrialRow]) -> Iterator[TunerError]:
    """Yield an error for each reward that cannot be loaded, fails, takes too long, or returns no useful numbers."""
    if not rows:
        return
    for block, name in zip(rewards, names_of(rewards), strict=True):
        if isinstance(block, EnvironmentReward):  # `tool_calls.described` tries it
            continue
        reward = RewardFunction(block, name, None)
        try:
            if mistake := _trial_mistake(reward, rows):
                yield mistake
        except TunerError as error:
            yield error
        finally:
            reward.close()


def _trial_mistake(reward: RewardFunction, rows: Sequence[TrialRow]) -> RewardError | None:
    names = {key for row in rows for key in row.columns}
    column = getattr(reward.block, "column", _ANSWER)
    tried = [(row, completion) for row in rows for completion in row.completions(column)]
    columns: dict[str, list[object]] = {name: [row.columns.get(name) for row, _ in tried] for name in names}
    columns |= {"prompts": [row.prompt for row, _ in tried], "completions": [completion for _, completion in tried]}
    try:
        outcomes = reward.whole_batch(columns)
    except CallFailure as failure:
        return _trial_error(reward, failure)
    for (_, completion), outcome in zip(tried, outcomes, strict=True):
        if isinstance(outcome, CallFailure):
            return _trial_error(reward, outcome, f" for the completion {text_of(completion)[:40]!r}")
    numbers = [outcome for outcome in outcomes if isinstance(outcome, float)]
    if not numbers:
        problem = f"the reward {reward.__name__!r} has no number for any of the first {len(rows)} rows"
        fix = f"Check the column of the answer, or choose another: {Option('rewards', 'NAME')}, or FILE.py:FUNCTION."
        return RewardError(problem, where=reward.place, fix=fix)
    has_answers = any(row.columns.get(column) is not None for row in rows)  # empty completions alone may be alike
    is_constant = has_answers and len(set(numbers)) == 1 and len(numbers) > 1
    if is_constant and reward.block.varies and getattr(reward.block, "trial", True):
        problem = f"the reward {reward.__name__!r} is {numbers[0]:g} for every right answer and every empty completion"
        fix = "A constant teaches nothing: correct it."
        if isinstance(reward.block, OwnReward):
            fix += f" If other completions differ, write dict(type={reward.block.type!r}, trial=False)."
        return RewardError(problem, where=reward.place, fix=fix)
    return None


def _trial_error(reward: RewardFunction, failure: CallFailure, completion: str = "") -> RewardError:
    problem = f"the reward {reward.__name__!r} failed on the first rows{completion}: {failure.problem}"
    is_slow = "its timeout" in failure.problem
    fix = f"Make it faster, or write dict(type={reward.block.type!r}, timeout=60)." if is_slow else _TRIAL_FIX
    return RewardError(problem, where=failure.where, fix=fix)
