"""What GRPO and its variants share: how rewards become advantages, which tokens carry the loss, and tools."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from tuner.recipes.schema.block import Contradictions
from tuner.recipes.schema.group_rewards import GroupRewards
from tuner.recipes.schema.tools import TOOL_KEYS, Tools


class GroupPolicy(GroupRewards, Tools):
    """An objective that makes completions with a reward above the mean of their prompt more likely."""

    own_keys: ClassVar = GroupRewards.own_keys | TOOL_KEYS
    # What an advantage is divided by: the spread of the rewards of its prompt, of all prompts, or nothing.
    scale_rewards: Literal["group", "batch", "none"] = "group"
    # Several rewards are added up and then normalized, or each is normalized in its group before they are added up, so
    # that one of large numbers does not hide the others (GDPO); scale_rewards is not read then.
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    # The share of tokens that carry the loss: those that are hardest to predict (arXiv 2506.01939 uses 0.2). They are
    # chosen in each micro-batch of all ranks, so below 1 tuner does not choose its size.
    top_entropy_quantile: Annotated[float, Field(gt=0, le=1)] = 1.0

    def contradictions(self) -> Contradictions:
        yield from super().contradictions()
        if self.multi_objective_aggregation == "normalize_then_sum":
            yield from self.unread("where each reward is normalized by itself", "scale_rewards")

    @property
    def own_functions(self) -> Mapping[str, tuple[str, ...]]:
        environment = (self.environment,) if self.environment else ()
        called = {"tools": self.tools, "environment": environment}
        return {**super().own_functions, **{key: names for key, names in called.items() if names}}

    @property
    def prompt_tokens(self) -> int:
        return self.max_result_tokens if self.environment else 0

    @property
    def depends_on_micro_batch(self) -> bool:
        """With `top_entropy_quantile` below 1: TRL 1.16 chooses the tokens in it."""
        return self.top_entropy_quantile < 1

    @property
    def depends_on_ranks(self) -> bool:
        """With `top_entropy_quantile` below 1: TRL 1.16 gathers the entropies of all ranks."""
        return self.top_entropy_quantile < 1
