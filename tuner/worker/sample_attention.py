"""Attention that computes the samples of a row one after the other, for rows that hold several samples end to end.

SDPA keeps samples apart with a mask, and computes all (S x T)^2 pairs of a row of S samples of T tokens each: without
a mask it computes S x T^2 of them. On a CPU a step over packed rows of 2,048 tokens took 1.7 times as long with the
mask (`python -m bench short`, SmolLM2-135M, LoRA); ranks that share long rows have no room for it. On GPUs flash
attention does the same in one kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.long_context import sees_whole_samples
from tuner.worker import compat

Attention = Callable[..., tuple[Tensor, Tensor | None]]


def use(model: Any, config: RecipeConfig) -> bool:
    """Let a model on a CPU compute attention by sample, if a token attends to all earlier ones of its sample.

    Answers of several prompts at once, and those that read a cache, still take SDPA's mask.

    Returns:
        Whether it does so now.
    """
    facts = model.config.get_text_config().to_dict()
    if compat.attention_of(model) != "sdpa" or not sees_whole_samples(config, facts):
        return False
    AttentionInterface.register(compat.BY_SAMPLE, sample_by_sample(sdpa_attention_forward))
    AttentionMaskInterface.register(compat.BY_SAMPLE, _mask)
    model.set_attn_implementation(compat.BY_SAMPLE)
    return True


def sample_by_sample(attention: Attention) -> Attention:
    """Return an attention that computes the samples of a row one after the other, by their position_ids.

    Args:
        attention: transformers' for SDPA: query, key and value have shape [rows, heads, T, width].
    """

    def of_samples(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if mask is not None or query.shape[0] > 1 or query.shape[2] != key.shape[2] or position_ids is None:
            return attention(module, query, key, value, mask, position_ids=position_ids, **options)
        is_first = position_ids[0].diff(prepend=position_ids[0, :1]) != 1
        starts = is_first.nonzero().flatten().tolist()
        if len(starts) == 1:  # nothing to join, so no copy is kept for the backward pass
            return attention(module, query, key, value, None, **options)
        lengths = [end - start for start, end in zip(starts, [*starts[1:], position_ids.shape[1]], strict=True)]
        samples = zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
        return torch.cat([attention(module, *one, None, **options)[0] for one in samples], dim=1), None

    return of_samples


def _mask(batch_size: int, q_length: int, kv_length: int, *given: Any, **named: Any) -> Tensor | None:
    """Return no mask for one row without a cache or padding, and SDPA's for all else."""
    if batch_size == 1 and q_length == kv_length and named.get("attention_mask") is None:
        return None
    mask: Tensor | None = sdpa_mask(batch_size, q_length, kv_length, *given, **named)
    return mask
