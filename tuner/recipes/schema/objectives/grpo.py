"""Group relative policy optimization."""

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from tuner.recipes.schema.group_rewards import GroupRewards
from tuner.recipes.schema.objective import ObjectiveFacts
from tuner.recipes.schema.sampling import DROPPED


class Grpo(GroupRewards):
    """Group relative policy optimization: completions with a reward above the mean of their prompt get more likely."""

    facts: ClassVar = ObjectiveFacts(
        "GRPO", rows="prompts", dropped=DROPPED, cuts=False, has_reference=True, generates=True
    )
    type: Literal["grpo"]
    # How the loss of tokens is added up: a mean over tokens ('dapo', 'bnpo'), over completions ('grpo'), or a sum
    # divided by a constant ('dr_grpo').
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    # What an advantage is divided by: the spread of the rewards of its prompt, of all prompts, or nothing.
    scale_rewards: Literal["group", "batch", "none"] = "group"
    # Whether probabilities are compared token by token or for whole completions.
    importance_sampling_level: Literal["token", "sequence"] = "token"
    # An upper bound of the ratio of probabilities where an advantage is negative: 1 + epsilon or more. None: no bound.
    delta: PositiveFloat | None = None
    # The weight of a bonus for tokens that are hard to predict.
    entropy_coef: NonNegativeFloat = 0.0
