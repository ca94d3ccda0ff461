"""The block `optim_wrapper` of a recipe: how weights are updated, and which library makes each optimizer.

Checks against other blocks are in `schema`.
"""

from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from tuner.recipes.strict import Block, Fraction, Lax

OptimizerType = Literal[
    "AdamW", "Adam", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop",  # torch.optim
    "AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit",  # bitsandbytes
    "FusedAdam", "Lamb", "Lion", "Muon",  # DeepSpeed
]  # fmt: skip
BITSANDBYTES_OPTIMIZERS = ("AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit")
DEEPSPEED_OPTIMIZERS = {"FusedAdam": "AdamW", "Lamb": "Lamb", "Lion": "Lion", "Muon": "Muon"}
"""Optimizers that DeepSpeed makes itself, with their names in its config."""
REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb", "onebitsgd")
"""Optimizers that DeepSpeed 0.19.7 removed, in lower case, as DeepSpeed compares names."""
_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""The names of torch and of XTuner's configs, with ours."""


def _short_dtype(name: object) -> object:
    return _DTYPES.get(name.removeprefix("torch."), name) if isinstance(name, str) else name


def _not_removed(name: object) -> object:
    if str(name).lower() in REMOVED_OPTIMIZERS:
        raise ValueError(f"{name!r} no longer exists: the 1-bit optimizers were removed from DeepSpeed; use AdamW")
    return name


class Optimizer(Block):
    """One optimizer by its class name; lr per optimizer step.

    `muon_lr` is the rate of Muon's matrices, and `lr` then that of all other weights; `loraplus_lr_ratio` is PEFT's.
    """

    type: Annotated[OptimizerType, BeforeValidator(_not_removed)]
    lr: PositiveFloat
    betas: Annotated[tuple[Fraction, Fraction], Lax]
    eps: PositiveFloat
    weight_decay: NonNegativeFloat
    muon_lr: PositiveFloat | None
    loraplus_lr_ratio: Annotated[float, Field(ge=1)] | None

    @field_validator("muon_lr", "loraplus_lr_ratio")
    @classmethod
    def _a_rate_of_its_own_needs_who_takes_it(cls, rate: float | None, info: ValidationInfo) -> float | None:
        kind = info.data.get("type")
        if rate and info.field_name == "muon_lr" and kind not in ("Muon", None):
            raise ValueError(f"optimizer.type {kind} has one learning rate for all weights; use Muon, or muon_lr=None")
        if rate and info.field_name == "loraplus_lr_ratio" and kind in DEEPSPEED_OPTIMIZERS:
            raise ValueError(f"optimizer.type {kind} is DeepSpeed's, which does not support LoRA+; use AdamW")
        return rate


class ClipGrad(Block):
    """The largest 2-norm of the gradient."""

    max_norm: PositiveFloat


class OptimWrapper(Block):
    """The optimizer step."""

    optimizer: Optimizer
    clip_grad: ClipGrad | None
    accumulative_counts: PositiveInt | Literal["auto"]
    dtype: Annotated[Literal["auto", "bf16", "fp16", "fp32"], BeforeValidator(_short_dtype)]
