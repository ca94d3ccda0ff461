"""Attention over rows that hold several samples end to end, one sample at a time and without a mask.

SDPA keeps samples apart with a mask, and computes all (S x T)^2 pairs of a row of S samples of T tokens each. With the
lengths of the samples S x T^2 pairs are enough: on GPUs flash attention computes them in one kernel, which torch brings
with it; on other devices SDPA computes one sample after the other.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tuner.recipes.schema.architecture import VARLEN

_CHANGES_SCORES = ("position_bias", "s_aux", "softcap")
"""Arguments of transformers' attention that change its scores."""
_IN_16_BITS = (torch.bfloat16, torch.float16)


def register() -> None:
    """Let transformers know this attention by the name `VARLEN`."""
    AttentionInterface.register(VARLEN, attend)
    AttentionMaskInterface.register(VARLEN, _mask)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Compute causal attention in transformers' `AttentionInterface`; without a mask each sample for itself.

    Args:
        query: [1, heads, T, width] of samples end to end; key and value may have fewer heads. Other batches, such as
            padded ones and those with a cache, come with a mask or in several rows: SDPA computes them.
        sliding_window: Tokens that a token attends to, itself included; None: all earlier ones.
        cu_seq_lens_q: int32 [S + 1], where the samples of the row begin and end. None: `position_ids` say it, for which
            a GPU waits.
        max_length_q: The length of the longest of them.

    Returns:
        The attended values [1, T, heads, width], and no weights.
    """
    in_one_row = query.shape[0] == 1 and query.shape[2] == key.shape[2]
    if attention_mask is not None or not in_one_row or not getattr(module, "is_causal", True):
        options |= {"dropout": dropout, "scaling": scaling}
        attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
        return attended
    if unknown := sorted(name for name in _CHANGES_SCORES if options.get(name) is not None):
        raise NotImplementedError(f"{VARLEN} attention has no {', '.join(unknown)}")
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = _starts(position_ids, query)
        max_length_q = int(cu_seq_lens_q.diff().max())
    window = None if sliding_window is None or sliding_window >= max_length_q else sliding_window
    if not query.is_cpu and query.dtype in _IN_16_BITS and not dropout:
        return _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling, window), None
    samples = zip(*(rows.split(cu_seq_lens_q.diff().tolist(), dim=2) for rows in (query, key, value)), strict=True)
    options = {"dropout": dropout, "scaling": scaling}
    parts = [sdpa_attention_forward(module, *sample, _within(window, sample[0]), **options)[0] for sample in samples]
    # One sample needs no copy, which would be kept for the backward pass.
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1), None


def _starts(position_ids: Tensor | None, query: Tensor) -> Tensor:
    """Return where the samples of a row begin, and where the last of them ends: int32 [S + 1]."""
    ends = torch.tensor([0, query.shape[2]], dtype=torch.int32, device=query.device)
    if position_ids is None:
        return ends
    begins = (position_ids[0].diff() != 1).nonzero().flatten() + 1
    return torch.cat([ends[:1], begins.to(torch.int32), ends[1:]])


def _flash(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_lens: Tensor,
    max_length: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return torch's flash attention over samples of all lengths, [1, T, heads, width]."""
    from torch.nn.attention.varlen import varlen_attn  # torch 2.12 and newer know all of these options

    width = value.shape[-1]  # latent attention has narrower values, and the kernel one width
    value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    states = (rows[0].transpose(0, 1) for rows in (query, key, value))
    seen = (-1, 0) if window is None else (window - 1, 0)  # tokens to the left and to the right
    lengths = (cu_seq_lens, cu_seq_lens, max_length, max_length)
    attended: Tensor = varlen_attn(*states, *lengths, scale=scaling, window_size=seen, enable_gqa=True)
    return attended[None, ..., :width]


def _within(window: int | None, query: Tensor) -> Tensor | None:
    """Return which tokens of one sample a token attends to, [T, T]; None: all earlier ones."""
    length = query.shape[2]
    if window is None or window >= length:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)


def _mask(batch_size: int, q_length: int, kv_length: int, *args: object, **options: object) -> Tensor | None:
    """Return no mask for one row without a cache or padding, and SDPA's mask otherwise."""
    if batch_size == 1 and q_length == kv_length and options.get("attention_mask") is None:
        return None
    mask: Tensor | None = sdpa_mask(batch_size, q_length, kv_length, *args, **options)
    return mask
