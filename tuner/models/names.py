"""Parts of a model under the names by which TRL's loss looks for them, where transformers gives them others."""

from __future__ import annotations

from typing import Any

_BACKBONE = "model"


def name_parts(model: Any) -> None:
    """Let TRL 1.16 find the layers below the head, and the number of experts for the loss that balances them.

    In transformers 5.23 Llama 4's class names a prefix that is another class's, and Granite's configs call their
    experts local ones, for which others (Mixtral's) keep the usual name too.
    """
    if model.base_model is model and hasattr(model, _BACKBONE):
        model.base_model_prefix = _BACKBONE
    config = model.config.get_text_config()
    if hasattr(config, "num_local_experts") and not hasattr(config, "num_experts"):
        kind = type(config)
        kind.attribute_map = {**kind.attribute_map, "num_experts": "num_local_experts"}
