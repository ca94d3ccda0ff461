"""Bytes of all tensors that live at one time, and their peak: what CUDA's allocator counts, on a machine without a GPU.

It follows the outputs of every operation from the moment that it is entered. What a kernel needs for itself and gives
back before it returns is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tuner.lab.compat_meta_tensors import joins_gradients


class Live(TorchDispatchMode):
    """Counts storages from their first tensor to their last: `now`, and the most since `reset`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that nothing here is compiled: torch would put calls between this and the operation's caller."""
        return False

    def __enter__(self) -> Live:
        gc.collect()  # what goes while it counts, and was garbage before, would be taken off
        self.add(thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor))
        self.reset()
        super().__enter__()
        return self

    def reset(self) -> None:
        self.peak = self.now

    def add(self, things: Iterable[Any]) -> None:
        for tensor in things:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                self._follow(tensor.untyped_storage())
        self.peak = max(self.peak, self.now)

    def _follow(self, storage: Any) -> None:
        known, size = self._sizes.get(storage._cdata), storage.nbytes()
        if known is None:
            weakref.finalize(storage, self._forget, storage._cdata).atexit = False
        self._sizes[storage._cdata] = size  # it may have grown or shrunk
        self.now += size - (known or 0)

    def _forget(self, address: int) -> None:
        self.now -= self._sizes.pop(address)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if joins_gradients(func, args):
            return args[0].add_(args[1])
        found = func(*args, **(kwargs or {}))
        self.add(tree_leaves(found))
        return found
