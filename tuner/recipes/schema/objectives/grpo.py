"""Group relative policy optimization."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from tuner.recipes.schema.block import Contradictions
from tuner.recipes.schema.group_rewards import GroupRewards
from tuner.recipes.schema.objective import ObjectiveFacts
from tuner.recipes.schema.sampling import DROPPED
from tuner.recipes.schema.tools import TOOL_KEYS, Tools


class Grpo(GroupRewards, Tools):
    """Group relative policy optimization: completions with a reward above the mean of their prompt get more likely."""

    facts: ClassVar = ObjectiveFacts(
        "GRPO", rows="prompts", dropped=DROPPED, cuts=False, has_reference=True, generates=True
    )
    own_keys: ClassVar = GroupRewards.own_keys | TOOL_KEYS
    type: Literal["grpo"]
    # How the loss of tokens is added up: a mean over the tokens of a step ('bnpo', and 'dapo', which counts them in all
    # completions that are generated at once), over completions ('grpo'), or a sum divided by a constant ('dr_grpo').
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo"] = "dapo"
    # What an advantage is divided by: the spread of the rewards of its prompt, of all prompts, or nothing.
    scale_rewards: Literal["group", "batch", "none"] = "group"
    # Whether probabilities are compared token by token or for whole completions.
    importance_sampling_level: Literal["token", "sequence"] = "token"
    # An upper bound of the ratio of probabilities where an advantage is negative: 1 + epsilon or more. None: no bound.
    delta: PositiveFloat | None = None
    # With beta above 0: multiply the distance to the reference model (k3) by the ratio of probabilities, so that its
    # gradient is that of the KL divergence (DeepSeek-V3.2). False: the distance of GRPO's paper.
    use_bias_correction_kl: bool = True
    # The weight of a bonus for tokens that are hard to predict, a mean over the tokens of a step.
    entropy_coef: NonNegativeFloat = 0.0

    def contradictions(self) -> Contradictions:
        yield from super().contradictions()
        if self.beta == 0:
            yield from self.unread("with beta = 0", "use_bias_correction_kl")

    @property
    def own_functions(self) -> Mapping[str, tuple[str, ...]]:
        environment = (self.environment,) if self.environment else ()
        called = {"tools": self.tools, "environment": environment}
        return {**super().own_functions, **{key: names for key, names in called.items() if names}}

    @property
    def prompt_tokens(self) -> int:
        return self.max_result_tokens if self.environment else 0
