"""How each model_type is built in transformers 5: its linear layers by name, norms, experts, other parameters.

`FAMILIES` holds names alone. `layer` builds one decoder layer from the numbers of an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from tuner.recipes.schema import measured
from tuner.recipes.schema.architecture import Architecture, Tower
from tuner.recipes.schema.measured import Experts, Linear

Names = tuple[str, ...]

_QKVO = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")


def _gated(block: str) -> Names:
    return f"{block}.gate_proj", f"{block}.up_proj", f"{block}.down_proj"


_FUSED_GATED = ("mlp.gate_up_proj", "mlp.down_proj")
_UP_DOWN = ("mlp.up_proj", "mlp.down_proj")
_NEOX_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
_ONE_SHARED = _gated("mlp.shared_expert")


class Family(NamedTuple):
    """What all models of one model_type share. Names are those of modules inside a decoder layer."""

    embeddings: str = "embed_tokens"
    attention: Names = _QKVO
    """Four, or two where queries, keys and values are one layer; the last one is the output's."""
    output_bias: bool = True
    """The output's layer has a bias where the others have one."""
    double_queries: bool = False
    """The queries' layer also makes a gate of the same size."""
    sinks: bool = False
    """One learned number for each head."""
    mlp: Names = _gated("mlp")
    gated: bool = True
    mlp_numbers: int = 0
    """Learned numbers of the activation function."""
    norms: int = 2
    norm_bias: bool = False
    qk_norm: Literal["", "head", "whole"] = ""
    """Norms of queries and keys: of a head's size for all heads, or of the size of all heads."""
    qk_norm_optional: bool = False
    """The architecture says whether it is there."""
    qk_norm_bias: bool = False
    embedding_norm: bool = False
    positions: int | None = None
    """How many more than max_position_embeddings are learned; None: none are."""
    linear_attention: tuple[tuple[str, int, int, int], ...] = ()
    """Inputs' layers: name, and how many times it makes the keys, the values, and one number a value head."""
    shared: Names = _gated("mlp.shared_experts")
    """The shared experts' layers: three, or two where gate and up are one."""
    shared_gate: bool = False
    router: str = ""
    """The router's name where it is an nn.Linear."""
    own_linears: Literal["", "router", "all"] = ""
    """Which of its linear layers are of a class of their own below nn.Linear: bitsandbytes leaves them as they are."""
    expert_bias: bool = False
    """Experts and router have biases."""
    clamped_experts: bool = False
    """The experts' gate and up layers are clamped before they are multiplied (gpt-oss)."""
    experts_beside_mlp: bool = False
    """A layer with experts keeps its dense MLP (Gemma 4)."""
    split_experts: Names = ()
    """Names of the router and of the expert's gate, up and down layers in older files, by which PEFT adapts them."""


_NEXT_LINEAR = (("linear_attn.in_proj_qkvz", 2, 2, 0), ("linear_attn.in_proj_ba", 0, 0, 2))
_SPLIT_LINEAR = (
    ("linear_attn.in_proj_qkv", 2, 1, 0),
    ("linear_attn.in_proj_z", 0, 1, 0),
    ("linear_attn.in_proj_b", 0, 0, 1),
    ("linear_attn.in_proj_a", 0, 0, 1),
)
_LLAMA = Family()
_BLOOM = Family(
    embeddings="word_embeddings",
    attention=("self_attention.query_key_value", "self_attention.dense"),
    mlp=_NEOX_MLP,
    gated=False,
    norm_bias=True,
)
_QWEN3_5 = Family(double_queries=True, qk_norm="head", linear_attention=_SPLIT_LINEAR)
_MIXTRAL_NAMES = ("gate", "w1", "w3", "w2")
_QWEN_NAMES = ("gate", "gate_proj", "up_proj", "down_proj")

_GPT2 = Family(
    embeddings="wte",
    attention=("attn.c_attn", "attn.c_proj"),
    mlp=("mlp.c_fc", "mlp.c_proj"),
    gated=False,
    norm_bias=True,
    positions=0,
)

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(
        ("llama", "internlm", "internlm2", "internlm3", "mistral", "ministral", "ministral3", "smollm3", "gemma"),
        _LLAMA,
    ),
    **dict.fromkeys(("granite", "granitemoe", "ernie4_5", "cwm", "minicpm3"), _LLAMA),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), Family(split_experts=_QWEN_NAMES)),
    **dict.fromkeys(("exaone4", "hunyuan_v1_dense", "qwen3"), Family(qk_norm="head")),
    **dict.fromkeys(("gemma3_text", "gemma3n_text"), Family(norms=4, qk_norm="head")),
    **dict.fromkeys(("gpt2", "gpt_bigcode"), _GPT2),
    **dict.fromkeys(("olmo2", "olmo3"), Family(qk_norm="whole")),
    **dict.fromkeys(("qwen2", "seed_oss"), Family(output_bias=False)),
    "apertus": Family(qk_norm="head", mlp=_UP_DOWN, gated=False, mlp_numbers=2),
    "arcee": Family(mlp=_UP_DOWN, gated=False),
    "bloom": _BLOOM._replace(embedding_norm=True),
    "cohere": Family(norms=1, qk_norm="whole", qk_norm_optional=True),
    "cohere2": Family(norms=1),
    "falcon": _BLOOM._replace(norms=1, own_linears="all"),
    "gemma2": Family(norms=4),
    "gemma4_text": Family(norms=4, qk_norm="head", experts_beside_mlp=True, router="router.proj"),
    "glm": Family(output_bias=False, mlp=_FUSED_GATED),
    "glm4": Family(output_bias=False, mlp=_FUSED_GATED, norms=4),
    "glm4_moe": Family(output_bias=False, qk_norm="head", qk_norm_optional=True, split_experts=_QWEN_NAMES),
    "gpt_neox": _BLOOM._replace(embeddings="embed_in", attention=("attention.query_key_value", "attention.dense")),
    "gpt_oss": Family(sinks=True, expert_bias=True, clamped_experts=True),
    "granitemoeshared": Family(shared=("shared_mlp.input_linear", "shared_mlp.output_linear")),
    "llama4_text": Family(
        mlp=_gated("feed_forward"),
        shared=_gated("feed_forward.shared_expert"),
        router="feed_forward.router",
        own_linears="router",
    ),
    "mixtral": Family(split_experts=_MIXTRAL_NAMES),
    "nemotron": Family(mlp=_UP_DOWN, gated=False, norm_bias=True),
    "olmo": Family(norms=0),
    "olmoe": Family(qk_norm="whole", split_experts=_QWEN_NAMES),
    "opt": Family(
        attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj"),
        mlp=("fc1", "fc2"),
        gated=False,
        norm_bias=True,
        positions=2,
    ),
    "phi": Family(
        attention=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
        mlp=("mlp.fc1", "mlp.fc2"),
        gated=False,
        norms=1,
        norm_bias=True,
        qk_norm="head",
        qk_norm_optional=True,
        qk_norm_bias=True,
    ),
    "phi3": Family(attention=("self_attn.qkv_proj", "self_attn.o_proj"), mlp=_FUSED_GATED),
    "phimoe": Family(norm_bias=True, router="mlp.router", own_linears="router"),
    "qwen2_moe": Family(output_bias=False, shared=_ONE_SHARED, shared_gate=True),
    "qwen3_5_moe_text": _QWEN3_5._replace(shared=_ONE_SHARED, shared_gate=True),
    "qwen3_5_text": _QWEN3_5,
    "qwen3_moe": Family(qk_norm="head", split_experts=_QWEN_NAMES),
    "qwen3_next": _QWEN3_5._replace(
        linear_attention=_NEXT_LINEAR, shared=_ONE_SHARED, shared_gate=True, split_experts=_QWEN_NAMES
    ),
    "stablelm": Family(output_bias=False, norm_bias=True, qk_norm="whole", qk_norm_optional=True),
    "starcoder2": Family(mlp=("mlp.c_fc", "mlp.c_proj"), gated=False, norm_bias=True),
}


class Layer(NamedTuple):
    """One decoder layer; `others` counts norms, convolutions, routers that are no linear layers, and the like."""

    linears: tuple[Linear, ...]
    experts: Experts | None
    others: int
    measured: measured.Layers | None = None
    """What was measured of it, where no formula counts what it holds."""

    @property
    def parameters(self) -> int:
        experts = self.experts.parameters if self.experts else 0
        return sum(linear.parameters for linear in self.linears) + experts + self.others


def layer(family: Family, architecture: Architecture, index: int) -> Layer:
    """Return a layer, counted from 0."""
    experts = None
    if architecture.has_experts(index):
        num, per_token = architecture.num_experts or 0, architecture.num_experts_per_tok or 0
        width = architecture.moe_intermediate_size or 0
        experts = Experts(num, per_token, architecture.hidden_size, width, family.expert_bias)
    linears = [*_attention(family, architecture, index)]
    if experts is None or family.experts_beside_mlp:
        linears += _mlp(family.mlp, family.gated, architecture, _inner(architecture, index))
    if experts:
        linears += _beside_experts(family, architecture, experts)
    linears += _of_gemma(architecture)
    if family.own_linears == "all":
        linears = [linear._replace(quantizable=False) for linear in linears]
    norms = _norms(family, architecture, index) + _of_gemma_norms(architecture)
    return Layer(tuple(linears), experts, norms + _router(family, experts) + family.mlp_numbers)


def _attention(family: Family, architecture: Architecture, index: int) -> Iterator[Linear]:
    if architecture.kv_lora_rank:
        return _latent(architecture, architecture.kv_lora_rank)
    if family.linear_attention and not architecture.attends_to_all(index):
        return _linear(family, architecture)
    return _grouped(family, architecture, index)


def _grouped(family: Family, architecture: Architecture, index: int) -> Iterator[Linear]:
    head, key_value_heads = _heads(architecture, index)
    query, key = architecture.num_attention_heads * head, key_value_heads * head
    outputs = [query * (2 if family.double_queries else 1), key, key]
    if _takes_keys(architecture, index):
        outputs = outputs[:1]
    elif architecture.attention_k_eq_v and architecture.attends_to_all(index):
        outputs = outputs[:2]
    *names, last = family.attention
    if len(names) == 1:
        outputs = [sum(outputs)]
    for name, size in zip(names, outputs, strict=False):
        yield Linear(name, architecture.hidden_size, size, architecture.attention_bias)
    yield Linear(last, query, architecture.hidden_size, architecture.attention_bias and family.output_bias)


def _heads(architecture: Architecture, index: int) -> tuple[int, int]:
    """Return a head's size and the number of key-value heads; Gemma 4's full-attention layers have their own."""
    size, num = architecture.head_dim, architecture.num_key_value_heads
    if architecture.attends_to_all(index):
        size = architecture.global_head_dim or size
        num = architecture.num_global_key_value_heads or num
    return size, num


def _takes_keys(architecture: Architecture, index: int) -> bool:
    return index >= architecture.num_hidden_layers - architecture.num_kv_shared_layers


def _latent(architecture: Architecture, rank: int) -> Iterator[Linear]:
    """Yield multi-head latent attention: DeepSeek-V2, 2024 (arXiv:2405.04434), section 2.1."""
    hidden, heads, bias = architecture.hidden_size, architecture.num_attention_heads, architecture.attention_bias
    nope, rope = architecture.qk_nope_head_dim or 0, architecture.qk_rope_head_dim or 0
    value = architecture.v_head_dim or 0
    if architecture.q_lora_rank:
        yield Linear("self_attn.q_a_proj", hidden, architecture.q_lora_rank, bias)
        yield Linear("self_attn.q_b_proj", architecture.q_lora_rank, heads * architecture.head_dim)
    else:
        yield Linear("self_attn.q_proj", hidden, heads * architecture.head_dim)
    yield Linear("self_attn.kv_a_proj_with_mqa", hidden, rank + rope, bias)
    yield Linear("self_attn.kv_b_proj", rank, heads * (nope + value))
    yield Linear("self_attn.o_proj", heads * value, hidden, bias)


def _linear(family: Family, architecture: Architecture) -> Iterator[Linear]:
    """Yield a gated delta net: Yang et al., 2024 (arXiv:2412.06464), as Qwen3-Next has it."""
    keys, values, value_heads = linear_widths(architecture)
    for name, of_keys, of_values, of_heads in family.linear_attention:
        yield Linear(name, architecture.hidden_size, of_keys * keys + of_values * values + of_heads * value_heads)
    yield Linear("linear_attn.out_proj", values, architecture.hidden_size)


def linear_widths(architecture: Architecture) -> tuple[int, int, int]:
    """Return the widths of a linear attention's keys and values, and the number of its value heads."""
    keys = (architecture.linear_num_key_heads or 0) * (architecture.linear_key_head_dim or 0)
    value_heads = architecture.linear_num_value_heads or 0
    return keys, value_heads * (architecture.linear_value_head_dim or 0), value_heads


def _inner(architecture: Architecture, index: int) -> int:
    doubled = architecture.use_double_wide_mlp and _takes_keys(architecture, index)
    return architecture.intermediate_size * (2 if doubled else 1)


def _mlp(names: tuple[str, ...], gated: bool, architecture: Architecture, inner: int) -> Iterator[Linear]:
    *into, out = names
    outputs = inner * (2 if gated else 1) // len(into)
    for name in into:
        yield Linear(name, architecture.hidden_size, outputs, architecture.mlp_bias)
    yield Linear(out, inner, architecture.hidden_size, architecture.mlp_bias)


def _beside_experts(family: Family, architecture: Architecture, experts: Experts) -> Iterator[Linear]:
    if family.router:
        yield Linear(family.router, experts.hidden, experts.num, quantizable=family.own_linears != "router")
    if architecture.shared_expert_intermediate_size:
        yield from _mlp(family.shared, True, architecture, architecture.shared_expert_intermediate_size)
        if family.shared_gate:
            yield Linear("mlp.shared_expert_gate", experts.hidden, 1)


def _router(family: Family, experts: Experts | None) -> int:
    if experts is None:
        return 0
    if family.experts_beside_mlp:  # Gemma 4: a scale of the inputs, one number an expert, three more norms
        return 4 * experts.hidden + experts.num
    return 0 if family.router else experts.num * (experts.hidden + family.expert_bias)


def _norms(family: Family, architecture: Architecture, index: int) -> int:
    num = (architecture.num_ln_in_parallel_attn or family.norms) - architecture.use_parallel_residual
    total = num * architecture.hidden_size * (2 if family.norm_bias else 1)
    if architecture.kv_lora_rank:
        return total + architecture.kv_lora_rank + (architecture.q_lora_rank or 0)
    if family.linear_attention and not architecture.attends_to_all(index):
        keys, values, value_heads = linear_widths(architecture)
        convolution = (2 * keys + values) * (architecture.linear_conv_kernel_dim or 0)
        return total + convolution + 2 * value_heads + (architecture.linear_value_head_dim or 0)
    return total + _query_key_norms(family, architecture, index) + architecture.num_attention_heads * family.sinks


def _query_key_norms(family: Family, architecture: Architecture, index: int) -> int:
    if not family.qk_norm or (family.qk_norm_optional and not architecture.use_qk_norm):
        return 0
    size, key_value_heads = _heads(architecture, index)
    if family.qk_norm == "whole":
        return (architecture.num_attention_heads + key_value_heads) * size
    return size * (1 if _takes_keys(architecture, index) else 2) * (2 if family.qk_norm_bias else 1)


def _of_gemma(architecture: Architecture) -> Iterator[Linear]:
    """Yield the layer's own input (Gemma 3n, 4), alternating updates and the learned residual (Gemma 3n)."""
    hidden, inputs = architecture.hidden_size, architecture.altup_num_inputs
    if architecture.hidden_size_per_layer_input:
        yield Linear("per_layer_input_gate", hidden, architecture.hidden_size_per_layer_input)
        yield Linear("per_layer_projection", architecture.hidden_size_per_layer_input, hidden)
    if architecture.laurel_rank:
        yield Linear("laurel.linear_left", hidden, architecture.laurel_rank)
        yield Linear("laurel.linear_right", architecture.laurel_rank, hidden)
    if inputs:
        yield Linear("altup.correction_coefs", inputs, inputs)
        yield Linear("altup.prediction_coefs", inputs, inputs**2)
        yield Linear("altup.modality_router", hidden, inputs)


def _of_gemma_norms(architecture: Architecture) -> int:
    per_layer_input, residual = bool(architecture.hidden_size_per_layer_input), bool(architecture.laurel_rank)
    return architecture.hidden_size * (per_layer_input + residual + 2 * bool(architecture.altup_num_inputs))


def layers_as_measured(measurement: measured.Measured) -> tuple[Layer, ...]:
    """Return the layers of a model that was measured."""
    kinds = [Layer(kind.linears, kind.experts, kind.others, kind) for kind in measurement.kinds]
    return tuple(kinds[index] for index in measurement.layers)


# Towers


class TowerFamily(NamedTuple):
    """How a tower is built, and what a layer keeps of each patch for backward, in numbers of the compute type.

    `widths` and `inner` count numbers of the tower's width and of its MLP's; `fp32` counts bytes of its width besides.
    """

    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "out_proj")
    mlp: tuple[str, ...] = ("fc1", "fc2")
    merges: bool = False
    """Neighboring patches are merged before the projector; its first layer keeps their width. Positions rotate."""
    pools: bool = False
    """Means of neighboring patches go through one linear layer into the LLM; rows and columns have embeddings."""
    bias: bool = True
    norms: int = 2
    head_norms: int = 0
    """Norms of queries and keys."""
    norm_bias: bool = True
    widths: int = 8
    inner: int = 2
    fp32: int = 0
    fp32_of_norms: int = 0
    """Bytes of the tower's width that norms keep if their weights are trained."""


_TOWER_OF_QWEN = TowerFamily(("qkv", "proj"), merges=True, widths=11)
_TOWERS = {
    **dict.fromkeys(("llava", "llava_next"), TowerFamily(inner=3)),  # CLIP's activation keeps its sigmoid
    "internvl": TowerFamily(("q_proj", "k_proj", "v_proj", "projection_layer"), widths=10),  # scales each half's output
    "qwen2_vl": _TOWER_OF_QWEN._replace(inner=3),  # rotary positions, attention in windows
    # And gates, and RMS norms in fp32.
    "qwen2_5_vl": _TOWER_OF_QWEN._replace(mlp=("gate_proj", "up_proj", "down_proj"), norm_bias=False, inner=4, fp32=8),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), _TOWER_OF_QWEN._replace(mlp=("linear_fc1", "linear_fc2"))),
    "gemma4": TowerFamily(
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        ("gate_proj", "up_proj", "down_proj"),
        pools=True,
        bias=False,
        norms=4,
        head_norms=2,
        norm_bias=False,
        widths=6,
        inner=4,
        fp32=28,
        fp32_of_norms=24,
    ),
}
"""model_type of the whole model -> its tower. A model without an entry has SigLIP's."""


def tower_family(tower: Tower) -> TowerFamily:
    """Return how the tower is built."""
    return _TOWERS.get(tower.model_type, TowerFamily())


def inner_of_tower(tower: Tower) -> int:
    """Return the width of the tower's MLPs."""
    return tower.intermediate_size or 4 * (tower.hidden_size or 0)


def layer_of_tower(tower: Tower) -> Iterator[Linear]:
    """Yield the linear layers of one layer of the tower."""
    family, width, inner = tower_family(tower), tower.hidden_size or 0, inner_of_tower(tower)
    *inputs, output = family.attention
    for name in inputs:
        yield Linear(name, width, width * 3 // len(inputs), family.bias)
    yield Linear(output, width, width, family.bias)
    *gates, down = family.mlp
    for name in gates:
        yield Linear(name, width, inner, family.bias)
    yield Linear(down, inner, width, family.bias)


def projector(architecture: Architecture, tower: Tower) -> tuple[Linear, ...]:
    """Return the linear layers between the tower and the LLM."""
    if tower_family(tower).pools:
        return (Linear("embedding_projection", tower.hidden_size or 0, architecture.hidden_size),)
    merged, llm = (tower.hidden_size or 0) * tower.merge_size**2, architecture.hidden_size
    if tower_family(tower).merges:
        return Linear("mlp.0", merged, merged, bias=True), Linear("mlp.2", merged, llm, bias=True)
    return Linear("linear_1", merged, llm, bias=True), Linear("linear_2", llm, llm, bias=True)


def pixels_of_patch(tower: Tower) -> int:
    """Return the numbers of a patch before it is embedded. Qwen-VL repeats an image as two frames of a video."""
    is_one = tower.image_size or tower_family(tower).pools
    return 3 * (tower.patch_size or 0) ** 2 * (1 if is_one else 2)
