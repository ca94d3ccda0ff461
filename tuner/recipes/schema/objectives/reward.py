"""A reward model."""

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from tuner.recipes.schema.objective import Objective, ObjectiveFacts


class Reward(Objective):
    """A model that scores answers, learned from pairs of answers (Bradley-Terry)."""

    facts: ClassVar = ObjectiveFacts(
        "reward model",
        rows="pairs",
        dropped="equal answers, or longer than max_length",
        answers_prompts=False,
        cuts=False,
        scores=True,
        balances_router=False,
    )
    type: Literal["reward"]
    # The weight of a term that pulls the scores to a mean of zero. None: no such term.
    center_rewards_coefficient: PositiveFloat | None = None
