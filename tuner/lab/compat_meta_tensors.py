"""Meta tensors instead of a GPU's: each storage is counted, and GPU kernels save what they save on a GPU.

Meta tensors hold no data. `Memory` counts their storages, and `GpuKernels` takes the path that torch takes on a GPU
where it computes otherwise. Not counted: what a kernel allocates inside, CUDA's context, the allocator's gaps.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

META = "meta"
NO_CODE: Mapping[str, Any] = {"trust_remote_code": False}
"""The arguments that load a model without its own code."""
_DEVICE = Tensor.device.__get__
_READ = 64
"""Elements. As many that leave the GPU are real on the host, where code reads them as numbers."""


class Memory(TorchDispatchMode):  # type: ignore[misc]
    """Counts the storages of meta tensors, each from its first tensor to its last.

    Large tensors of the host are meta tensors too, and are not counted. A value that code reads from a meta tensor is
    0: no overflow, and a norm that needs no clipping.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = self.operations = 0
        self.held: dict[int, int] = {}
        """Bytes of each storage, by address."""
        self._on_host: set[int] = set()
        self._layouts: dict[Any, tuple[Any, ...] | None] = {}
        """Shape, strides and type of an operation's result, by the operation and those of its inputs; None: there is
        more than one result, or it has the storage of an input."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that nothing here is compiled: torch 2.13 would import its compiler, and ask it at each operation."""
        return False

    def begin(self) -> None:
        """Take what is held now for the peak so far."""
        self.peak = self.now

    def is_on_host(self, tensor: Tensor) -> bool:
        return not tensor.is_meta or tensor.untyped_storage()._cdata in self._on_host

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations += 1
        if func.is_view:
            return func(*args, **(kwargs or {}))
        kwargs, name = dict(kwargs or {}), func._schema.name
        if name in ("aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal") and args[0].is_meta:
            return 0.0 if args[0].is_floating_point() else 0
        if name == "aten::_fused_adamw_":
            return None  # in place, and not known on meta tensors
        if joins_gradients(func, args):
            return args[0]
        if name == "aten::copy_" and args[1].is_meta and not args[0].is_meta:
            return args[0]  # small numbers that leave the GPU
        if name == "bitsandbytes::gemm_4bit":
            from bitsandbytes.backends.default.ops import _gemm_4bit_default_impl

            return _gemm_4bit_default_impl(*args, **kwargs)  # its CUDA kernel does this for more than 1,536 tokens
        inputs = [*_tensors(args), *_tensors(kwargs.values())]
        device, to_host = kwargs.get("device"), False
        if device is not None and device.type == "cpu":
            moved = next((tensor for tensor in inputs if tensor.is_meta), None)
            if moved is not None and moved.numel() <= _READ:
                return torch.zeros(moved.shape, dtype=kwargs.get("dtype") or moved.dtype)
            to_host = moved is not None or (not inputs and _num_elements(args) > 1)
        if to_host:
            kwargs["device"] = torch.device(META)
        result = self._made(func, args, kwargs)
        if name == "aten::zeros_like" and device is not None:
            return result  # ZeRO-1 and 2 note shapes in meta tensors
        on_host = to_host or (device is None and bool(inputs) and all(map(self.is_on_host, inputs)))
        for tensor in _tensors((result,)):
            if tensor.is_meta:
                self._follow(tensor.untyped_storage(), on_host)
        if self.now > self.peak:
            self.begin()
        return result

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what an operation returns. torch works out the layout of a result once: in Python, in up to 1 ms."""
        key = None if func._schema.is_mutable else _key_of(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if layout := self._layouts.get(key):
            size, stride, dtype = layout
            return torch.empty_strided(size, stride, dtype=dtype, device=META)
        result = func(*args, **kwargs)
        if key not in self._layouts:
            is_new = type(result) is Tensor and result.is_meta and _is_new(result, args)
            self._layouts[key] = (result.shape, result.stride(), result.dtype) if is_new else None
        return result

    def _follow(self, storage: Any, on_host: bool) -> None:
        address = storage._cdata
        if address in self._on_host:
            return
        if address not in self.held:
            weakref.finalize(storage, self.forget, address).atexit = False
            if on_host:
                self._on_host.add(address)
                return
        self.hold(address, storage.nbytes())

    def hold(self, address: int, size: int) -> None:
        """Note the bytes that a storage has now."""
        self.now += size - self.held.get(address, 0)
        self.held[address] = size

    def forget(self, address: int) -> None:
        """Note that a storage is gone."""
        self._on_host.discard(address)
        self.now -= self.held.pop(address, 0)


_ALONE = 4, 2
"""How often a sum of gradients and its storage are held if autograd alone holds them, the call and its tensor here."""


def joins_gradients(func: Any, args: Any) -> bool:
    """Return whether autograd adds a gradient to a sum that it would add in place if no mode looked on.

    It writes into a sum that nothing else holds, but not under a mode (torch 2.13, `can_accumulate_inplace` in
    csrc/autograd/input_buffer.cpp). So a mode sees one tensor more than there is.
    """
    if func is not torch.ops.aten.add.Tensor or sys._getframe(2).f_code.co_name != "_engine_run_backward":
        return False
    held = args[0]._use_count(), torch._C._storage_Use_Count(args[0].untyped_storage()._cdata)
    return held == _ALONE and args[0].shape == args[1].shape


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an operator's arguments or results, in lists too; torch's own walk takes long."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _key_of(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...] | None:
    """Return on what the layout of a result depends; None if it may be more."""
    key: list[Any] = [func]
    is_plain = _add_layouts(key, args) and (not kwargs or _add_layouts(key, kwargs.items()))
    return tuple(key) if is_plain else None


def _add_layouts(key: list[Any], values: Iterable[Any]) -> bool:
    """Add each value, of a meta tensor its layout; return whether there are no other tensors."""
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_meta:
                return False
            key.append((value.shape, value.stride(), value.dtype))
        elif isinstance(value, list | tuple):
            key.append(len(value))
            if not _add_layouts(key, value):
                return False
        else:
            key.append((type(value), value))  # 1 and 1.0 are the same key
    return True


def _is_new(result: Tensor, args: Any) -> bool:
    """Return whether a result has a storage of its own, and no more than it needs."""
    storage = result.untyped_storage()
    elements = sum((size - 1) * stride for size, stride in zip(result.shape, result.stride(), strict=True)) + 1
    inputs = {tensor.untyped_storage()._cdata for tensor in _tensors(args)}
    return storage._cdata not in inputs and storage.nbytes() == result.itemsize * elements * (result.numel() > 0)


def _num_elements(args: Any) -> int:
    return math.prod(args[0]) if args and isinstance(args[0], list | tuple) else 0


class _Scattered(torch.autograd.Function):  # type: ignore[misc]
    """Tensor.masked_scatter, of which meta tensors do not know how many values the mask selects."""

    @staticmethod
    def forward(context: Any, values: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        context.save_for_backward(mask)
        context.source = source.shape
        return torch.empty_like(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        return torch.empty_like(gradient), None, gradient.new_empty(context.source)


class GpuKernels(TorchFunctionMode):  # type: ignore[misc]
    """Computes what torch 2.13 computes otherwise on a GPU than on meta tensors."""

    def __init__(self, memory: Memory, capability: tuple[int, int]) -> None:
        super().__init__()
        self.memory, self.capability = memory, capability

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        if func is Tensor.masked_scatter:
            return _Scattered.apply(*args)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        if func == _DEVICE and args[0].is_meta and self.memory.is_on_host(args[0]):
            return torch.device("cpu")
        if func is Tensor.to and self.memory.is_on_host(args[0]) and META in map(str, (*args[1:], *kwargs.values())):
            return torch.empty_like(args[0], device=META) if args[0].is_meta else func(*args, **kwargs)
        index = args[1] if func is Tensor.__getitem__ else None
        if isinstance(index, Tensor) and index.is_meta and index.dtype == torch.bool:
            # The places that a mask selects are found first and kept for backward. Here it selects all of them.
            places = torch.empty((index.ndim, index.numel()), dtype=torch.long, device=META)
            return func(args[0], tuple(places.unbind()))
        return func(*args, **kwargs)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Compute attention with the kernel that torch selects (ATen/native/transformers/cuda/sdp_utils.cpp)."""
        is_ampere, is_half = self.capability >= (8, 0), query.dtype in (torch.float16, torch.bfloat16)
        if is_ampere and is_half and attn_mask is None and query.shape[-1] == value.shape[-1] <= 256:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
        if query.shape[1] == key.shape[1] and (is_ampere or query.dtype != torch.bfloat16):
            efficient = torch.ops.aten._scaled_dot_product_efficient_attention
            keeps = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
            bias = None if attn_mask is None else _bias(attn_mask, query, key)
            return efficient(query, key, value, bias, keeps, dropout_p, is_causal, scale=scale)[0]
        # Meta tensors take the math path by themselves, with the scores of all pairs of tokens.
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Return a mask as the efficient kernel takes it: numbers in the compute type, in rows of a multiple of 16."""
    if mask.dtype == torch.bool:
        visible, hidden = (torch.empty((), dtype=query.dtype, device=META) for _ in range(2))
        mask = torch.where(mask, visible, hidden)
    if missing := -mask.shape[-1] % 16:
        mask = F.pad(mask, (0, missing))[..., : key.shape[2]]
    return mask.expand(*query.shape[:3], key.shape[2])


def _dropout(values: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Drop out with the kernel for GPUs, which keeps a mask of one byte per number."""
    return torch.native_dropout(values, p, training)[0] if training and p else values


@contextmanager
def without_autocast(dtype: torch.dtype) -> Iterator[None]:
    """Answer for meta tensors what libraries ask about autocast, which torch does not know on them."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "is_autocast_enabled", lambda *_: False))
        stack.enter_context(mock.patch.object(torch, "get_autocast_dtype", lambda *_: dtype))
        stack.enter_context(mock.patch.object(torch, "autocast", lambda *_, **__: nullcontext()))
        yield


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """Return the layers of a model's decoder; None where it has no list of so many."""
    number = model.config.get_text_config().num_hidden_layers
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    return next((layers for layers in lists if len(layers) == number), None)


def attention_of(config: Any) -> str:
    """Return the attention that transformers (5.24) has chosen for a model with this config."""
    name: str | None = getattr(config, "_attn_implementation", None)
    return name or "eager"
