"""LoRA of a linear layer as one function: the update is added inside the matrix product.

PEFT computes x W', then the low-rank product, its scaling and the sum, each over the full width of the output. A GPU
spends most of LoRA's time on moving these; the values and the saved adapter are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear


def fuse(model: torch.nn.Module) -> None:
    """Let the LoRA layers of a model compute as one function; those of quantized weights stay as they are."""
    for layer in model.modules():
        if type(layer) is Linear and type(layer.base_layer) is torch.nn.Linear:
            layer.__class__ = FusedLinear


class FusedLinear(Linear):  # type: ignore[misc]
    """PEFT's LoRA layer, which computes as PEFT does where more than x W' + b + s x A' B' is asked of it."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Tensor:
        names = [name for name in self.active_adapters if name in self.lora_A]
        if args or options or len(names) != 1 or not self._is_plain(names[0], x):
            unfused: Tensor = super().forward(x, *args, **options)
            return unfused
        base, down, up = self.base_layer, self.lora_A[names[0]], self.lora_B[names[0]]
        x_TI = x.flatten(0, -2)
        out_TO: Tensor = _Fused.apply(x_TI, base.weight, base.bias, down.weight, up.weight, self.scaling[names[0]])
        # Not inside: what a function of its own returns may be no view, which Llama 4 changes in place.
        return out_TO.view(*x.shape[:-1], out_TO.shape[-1])

    def _is_plain(self, name: str, x: Tensor) -> bool:
        weight, down, up = self.base_layer.weight, self.lora_A[name], self.lora_B[name]
        drops = self.training and not isinstance(self.lora_dropout[name], torch.nn.Identity)
        is_changed = self.disable_adapters or self.merged or name in self.lora_variant
        bias = self.base_layer.bias  # other tools' adapters may train it
        has_more = weight.requires_grad or (bias is not None and bias.requires_grad)
        has_more |= down.bias is not None or up.bias is not None
        is_one_type = x.dtype == weight.dtype == down.weight.dtype and not torch.is_autocast_enabled(x.device.type)
        return is_one_type and not (drops or is_changed or has_more)


class _Fused(torch.autograd.Function):  # type: ignore[misc]
    """x W' + b + s x A' B'; W and b are frozen."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x_TI: Tensor, weight: Tensor, bias: Tensor | None, down: Tensor, up: Tensor, scaling: float
    ) -> Tensor:
        low_TR = x_TI @ down.t()
        ctx.save_for_backward(x_TI, weight, down, up, low_TR)
        ctx.scaling = scaling
        return linear(x_TI, weight, bias).addmm_(low_TR, up.t(), alpha=scaling)

    @staticmethod
    def backward(ctx: Any, of_out_TO: Tensor) -> tuple[Tensor | None, ...]:
        x_TI, weight, down, up, low_TR = ctx.saved_tensors
        of_low_TR = (of_out_TO @ up).mul_(ctx.scaling)
        of_x_TI = (of_out_TO @ weight).addmm_(of_low_TR, down) if ctx.needs_input_grad[0] else None
        return of_x_TI, None, None, of_low_TR.t() @ x_TI, (of_out_TO.t() @ low_TR).mul_(ctx.scaling), None
