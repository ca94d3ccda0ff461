"""How weights are updated: the block `optim_wrapper` of a recipe, and whose each optimizer is.

What it means for the rest of a recipe is `schema`'s.
"""

from typing import Annotated, Any, Literal

from pydantic_core import core_schema as core

from tuner.recipes.block import Before, Block, Field, Fraction, Lax, PositiveFloat, PositiveInt, check_key

OptimizerType = Literal[
    "AdamW", "Adam", "NAdam", "RAdam", "Adamax", "SGD", "RMSprop",  # torch.optim
    "AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit",  # bitsandbytes
    "FusedAdam", "Lamb", "Lion", "Muon",  # DeepSpeed
]  # fmt: skip


BITSANDBYTES_OPTIMIZERS = ("AdamW8bit", "PagedAdamW8bit", "PagedAdamW32bit")
DEEPSPEED_OPTIMIZERS = {"FusedAdam": "AdamW", "Lamb": "Lamb", "Lion": "Lion", "Muon": "Muon"}
"""Those that DeepSpeed makes itself, by the names that its config has for them."""
REMOVED_OPTIMIZERS = ("onebitadam", "zerooneadam", "onebitlamb", "onebitsgd")
"""DeepSpeed 0.19.7 took them out. In lower case, as DeepSpeed reads names."""


_DTYPES = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
"""The words of torch and of XTuner's configs."""


def _short_dtype(name: Any) -> Any:
    return _DTYPES.get(name.removeprefix("torch."), name) if isinstance(name, str) else name


def _not_removed(name: Any) -> Any:
    if str(name).lower() in REMOVED_OPTIMIZERS:
        raise ValueError(f"{name!r} no longer exists: the 1-bit optimizers were removed from DeepSpeed; use AdamW")
    return name


class Optimizer(Block):
    """One optimizer by its class name; lr per optimizer step.

    `muon_lr` is that of Muon's matrices, `lr` then that of the rest; `loraplus_lr_ratio` is PEFT's.
    """

    type: Annotated[OptimizerType, Before(_not_removed)]
    lr: PositiveFloat
    betas: Annotated[tuple[Fraction, Fraction], Lax]
    eps: PositiveFloat
    weight_decay: Annotated[float, Field(ge=0)]
    muon_lr: PositiveFloat | None
    loraplus_lr_ratio: Annotated[float, Field(ge=1)] | None

    @check_key("muon_lr", "loraplus_lr_ratio")
    @classmethod
    def _a_rate_of_its_own_needs_who_takes_it(cls, rate: float | None, info: core.ValidationInfo) -> float | None:
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
    dtype: Annotated[Literal["auto", "bf16", "fp16", "fp32"], Before(_short_dtype)]
