"""Odds-ratio preference optimization."""

from typing import ClassVar, Literal

from pydantic import PositiveFloat

from tuner.recipes.schema.objective import EQUAL_OR_NO_LOSS, Objective, ObjectiveFacts


class Orpo(Objective):
    """Odds-ratio preference optimization on pairs of answers, without a reference model.

    The likelihood term, the mean over the tokens of the chosen samples, counts the prompts too, as TRL 1.16's does.
    """

    facts: ClassVar = ObjectiveFacts(
        "ORPO",
        rows="pairs",
        dropped=EQUAL_OR_NO_LOSS,
        logit_copies=2.5,  # the logits and half of their log-softmax kept, and the gradients
        offloads_activations=False,
    )
    type: Literal["orpo"]
    # The weight of the odds ratio.
    beta: PositiveFloat = 0.1
