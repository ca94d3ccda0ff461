"""The linear layers of models on which LoRA would never have a gradient, and the error for whoever names them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tuner.errors import Key, ModelError

CHOOSERS = r"(?:.*\.)?indexer\..+"
"""A regular expression for the names of what indexers hold (DeepSeek V3.2 and V4, GLM 5 ...), in transformers 5.24.

Their scores only choose which tokens are attended to, and a choice has no gradient.
"""
WITHOUT_GRADIENT = rf"{CHOOSERS}|(?:.*\.)?(?:altup\.correction_coefs|router\.classifier|vision_tower\.head\..+)"
"""The same for all layers on which LoRA never learns.

Gemma 3n, which clips the weight of its correction while it trains, and LongCat's router read a weight past LoRA.
Nothing reads what the head of SigLIP returns (Gemma 3).
"""


def without_gradient(layers: Iterable[str]) -> list[str]:
    """Return those of a model's linear layers on which LoRA would never learn, and which get none."""
    return [layer for layer in layers if re.fullmatch(WITHOUT_GRADIENT, layer)]


def left_out(targets: str | Sequence[str], layers: Iterable[str]) -> list[str]:
    """Return the layers that `target_modules` mean and that get no LoRA; arguments as for `refusal`."""
    return [layer for layer in without_gradient(layers) if _is_target(layer, targets)]


def refusal(targets: str | Sequence[str], layers: Iterable[str]) -> ModelError | None:
    """Return the error if one of `target_modules` means such layers alone; None if each has a layer that learns.

    Args:
        targets: 'all-linear', a regular expression, or the ends of names, as PEFT takes them.
        layers: The names of all layers that could get LoRA.
    """
    names = [*layers]
    unlearned = {*without_gradient(names)}
    for target in [targets] if isinstance(targets, str) else [[name] for name in targets]:
        matched = [name for name in names if _is_target(name, target)]
        if target != "all-linear" and matched and unlearned.issuperset(matched):
            shown = target if isinstance(target, str) else target[0]
            problem = f"LoRA on {shown!r} would not learn: no gradient reaches {matched[0]!r}"
            fix = f"Remove it, or use {Key('target_modules', 'all-linear')}, which leaves such layers out."
            return ModelError(problem, where="adapter.target_modules", fix=fix)
    return None


def _is_target(layer: str, targets: str | Sequence[str]) -> bool:
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, layer) is not None
    return any(f".{layer}".endswith(f".{name}") for name in targets)
