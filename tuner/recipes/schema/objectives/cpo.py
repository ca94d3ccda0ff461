"""Contrastive preference optimization."""

from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from tuner.recipes.schema.block import Contradictions
from tuner.recipes.schema.chosen_likelihood import ChosenLikelihood
from tuner.recipes.schema.objectives.dpo import Smoothing


class Cpo(ChosenLikelihood):
    """Contrastive preference optimization on pairs of answers: DPO without a reference model, with a likelihood term.

    Xu et al., 2024 (arXiv:2401.08417), equation 5.
    """

    type: Literal["cpo"]
    # 'hinge' is that of SLiC; 'ipo' compares mean log-probabilities of tokens.
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    # The scale of the difference of the answers' log-probabilities.
    beta: PositiveFloat = 0.1
    # The weight of the likelihood of the chosen answers, which is added to the loss.
    cpo_alpha: NonNegativeFloat = 1.0
    # The assumed share of pairs with swapped labels.
    label_smoothing: Smoothing = 0.0

    def contradictions(self) -> Contradictions:
        if self.loss_type != "sigmoid":
            yield from self.unread(f"with the loss {self.loss_type}", "label_smoothing")
