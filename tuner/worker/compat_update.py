"""The optimizer step of DeepSpeed's stage 0 in 16 bits on one rank, taken with few kernels and one wait.

Seen with DeepSpeed 0.19.8 and torch 2.13. DeepSpeed looks at each gradient, waits for the answer, scales it, and copies
its weight back; before it, one rank flattens, "reduces" and copies all gradients. Measured by counts: one wait for each
trained tensor, 448 with LoRA on 8B.
"""

from __future__ import annotations

import math
from itertools import chain
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer

from tuner.machine.libraries import require_names

_TORCHS_ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers whose fused kernels divide the gradients by `grad_scale`, and do nothing where `found_inf` is 1."""


def check_names() -> None:
    """Refuse a DeepSpeed without one of these names. Raises as `compat.check_names`."""
    require_names("deepspeed", DeepSpeedEngine, "buffered_allreduce_fallback")
    require_names("deepspeed", FP16_UnfusedOptimizer, "step", "_skip_invalid_grad_norm", "_update_scale")


def step_at_once(engine: DeepSpeedEngine) -> None:
    """Let an engine take its optimizer steps with few kernels, if it is of this kind and torch's Adam is fused."""
    wrapper = engine.optimizer
    if not isinstance(wrapper, FP16_UnfusedOptimizer) or dist.get_world_size() > 1:
        return
    inner = wrapper.optimizer
    masters = chain.from_iterable(wrapper.fp32_groups)
    if {master.device.type for master in masters} - {"cpu", "cuda"}:
        return  # their kernels were not seen
    if type(inner) in _TORCHS_ADAM and all(group["fused"] for group in inner.param_groups):
        wrapper.step = MethodType(_step, wrapper)
        engine.buffered_allreduce_fallback = lambda *_, **__: None  # of one rank alone


@torch.no_grad()  # type: ignore[untyped-decorator]
def _step(self: Any, closure: None = None) -> bool:
    """Take a step as `FP16_UnfusedOptimizer.step` does, and return whether it was skipped.

    In the steps after which fp16's scale grows, DeepSpeed divides by the new scale; this divides by that of the loss.
    """
    weights, masters = (list(chain.from_iterable(groups)) for groups in (self.fp16_groups, self.fp32_groups))
    gradients = [torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights]
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)))
    in_fp32 = [torch.empty_like(master) for master in masters]
    torch._foreach_copy_(in_fp32, gradients)
    for master, gradient in zip(masters, in_fp32, strict=True):
        master.grad = gradient
    scale = self.loss_scale_config.cur_scale
    above_limit = (norm / scale + 1e-6) / self.clip_grad if self.clip_grad > 0 else torch.ones_like(norm)
    self.optimizer.grad_scale = above_limit.clamp(min=1.0) * scale
    self.optimizer.found_inf = (~norm.isfinite()).float()
    try:
        self.optimizer.step()
    finally:
        del self.optimizer.grad_scale, self.optimizer.found_inf
    torch._foreach_copy_(weights, masters)
    for master in masters:
        master.grad = None
    length = norm.item()  # the one wait, behind all kernels
    if not math.isfinite(length):
        return bool(self._skip_invalid_grad_norm())
    self.overflow, self._global_grad_norm = False, length
    self._update_scale(False)
    return False
