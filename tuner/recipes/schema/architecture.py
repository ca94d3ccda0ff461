"""The block `architecture` of a recipe: what a model consists of, in the keys of its own config.json.

Model families name some keys differently. `Architecture` keeps the keys as they are written, so that transformers can
build the model, and adds the common names, so that `fit` can count. It counts nothing and opens no file.
"""

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tuner.files import JsonObject
from tuner.model_folder import MAX_LAYERS, Layers, Width
from tuner.recipes.schema.block import Block, Contradictions, Lax, refuse
from tuner.recipes.schema.measured import Measured

_MOST = 2**31 - 1
LACKS = "lacks_a_key"
"""The type of the validation error for a missing key that the model_type needs."""
NotNegative = Annotated[int, Field(ge=0, le=_MOST)]
Kinds = Annotated[tuple[str, ...], Lax, Field(max_length=MAX_LAYERS)]

_ATTENTION_BIAS = {"attention_bias": True}
_BIASES = {"attention_bias": True, "mlp_bias": True}
_DEFAULTS: dict[str, JsonObject] = {
    "bloom": _BIASES,
    "falcon": {"multi_query": True, "parallel_attn": True},
    "gemma4_text": {"full_attention_interval": 6, "global_head_dim": 512, "enable_moe_block": False},
    "glm": _ATTENTION_BIAS,
    "glm4": _ATTENTION_BIAS,
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "gpt2": _BIASES,
    "gpt_bigcode": {**_BIASES, "multi_query": True},
    "gpt_neox": _BIASES,
    "gpt_oss": _ATTENTION_BIAS,
    "internlm": {"bias": True},
    "opt": {"enable_bias": True},
    "phi": {**_BIASES, "lm_head_bias": True},
    "qwen2": _ATTENTION_BIAS,
    "qwen2_moe": {"qkv_bias": True},
    "qwen3_5_moe_text": {"full_attention_interval": 4},
    "qwen3_5_text": {"full_attention_interval": 4},
    "qwen3_next": {"full_attention_interval": 4},
    "seed_oss": _ATTENTION_BIAS,
    "starcoder2": {"use_bias": True},
}
"""transformers' defaults by model_type, for keys that a config.json may leave out; only those that are not off."""

_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_LINEAR = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
_NEEDS = {
    **dict.fromkeys(
        ("mixtral", "phimoe", "olmoe", "gpt_oss", "granitemoe", "qwen2_moe", "qwen3_moe", "glm4_moe", "llama4_text"),
        _EXPERTS,
    ),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _LATENT + _EXPERTS),
    "gemma3n_text": ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "laurel_rank", "altup_num_inputs"),
    "granitemoeshared": (*_EXPERTS, "shared_expert_intermediate_size"),
    "minicpm3": _LATENT,
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_next"), _LINEAR + _EXPERTS),
    "qwen3_5_text": _LINEAR,
}
_HAVE_EXPERTS = {kind for kind, keys in _NEEDS.items() if "num_experts" in keys} | {"gemma4_text"}
_ATTENTION_BIASES = ("attention_bias", "qkv_bias", "use_qkv_bias", "bias", "use_bias", "enable_bias")
_FOUR_TIMES_HIDDEN = ("bloom", "falcon", "gpt2", "gpt_bigcode")
KEEPS_APART = frozenset(
    (
        *("afmoe", "apertus", "arcee", "bamba", "codegen", "cohere", "cohere2", "cwm", "deepseek_v2", "deepseek_v3"),
        *("dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "falcon_h1", "flex_olmo", "gemma"),
        *("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt2"),
        *("gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid"),
        *("granitemoeshared", "helium", "hunyuan_v1_dense", "internlm", "internlm2", "internlm3", "jamba"),
        *("kimi_linear", "lfm2", "lfm2_moe", "llama", "llama4_text", "minicpm3", "minimax_m2", "ministral"),
        *("ministral3", "mistral", "mixtral", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid"),
        *("olmoe", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_5_moe_text"),
        *("qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2", "zamba2"),
    )
)
"""model_types in which the samples of one row do not see each other, as `models.load` loads them (measured).

In other models a mask ignores position_ids, or a convolution or a state carries one sample into the next, usually
without an error. They get one sample a row, padded unless `VARLEN` keeps them apart.
"""
MIXES = frozenset(
    (
        *("bloom", "deepseek_v32", "deepseek_v4", "falcon_mamba", "glm_moe_dsa", "mamba", "mamba2"),
        *("minimax", "mpt", "opt", "recurrent_gemma"),
    )
)
"""model_types in which they do (measured), or may: an indexer chooses tokens. Of a model_type in neither a trial
decides when a run starts (`lab.isolation`)."""
UNTRIED = "untried"
"""The value of `model.packs_with` until then."""

NOT_BEHIND_PADDING = frozenset(("deepseek_v4", "recurrent_gemma"))
"""model_types that compute a sample otherwise behind padding, as prompts of several lengths are batched (measured)."""

VARLEN = "varlen"
"""The name of `models.attention` as `model.attn_implementation`."""
WITH_VARLEN = KEEPS_APART - {
    *("falcon", "gemma2", "gpt_bigcode", "gpt_neo", "granitemoehybrid", "llama4_text", "persimmon", "phimoe"),
    "qwen2_moe",
}
"""model_types that compute the same with it (measured). The others cap their scores, have chunks or a window in the
mask alone or in the attention alone, tell it no positions, or have an attention of their own."""
KEEPS_IMAGES_APART = frozenset(("internvl", "llava", "llava_next", "smolvlm"))
"""The same for models that read images. Others count the positions of an image's tokens in three dimensions (Qwen-VL),
or let the tokens of an image see each other (Gemma)."""


def is_untried(model_type: str) -> bool:
    """Return whether no test knows if samples of one row see each other in models of this type."""
    return model_type not in KEEPS_APART | MIXES


def may_share_row(model_type: str, image_type: str | None = None, *, varlen: bool = False) -> bool:
    """Return whether several samples may share a row: the model keeps them apart.

    Args:
        model_type: Of the LLM.
        image_type: Of the whole model, in a run that reads images; None in other runs.
        varlen: Whether the attention is `VARLEN`, which fewer models compute the same with.
    """
    keeps_text_apart = model_type in (WITH_VARLEN if varlen else KEEPS_APART)
    return keeps_text_apart and (image_type is None or image_type in KEEPS_IMAGES_APART)


NOT_ON_IMAGES = {
    "llama4": "tuner does not train Llama 4 on images: transformers makes their pixels with torchvision alone, and an "
    "image has tokens of several kinds"
}
"""model_types with a vision tower that are trained on text alone, and why."""


class Tower(BaseModel):
    """What config.json says about the half of a model that reads images. No key of it can be set alone."""

    model_config = ConfigDict(frozen=True, defer_build=True)
    # Of the whole model: 'llava', 'qwen2_5_vl' ...
    model_type: str
    num_hidden_layers: Layers | None = None
    hidden_size: Width | None = None
    intermediate_size: Width | None = None
    num_attention_heads: Width | None = None
    # Pixels of a patch's side.
    patch_size: Width | None = None
    # Pixels of a side of what the tower reads. None: it reads images of any size.
    image_size: Width | None = None
    # Patches that become one token, along each side.
    merge_size: Width = 1
    # Tokens of an image, or of a tile of it. None: they depend on its size.
    num_tokens: Width | None = None
    # Of the part that reads sound, which is loaded and never trained.
    num_parameters_of_sound: NotNegative = 0


class Architecture(Block):
    """What config.json says about the model; for a model that also sees or hears, about its text half.

    `model_dump` gives the keys as they were written; the attributes have transformers' common names (those of its
    attribute_map), worked out where a family has others or leaves them out.

    Raises:
        ValidationError: numbers contradict each other, or a key is missing that the model_type needs.
    """

    model_type: str
    num_hidden_layers: Layers
    hidden_size: Width
    num_attention_heads: Width
    vocab_size: Width
    tie_word_embeddings: bool
    max_position_embeddings: Width

    # 0: worked out from the others. Of a dense layer's MLP; of one expert where every layer holds experts.
    intermediate_size: Width = 0
    num_key_value_heads: Width = 0
    # Of queries and keys; with latent attention qk_nope_head_dim + qk_rope_head_dim.
    head_dim: Width = 0
    attention_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    # Norms on queries and keys of types where only some models have them: cohere, glm4_moe, phi, stablelm.
    use_qk_norm: bool = False
    # stablelm: one norm in a layer instead of two.
    use_parallel_residual: bool = False
    # opt: width of the embeddings where it is not hidden_size; False: no norm after the last layer.
    word_embed_proj_dim: Width | None = None
    do_layer_norm_before: bool = True

    # Experts: the width of one, and of all shared ones together.
    num_experts: NotNegative | None = None
    num_experts_per_tok: Width | None = None
    moe_intermediate_size: Width | None = None
    shared_expert_intermediate_size: NotNegative | None = None
    # Layers without experts: the first ones, the named ones, and all but every decoder_sparse_step-th.
    first_k_dense_replace: NotNegative = 0
    mlp_only_layers: Annotated[tuple[NotNegative, ...], Lax] = ()
    mlp_layer_types: Kinds = ()
    decoder_sparse_step: Width = 1

    # Latent attention (DeepSeek). q_lora_rank None: queries are not compressed.
    q_lora_rank: Width | None = None
    kv_lora_rank: Width | None = None
    qk_nope_head_dim: Width | None = None
    qk_rope_head_dim: Width | None = None
    v_head_dim: Width | None = None

    # Which layers attend to all tokens, or that every N-th does; others: linear (qwen3_next, qwen3_5) or windows.
    layer_types: Kinds = ()
    full_attention_interval: Width | None = None
    linear_conv_kernel_dim: Width | None = None
    linear_key_head_dim: Width | None = None
    linear_value_head_dim: Width | None = None
    linear_num_key_heads: Width | None = None
    linear_num_value_heads: Width | None = None

    # gemma3n, gemma4: each layer's own embeddings; layers at the end that take keys and values from an earlier one.
    hidden_size_per_layer_input: NotNegative | None = None
    vocab_size_per_layer_input: Width | None = None
    num_kv_shared_layers: NotNegative = 0
    # gemma3n
    laurel_rank: Width | None = None
    altup_num_inputs: Width | None = None
    # gemma4: its full-attention layers have other heads, and values that are the keys; its sharing layers, wider MLPs.
    global_head_dim: Width | None = None
    num_global_key_value_heads: Width | None = None
    attention_k_eq_v: bool = False
    use_double_wide_mlp: bool = False
    enable_moe_block: bool = False

    # The same under the names of single families.
    ffn_dim: Width | None = None
    ffn_hidden_size: Width | None = None
    n_inner: Width | None = None
    intermediate_size_mlp: Width | None = None
    bias: bool | None = None
    enable_bias: bool | None = None
    qkv_bias: bool | None = None
    use_bias: bool | None = None
    use_qkv_bias: bool | None = None
    qk_layernorm: bool | None = None
    num_local_experts: NotNegative | None = None
    n_routed_experts: Width | None = None
    top_k_experts: Width | None = None
    n_shared_experts: NotNegative | None = None
    shared_intermediate_size: NotNegative | None = None
    interleave_moe_layer_step: Width | None = None
    # falcon, gpt_bigcode
    multi_query: bool = False
    num_kv_heads: Width | None = None
    new_decoder_architecture: bool = False
    parallel_attn: bool = False
    num_ln_in_parallel_attn: Width | None = None

    # The half that reads images.
    vision_config: Tower | None = None

    _config: JsonObject = PrivateAttr()
    """The keys as they were written."""
    _measured: Measured | None = PrivateAttr(None)

    @property
    def measured(self) -> Measured | None:
        """What was measured of a model that no formula describes; it is in no file of a recipe."""
        return self._measured

    @property
    def is_mixture(self) -> bool:
        """Whether the model is a mixture of experts, by its facts or by what was measured."""
        of_layers = self._measured.kinds if self._measured else ()
        return bool(self.num_experts) or any(layers.experts for layers in of_layers)

    def with_measured(self, measured: Measured) -> "Architecture":
        """Return the same facts with what was measured."""
        copied = self.model_copy()
        copied._measured = measured
        return copied

    @model_validator(mode="wrap")
    @classmethod
    def _read(cls, config: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Add the values under the common names."""
        if isinstance(config, cls):
            return config
        architecture = validate(config)
        architecture._config = dict(config)
        # In place, although the block is frozen: pydantic expects the object that it created.
        architecture.__dict__.update(_in_common(_DEFAULTS.get(architecture.model_type, {}) | config))
        for key in ("intermediate_size", *_NEEDS.get(architecture.model_type, ())):
            if not getattr(architecture, key):
                raise PydanticCustomError(LACKS, "{kind} needs {key}", {"kind": architecture.model_type, "key": key})
        refuse(architecture, _contradictions(architecture))
        return architecture

    def __eq__(self, other: object) -> bool:
        """Return whether the facts are the same, whether written as a list or a tuple."""
        return isinstance(other, Architecture) and self.__dict__ == other.__dict__ and self._measured == other._measured

    @model_serializer
    def _as_written(self) -> JsonObject:
        return self._config

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, holds experts."""
        if not self.num_experts or layer < self.first_k_dense_replace or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    def attends_to_all(self, layer: int) -> bool:
        """Return whether a layer, counted from 0, has softmax attention over the whole text."""
        if self.layer_types:
            return self.layer_types[layer] == "full_attention"
        return self.full_attention_interval is None or (layer + 1) % self.full_attention_interval == 0


def _in_common(config: JsonObject) -> JsonObject:
    """Return the values of a config under the common names; the config holds its type's defaults too."""
    kind, heads, hidden = config["model_type"], config["num_attention_heads"], config["hidden_size"]
    inner = _first(config, "ffn_dim", "ffn_hidden_size", "n_inner", "intermediate_size_mlp", "intermediate_size")
    if not inner:
        inner = 4 * hidden if kind in _FOUR_TIMES_HIDDEN else config.get("moe_intermediate_size")
    # One key for all biases but internlm's, which is attention's alone.
    of_all = None if kind == "internlm" else _first(config, "use_bias", "enable_bias", "bias")
    common: JsonObject = {key: config[key] for key in _DEFAULTS.get(kind, ())} | {
        "intermediate_size": inner or 0,
        "num_key_value_heads": _key_value_heads(config) or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "attention_bias": bool(_first(config, *_ATTENTION_BIASES)),
        "mlp_bias": bool(config.get("mlp_bias") if of_all is None else of_all),
        # Llama 4's norm of queries and keys has no weights.
        "use_qk_norm": kind != "llama4_text" and bool(_first(config, "use_qk_norm", "qk_layernorm")),
        # GPT-NeoX has the same key, and two norms all the same.
        "use_parallel_residual": kind == "stablelm" and bool(config.get("use_parallel_residual")),
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input") or None,
    }
    if config.get("word_embed_proj_dim") == hidden:
        common["word_embed_proj_dim"] = None
    if kind == "falcon":
        own_norms = 2 if config.get("new_decoder_architecture") or not config["parallel_attn"] else 1
        common["num_ln_in_parallel_attn"] = config.get("num_ln_in_parallel_attn") or own_norms
    if config.get("kv_lora_rank") and config.get("qk_nope_head_dim") and config.get("qk_rope_head_dim"):
        common["head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        common["v_head_dim"] = config.get("v_head_dim") or hidden // heads
    return common | _experts(config, kind)


def _first(config: JsonObject, *keys: str) -> Any:
    return next((config[key] for key in keys if config.get(key) is not None), None)


def _key_value_heads(config: JsonObject) -> int | None:
    if config.get("new_decoder_architecture"):
        return config.get("num_kv_heads")
    if "multi_query" in config:
        return 1 if config["multi_query"] else None
    return config.get("num_key_value_heads")


def _experts(config: JsonObject, kind: str) -> JsonObject:
    num = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    if not num or kind not in _HAVE_EXPERTS or not config.get("enable_moe_block", True):
        return dict.fromkeys((*_EXPERTS, "shared_expert_intermediate_size"))
    width = config.get("moe_intermediate_size") or config.get("intermediate_size")
    shared = _first(config, "shared_expert_intermediate_size", "shared_intermediate_size")
    if shared is None:  # Llama 4 has one, of an expert's width
        shared = (width or 0) * config.get("n_shared_experts", int(kind == "llama4_text"))
    kinds = config.get("mlp_layer_types") or ()
    return {
        "num_experts": num,
        "num_experts_per_tok": _first(config, "num_experts_per_tok", "top_k_experts"),
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared or None,
        "first_k_dense_replace": 0 if kinds else config.get("first_k_dense_replace", 0),
        "mlp_only_layers": tuple(index for index, name in enumerate(kinds) if name == "dense")
        or tuple(config.get("mlp_only_layers") or ()),
        "decoder_sparse_step": _first(config, "decoder_sparse_step", "interleave_moe_layer_step") or 1,
    }


def _contradictions(architecture: Architecture) -> Contradictions:
    """Yield what does not fit together, once all common names have their values."""
    for key in ("num_key_value_heads", "num_global_key_value_heads"):
        shared = getattr(architecture, key) or 1
        if architecture.num_attention_heads % shared:
            yield key, f"does not divide num_attention_heads = {architecture.num_attention_heads}"
    if (architecture.num_experts_per_tok or 0) > (architecture.num_experts or 0):
        yield "num_experts_per_tok", f"is more than num_experts = {architecture.num_experts}"
    for key in ("first_k_dense_replace", "num_kv_shared_layers"):
        if getattr(architecture, key) > architecture.num_hidden_layers:
            yield key, f"is more than num_hidden_layers = {architecture.num_hidden_layers}"
    for key in ("layer_types", "mlp_layer_types"):
        if (num := len(getattr(architecture, key))) not in (0, architecture.num_hidden_layers):
            yield key, f"names {num} layers, not num_hidden_layers = {architecture.num_hidden_layers}"
