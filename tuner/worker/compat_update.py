"""What DeepSpeed's steps wait for and repeat without need, left out. It changes no number but those of `step_at_once`.

Seen with DeepSpeed 0.19.8 and torch 2.13. `bench counts` counts waits and operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import combine_grad_norm_groups
from deepspeed.runtime.zero import stage3, stage_1_and_2
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, NoGatherCoalescedHandle, NoGatherHandle
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import nvtx
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from tuner.files import JsonObject

_TORCHS_ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""Optimizers with fused kernels that divide the gradients by `grad_scale`, and do nothing where `found_inf` is 1."""
_FETCH, _GATHER = PartitionedParameterCoordinator.fetch_sub_module, GatheredParameters.__enter__
"""By which a forward pass of ZeRO-3 gets the weights of a module, and those that a loss asks for."""
_WAITS = {handle: handle.wait for handle in (NoGatherHandle, NoGatherCoalescedHandle)}
"""How ZeRO-3 waits for weights that no other rank has a part of."""


NAMES = (
    ("deepspeed", DeepSpeedEngine, "buffered_allreduce_fallback"),
    ("deepspeed", FP16_UnfusedOptimizer, "step", "_skip_invalid_grad_norm", "_update_scale"),
    ("deepspeed", stage_1_and_2, "combine_grad_norm_groups"),
    ("deepspeed", stage3, "combine_grad_norm_groups"),
    ("deepspeed", nvtx, "enable_nvtx"),
)


def spare_waits(zero: JsonObject) -> None:
    """Let ZeRO's stages wait once for the norm of the gradients and not for weights that are there; mark no ranges.

    ZeRO-1 and 2 ask the GPU for each group of weights whether the norm is a number, and the Trainer for its value.
    Where Python has the norm, as at ZeRO-3 with offloading, no one waits again, and the gradients are scaled by the
    same number. An NVTX range is two calls for each hook, thousands in a pass of ZeRO-3.

    One rank at ZeRO-3 has all weights, and waits for the GPU at each module, as if they were on their way. Without
    `offload_param` they are there.
    """
    for stage in (stage_1_and_2, stage3):
        stage.combine_grad_norm_groups = _combined
    nvtx.enable_nvtx = False
    if not zero.get("zero_optimization", {}).get("offload_param"):
        for handle, wait in _WAITS.items():
            handle.wait = _without_wait(wait)


def around_gathers(call: Callable[[Callable[[], None]], None]) -> None:
    """Let ZeRO-3 gather weights, and wait for them, inside a function of ours; the last one given counts."""
    PartitionedParameterCoordinator.fetch_sub_module = lambda *args, **options: call(partial(_FETCH, *args, **options))
    GatheredParameters.__enter__ = lambda context: call(partial(_GATHER, context))


def _without_wait(wait: Callable[..., None]) -> Callable[..., None]:
    """Return a handle's `wait` that takes its weights for there: it asks the accelerator whether they may not be."""

    def waited(handle: object, **options: object) -> None:
        accelerator = get_accelerator()
        accelerator.resolves_data_dependency = lambda: True
        try:
            wait(handle, **options)
        finally:
            del accelerator.resolves_data_dependency

    return waited


def _combined(*args: Any, **options: Any) -> torch.Tensor:
    norm: torch.Tensor = combine_grad_norm_groups(*args, **options).cpu()
    return norm


def spare_walks(engine: DeepSpeedEngine) -> None:
    """Let an engine list its modules and weights once, not for each micro-batch (`train`) and step (`zero_grad`)."""
    modules, weights, train = [*engine.module.modules()], [*engine.module.parameters()], engine.train

    def train_where_it_does_not(mode: bool = True) -> None:
        if not mode or not all(module.training for module in modules):
            train(mode)

    def zero_grad() -> None:
        for weight in weights:
            weight.grad = None

    engine.train, engine.zero_grad = train_where_it_does_not, zero_grad


def step_at_once(engine: DeepSpeedEngine) -> None:
    """Let an engine take its optimizer steps with few kernels, if it is of this kind and torch's Adam is fused.

    In stage 0 in 16 bits DeepSpeed looks at each gradient, waits for the answer, scales it, and copies its weight back;
    before it, one rank flattens, "reduces" and copies all gradients. Measured by counts: one wait for each trained
    tensor, 448 with LoRA on 8B. Several ranks reduce their gradients as DeepSpeed does.
    """
    wrapper, num_ranks = engine.optimizer, dist.get_world_size()
    if not isinstance(wrapper, FP16_UnfusedOptimizer) or (num_ranks > 1 and not _has_equal_ranks(engine)):
        return
    inner = wrapper.optimizer
    masters = chain.from_iterable(wrapper.fp32_groups)
    if {master.device.type for master in masters} - {"cpu", "cuda"}:
        return  # their kernels were not seen
    if type(inner) in _TORCHS_ADAM and all(group["fused"] for group in inner.param_groups):
        wrapper.step = MethodType(_step, wrapper)
        if num_ranks == 1:
            engine.buffered_allreduce_fallback = lambda *_, **__: None


def _has_equal_ranks(engine: DeepSpeedEngine) -> bool:
    """Return whether each rank has all weights and, after the backward pass, the same gradients."""
    split_by = engine.mpu.get_model_parallel_world_size() if engine.mpu else 1
    return split_by == 1 and not engine.has_moe_layers and engine.enable_backward_allreduce


def spare_timer(engine: DeepSpeedEngine) -> None:
    """Let an engine measure samples a second without a wait, and only where it prints them; unless a config has timers.

    DeepSpeed waits, by default, for all that the GPU computes before each forward pass and after each step.
    """
    if "timers" not in engine.config:
        prints = engine.steps_per_print() is not None
        engine.tput_timer.config = DeepSpeedThroughputTimerConfig(enabled=prints, synchronized=False)


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
    is_infinite = (~norm.isfinite()).float()
    if dist.get_world_size() > 1:  # the gradients are equal, but no two ranks may ever decide otherwise
        dist.all_reduce(is_infinite, dist.ReduceOp.MAX)
    self.optimizer.found_inf = is_infinite
    try:
        self.optimizer.step()
    finally:
        del self.optimizer.grad_scale, self.optimizer.found_inf
    torch._foreach_copy_(weights, masters)
    for master in masters:
        master.grad = None
    length = torch.where(is_infinite > 0, math.inf, norm).item()  # the one wait, behind all kernels
    if not math.isfinite(length):
        return bool(self._skip_invalid_grad_norm())
    self.overflow, self._global_grad_norm = False, length
    self._update_scale(False)
    return False
