"""What is learned: one block for each objective, in TRL's names for its settings.

It knows no trainer; `worker` hands these values to the one of TRL that `type` means.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Strict

from tuner.recipes.block import Block, PositiveFloat

Smoothing = Annotated[float, Field(ge=0, lt=0.5)]

DpoLoss = Literal[
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
    "apo_zero", "apo_down", "discopop", "sft",
]  # fmt: skip


class Sft(Block):
    """Loss on the assistant's turns."""

    type: Literal["sft"]


class Pretrain(Block):
    """Loss on every token of plain text."""

    type: Literal["pretrain"]


class Dpo(Block):
    """Direct preference optimization on pairs; beta is the weight of the distance to the reference model."""

    type: Literal["dpo"]
    beta: PositiveFloat = 0.1
    loss_type: Annotated[tuple[DpoLoss, ...], Strict(False)] | DpoLoss = "sigmoid"
    loss_weights: Annotated[tuple[PositiveFloat, ...], Strict(False)] | None = None
    label_smoothing: Smoothing = 0.0
    precompute_ref_log_probs: bool = False


class Orpo(Block):
    """Odds-ratio preference optimization on pairs: no reference model; beta is the weight of the odds ratio."""

    type: Literal["orpo"]
    beta: PositiveFloat = 0.1


class Kto(Block):
    """Kahneman-Tversky optimization on single answers marked good or bad."""

    type: Literal["kto"]
    beta: PositiveFloat = 0.1
    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    desirable_weight: PositiveFloat = 1.0
    undesirable_weight: PositiveFloat = 1.0
    precompute_ref_log_probs: bool = False


class Reward(Block):
    """A model that scores answers, from pairs (Bradley-Terry)."""

    type: Literal["reward"]
    center_rewards_coefficient: PositiveFloat | None = None


Objective = Annotated[Sft | Pretrain | Dpo | Orpo | Kto | Reward, Field(discriminator="type")]
