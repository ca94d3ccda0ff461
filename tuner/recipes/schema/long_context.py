"""Long rows: the tokens of a rank, the tiles of an MLP, and the models that ranks may divide.

The plan and the rank use it; it computes no memory.
"""

from __future__ import annotations

from functools import partial

from tuner.errors import Key, ModelError
from tuner.recipes.schema import RecipeConfig

SHARED_BY = "train_cfg.sequence_parallel_size"
TILED_TYPES = frozenset(
    (
        *("apertus", "arcee", "cohere", "ernie4_5", "gemma", "glm", "glm4", "gpt_neox", "granite", "hunyuan_v1_dense"),
        *("internlm", "internlm2", "internlm3", "llama", "ministral3", "mistral", "nemotron", "olmo", "olmo2", "phi"),
        *("phi3", "qwen2", "qwen3", "smollm3", "stablelm", "starcoder2"),
    )
)
"""model_types whose MLPs compute each token alone (tests/worker/test_tiled_mlp.py)."""
SHARED_TYPES = TILED_TYPES | {
    *("glm4_moe", "gpt_oss", "granitemoe", "granitemoeshared", "mixtral", "olmoe", "qwen3_moe")
}
"""model_types for which two ranks compute the same loss and gradients as one (tests/worker/test_sequence_parallel.py).

Left out are models that Ulysses in DeepSpeed 0.19.8 does not support (heads of several widths, latent attention, no
position_ids), models with a window in the mask alone, phimoe, whose router draws random numbers, and hybrids: their
state goes from token to token through the whole row, so each rank would wait for the one before it, or begin anew.
"""


def tokens_of_rank(recipe: RecipeConfig, key: str = "train_dataloader") -> int:
    """Return the largest number of tokens of one micro-batch on one rank, in training or validation."""
    tokens = recipe.loaders[key].micro_batch * tokens_per_sample(recipe, key)
    return -(-tokens // recipe.train_cfg.sequence_parallel_size)


def num_tiles(recipe: RecipeConfig, hidden_size: int) -> int:
    """Return the number of tiles of a tiled MLP, as in ALST: a tile has as many tokens as the hidden size."""
    return -(-tokens_of_rank(recipe) // hidden_size)


def tokens_per_sample(recipe: RecipeConfig, key: str = "train_dataloader") -> int:
    """Return the largest number of tokens of one sample: a pair is two answers, a prompt gets a completion."""
    sequences, objective = recipe.objective.facts.sequences_per_sample, recipe.objective
    added = objective.completion_tokens + objective.prompt_tokens
    return sequences * (recipe.loaders[key].dataset.max_length + added)


def refuse_tiles(config: RecipeConfig, model_type: str) -> None:
    """Refuse a tiled MLP that sees more than one token: experts choose among, and balance, all of them.

    Raises:
        ModelError: it may.
    """
    if config.train_cfg.tiled_mlp and model_type not in TILED_TYPES:
        problem = f"tiled_mlp is not tested with {model_type} models"
        raise ModelError(problem, where="train_cfg.tiled_mlp", fix=f"Use {Key('tiled_mlp', False)}.")


def untested_by(way: str, where: str, tested: frozenset[str], size: int, model_type: str) -> ModelError | None:
    """Return an error if `size` ranks may not compute the same as one with such a model; None if that is tested."""
    if model_type in tested:
        return None
    problem = f"{way} parallelism over {size} ranks is not tested with {model_type} models"
    return ModelError(problem, where=where, fix=f"Remove it; tested are {', '.join(sorted(tested))}.")


untested = partial(untested_by, "sequence", SHARED_BY, SHARED_TYPES)
"""`untested_by` of ranks that share samples."""
