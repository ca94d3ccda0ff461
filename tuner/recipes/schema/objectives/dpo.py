"""Direct preference optimization."""

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from tuner.recipes.schema.block import Lax
from tuner.recipes.schema.objective import EQUAL_OR_NO_LOSS, Objective, ObjectiveFacts, Share

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
_OF_DIFFERENCES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
"""The losses of the difference of two rewards; in others an f-divergence leaves a term that does not cancel."""


def _several(value: object) -> object:
    """Return a tuple of one loss for a single loss."""
    return (value,) if isinstance(value, str) else value


class Dpo(Objective):
    """Direct preference optimization on pairs of answers."""

    facts: ClassVar = ObjectiveFacts(
        "DPO",
        rows="pairs",
        dropped=EQUAL_OR_NO_LOSS,
        has_reference=True,
        chooses_loss=True,
    )
    type: Literal["dpo"]
    # The weight of the distance to the reference model.
    beta: PositiveFloat = 0.1
    # The assumed share of pairs with swapped labels.
    label_smoothing: Smoothing = 0.0
    # LD-DPO: the weight of the extra tokens of the longer answer. None: 1.
    ld_alpha: Share | None = None
    # How the distance to the reference model is measured.
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    # The alpha of 'alpha_divergence'.
    f_alpha_divergence_coef: PositiveFloat = 0.5
    # WPO: weight each pair by how likely the model is to write it now.
    use_weighting: bool = False
    # The temperature of the 'discopop' loss.
    discopop_tau: PositiveFloat = 0.05
    # The reference model judges all pairs before training and is not kept in memory.
    precompute_ref_log_probs: bool = False
    # Samples that the reference model judges at a time. None: the micro-batch.
    precompute_ref_batch_size: PositiveInt | None = None
    # One loss, or several whose weighted sum is trained on.
    loss_type: Annotated[
        tuple[DpoLoss, ...],
        Field(strict=False, min_length=1, validate_default=True),
        BeforeValidator(_several),
    ] = ("sigmoid",)
    # A weight for each loss of loss_type. None: 1 each.
    loss_weights: Annotated[tuple[PositiveFloat, ...], Lax] | None = None

    @field_validator("loss_type")
    @classmethod
    def _settings_that_the_losses_take(cls, losses: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        # TRL refuses these only after the model is loaded.
        if "exo_pair" in losses and info.data.get("label_smoothing") == 0:
            raise ValueError("exo_pair needs a label_smoothing above 0; its paper uses 1e-3")
        if (others := set(losses) - _OF_DIFFERENCES) and info.data.get("f_divergence_type") != "reverse_kl":
            raise ValueError(f"{min(others)} supports only the f_divergence_type reverse_kl")
        if info.data.get("use_weighting") and (sorting := {"aot", "aot_unpaired"} & set(losses)):
            raise ValueError(f"{min(sorting)} sorts its samples, so use_weighting has no effect")
        return losses

    @field_validator("loss_weights")
    @classmethod
    def _one_weight_for_each_loss(
        cls, weights: tuple[float, ...] | None, info: ValidationInfo
    ) -> tuple[float, ...] | None:
        losses = info.data.get("loss_type")
        if weights is not None and losses and len(weights) != len(losses):
            raise ValueError(f"{len(weights)} weights for {len(losses)} losses; give one for each of {losses}")
        return weights

    @property
    def depends_on_micro_batch(self) -> bool:
        """In TRL 1.16 'sft' is a mean over a micro-batch's tokens, 'aot' sorts it, 'bco_pair' keeps a running mean."""
        return not {"sft", "aot", "aot_unpaired", "bco_pair"}.isdisjoint(self.loss_type)
