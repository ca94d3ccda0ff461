"""What a DeepSpeed config's optimizer and scheduler blocks ask for, as the recipe's values that ask for the same.

It takes checked blocks and changes none; whether to follow them is the user's choice.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from tuner.recipes.merging import lookup
from tuner.recipes.schema import OptimizerType
from tuner.zero.rules import AUTO

_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_MODES = ("torch_adam", "adam_w_mode", "fused", "foreach", "set_grad_none")
"""How an optimizer is computed: nothing that a recipe would say."""


class Wish(NamedTuple):
    """Recipe values by dotted key, and one sentence for each thing that no recipe can say."""

    values: dict[str, Any]
    notes: tuple[str, ...]

    def flags(self, recipe: Mapping[str, Any]) -> str:
        """Return the `--set` flags, ready for a shell, that give `recipe` the values it does not have."""
        differs = {key: value for key, value in self.values.items() if _held(recipe, key) != value}
        return " ".join(f"--set {key}={shlex.quote(str(value))}" for key, value in differs.items())


def optimizer(block: Mapping[str, Any]) -> Wish:
    """Return what an optimizer block asks for."""
    params, prefix = _params(block), "optim_wrapper.optimizer."
    kind = _optimizer_type(block["type"], params)
    known: dict[str, Any] = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay") if key in params}
    notes = [f"a recipe has no {key}." for key in params if key not in (*known, *_MODES)]
    if kind is None:
        return Wish({}, (f"optim_wrapper.optimizer does not support {block['type']!r}.", *notes))
    values: dict[str, Any] = {"type": kind, **known}
    return Wish({f"{prefix}{key}": value for key, value in values.items()}, tuple(notes))


def scheduler(block: Mapping[str, Any]) -> Wish:
    """Return what a scheduler block asks for; its steps become a part of all steps where it says how many those are."""
    params, kind = _params(block), _SCHEDULES.get(block["type"])
    if kind is None:
        return Wish({}, (f"param_scheduler has no counterpart of {block['type']}.",))
    values: dict[str, Any] = {"param_scheduler.type": kind}
    warmup, total = params.get("warmup_num_steps"), params.get("total_num_steps")
    notes = []
    if warmup and total and warmup < total:
        values["param_scheduler.warmup_ratio"] = warmup / total
    elif warmup:
        notes.append(f"its warmup is a share of all steps: param_scheduler.warmup_ratio = {warmup} / all steps.")
    if isinstance(params.get("warmup_max_lr"), int | float):
        values["optim_wrapper.optimizer.lr"] = params["warmup_max_lr"]
    return Wish(values, tuple(notes))


def _params(block: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in (block.get("params") or {}).items() if value != AUTO}


def _optimizer_type(name: str, params: Mapping[str, Any]) -> str | None:
    # DeepSpeed reads its own names in any case, and its Adam is AdamW unless adam_w_mode is false.
    if name.lower() == "adam" and params.get("adam_w_mode", True):
        return "AdamW"
    return next((known for known in get_args(OptimizerType) if known.lower() == name.lower()), None)


def _held(recipe: Mapping[str, Any], key: str) -> Any:
    value = lookup(recipe, tuple(key.split(".")))
    return list(value) if isinstance(value, tuple) else value
