"""REINFORCE with a leave-one-out baseline."""

from typing import Annotated, ClassVar, Literal

from pydantic import NonNegativeFloat

from tuner.recipes.schema.block import Contradictions, Lax
from tuner.recipes.schema.group_rewards import GroupRewards
from tuner.recipes.schema.sampling import facts_of_prompts
from tuner.recipes.schema.tools import TOOL_KEYS


class Rloo(GroupRewards):
    """REINFORCE: a completion is compared with the mean reward of the others of its prompt."""

    facts: ClassVar = facts_of_prompts("RLOO", has_reference=True)
    lacks: ClassVar = dict.fromkeys(TOOL_KEYS, "TRL's trainer for RLOO calls no tools")
    type: Literal["rloo"]
    beta: NonNegativeFloat = 0.05
    # Divide advantages by their spread.
    normalize_advantages: bool = False
    # The least and the most that the sum of the rewards of a completion may be, before the distance to the reference
    # model is subtracted. None: no bounds.
    reward_clip_range: Annotated[tuple[float, float], Lax] | None = None

    def contradictions(self) -> Contradictions:
        yield from super().contradictions()
        if self.reward_clip_range is not None and not self.reward_clip_range[0] < self.reward_clip_range[1]:
            yield "reward_clip_range", "write the least reward first, then the most, such as (-1.0, 1.0)"
