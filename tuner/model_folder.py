"""What may be in a model's folder: regular files of a bounded size, and JSON with the types that libraries count on.

Whoever loads a model, and every check before a run, asks here once: a library that meets another type fails somewhere
deep inside. It knows nothing of what the values mean.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from tuner import paths
from tuner.errors import ModelError, Option, brief_repr
from tuner.files import MAX_BYTES, JsonObject, open_regular, read_json_object, read_text

_TEXTS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe", ".py")
_TEMPLATES = "additional_chat_templates/*"
_OTHER_MODEL = "audio_tokenizer"

MAX_LAYERS = 10_000
"""Layers are counted one by one; the deepest published decoder has 126."""
Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]
Width = Annotated[int, Field(gt=0, le=2**31 - 1)]
Widths = Width | list[Width | None] | None
Ids = Annotated[int, Field(ge=-1)]
Object = dict[str, JsonValue]


def _name_of_type(value: str) -> str:
    if not re.fullmatch(r"\w*(float|half|double|int)\w*", value):
        raise ValueError("should be the name of a type in torch, such as 'bfloat16'")
    return value


Type = Annotated[str, AfterValidator(_name_of_type)]


class _Json(BaseModel):
    model_config = ConfigDict(strict=True, allow_inf_nan=False, defer_build=True)


class _Quantization(_Json):
    quant_method: str | None = None


class _Config(_Json):
    """The keys of config.json and of the halves in it that are sizes, or are read before a class is known."""

    model_type: str | None = None
    architectures: list[str] | None = None
    auto_map: Object | None = None
    num_hidden_layers: Layers | list[Layers] | Object | None = None  # LXMERT has three kinds
    n_layer: Layers | None = None
    depth: Layers | list[Layers] | None = None
    hidden_size: Widths = None
    n_embd: Width | None = None
    intermediate_size: Widths = None
    num_attention_heads: Widths = None
    n_head: Width | None = None
    num_key_value_heads: Widths = None
    v_head_dim: Width | None = None
    head_dim: Annotated[int, Field(ge=0, le=2**31 - 1)] | None = None
    vocab_size: Width | None = None
    max_position_embeddings: Width | Annotated[float, Field(gt=0)] | None = None
    bos_token_id: Ids | list[Ids] | None = None
    eos_token_id: Ids | list[Ids] | None = None
    pad_token_id: Ids | list[Ids] | None = None
    tie_word_embeddings: bool | None = None
    layer_types: list[str] | None = None
    rope_scaling: Object | None = None
    rope_parameters: Object | None = None
    per_layer_config: dict[str, Object] | None = None
    id2label: Object | None = None
    torch_dtype: Type | Object | None = None
    dtype: Type | Object | None = None
    quantization_config: _Quantization | None = None
    text_config: _Config | None = None
    vision_config: _Config | None = None
    audio_config: _Config | None = None

    @field_validator("head_dim")
    @classmethod
    def _heads_have_a_width(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value == 0 and info.data.get("v_head_dim") is None:  # GLM 5 has 0, and other widths
            raise ValueError("should be greater than 0")
        return value


class _Generation(_Json):
    bos_token_id: Ids | list[Ids] | None = None
    eos_token_id: Ids | list[Ids] | None = None
    pad_token_id: Ids | list[Ids] | None = None
    do_sample: bool | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_k: int | None = None  # -1: vLLM's word for all
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0)] | None = None
    max_length: int | None = None
    max_new_tokens: int | None = None
    min_length: int | None = None
    min_new_tokens: int | None = None
    stop_strings: str | list[str] | None = None
    suppress_tokens: list[int] | None = None
    begin_suppress_tokens: list[int] | None = None
    bad_words_ids: list[list[int]] | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | list[int] | None = None
    sequence_bias: Object | list[JsonValue] | None = None
    cache_implementation: str | None = None
    watermarking_config: Object | None = None


class _Template(_Json):
    name: str
    template: str


Token = str | Object | None


class _Tokenizer(_Json):
    tokenizer_class: str | None = None
    chat_template: str | list[_Template] | dict[str, str] | None = None
    auto_map: Object | list[str | None] | None = None
    model_max_length: float | None = None
    added_tokens_decoder: dict[str, Object] | None = None
    additional_special_tokens: list[str | Object] | None = None
    extra_special_tokens: Object | list[str | Object] | None = None
    bos_token: Token = None
    eos_token: Token = None
    pad_token: Token = None
    unk_token: Token = None


class _Adapter(_Json):
    peft_type: str | None = None
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: Width | None = None
    lora_alpha: float | None = None
    lora_dropout: float | None = None
    target_modules: str | list[str] | None = None
    modules_to_save: list[str] | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    auto_mapping: Object | None = None


_KINDS: dict[str, type[_Json]] = {
    "config.json": _Config,
    "generation_config.json": _Generation,
    "tokenizer_config.json": _Tokenizer,
    "adapter_config.json": _Adapter,
    "processor_config.json": _Json,
    "preprocessor_config.json": _Json,
    "special_tokens_map.json": _Json,
    "added_tokens.json": _Json,
}


def problem_of(folder: Path) -> str | None:
    """Return what no library may read in a model's folder, in one sentence without its end, or None."""
    return _no_regular_file(folder) or _other_model(folder) or _other_index(folder) or _wrong_json(folder)


UNPACKED = ("fp8", "mxfp4")
"""Formats of weights that transformers turns into 16 bits while it loads them."""
PUBLISHED_IN = {
    # huggingface.co/docs/transformers/quantization/mxfp4: these two alone, and what their config.json says.
    **dict.fromkeys(("openai/gpt-oss-20b", "openai/gpt-oss-120b"), "mxfp4"),
    # github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md; transformers has its "fp8" for V3 and R1 (docs, as above).
    **dict.fromkeys(("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-R1"), "fp8"),
    # The cards of what others made of it: huggingface.co/eousphoros/DeepSeek-V3.2-NVFP4, "converts the original FP8".
    "deepseek-ai/DeepSeek-V3.2": "fp8",
    # From memory.
    **{f"deepseek-ai/DeepSeek-{name}": "fp8" for name in ("V3-0324", "V3.1", "V3.2-Exp", "R1-0528")},
    # docs.vllm.ai, vllm.models.deepseek_v4.quant_config: FP8 in all checkpoints; experts too in this one.
    "deepseek-ai/DeepSeek-V4-Flash-Base": "fp8",
    # docs.vllm.ai/projects/recipes, Mistral/Ministral-3-Instruct: FP8 weights in three sizes.
    **{f"mistralai/Ministral-3-{size}-Instruct-2512": "fp8" for size in ("3B", "8B", "14B")},
    # recipes.vllm.ai/mistralai/Mistral-Small-4-119B-2603: "pre-quantized to FP8".
    "mistralai/Mistral-Small-4-119B-2603": "fp8",
    # huggingface.co/MiniMaxAI/MiniMax-M2, config.json.
    "MiniMaxAI/MiniMax-M2": "fp8",
    # docs.vllm.ai/projects/recipes, moonshotai/Kimi-K2; docs/deploy_guidance.md of github.com/MoonshotAI/Kimi-K2.
    "moonshotai/Kimi-K2-Instruct": "fp8",
    # docs.vllm.ai/projects/llm-compressor, kimi-k26: "4-bit integer weights", read by its CompressedTensorsDequantizer.
    "moonshotai/Kimi-K2.6": "compressed-tensors",
}
"""Models on the hub -> `quant_method` in their config.json, for who asks before it is here. Above each: its source."""


def stored_as(quantization: object) -> str | None:
    """Return the format of weights in fewer than 16 bits by config.json's `quantization_config`; None: 16 or more."""
    if not isinstance(quantization, dict):
        return None
    old = quantization.get("load_in_4bit") or quantization.get("load_in_8bit")  # before there was a quant_method
    return quantization.get("quant_method") or ("bitsandbytes" if old else None)


def refusal_of_stored(path: str, method: str | None, *, quantizes: bool, adapts: bool) -> ModelError | None:
    """Return an error if weights that are stored in fewer than 16 bits cannot be trained.

    Args:
        path: The model's.
        method: The result of `stored_as`.
        quantizes: The recipe quantizes the weights itself.
        adapts: The recipe trains an adapter on them.
    """
    if method is None or (method in UNPACKED and not quantizes):
        return None
    if quantizes:
        message = f"the weights of {path!r} are already stored in {method} and cannot be quantized again"
        return ModelError(message, where="quantization", fix="Use the method lora, or a 16-bit copy of the model.")
    if not adapts:
        message = f"the weights of {path!r} are stored in {method} and cannot be trained"
        return ModelError(message, where="model.path", fix="Use the method lora, or a 16-bit copy of the model.")
    return None


def beside_adapter(path: str) -> ModelError:
    """Return the error for a model with an adapter_config.json: libraries load that one's base, and not its weights."""
    message = f"{path!r} holds a whole model and {paths.ADAPTER}, for which libraries load another model: its base"
    adapter = f"{Option('model', 'BASE')} {Option('adapter', path)}"
    fix = f"Remove {paths.ADAPTER} if the adapter is merged into the weights; to train the adapter on: {adapter}."
    return ModelError(message, where="model.path", fix=fix)


def config_of(place: Path) -> JsonObject:
    """Return the config.json of a model's folder, or in this file; empty if it is missing or not a JSON object.

    Raises:
        ModelError: a value in it is of another type, or out of range.
    """
    file = place if paths.is_file(place) else place / "config.json"
    config = read_json_object(file)
    try:
        _Config.model_validate(config)
    except ValidationError as error:
        raise ModelError(_first(error, config), where=file, fix="Download or copy the model again.") from None
    return config


def _no_regular_file(folder: Path) -> str | None:
    try:
        for file in sorted((*folder.iterdir(), *folder.glob(_TEMPLATES))):
            if file.suffix in _TEXTS and not file.is_dir():
                with open_regular(file) as stream:
                    if os.fstat(stream.fileno()).st_size > MAX_BYTES:
                        return f"{file} is larger than {MAX_BYTES:,} bytes"
            elif file.exists() and not (file.is_file() or file.is_dir()):
                return f"{file} is not a regular file"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    return None


def _other_model(folder: Path) -> str | None:
    """Return which processor names another model.

    transformers loads any class from any place for it, and asks the terminal about its code.
    """
    for name in ("processor_config.json", "preprocessor_config.json"):
        if _OTHER_MODEL in read_json_object(folder / name):
            return f"{folder / name} names another model ({_OTHER_MODEL}), which images and text do not need"
    if (file := folder / f"{_OTHER_MODEL}_config.json").exists():
        return f"{file} names another model, which images and text do not need"
    return None


def _other_index(folder: Path) -> str | None:
    """Return what an index of safetensors names beside safetensors of the folder: transformers loads it as a pickle."""
    for file in folder.glob("*.safetensors.index.json"):
        weight_map = read_json_object(file).get("weight_map")
        for name in weight_map.values() if isinstance(weight_map, dict) else ():
            if not (isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name):
                return f"{file} names {brief_repr(name)}, which is no *.safetensors file of the folder"
    return None


def _wrong_json(folder: Path) -> str | None:
    for name, kind in _KINDS.items():
        file = folder / name
        if not file.is_file():
            continue
        try:
            value: Any = json.loads(read_text(file))
        except (OSError, ValueError, RecursionError) as error:
            reason = "it is nested too deep" if isinstance(error, RecursionError) else error
            return f"{str(file)!r} is not a JSON object: {reason}"
        if not isinstance(value, dict):
            return f"{str(file)!r} is not a JSON object"
        try:
            kind.model_validate(value)
        except ValidationError as error:
            return f"{file}: {_first(error, value)}"
    return None


def _first(error: ValidationError, value: Any) -> str:
    """Return the first key with a wrong value, the value and what it should be."""
    details = error.errors(include_url=False, include_context=False)
    # Of the branches of a union, what is said about the first one; its name is no part of the place.
    place, inner = [], value
    for key in details[0]["loc"]:
        if isinstance(inner, dict | list) and (key in inner if isinstance(inner, dict) else isinstance(key, int)):
            place.append(str(key))
            inner = inner[key]  # type: ignore[index]
    reason = details[0]["msg"][:1].lower() + details[0]["msg"][1:]
    return f"{'.'.join(place)} = {brief_repr(inner)}: {reason}"
