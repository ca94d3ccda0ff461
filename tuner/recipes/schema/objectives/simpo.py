"""Simple preference optimization."""

from typing import ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from tuner.recipes.schema.objective import EQUAL_OR_NO_LOSS, Objective, ObjectiveFacts


class Simpo(Objective):
    """Simple preference optimization on pairs of answers, without a reference model.

    The reward of an answer is beta times the mean log-probability of its tokens, so a longer answer has no advantage.
    """

    facts: ClassVar = ObjectiveFacts(
        "SimPO",
        rows="pairs",
        dropped=EQUAL_OR_NO_LOSS,
        logit_copies=2,  # the logits, and their log-softmax or the gradients that take its place
        offloads_activations=False,
    )
    type: Literal["simpo"]
    # The scale of the rewards.
    beta: PositiveFloat = 2.0
    # By how much the chosen answer's reward shall exceed the other's.
    simpo_gamma: NonNegativeFloat = 1.0
