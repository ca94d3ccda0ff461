"""What transformers builds from our facts: a model on the meta device, its size."""

from __future__ import annotations

from functools import cache

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from tuner.lab.shrink import config_of
from tuner.recipes.schema.architecture import Architecture


@cache
def built(facts: Architecture) -> int:
    """Return the parameters of the model that AutoModelForCausalLM builds from these facts; tied ones count once."""
    return sum(parameter.numel() for parameter in on_meta(facts).parameters())


def on_meta(facts: Architecture) -> PreTrainedModel:
    """Return the model without memory for its weights."""
    with torch.device("meta"), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(facts))
    model.tie_weights()
    return model
