"""Models that are transformers' own Llama under another name: their config.json, and how Auto classes learn of them.

It knows no model by name, and defines no layer.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    TokenizersBackend,
)

_FOR_REMOTE_CODE = ("auto_map", "attn_implementation")
_HEADS = (
    (AutoModel, LlamaModel),
    (AutoModelForCausalLM, LlamaForCausalLM),
    (AutoModelForSequenceClassification, LlamaForSequenceClassification),
)


@strict
class PublishedConfig(LlamaConfig):  # type: ignore[misc]
    """A published config.json, read without what is for the publisher's code."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> PublishedConfig:
        """Return the config of a published config.json; `kwargs` win, as in transformers.

        Two of its keys are for the publisher's code only: auto_map, which would dangle after save_pretrained, and
        attn_implementation, which says 'eager' and would take SDPA away from everyone who asks for nothing.
        """
        facts = {key: value for key, value in config_dict.items() if key not in _FOR_REMOTE_CODE}
        config: PublishedConfig = super().from_dict(facts, **kwargs)
        return config


def published_rope(facts: dict[str, Any], key: str) -> dict[str, Any]:
    """Return `rope_theta` and `rope_scaling` for the rope_parameters of a config; `key` names the kind of scaling.

    Readers of the published format take a missing rope_theta as 10,000.
    """
    rope = {
        name: value for name, value in (facts["rope_parameters"] or {}).items() if name not in ("type", "rope_type")
    }
    kind = (facts["rope_parameters"] or {}).get("rope_type", "default")
    theta = rope.pop("rope_theta", None)
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope | {key: kind}}


def register(config: type[PublishedConfig], tokenizer: type[TokenizersBackend]) -> None:
    """Register a config with the Auto classes: Llama's classes under its name, so that its files get its conversion."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoTokenizer.register(config, tokenizer_class=tokenizer, exist_ok=True)
    name = config.__name__.removesuffix("Config")
    for auto, llama in _HEADS:
        own = type(llama.__name__.replace("Llama", name), (llama,), {"config_class": config})
        auto.register(config, own, exist_ok=True)
