"""The optimizers by their names in `optim_wrapper.optimizer.type`: all that depends on which one it is.

A new one is a row here. Its name stands elsewhere only where a rule is about this one alone, such as Muon's two rates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

Library = Literal["torch", "bitsandbytes", "DeepSpeed"]


class OptimizerFacts(NamedTuple):
    """One optimizer.

    Args:
        library: Who makes it. torch and bitsandbytes have a class of its name.
        state_bytes: Of its own state for one trained parameter, beside the master copy.
        of_deepspeed: The name in DeepSpeed's config of one that DeepSpeed makes.
        on_cpu: Whether it runs without a GPU: always, where the optimizer is offloaded, or never.
        has_betas: Its update has decay rates of running means.
        has_eps: Its update has a small number that it divides by.
        decays_gradient: Weight decay is added to the gradient (L2). Otherwise it is decoupled, and no state sees it.
        sees_matrices: Its update looks at a whole matrix, which ranks that split layers do not have.
        is_redistributed: DeepSpeed 0.19.8's ds_to_universal moves its states (exp_avg, exp_avg_sq and step) to another
            number of ranks.
    """

    library: Library
    state_bytes: int = 8
    of_deepspeed: str | None = None
    on_cpu: Literal["always", "offloaded", "never"] = "always"
    has_betas: bool = True
    has_eps: bool = True
    decays_gradient: bool = False
    sees_matrices: bool = False
    is_redistributed: bool = False


OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    "AdamW": OptimizerFacts("torch", is_redistributed=True),
    "Adam": OptimizerFacts("torch", decays_gradient=True, is_redistributed=True),
    "NAdam": OptimizerFacts("torch", decays_gradient=True),
    "RAdam": OptimizerFacts("torch", decays_gradient=True, is_redistributed=True),
    "Adamax": OptimizerFacts("torch", decays_gradient=True),
    "SGD": OptimizerFacts("torch", state_bytes=0, has_betas=False, has_eps=False, decays_gradient=True),
    "RMSprop": OptimizerFacts("torch", state_bytes=4, has_betas=False, decays_gradient=True),
    "Adadelta": OptimizerFacts("torch", has_betas=False, decays_gradient=True),
    "AdamW8bit": OptimizerFacts("bitsandbytes", state_bytes=2),
    "PagedAdamW8bit": OptimizerFacts("bitsandbytes", state_bytes=2),
    "PagedAdamW32bit": OptimizerFacts("bitsandbytes"),
    "AdEMAMix": OptimizerFacts("bitsandbytes", state_bytes=12),
    "FusedAdam": OptimizerFacts("DeepSpeed", of_deepspeed="AdamW", on_cpu="never"),
    "Lamb": OptimizerFacts("DeepSpeed", of_deepspeed="Lamb", on_cpu="never", sees_matrices=True),
    "Lion": OptimizerFacts("DeepSpeed", state_bytes=4, of_deepspeed="Lion", on_cpu="offloaded", has_eps=False),
    # It has one moment, and DeepSpeed 0.19.8 keeps a second copy of it, to step back to, at stages 1 and 2.
    "Muon": OptimizerFacts("DeepSpeed", of_deepspeed="Muon", sees_matrices=True),
}
REMOVED = ("onebitadam", "zerooneadam", "onebitlamb", "onebitsgd")
"""Optimizers that DeepSpeed 0.19.7 removed, in lower case, as DeepSpeed compares names."""
_SEES_SHAPES = "it needs the shape of each matrix, and a rank of ZeRO updates a flat shard of many"
_UNSUITED = {
    # optimi and timm: lr / max(1, sqrt(mean(g^2 / v))), a mean over each tensor (arXiv 2304.13013, section 3.4).
    "stableadamw": "it slows each tensor down by a mean over it, and a rank of ZeRO updates a flat shard of many",
    "adafactor": _SEES_SHAPES,
    "galore": _SEES_SHAPES,
    "apollo": _SEES_SHAPES,
    "adammini": _SEES_SHAPES,
    "shampoo": _SEES_SHAPES,
    "soap": _SEES_SHAPES,
    "adagrad": "DeepSpeed 0.19.8 fails to begin with it at ZeRO 1 to 3",
    "lomo": "it updates weights inside the backward pass, which is DeepSpeed's",
    "schedulefree": "it swaps the weights for a validation and a save, and at ZeRO 1 to 3 not those of the model",
}
"""A part of an optimizer's name, as `unsuited` compares it -> why ZeRO does not suit it."""


def unsuited(name: object) -> str | None:
    """Return why an optimizer, by its class or by transformers' word, is wrong with ZeRO; None for others."""
    word = re.sub(r"[\W_]", "", str(name).lower())
    return next((why for part, why in _UNSUITED.items() if part in word), None)
