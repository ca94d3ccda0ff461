"""Calls every reward on the first rows before a run starts: with the right answer, and with an empty completion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tuner.errors import RewardError, TunerError
from tuner.recipes.schema.rewards import OwnReward, RewardBlock
from tuner.rewards.built_in import Completion, text_of
from tuner.rewards.isolation import RewardFailure
from tuner.rewards.reward_function import RewardFunction, names_of

ANSWER = "answer"
"""The column with the answer that a row was cut before."""
_FIX = "Correct the function: it gets lists and returns a list with one number for each completion, or None."


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


def mistakes(rewards: Sequence[RewardBlock], rows: Sequence[TrialRow]) -> Iterator[TunerError]:
    """Yield an error for each reward that cannot be loaded, fails, takes too long, or returns no useful numbers."""
    if not rows:
        return
    for block, name in zip(rewards, names_of(rewards), strict=True):
        reward = RewardFunction(block, name, None)
        try:
            if mistake := _mistake(reward, rows):
                yield mistake
        except TunerError as error:
            yield error
        finally:
            reward.close()


def _mistake(reward: RewardFunction, rows: Sequence[TrialRow]) -> RewardError | None:
    names = {key for row in rows for key in row.columns}
    column = getattr(reward.block, "column", ANSWER)
    tried = [(row, completion) for row in rows for completion in row.completions(column)]
    columns: dict[str, list[object]] = {name: [row.columns.get(name) for row, _ in tried] for name in names}
    columns |= {"prompts": [row.prompt for row, _ in tried], "completions": [completion for _, completion in tried]}
    try:
        outcomes = reward.whole_batch(columns)
    except RewardFailure as failure:
        return _error(reward, failure)
    for (_, completion), outcome in zip(tried, outcomes, strict=True):
        if isinstance(outcome, RewardFailure):
            return _error(reward, outcome, f" for the completion {text_of(completion)[:40]!r}")
    numbers = [outcome for outcome in outcomes if isinstance(outcome, float)]
    if not numbers:
        problem = f"the reward {reward.__name__!r} has no number for any of the first {len(rows)} rows"
        return RewardError(problem, where=reward.place, fix="Check the column of the right answer.")
    has_answers = any(row.columns.get(column) is not None for row in rows)  # empty completions alone may be alike
    is_constant = has_answers and len(set(numbers)) == 1 and len(numbers) > 1
    if is_constant and reward.block.varies and getattr(reward.block, "trial", True):
        problem = f"the reward {reward.__name__!r} is {numbers[0]:g} for every right answer and every empty completion"
        fix = "A constant teaches nothing: correct it."
        if isinstance(reward.block, OwnReward):
            fix += f" If other completions differ, write dict(type={reward.block.type!r}, trial=False)."
        return RewardError(problem, where=reward.place, fix=fix)
    return None


def _error(reward: RewardFunction, failure: RewardFailure, completion: str = "") -> RewardError:
    problem = f"the reward {reward.__name__!r} failed on the first rows{completion}: {failure.problem}"
    is_slow = "its timeout" in failure.problem
    fix = f"Make it faster, or write dict(type={reward.block.type!r}, timeout=60)." if is_slow else _FIX
    return RewardError(problem, where=failure.where, fix=fix)
