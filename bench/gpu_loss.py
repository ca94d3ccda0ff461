"""TRL's losses on a CPU with the tensors that they have on a GPU.

On a GPU TRL 1.16 computes them in Triton: logits in place, a tile at a time, and only of tokens with a label. On a CPU
it takes every token, and several copies of a tile in fp32. Here the same arithmetic stands for the kernels, which need
a GPU: what it allocates for itself is hidden from `live.Live`. Everything around the kernels is TRL's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from trl.kernels import chunked_logprob
from trl.trainer import utils


def _hidden(function: Callable[..., Any]) -> Callable[..., Any]:
    def hidden(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **options)

    return hidden


class _Kernel:
    """Takes a grid before its arguments, as a kernel of Triton does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = _hidden(function)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.function


class _LogProbs(torch.autograd.Function):
    """trl.kernels.logprob_entropy, which is defined only where Triton is: the same tensors saved, the same gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor) -> Tensor:
        chosen, _, log_z, expected = (torch.empty(index.shape) for _ in range(4))
        with _disable_current_modes():
            log_z.copy_(logits.float().logsumexp(-1))
            chosen.copy_(logits.gather(-1, index.unsqueeze(-1)).squeeze(-1).float() - log_z)
        ctx.save_for_backward(logits, index, log_z, expected)
        return chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        logits, index, log_z, _ = ctx.saved_tensors
        found = torch.empty_like(logits, memory_format=torch.contiguous_format)
        with _disable_current_modes():
            each = -(logits.float() - log_z.unsqueeze(-1)).exp()
            each.scatter_add_(-1, index.unsqueeze(-1), torch.ones_like(each[..., :1]))
            found.copy_(each * gradients[0].unsqueeze(-1))
        return found, None


_WITH_TRITON = ("triton", "_fused_logprob_entropy")
"""What TRL's modules import where Triton is installed."""


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Let TRL take the path that it takes on a GPU."""
    kernels = {
        "_use_triton": lambda device: True,
        "_forward_kernel": _Kernel(chunked_logprob._forward_tile),
        "_backward_kernel": _Kernel(chunked_logprob._backward_tile),
        "_addmm_fp32": _hidden(chunked_logprob._addmm_fp32),
        "triton": SimpleNamespace(cdiv=lambda whole, part: -(-whole // part)),
    }
    losses = {
        "_use_triton": lambda device: True,
        "is_triton_available": lambda: True,
        "_supports_trl_loss_kernel": lambda *_: True,
        "_fused_logprob_entropy": lambda logits, index, **_: (_LogProbs.apply(logits, index), None),
    }
    with ExitStack() as stack:
        for module, patches in ((chunked_logprob, kernels), (utils, losses)):
            for name, stand_in in patches.items():
                stack.enter_context(mock.patch.object(module, name, stand_in, create=name in _WITH_TRITON))
        yield
