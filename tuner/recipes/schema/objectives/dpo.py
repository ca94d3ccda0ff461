"""Direct preference optimization."""

from collections.abc import Mapping, Set
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field, PositiveFloat

from tuner.recipes.schema.block import Contradictions, Lax
from tuner.recipes.schema.objective import EQUAL_OR_NO_LOSS, ObjectiveFacts, UnitInterval
from tuner.recipes.schema.precomputed_reference import PrecomputedReference

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]
DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm",
]  # fmt: skip
_OF_DIFFERENCES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
"""The losses of the difference of two rewards; in others an f-divergence leaves a term that does not cancel."""
_SORTING = {"aot", "aot_unpaired"}
_NOT_OF_PAIRS = _SORTING | {"sft"}
"""The losses that are not a mean of one number for each pair: they sort the samples, or count tokens."""
CONSERVATIVE = {"sigmoid", "sigmoid_norm"}
"""The losses that label_smoothing makes conservative DPO (Mitchell, 2023); TRL 1.16 does not read it there."""
_COMPARE = set(get_args(DpoLoss)) - {"sft"}
READERS: Mapping[str, Set[str]] = {
    "beta": _COMPARE,
    "label_smoothing": CONSERVATIVE | {"robust", "exo_pair", "aot", "aot_unpaired"},
    "ld_alpha": _COMPARE,
    "f_divergence_type": _OF_DIFFERENCES - {"sft"},
    "discopop_tau": {"discopop"},
}
"""The losses that read a key. Where no chosen loss does, another value than the default is refused."""


def _several(value: object) -> object:
    """Return a tuple of one loss for a single loss."""
    return (value,) if isinstance(value, str) else value


class Dpo(PrecomputedReference):
    """Direct preference optimization on pairs of answers."""

    facts: ClassVar = ObjectiveFacts(
        "DPO",
        rows="pairs",
        dropped=EQUAL_OR_NO_LOSS,
        is_usual=True,
        has_reference=True,
        can_chunk_logits=True,
    )
    type: Literal["dpo"]
    # One loss, or several whose weighted sum is trained on.
    loss_type: Annotated[
        tuple[DpoLoss, ...],
        Field(strict=False, min_length=1),
        BeforeValidator(_several),
    ] = ("sigmoid",)
    # A weight for each loss of loss_type. None: 1 each.
    loss_weights: Annotated[tuple[PositiveFloat, ...], Lax] | None = None
    # The weight of the distance to the reference model.
    beta: PositiveFloat = 0.1
    # The assumed share of pairs with swapped labels. With 'sigmoid' and 'sigmoid_norm' it makes the loss conservative
    # DPO; 'robust', 'exo_pair', 'aot' and 'aot_unpaired' read it too.
    label_smoothing: Smoothing = 0.0
    # LD-DPO: the weight of the extra tokens of the longer answer. None: 1.
    ld_alpha: UnitInterval | None = None
    # How the distance to the reference model is measured.
    f_divergence_type: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    # The alpha of 'alpha_divergence'.
    f_alpha_divergence_coef: PositiveFloat = 0.5
    # WPO: weight each pair by how likely the model is to write it now.
    use_weighting: bool = False
    # The temperature of the 'discopop' loss.
    discopop_tau: PositiveFloat = 0.05

    def contradictions(self) -> Contradictions:
        yield from super().contradictions()
        losses = self.loss_type
        if self.loss_weights is not None and len(self.loss_weights) != len(losses):
            why = f"{len(self.loss_weights)} weights for {len(losses)} losses; give one for each of {losses}"
            yield "loss_weights", why
        unread = (key for key, readers in READERS.items() if readers.isdisjoint(losses))
        yield from self.unread(f"with the loss {' and '.join(losses)}", *unread)
        if "exo_pair" in losses and self.label_smoothing == 0:
            yield "loss_type", "exo_pair needs a label_smoothing above 0; its paper uses 1e-3"
        # TRL refuses this, and some others, only after the model is loaded.
        others = set(losses) - _OF_DIFFERENCES
        if others and self.f_divergence_type != "reverse_kl" and not READERS["f_divergence_type"].isdisjoint(losses):
            yield "f_divergence_type", f"{min(others)} supports only the f_divergence_type reverse_kl"
        if self.use_weighting and (unweighed := _NOT_OF_PAIRS & set(losses)):
            yield "use_weighting", f"{min(unweighed)} has no loss of single pairs, so use_weighting cannot weight it"
        if self.f_divergence_type != "alpha_divergence":
            yield from self.unread(f"with the f_divergence_type {self.f_divergence_type}", "f_alpha_divergence_coef")

    @property
    def least_batch_size(self) -> int:
        """The losses 'aot' and 'aot_unpaired' sort a micro-batch; of one pair there is nothing to sort."""
        return 1 if _SORTING.isdisjoint(self.loss_type) else 2

    @property
    def depends_on_micro_batch(self) -> bool:
        """With the `loss_type` 'aot' or 'aot_unpaired', which sort it, or 'sft', in TRL 1.16 a mean over its tokens."""
        return not _NOT_OF_PAIRS.isdisjoint(self.loss_type)
