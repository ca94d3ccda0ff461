"""The adapter that TRL's trainers of preferences put beside the trained one, as the model that it is compared with.

It computes nothing.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from peft import PeftModel

from tuner.recipes import paths
from tuner.recipes.schema import RecipeConfig


def fit_adapters(model: Any, wanted: torch.dtype, config: RecipeConfig, *, judges: bool = False) -> None:
    """Make TRL's reference adapter what training began with, and give the trained weights the compute type.

    Args:
        model: The one of the trainer.
        wanted: The compute type.
        config: The recipe.
        judges: The model is trained already, and TRL's copy is of the trained adapter.
    """
    began = config.adapter.path if config.adapter else None
    if isinstance(model, PeftModel) and "ref" in model.peft_config:
        if judges or not began:
            # TRL's copy of the new adapter, which does nothing yet: the base model alone is the same reference. It
            # would take memory, and be saved with the result.
            model.delete_adapter("ref")
        if judges and began:
            model.load_adapter(str(paths.expanded(began)), "ref", autocast_adapter_dtype=False)
        if not judges and began:
            # The copy is of no use to who loads a checkpoint or the result.
            model.save_pretrained = partial(model.save_pretrained, selected_adapters=["default"])
    for parameter in model.parameters():
        # TRL makes the adapters of a quantized model bf16 whatever the run's compute type is.
        if parameter.requires_grad and parameter.dtype == torch.bfloat16 != wanted:
            parameter.data = parameter.data.to(wanted)
