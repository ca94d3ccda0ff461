"""The blocks `adapter` and `quantization` of a recipe: what is trained of a frozen model, and how the rest is stored.

Checks against other blocks are in `schema`.
"""

import re
from typing import Literal

from pydantic import PositiveInt, ValidationInfo, field_validator

from tuner.recipes.strict import Block, Fraction


class Quantization(Block):
    """bitsandbytes' storage of the frozen base weights."""

    # Bits of a frozen weight.
    bits: Literal[4, 8] = 4
    # How 4 bits stand for numbers: 'nf4' suits weights that are normally distributed.
    quant_type: Literal["nf4", "fp4"] = "nf4"
    # Quantize the scales too, which saves about 0.4 bits a weight.
    double_quant: bool = True


INITS = ("True", "'gaussian'", "'orthogonal'", "'olora'", "'pissa'", "'pissa_niter_N'")
"""The values of adapter.init_lora_weights: how an adapter begins, in PEFT's words."""
UNUSED_INITS = {
    "eva": "eva needs the data's activations, and so a pass before training; use 'pissa'",
    "corda": "corda needs the data's activations, and so a pass before training; use 'pissa'",
    "lora_ga": "lora_ga needs the data's gradients, and so a pass before training; use 'pissa'",
    "loftq": "loftq quantizes the weights itself instead of bitsandbytes; use True, or 'pissa' on 16 bits",
    "mica": "mica freezes one half of each adapter, which checkpoints do not save; use 'pissa'",
}
"""PEFT's other values, and why each is refused."""


class Adapter(Block):
    """PEFT's LoraConfig, in its own names; path: a trained adapter to go on with, whose weights and values it has."""

    # A trained adapter to go on with; it brings its own r, lora_alpha and target_modules. None: a new one.
    path: str | None = None
    # The rank of the two matrices of each layer.
    r: PositiveInt
    # The update is scaled by lora_alpha / r.
    lora_alpha: PositiveInt
    # The part of an adapter's inputs that is dropped in training.
    lora_dropout: Fraction = 0.0
    # The layers that get an adapter: 'all-linear', names such as ['q_proj', 'v_proj'], or a regular expression.
    target_modules: str | list[str] | tuple[str, ...] = "all-linear"
    # DoRA: train the length of each weight vector besides its direction.
    use_dora: bool = False
    # rsLoRA: scale the update by lora_alpha / sqrt(r).
    use_rslora: bool = False
    # Layers that are trained whole and saved with the adapter, such as ['embed_tokens', 'lm_head'].
    modules_to_save: list[str] | None = None
    # How a new adapter begins: True, 'gaussian', 'orthogonal', 'olora', 'pissa' or 'pissa_niter_N'.
    init_lora_weights: bool | str = True

    @property
    def changes_base(self) -> bool:
        """Whether the adapter begins as a part of the base weights, which PEFT subtracts from them."""
        return self.path is None and str(self.init_lora_weights).startswith(("pissa", "olora"))

    @field_validator("init_lora_weights")
    @classmethod
    def _peft_can_begin_so(cls, init: bool | str, info: ValidationInfo) -> bool | str:
        if why := UNUSED_INITS.get(str(init).lower()):
            raise ValueError(why)
        if not (init is True or re.fullmatch(r"gaussian|orthogonal|olora|pissa(_niter_\d+)?", str(init))):
            raise ValueError(f"is {init!r}, and must be one of {', '.join(INITS)}")
        if info.data.get("use_dora") and str(init).startswith(("pissa", "olora")):
            raise ValueError(f"{init} changes the base's weights, whose norms DoRA scales by; use one of them")
        return init
