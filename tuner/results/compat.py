"""The private name of transformers that this room takes. Version seen: 5.23."""

from __future__ import annotations

from typing import Any

from transformers.core_model_loading import revert_weight_conversion

from tuner.errors import MachineError

_KEPT = "_weight_conversions"


def keep_conversions(model: Any, conversions: list[Any]) -> None:
    """Leave on a model what `save_pretrained` reverts: `from_pretrained` alone does so (transformers#42396).

    Raises:
        MachineError: this transformers looks for another name, and would revert nothing.
    """
    if _KEPT not in revert_weight_conversion.__code__.co_consts:
        what = f"transformers does not look for {_KEPT} when it saves, which tuner builds on"
        raise MachineError(what, fix="Install the tested versions: pip install -r requirements.txt")
    setattr(model, _KEPT, conversions)
