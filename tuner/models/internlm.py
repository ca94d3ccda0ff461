"""InternLM 1 and InternLM3 as transformers' own Llama: only their config.json differs from Llama's.

It converts no weights: both have Llama's names and layout. InternLM2 has not, and a module of its own.
"""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict

from tuner.errors import ModelError
from tuner.models.as_llama import PublishedConfig, published_rope, register
from tuner.models.internlm2 import InternLM2Tokenizer

_ROTARY = {"base": 10000, "type": "dynamic"}
"""What the publisher's code takes where config.json has no `rotary`, as the first ones have not."""


@strict
class InternLMConfig(PublishedConfig):
    """InternLM 1's config.json: `bias` is of q, k, v and o; `rotary` is the rotary embedding."""

    model_type = "internlm"
    attribute_map: ClassVar[dict[str, str]] = {"bias": "attention_bias"}
    attention_bias: bool = True
    rope_parameters: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        rotary = _ROTARY | (kwargs.pop("rotary", None) or {})
        self.rope_parameters = self.rope_parameters or _rope(rotary)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Return the config with the publisher's keys beside transformers' own."""
        facts: dict[str, Any] = super().to_dict()
        rope = facts["rope_parameters"]
        rotary = {"base": rope["rope_theta"], "type": "origin"}
        if rope["rope_type"] == "dynamic":
            rotary |= {"type": "dynamic", "scaling_factor": rope["factor"]}
        return facts | {"bias": self.attention_bias, "rotary": rotary}


def _rope(rotary: dict[str, Any]) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": float(rotary["base"])}
    if rotary["type"] == "dynamic":
        rope |= {"rope_type": "dynamic", "factor": float(rotary.get("scaling_factor", 1.0))}
    return rope


@strict
class InternLM3Config(PublishedConfig):
    """InternLM3's config.json: `qkv_bias` is of q, k and v, `bias` of every other projection.

    transformers 5.18 has no InternLM3; later ones have, but drop both keys when they save.

    Raises:
        ModelError: only one of the two is true, which Llama cannot do and no published InternLM3 does.
    """

    model_type = "internlm3"
    attribute_map: ClassVar[dict[str, str]] = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # sets what attribute_map renames
        if self.attention_bias != self.mlp_bias:
            raise ModelError(
                f"an InternLM3 with qkv_bias = {self.attention_bias} and bias = {self.mlp_bias} is not supported",
                where="config.json",
                fix="Take a published InternLM3, where both are false.",
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the config with the publisher's keys beside transformers' own."""
        facts: dict[str, Any] = super().to_dict()
        biases = {"qkv_bias": self.attention_bias, "bias": self.mlp_bias}
        return facts | published_rope(facts, "rope_type") | biases


class InternLMTokenizer(InternLM2Tokenizer):
    """InternLM2's, under the name in the files of InternLM 1: transformers looks a class up by that name."""


class InternLM3Tokenizer(InternLM2Tokenizer):
    """InternLM2's, under the name in the files of InternLM3."""


register(InternLMConfig, InternLMTokenizer)
register(InternLM3Config, InternLM3Tokenizer)
