"""Attention over rows that hold several samples end to end, one sample at a time and without a mask.

SDPA keeps samples apart with a mask, and computes all (S x T)^2 pairs of a row of S samples of T tokens each. With the
lengths of the samples S x T^2 pairs are enough: on GPUs flash attention computes them in one kernel, which torch brings
with it; on other devices SDPA computes one sample after the other.

A sink is a learned score of each head that takes a part of the attention and gives nothing (gpt-oss).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tuner.models import compat
from tuner.recipes.schema.architecture import VARLEN

_CHANGES_SCORES = ("position_bias", "softcap")
"""Arguments of transformers' attention that change its scores."""
_IN_16_BITS = (torch.bfloat16, torch.float16)
_TOKENS_AT_ONCE = 512
"""In 32 bits, in the gradient of sinks."""


def register() -> None:
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
    s_aux: Tensor | None = None,
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
        s_aux: The sink of each head, [heads].
        cu_seq_lens_q: int32 [S + 1], where the samples of the row begin and end. None: `position_ids` say it, for which
            a GPU waits.
        max_length_q: The length of the longest of them.

    Returns:
        The attended values [1, T, heads, width], and no weights.
    """
    in_one_row = query.shape[0] == 1 and query.shape[2] == key.shape[2]
    if attention_mask is not None or not in_one_row or not getattr(module, "is_causal", True):
        options |= {"dropout": dropout, "scaling": scaling}
        return _by_sdpa(module, query, key, value, attention_mask, s_aux, **options), None
    if unknown := sorted(name for name in _CHANGES_SCORES if options.get(name) is not None):
        raise NotImplementedError(f"{VARLEN} attention has no {', '.join(unknown)}")
    if cu_seq_lens_q is None or max_length_q is None:
        cu_seq_lens_q = _starts(position_ids, query)
        max_length_q = int(cu_seq_lens_q.diff().max())
    window = None if sliding_window is None or sliding_window >= max_length_q else sliding_window
    if not query.is_cpu and query.dtype in _IN_16_BITS and not dropout:
        return _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling, window, s_aux), None
    samples = zip(*(rows.split(cu_seq_lens_q.diff().tolist(), dim=2) for rows in (query, key, value)), strict=True)
    options = {"dropout": dropout, "scaling": scaling}
    parts = [_by_sdpa(module, q, k, v, _within(window, q), s_aux, **options) for q, k, v in samples]
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
    sinks: Tensor | None,
) -> Tensor:
    """Return torch's flash attention over samples of all lengths, [1, T, heads, width]."""
    from torch.nn.attention.varlen import varlen_attn  # torch 2.12 and newer know all of these options

    width = value.shape[-1]  # latent attention has narrower values, and the kernel one width
    value = pad(value, (0, query.shape[-1] - width))
    states = (rows[0].transpose(0, 1) for rows in (query, key, value))
    window_size = (-1, 0) if window is None else (window - 1, 0)  # tokens to the left and to the right
    lengths = (cu_seq_lens, cu_seq_lens, max_length, max_length)
    if sinks is None:
        attended: Tensor = varlen_attn(*states, *lengths, scale=scaling, window_size=window_size, enable_gqa=True)
    else:
        attended = _FlashWithSinks.apply(*states, sinks, lengths, scaling, window_size)
    return attended[None, ..., :width]


class _FlashWithSinks(torch.autograd.Function):  # type: ignore[misc]
    """Flash attention in which a sink takes its part of each token's attention.

    The kernel knows no sink, and torch 2.13 leaves out the gradient of its log-sum-exp without an error. But a sink
    only makes the sum of a token's exponentials larger: the kernel's own backward pass is right if it gets the values
    and the log-sum-exp that the sink has changed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        sinks: Tensor,
        lengths: tuple[Tensor, Tensor, int, int],
        scaling: float | None,
        window: tuple[int, int],
    ) -> Tensor:
        from torch.nn.attention.varlen import AuxRequest, varlen_attn

        states, options = (query_THD, key_TGD, value_TGD), {"scale": scaling, "window_size": window}
        out_THD, lse_HT = varlen_attn(*states, *lengths, **options, enable_gqa=True, return_aux=AuxRequest(lse=True))
        of_sinks_H1 = sinks.float()[:, None].clone()  # ZeRO-3 takes the weight back before the backward pass
        with_sinks_HT = torch.logaddexp(lse_HT, of_sinks_H1)
        out_THD = (out_THD * (lse_HT - with_sinks_HT).exp().t()[..., None]).to(query_THD.dtype)
        ctx.save_for_backward(*states, out_THD, with_sinks_HT, of_sinks_H1, *lengths[:2])
        ctx.longest, ctx.options, ctx.dtype = lengths[2:], options, sinks.dtype
        return out_THD

    @staticmethod
    def backward(ctx: Any, of_out_THD: Tensor) -> tuple[Tensor | None, ...]:
        *states, out_THD, lse_HT, of_sinks_H1, begins_q, begins_k = ctx.saved_tensors
        saved = (*states, out_THD, lse_HT, begins_q, begins_k, *ctx.longest)
        of_states = compat.varlen_backward(of_out_THD.contiguous(), *saved, **ctx.options)
        both = zip(of_out_THD.split(_TOKENS_AT_ONCE), out_THD.split(_TOKENS_AT_ONCE), strict=True)
        given_TH = torch.cat([(gradient.float() * out.float()).sum(-1) for gradient, out in both])
        of_sinks = -((of_sinks_H1 - lse_HT).exp() * given_TH.t()).sum(-1)
        return (*of_states, of_sinks.to(ctx.dtype), None, None, None)


def _by_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    **options: object,
) -> Tensor:
    """Return SDPA's attention, [B, T, heads, width]; a sink is one more key, of which the mask is the score."""
    if sinks is not None:
        length, num_keys = query.shape[2], key.shape[2]
        if mask is None:
            mask = torch.ones(length, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - length)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
        shape = (query.shape[0], query.shape[1], length)
        mask = torch.cat([mask.expand(*shape, -1), sinks.to(query.dtype)[:, None, None].expand(*shape, 1)], dim=-1)
        key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
    attended: Tensor = sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    return attended


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
