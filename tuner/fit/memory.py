"""Bytes of model states per GPU, from a model's facts and a ZeRO level, by the published formulas.

It takes plain numbers and the recipe's blocks; it looks at no machine and opens no file.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuner.recipes.schema import Adapter, Architecture, RecipeConfig

GIB = 1024**3
LEVELS = (
    "none",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero2_offload",
    "deepspeed_zero3",
    "deepspeed_zero3_offload",
)
"""From the fastest to the one that needs the least GPU memory, as Hugging Face's DeepSpeed guide orders them."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters: `trainable`, `frozen` in 16 bits, and `quantized` (frozen, stored in fewer bits)."""

    trainable: int
    frozen: int = 0
    quantized: int = 0
    quantized_bits: int = 4

    @property
    def frozen_bytes(self) -> float:
        """Bytes of the frozen weights; 4-bit storage carries about 0.016 bytes of scales a weight (double quant)."""
        per_weight = 0.516 if self.quantized_bits == 4 else 1.0
        return 2 * self.frozen + per_weight * self.quantized


def linear_shapes(facts: Architecture) -> list[tuple[int, int]]:
    """Return (inputs, outputs) of the linear layers of one decoder block."""
    hidden, inner = facts.hidden_size, facts.intermediate_size
    query, key = facts.num_attention_heads * facts.head_dim, facts.num_key_value_heads * facts.head_dim
    return [
        (hidden, query),
        (hidden, key),
        (hidden, key),
        (query, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    ]


def num_parameters(facts: Architecture) -> int:
    """Return the parameters of a dense decoder (Llama's layout and its relatives), embeddings included."""
    shapes = linear_shapes(facts)
    block = sum(inputs * outputs for inputs, outputs in shapes) + _norms_and_biases(facts, shapes)
    embeddings = facts.vocab_size * facts.hidden_size * (1 if facts.tie_word_embeddings else 2)
    return facts.num_hidden_layers * block + embeddings + facts.hidden_size


def _norms_and_biases(facts: Architecture, shapes: list[tuple[int, int]]) -> int:
    norms = 4 if facts.model_type.startswith("gemma") and facts.model_type != "gemma" else 2
    total = norms * facts.hidden_size
    if facts.model_type == "qwen2":  # biases on q, k and v
        total += sum(outputs for _, outputs in shapes[:3])
    if facts.model_type.startswith(("qwen3", "gemma3")):  # RMSNorm on each head's q and k
        total += 2 * facts.head_dim
    return total


def count(recipe: RecipeConfig, facts: Architecture) -> Parameters:
    """Return how many parameters a recipe trains, freezes and quantizes."""
    total = num_parameters(facts)
    if recipe.adapter is None:
        return Parameters(trainable=total)
    trainable = facts.num_hidden_layers * _adapter_block(recipe.adapter, facts)
    if recipe.quantization is None:
        return Parameters(trainable, frozen=total)
    quantized = facts.num_hidden_layers * sum(inputs * outputs for inputs, outputs in linear_shapes(facts))
    return Parameters(trainable, total - quantized, quantized, recipe.quantization.bits)


def _adapter_block(adapter: Adapter, facts: Architecture) -> int:
    # An adapter on named modules is no larger than one on all of them: count all, the safe side.
    shapes = linear_shapes(facts)
    low_rank = sum(adapter.r * (inputs + outputs) for inputs, outputs in shapes)
    return low_rank + (sum(outputs for _, outputs in shapes) if adapter.use_dora else 0)


def model_state_bytes(level: str, parameters: Parameters, world_size: int) -> float:
    """Return the bytes of weights, gradients and Adam states that one GPU holds at the end of backward.

    With T trainable parameters, N ranks and F bytes of frozen weights, mixed precision:
    none 16T + F; ZeRO-1 4T + 12T/N + F; ZeRO-2 2T + 14T/N + F; ZeRO-3 (16T + F)/N; offloading the optimizer leaves
    2T (ZeRO-2) or 2T/N (ZeRO-3); offloading the parameters too leaves 0.

    Source: Rajbhandari et al., ZeRO, 2020 (arXiv:1910.02054), section 3 and figure 1, with K = 12.
    """
    trainable, frozen, ranks = parameters.trainable, parameters.frozen_bytes, world_size
    return {
        "none": 16 * trainable + frozen,
        "deepspeed_zero1": 4 * trainable + 12 * trainable / ranks + frozen,
        "deepspeed_zero2": 2 * trainable + 14 * trainable / ranks + frozen,
        "deepspeed_zero2_offload": 2 * trainable + frozen,
        "deepspeed_zero3": (16 * trainable + frozen) / ranks,
        "deepspeed_zero3_offload": 0,
    }[level]


@dataclass(frozen=True)
class Choice:
    """A level and why it was taken."""

    level: str
    reason: str


def lowest_level(recipe: RecipeConfig, world_size: int, gpu_bytes: int) -> Choice:
    """Return the lowest level whose model states fit into `gpu_bytes` (0: no GPU) on each of `world_size` ranks."""
    if not gpu_bytes:
        level = "none" if world_size == 1 else "deepspeed_zero2"
        return Choice(level, f"{world_size} rank{'s' * (world_size > 1)} on a CPU")
    if recipe.architecture is None:
        return Choice("deepspeed_zero3", "the model's size is not known before it is loaded")
    parameters = count(recipe, recipe.architecture)
    levels = [level for level in LEVELS if world_size == 1 or level != "none"]
    for level in levels:
        needed = model_state_bytes(level, parameters, world_size)
        if needed <= gpu_bytes:
            return Choice(
                level, f"the lowest level whose model states fit: {needed / GIB:.1f} of {gpu_bytes / GIB:.0f} GiB a GPU"
            )
    raise AssertionError("deepspeed_zero3_offload needs nothing on paper")
