"""InternLM 1, 2 and 3 as transformers' own Llama, without remote code: configs, tokenizers, InternLM2's weights.

It defines no layer: only the format of the published files differs from Llama's.

Shapes: G key-value groups, Q queries per group, D head_dim, H hidden_size.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from torch import Tensor
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
    PretrainedConfig,
    TokenizersBackend,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.convert_slow_tokenizer import SentencePieceExtractor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming

from tuner.errors import ModelError
from tuner.files import JsonObject

_FOR_REMOTE_CODE = ("auto_map", "attn_implementation")
_HEADS = (
    (AutoModel, LlamaModel),
    (AutoModelForCausalLM, LlamaForCausalLM),
    (AutoModelForSequenceClassification, LlamaForSequenceClassification),
)
_ROTARY = {"base": 10000, "type": "dynamic"}
"""The publisher's default if config.json has no `rotary`, as in the first models."""
_USER_DEFINED = 4
"""SentencePiece.Type.USER_DEFINED, sentencepiece_model.proto."""
_Tensors = dict[str, Tensor | list[Tensor]]
_QKV = ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"]


@strict
class PublishedConfig(LlamaConfig):  # type: ignore[misc]
    """A published config.json, read without the keys for the publisher's code."""

    @classmethod
    def from_dict(cls, config_dict: JsonObject, **kwargs: object) -> PublishedConfig:
        """Return the config of a published config.json; `kwargs` win, as in transformers.

        Two of its keys are only for the publisher's code: auto_map, which would point to missing files after
        save_pretrained, and attn_implementation, which is 'eager' and would replace the default, SDPA.
        """
        values = {key: value for key, value in config_dict.items() if key not in _FOR_REMOTE_CODE}
        config: PublishedConfig = super().from_dict(values, **kwargs)
        return config


def published_rope(config_json: JsonObject, key: str) -> JsonObject:
    """Return `rope_theta` and `rope_scaling` for the rope_parameters of a config; `key` names the kind of scaling.

    Readers of the published format use 10,000 if rope_theta is missing.
    """
    rope = {
        name: value
        for name, value in (config_json["rope_parameters"] or {}).items()
        if name not in ("type", "rope_type")
    }
    kind = (config_json["rope_parameters"] or {}).get("rope_type", "default")
    theta = rope.pop("rope_theta", None)
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else rope | {key: kind}}


def register(config: type[PublishedConfig], tokenizer: type[TokenizersBackend]) -> None:
    """Register a config, and Llama's classes under its name, with the Auto classes, so that its conversion is used."""
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoTokenizer.register(config, tokenizer_class=tokenizer, exist_ok=True)
    name = config.__name__.removesuffix("Config")
    for auto, llama in _HEADS:
        model_class = type(llama.__name__.replace("Llama", name), (llama,), {"config_class": config})
        auto.register(config, model_class, exist_ok=True)


@strict
class InternLM2Config(PublishedConfig):
    """The published config.json under `model_type: internlm2`.

    Raises:
        ModelError: `bias` is true; no published InternLM2 has biases.
    """

    model_type = "internlm2"

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.pop("bias", False):
            raise ModelError(
                "an InternLM2 with bias = true is not supported",
                where="config.json",
                fix="Use a published InternLM2: its config.json has bias = false.",
            )
        super().__post_init__(**kwargs)

    def to_dict(self) -> JsonObject:
        """Return the config with the publisher's keys; readers of the published format read a missing bias as true."""
        config_json: JsonObject = super().to_dict()
        return config_json | published_rope(config_json, "type") | {"bias": False}


class SplitGroups(ConversionOps):  # type: ignore[misc]
    """One wqkv of shape [G * (Q + 2) * D, H] -> the q, k and v projections, [G * Q * D, H] and twice [G * D, H]."""

    def convert(
        self, input_dict: _Tensors, *, target_patterns: list[str], config: PretrainedConfig, **_: object
    ) -> dict[str, Tensor]:
        (fused,) = (_only(value) for value in input_dict.values())
        groups, queries, dim = _layout(config)
        wqkv_GQDH = fused.view(groups, queries + 2, dim, -1)
        parts = wqkv_GQDH[:, :queries], wqkv_GQDH[:, -2], wqkv_GQDH[:, -1]
        flat = (part.reshape(-1, fused.shape[-1]).contiguous() for part in parts)
        return dict(zip(target_patterns, flat, strict=True))

    @property
    def reverse_op(self) -> ConversionOps:
        return FuseGroups()


class FuseGroups(ConversionOps):  # type: ignore[misc]
    """The inverse of `SplitGroups`, for save_pretrained.

    Raises:
        ModelError: the projections are quantized to 4 or 8 bits; such blocks cross the groups.
    """

    def convert(
        self,
        input_dict: _Tensors,
        *,
        source_patterns: list[str],
        target_patterns: list[str],
        config: PretrainedConfig,
        **kwargs: object,
    ) -> dict[str, Tensor]:
        groups, _, dim = _layout(config)
        parts = [_only(input_dict[pattern]) for pattern in source_patterns]
        hidden = parts[0].shape[-1]
        if hidden != config.hidden_size:
            raise ModelError(
                "quantized InternLM2 weights have no published layout",
                where="save_pretrained",
                fix="Save only the adapter, or pass save_original_format=False.",
            )
        fused = torch.cat([part.view(groups, -1, dim, hidden) for part in parts], dim=1)
        return {target_patterns[0]: fused.reshape(-1, hidden)}

    @property
    def reverse_op(self) -> ConversionOps:
        return SplitGroups()


def _layout(config: PretrainedConfig) -> tuple[int, int, int]:
    """Return G, Q and D."""
    groups = config.num_key_value_heads
    return groups, config.num_attention_heads // groups, config.head_dim


def _only(value: Tensor | list[Tensor]) -> Tensor:
    return value[0] if isinstance(value, list) else value


class InternLM2Tokenizer(TokenizersBackend):  # type: ignore[misc]
    """The published tokenizer: tokenizer.json if the folder has one, otherwise tokenizer.model, converted.

    It has no __init__: transformers reads tokenizer.json unchanged only for classes without one.
    """

    @classmethod
    def convert_to_native_format(cls, trust_remote_code: bool = False, **kwargs: str) -> JsonObject:
        """Return the arguments of __init__; the publisher's class adds the beginning-of-sequence token by default."""
        native: JsonObject = super().convert_to_native_format(trust_remote_code, **kwargs)
        # As in PublishedConfig: save_pretrained does not write the files that it names.
        native.pop("auto_map", None)
        if "tokenizer_object" in native:
            native.setdefault("add_bos_token", True)
            # The model's own names of the special tokens; added again, they would get ids past the embedding.
            native.pop("additional_special_tokens", None)
            _finish(native["tokenizer_object"], SentencePieceExtractor(kwargs["vocab_file"]).proto)
        return native


def _finish(tokenizer: Tokenizer, proto: Any) -> None:
    """Add what transformers leaves out of a sentencepiece model: whole symbols, and the space before the text."""
    vocab = tokenizer.get_vocab()
    symbols = [piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED and piece.piece in vocab]
    tokenizer.add_tokens([AddedToken(symbol, normalized=False, special=False) for symbol in symbols])
    if proto.normalizer_spec.add_dummy_prefix and tokenizer.pre_tokenizer is None:  # transformers 5.24 adds one itself
        # Not Llama's Metaspace pre-tokenizer: it adds no space if the text begins with one.
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), tokenizer.normalizer])
        tokenizer.decoder = decoders.Sequence([tokenizer.decoder, decoders.Strip(" ", left=1)])


def _weight_map() -> list[WeightRenaming | WeightConverter]:
    return [
        WeightRenaming("tok_embeddings", "embed_tokens"),
        WeightRenaming("attention.wo", "self_attn.o_proj"),
        WeightRenaming("feed_forward.w1", "mlp.gate_proj"),
        WeightRenaming("feed_forward.w3", "mlp.up_proj"),
        WeightRenaming("feed_forward.w2", "mlp.down_proj"),
        WeightRenaming("attention_norm", "input_layernorm"),
        WeightRenaming("ffn_norm", "post_attention_layernorm"),
        WeightRenaming(r"^output\.", "lm_head."),
        WeightConverter("attention.wqkv.weight", list(_QKV), [SplitGroups()]),
    ]


def as_llama(config: LlamaConfig) -> LlamaConfig:
    """Return the config of an InternLM as that of a Llama, which transformers knows by itself."""
    return LlamaConfig(**{key: value for key, value in LlamaConfig.to_dict(config).items() if key != "model_type"})


def llama_weights(name: str, weight: Tensor, config: PretrainedConfig) -> dict[str, Tensor]:
    """Return a published weight of an InternLM under Llama's names; that of queries, keys and values becomes three."""
    if config.model_type != InternLM2Config.model_type:
        return {name: weight}
    for entry in _weight_map():
        name, pattern = entry.rename_source_key(name)
        if pattern and isinstance(entry, WeightConverter):
            names = [name.replace(_QKV[0], target) for target in _QKV]
            parts: dict[str, Tensor] = SplitGroups().convert({pattern: weight}, target_patterns=names, config=config)
            return parts
    return {name: weight}


@strict
class InternLMConfig(PublishedConfig):
    """InternLM 1's config.json: `bias` belongs to q, k, v and o; `rotary` describes the rotary embedding."""

    model_type = "internlm"
    attribute_map: ClassVar[dict[str, str]] = {"bias": "attention_bias"}
    attention_bias: bool = True
    rope_parameters: JsonObject | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        rotary = _ROTARY | (kwargs.pop("rotary", None) or {})
        rope = {"rope_type": "default", "rope_theta": float(rotary["base"])}
        if rotary["type"] == "dynamic":
            rope |= {"rope_type": "dynamic", "factor": float(rotary.get("scaling_factor", 1.0))}
        self.rope_parameters = self.rope_parameters or rope
        super().__post_init__(**kwargs)

    def to_dict(self) -> JsonObject:
        """Return the config with the publisher's keys beside transformers' own."""
        config_json: JsonObject = super().to_dict()
        rope = config_json["rope_parameters"]
        rotary = {"base": rope["rope_theta"], "type": "origin"}
        if rope["rope_type"] == "dynamic":
            rotary |= {"type": "dynamic", "scaling_factor": rope["factor"]}
        return config_json | {"bias": self.attention_bias, "rotary": rotary}


@strict
class InternLM3Config(PublishedConfig):
    """InternLM3's config.json: `qkv_bias` belongs to q, k and v, `bias` to every other projection.

    transformers' own class drops both keys when it saves.

    Raises:
        ModelError: only one of the two is true; Llama does not support that, and no published InternLM3 has it.
    """

    model_type = "internlm3"
    attribute_map: ClassVar[dict[str, str]] = {"qkv_bias": "attention_bias", "bias": "mlp_bias"}

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # sets what attribute_map renames
        if self.attention_bias != self.mlp_bias:
            raise ModelError(
                f"an InternLM3 with qkv_bias = {self.attention_bias} and bias = {self.mlp_bias} is not supported",
                where="config.json",
                fix="Use a published InternLM3, where both are false.",
            )

    def to_dict(self) -> JsonObject:
        """Return the config with the publisher's keys beside transformers' own."""
        config_json: JsonObject = super().to_dict()
        biases = {"qkv_bias": self.attention_bias, "bias": self.mlp_bias}
        return config_json | published_rope(config_json, "rope_type") | biases


class InternLMTokenizer(InternLM2Tokenizer):
    """InternLM2's tokenizer under the name in the files of InternLM 1: transformers looks up the class by that name."""


class InternLM3Tokenizer(InternLM2Tokenizer):
    """InternLM2's tokenizer under the name in the files of InternLM3."""


register(InternLMConfig, InternLMTokenizer)
register(InternLM3Config, InternLM3Tokenizer)
register(InternLM2Config, InternLM2Tokenizer)
register_checkpoint_conversion_mapping(InternLM2Config.model_type, _weight_map())
