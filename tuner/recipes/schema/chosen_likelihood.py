"""What CPO and SimPO share: TRL's CPOTrainer can add the likelihood of the chosen answers to both."""

from typing import ClassVar

from pydantic import NonNegativeFloat

from tuner.recipes.schema.objective import EQUAL_OR_NO_LOSS, Objective, ObjectiveFacts


class ChosenLikelihood(Objective):
    """An objective on pairs of answers without a reference model, to which the likelihood of the chosen can be added.

    That term is the mean over the tokens of the chosen answers, as in TRL 1.16 and in the program of CPO's authors.
    """

    facts: ClassVar = ObjectiveFacts(
        "CPO",
        rows="pairs",
        dropped=EQUAL_OR_NO_LOSS,
        logit_copies=2,  # the logits, and their log-softmax or the gradients that take its place
        offloads_activations=False,
    )
    # The weight of the likelihood of the chosen answers, which is added to the loss.
    cpo_alpha: NonNegativeFloat = 0.0

    @property
    def logit_copies(self) -> float:
        """The term keeps the log-softmax of the chosen half, or has its gradient."""
        return self.facts.logit_copies + 0.5 * (self.cpo_alpha > 0)
