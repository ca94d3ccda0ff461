"""The parts of TRL's fused head that `worker.loss` uses: what it does to logits, and its kernels for a tile of them.

Seen with TRL 1.16. Its own function computes all logits twice, and gives each token a gradient of its own.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from trl.kernels import chunked_logprob
from trl.trainer import utils

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PretrainedConfig, PreTrainedModel

_SCALES = ("logit_scale", "final_logit_softcapping", "temperature")
_MULTIPLIERS = ("logit_scale", "output_multiplier", "lm_head_multiplier")


NAMES = (
    ("trl", chunked_logprob, "_use_triton", "_forward_kernel", "_backward_kernel", "_addmm_fp32", "_BLOCK_SIZE"),
    ("trl", utils, "maybe_gather_lm_head_ctx", "_CHUNKED_LOGPROB_CHUNK_SIZE"),
)


class Scales(NamedTuple):
    """What becomes of the product of a hidden state and the head's weight: x -> cap * tanh(x * scale / cap)."""

    scale: float = 1.0
    cap: float | None = None


def scales_of(model: PreTrainedModel) -> Scales:
    """Return what TRL's head does to the logits of a model that has one; it knows families' names for it."""
    variables = inspect.getclosurevars(model.forward).nonlocals
    scale, cap, temperature = (variables[name] for name in _SCALES)
    assert temperature == 1.0, "of objectives that generate"
    return Scales(scale, cap)


def scales_in(config: PretrainedConfig) -> Scales:
    """Return what a model does to its logits by its config, in the families' names that TRL's distillation knows."""
    text = config.get_text_config()
    scale = next((value for name in _MULTIPLIERS if (value := getattr(text, name, None)) is not None), None)
    if scale is None and getattr(text, "logits_scaling", None) is not None:
        scale = text.logits_scaling if text.model_type == "hyperclovax" else 1 / text.logits_scaling
    return Scales(1.0 if scale is None else scale, getattr(text, "final_logit_softcapping", None))


def most_logits() -> int:
    """Return how many logits TRL's head has in memory at a time."""
    logits: int = chunked_logprob.TOKEN_CHUNK_SIZE * utils._CHUNKED_LOGPROB_CHUNK_SIZE
    return logits


def gathered(*weights: Tensor | None) -> AbstractContextManager[object]:
    """Return a context in which weights are whole on this rank, as outside of ZeRO-3."""
    context: AbstractContextManager[object] = utils.maybe_gather_lm_head_ctx(*weights)
    return context


def add_product(sums_fp32: Tensor, left: Tensor, right: Tensor, *, is_only_product: bool) -> None:
    """Add a product of two matrices to sums in fp32.

    The product is not rounded to 16 bits before others are added to it. On a CPU, which can do so only with copies in
    fp32 (2.6 times the time), the only product of its sums is rounded, as whole logits round it.
    """
    is_rounded = is_only_product and left.dtype != sums_fp32.dtype
    if is_rounded and left.device.type == "cpu" and not has_kernels(left.device):
        sums_fp32.copy_(left @ right)
    else:
        chunked_logprob._addmm_fp32(sums_fp32, left, right)


def has_kernels(device: torch.device) -> bool:
    """Return whether TRL's kernels, in Triton, run on the device."""
    uses: bool = chunked_logprob._use_triton(device)
    return uses


def fold(
    tile_NV: Tensor,
    targets_N: Tensor,
    weights_N: Tensor | None,
    scales: Scales,
    metrics: Sequence[str],
    *,
    by_probability: bool = False,
) -> dict[str, Tensor]:
    """Return log-probabilities and metrics of tokens, [N] in fp32, from the products of their hidden states.

    Args:
        tile_NV: With weights it becomes the gradient of -(weights * log-probabilities).sum(), in its own type.
        weights_N: In fp32; None: no gradient is needed.
        by_probability: In the gradient a token's weight is times its probability.
    """
    (num_tokens, vocab_size), new = tile_NV.shape, targets_N.new_zeros
    shared = {
        "logit_scale": scales.scale,
        "softcap": scales.cap or 1.0,
        "inv_t": 1.0,
        "HAS_SOFTCAP": scales.cap is not None,
        "BLOCK_SIZE": chunked_logprob._BLOCK_SIZE,
    }
    sum_exp, unused, of_target = (new(num_tokens, dtype=torch.float32) for _ in range(3))
    maximum = torch.full_like(sum_exp, -torch.inf)
    before = torch.full_like(sum_exp, -torch.inf) if "is_top1" in metrics else unused
    x_sum_exp = torch.zeros_like(sum_exp) if "entropy" in metrics else unused
    chunked_logprob._forward_kernel[(num_tokens,)](
        tile_NV,
        tile_NV.stride(0),
        targets_N,
        maximum,
        sum_exp,
        x_sum_exp,
        unused,  # for the probabilities' squares
        unused,  # for the mean logit
        before,
        of_target,
        0,
        vocab_size,
        HAS_ENTROPY="entropy" in metrics,
        HAS_LOG_SUM_SQ_PROBS=False,
        HAS_MEAN_LOGITS=False,
        HAS_IS_TOP1="is_top1" in metrics,
        **shared,
    )
    log_z = maximum + sum_exp.log()
    values = {"log_probs": of_target - log_z}
    if "entropy" in metrics:
        values["entropy"] = log_z - x_sum_exp / sum_exp
    if "is_top1" in metrics:
        values["is_top1"] = (of_target >= maximum) & (of_target > before)
    if weights_N is not None:
        weights_N = weights_N * values["log_probs"].exp() if by_probability else weights_N
        num_blocks = -(-vocab_size // chunked_logprob._BLOCK_SIZE)
        chunked_logprob._backward_kernel[(num_tokens, num_blocks)](
            tile_NV,
            tile_NV.stride(0),
            targets_N,
            log_z,
            unused,  # the entropy
            -weights_N,
            unused,  # its gradient
            0,
            vocab_size,
            HAS_LOGPROB_GRAD=True,
            HAS_ENTROPY_GRAD=False,
            **shared,
        )
    return values
