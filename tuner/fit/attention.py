"""Which attention computes a model where the recipe names none, and the bytes of scores that an eager one holds.

`launch.fitting` settles a run's attention with it, and `activations` counts the memory of the same attention.
Source: transformers 5.23, the model classes and their `eager_attention_forward`.
"""

from __future__ import annotations

from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import Architecture

WITHOUT_SDPA = {"bloom", "gemma2", "gpt_oss"}
"""model_types whose scores SDPA cannot compute: ALiBi, soft-capping, sinks."""
_SCORE_BYTES = {"gemma2": 8, "gpt_oss": 2}
"""Bytes that eager attention saves for a head and a pair of tokens: gemma2's tanh too; gpt_oss's softmax in 16 bits."""
_OTHER_SCORES = 6
"""A softmax in fp32 (4) and its copy in 16 bits (2)."""
_WORK_BYTES = {"gpt_oss": 4}
_OTHER_WORK = 6
"""More of them at the peak: the gradients of the softmax's output and input, less what is freed by then."""
_MASKS = {"gemma2": 2, "gpt_oss": 2}
"""Masks of an eager model that has layers with a window beside those without: one for each kind."""
_WIDEST_HEAD = 256
"""The widest head for which transformers lets SDPA share key-value heads (integrations/sdpa_attention.py)."""


def of_transformers(architecture: Architecture) -> str:
    """Return the attention that transformers takes if none is named: 'sdpa', or 'eager' where that cannot compute."""
    return "eager" if architecture.model_type in WITHOUT_SDPA else "sdpa"


def of_recipe(recipe: RecipeConfig, architecture: Architecture) -> str:
    """Return the attention of a recipe; 'auto' that is not settled yet counts as no flash attention."""
    name = recipe.model.attn_implementation
    return of_transformers(architecture) if name in (None, "auto") else str(name)


def score_bytes(architecture: Architecture) -> int:
    """Return the bytes that eager attention saves for each pair of tokens of a row, over all heads, in 16 bits."""
    return architecture.num_attention_heads * _SCORE_BYTES.get(architecture.model_type, _OTHER_SCORES)


def work_bytes(architecture: Architecture) -> int:
    """Return the bytes that eager attention needs beside them, at its own peak."""
    return architecture.num_attention_heads * _WORK_BYTES.get(architecture.model_type, _OTHER_WORK)


def num_masks(architecture: Architecture) -> int:
    """Return the masks of an eager model, which all layers of one kind share."""
    return _MASKS.get(architecture.model_type, 1)


def repeats_heads(attention: str, architecture: Architecture, *, has_mask: bool, old_gpus: bool) -> bool:
    """Return whether keys and values are copied to all query heads, and the copies saved.

    Eager attention always does (`repeat_kv`); SDPA where it has a mask or wide heads, and on GPUs whose kernels take no
    grouped heads, where `models.compat.repeat_heads_on_old_gpus` makes it.
    """
    if attention == "sdpa":
        return has_mask or old_gpus or architecture.head_dim > _WIDEST_HEAD
    return attention == "eager"
