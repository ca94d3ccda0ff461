"""Group relative policy optimization."""

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from tuner.recipes.schema.block import Contradictions
from tuner.recipes.schema.group_policy import GroupPolicy
from tuner.recipes.schema.sampling import facts_of_prompts

_CLIPPED = frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "luspo"})
READERS = {
    "epsilon": _CLIPPED,
    "epsilon_high": _CLIPPED | {"cispo"},
    "delta": _CLIPPED,
    **dict.fromkeys(("sapo_temperature_pos", "sapo_temperature_neg"), frozenset({"sapo"})),
    **dict.fromkeys(("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), frozenset({"vespo"})),
}
"""The losses that read a key, in TRL 1.16."""


class Grpo(GroupPolicy):
    """Group relative policy optimization: completions with a reward above the mean of their prompt get more likely."""

    facts: ClassVar = facts_of_prompts("GRPO", is_usual=True, has_reference=True)
    type: Literal["grpo"]
    # How the loss of tokens is added up: a mean over the tokens of a step ('bnpo', and 'dapo', which counts them in all
    # completions that are generated at once), over completions ('grpo'), or a sum divided by a constant ('dr_grpo').
    # Others replace the clipping: 'cispo' clips the weight of a token (arXiv 2506.13585; set epsilon_high=5.0), 'sapo'
    # weighs by a soft gate (arXiv 2511.20347), 'vespo' by the probability of the whole completion; 'luspo' sums the
    # tokens of a completion (with importance_sampling_level='sequence').
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"] = "dapo"
    # Whether probabilities are compared token by token or for whole completions.
    importance_sampling_level: Literal["token", "sequence"] = "token"
    # An upper bound of the ratio of probabilities where an advantage is negative: 1 + epsilon or more. None: no bound.
    delta: PositiveFloat | None = None
    # With beta above 0: multiply the distance to the reference model (k3) by the ratio of probabilities, so that its
    # gradient is that of the KL divergence (DeepSeek-V3.2). False: the distance of GRPO's paper.
    use_bias_correction_kl: bool = True
    # The weight of a bonus for tokens that are hard to predict, a mean over the tokens of a step.
    entropy_coef: NonNegativeFloat = 0.0
    # The temperature of 'sapo' for completions above the mean of their prompt.
    sapo_temperature_pos: PositiveFloat = 1.0
    # The same for the others.
    sapo_temperature_neg: PositiveFloat = 1.05
    # The power of the weights of 'vespo' for completions above the mean of their prompt: w^k e^(lambda (1 - w)).
    vespo_k_pos: PositiveFloat = 2.0
    # Their decay.
    vespo_lambda_pos: PositiveFloat = 3.0
    # The power for the others.
    vespo_k_neg: PositiveFloat = 3.0
    # Their decay.
    vespo_lambda_neg: PositiveFloat = 2.0

    def contradictions(self) -> Contradictions:
        yield from super().contradictions()
        loss = self.loss_type
        unread = (key for key, readers in READERS.items() if loss not in readers)
        yield from self.unread(f"with the loss {loss}", *unread)
        if loss == "cispo" and (self.epsilon_high is None or self.epsilon_high < 1):
            shown = self.epsilon if self.epsilon_high is None else self.epsilon_high
            why = f"cispo clips weights at epsilon_high, and {shown} scales every gradient down; set it to 5.0"
            yield "loss_type", why
        if loss == "luspo" and self.importance_sampling_level != "sequence":
            yield "loss_type", "luspo compares whole completions: set importance_sampling_level to 'sequence'"
        if loss == "vespo" and self.importance_sampling_level != "token":
            yield "loss_type", "vespo weighs whole completions by itself: set importance_sampling_level to 'token'"
        if self.top_entropy_quantile < 1 and self.entropy_coef:
            yield (
                "entropy_coef",
                "the bonus is a mean over all tokens, and top_entropy_quantile leaves some out: use one",
            )
        if self.beta == 0:
            yield from self.unread("with beta = 0", "use_bias_correction_kl")
