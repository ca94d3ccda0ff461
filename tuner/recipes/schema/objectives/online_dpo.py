"""Online direct preference optimization."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat

from tuner.recipes.schema.block import Contradictions
from tuner.recipes.schema.group_rewards import GroupRewards
from tuner.recipes.schema.sampling import facts_of_prompts
from tuner.recipes.schema.tools import TOOL_KEYS


class OnlineDpo(GroupRewards):
    """Online DPO: of two completions of a prompt, that with the higher reward is chosen; the loss is DPO's.

    Guo et al., 2024 (arXiv:2402.04792). Two completions with the same reward carry no loss.
    """

    facts: ClassVar = facts_of_prompts("online DPO", has_reference=True)
    own_keys: ClassVar = GroupRewards.own_keys | {"loss_type"}
    lacks: ClassVar = dict.fromkeys(TOOL_KEYS, "a pair of online DPO is two completions without calls of tools")
    type: Literal["online_dpo"]
    # The loss of a pair, as in `dpo`.
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"
    # The weight of the distance to the reference model.
    beta: PositiveFloat = 0.1
    # Completions of each prompt: the two of a pair.
    num_generations: Annotated[int, Field(ge=2, le=2)] = 2

    def contradictions(self) -> Contradictions:
        yield from super().contradictions()
        yield from self.unread("by DPO's loss", "epsilon", "epsilon_high", "mask_truncated_completions")

    def micro_batches(self, max_size: int) -> range:
        """The completions of a pair are in the same micro-batch."""
        return range(2, max_size + 1, 2)
