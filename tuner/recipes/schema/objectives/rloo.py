"""REINFORCE with a leave-one-out baseline."""

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat

from tuner.recipes.schema.group_rewards import GroupRewards
from tuner.recipes.schema.objective import ObjectiveFacts
from tuner.recipes.schema.sampling import DROPPED


class Rloo(GroupRewards):
    """REINFORCE: a completion is compared with the mean reward of the others of its prompt."""

    facts: ClassVar = ObjectiveFacts(
        "RLOO", rows="prompts", dropped=DROPPED, cuts=False, has_reference=True, generates=True
    )
    type: Literal["rloo"]
    beta: NonNegativeFloat = 0.05
    # Divide advantages by their spread.
    normalize_advantages: bool = False
