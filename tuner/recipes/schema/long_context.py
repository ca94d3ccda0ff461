"""What long rows ask of a recipe and its model: the tokens of a rank, tiles of them, and models that may be so divided.

It computes no memory and trains nothing: the plan and the rank ask it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.errors import ModelError
from tuner.recipes.schema import RecipeConfig

SHARED_BY = "train_cfg.sequence_parallel_size"
KINDS = frozenset(
    (
        *("apertus", "arcee", "cohere", "ernie4_5", "gemma", "glm", "glm4", "gpt_neox", "granite", "hunyuan_v1_dense"),
        *("internlm", "internlm2", "internlm3", "llama", "ministral3", "mistral", "nemotron", "olmo", "olmo2", "phi"),
        *("phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2"),
    )
)
"""model_types of which two ranks compute the loss and the gradients of one (tests/worker/test_sequence_parallel.py).

Left out are those that Ulysses in DeepSpeed 0.19.8 does not compute (heads of several widths, latent attention, no
position_ids), whose windows it forgets, and mixtures of experts, whose load balancing is another on parts of a row.
"""


def tokens_of_rank(recipe: RecipeConfig, key: str = "train_dataloader") -> int:
    """Return the tokens of one micro-batch on one rank at most, of training or of the validation."""
    tokens = recipe.loaders[key].micro_batch * tokens_per_sample(recipe, key)
    return -(-tokens // recipe.train_cfg.sequence_parallel_size)


def num_tiles(recipe: RecipeConfig, hidden_size: int) -> int:
    """Return in how many parts a tiled MLP takes a micro-batch: as ALST, of as many tokens as a token has numbers."""
    return -(-tokens_of_rank(recipe) // hidden_size)


def tokens_per_sample(recipe: RecipeConfig, key: str = "train_dataloader") -> int:
    """Return the tokens of one sample at most; a pair is two answers."""
    return recipe.objective.facts.sequences_per_sample * recipe.loaders[key].dataset.max_length


def forgets_window(config: RecipeConfig, model: Mapping[str, Any], attention: str | None) -> ModelError | None:
    """Return what is wrong with SDPA where a model attends to so many tokens back alone: its window is in its mask.

    Args:
        model: config.json, as far as it is known.
        attention: The recipe's, or the one that the model was loaded with.
    """
    longer = _longer_than_window(config, model)
    if not longer or attention not in (None, "auto", "sdpa"):
        return None
    window, lengths = model["sliding_window"], [loader.dataset.max_length for loader in config.loaders.values()]
    length = max(lengths)
    what = f"SDPA ignores the model's window of {window} tokens in sequence parallelism over samples of up to {length}"
    fix = " ".join(f"--set {key}.dataset.max_length={window}" for key in longer)
    return ModelError(what, where=SHARED_BY, fix=f"Use flash attention, or {fix}.")


def sees_whole_samples(config: RecipeConfig, model: Mapping[str, Any]) -> bool:
    """Return whether a token of a model attends to all earlier ones of its sample in SFT and pretraining.

    Args:
        config: The recipe, with the lengths of its samples.
        model: config.json, or as much of it as is known.
    """
    is_known = model.get("model_type") in KINDS and config.objective.facts.packs
    return is_known and config.train_cfg.sequence_parallel_size == 1 and not _longer_than_window(config, model)


def _longer_than_window(config: RecipeConfig, model: Mapping[str, Any]) -> list[str]:
    """Return the loaders with samples that may be longer than the model's sliding window."""
    window = model.get("sliding_window") if model.get("use_sliding_window", True) else None
    return [key for key, loader in config.loaders.items() if window and loader.dataset.max_length > window]
