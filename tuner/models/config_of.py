"""A config of transformers from an architecture's keys; AutoModelForCausalLM builds a model of random weights from it.

It builds none.
"""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

import tuner.models  # noqa: F401  registers internlm, internlm2
from tuner.recipes.architecture import Architecture

_TOKENS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
"""Inside every vocabulary: a padding token is a row of the embeddings."""


def config_of(facts: Architecture) -> PreTrainedConfig:
    """Return the config of the model.

    Raises:
        ValueError: transformers has no such model_type.
    """
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # no remarks on rope factors, which small made configs do not match
    try:
        config: PreTrainedConfig = AutoConfig.for_model(**facts.model_dump(), **_TOKENS)
    finally:
        logging.set_verbosity(level)
    return config
