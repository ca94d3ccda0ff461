"""What a step would wait for on a GPU, and the operations that it would start there, counted on a CPU.

A GPU works behind Python, which waits for it where it reads a value from it, and where it copies memory to it that is
not pinned, or without `non_blocking`. A CPU has one kind of memory, so it is told here what lies where: what a data
loader collates lies with Python, what a step makes without naming a device, and the whole numbers that were there
before; all else is taken to be on the GPU.
DeepSpeed's accelerator for CPUs is made to give streams and events, whose waits count too, as on CUDA.

It counts Python's calls (`item`, `tolist`, a tensor as a condition or an index, `cpu`, `tensor(..., device)`, `to`)
and what torch's own functions read (a mask as an index, `nonzero`). It does not know whether memory is pinned: a copy
with `non_blocking` is not counted.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_READS = {
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__", "__array__",
    "nonzero", "argwhere", "masked_select", "unique", "equal", "allclose", "is_nonzero",
}  # fmt: skip
_MAKERS = {"tensor", "as_tensor", "new_tensor", "asarray"}
"""What makes tensors of values that Python has."""
_OPERATIONS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::masked_scatter_backward",
}  # fmt: skip
"""What reads values where no function of Python does, such as the backward pass of a mask."""
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
"""What reads values if a mask is among its indices."""


class Counted:
    """Counts between `start` and `stop`: `waits` by their kind and place, and `operations` by their name."""

    def __init__(self) -> None:
        self.waits: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self._of_python: dict[int, Any] = {}
        """Tensors that Python has, by their id; held, so that no other gets the id."""
        self._functions, self._dispatched = _Functions(self), _Dispatched(self)
        self.is_running = False
        self.is_collating = False

    def start(self) -> None:
        rows = (thing for thing in gc.get_objects() if type(thing) is torch.Tensor and not thing.is_floating_point())
        self.keep(list(rows), of_python=True)
        self._dispatched.__enter__()
        self._functions.__enter__()
        self.is_running = True

    def reset(self) -> None:
        """Forget what was counted, not what lies where: the rows of a step are made in the step before."""
        self.waits.clear()
        self.operations.clear()

    def stop(self) -> None:
        self.is_running = False
        self._functions.__exit__(None, None, None)
        self._dispatched.__exit__(None, None, None)

    def wait(self, kind: str) -> None:
        self.waits[f"{kind} {_place()}"] += 1

    def is_of_python(self, value: Any) -> bool:
        return id(value) in self._of_python

    def keep(self, values: Any, *, of_python: bool) -> None:
        for value in _tensors(values):
            if of_python:
                self._of_python[id(value)] = value
            else:
                self._of_python.pop(id(value), None)


class _Functions(TorchFunctionMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted
        self.is_counted = self.is_of_python = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted, kwargs = self.counted, kwargs or {}
        name = getattr(func, "__name__", "")
        inputs = list(_tensors((args, kwargs)))
        on_device = [tensor for tensor in inputs if not counted.is_of_python(tensor)]
        target = _device(name, args, kwargs)
        waits = not counted.is_collating and self._waits(name, args, kwargs, bool(on_device), target)
        if waits:
            counted.wait(name)
        before = self.is_counted, self.is_of_python
        self.is_of_python = counted.is_collating or (not on_device and not target)
        self.is_counted = waits or self.is_of_python
        try:
            result = func(*args, **kwargs)
        finally:
            of_python, (self.is_counted, self.is_of_python) = self.is_of_python, before
        counted.keep(result, of_python=name in ("cpu", "pin_memory") or of_python)
        return result

    def _waits(self, name: str, args: Any, kwargs: Any, on_device: bool, target: bool) -> bool:
        if name in ("to", "cuda"):
            return target and not on_device and not _is_async(args[1:], kwargs)
        if name == "copy_":
            source = args[1] if len(args) > 1 else kwargs.get("src")
            is_sent = self.counted.is_of_python(source) and not self.counted.is_of_python(args[0])
            return is_sent and source.ndim > 0 and not _is_async(args[2:], kwargs)
        if name in _MAKERS:
            return target and not list(_tensors(args[:1] if name != "new_tensor" else args[1:2]))
        if name == "where":
            return on_device and len(args) + len(kwargs) == 1
        if name in ("__getitem__", "__setitem__"):
            return on_device and _is_masked(args) and (name == "__getitem__" or _num_values(args[2]) != 1)
        return on_device and name in _READS


class _Dispatched(TorchDispatchMode):
    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counted, functions, name = self.counted, self.counted._functions, func.overloadpacket._qualified_op_name
        if not functions.is_of_python:
            counted.operations[name] += 1
        reads = name in _OPERATIONS or (name in _INDEXED and _is_masked(args))
        if reads and not functions.is_counted:
            counted.wait(name)
        return func(*args, **(kwargs or {}))


def _tensors(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _device(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether a call names a device. On a CPU its name does not tell which one: it counts as the GPU."""
    if kwargs.get("device") is not None or name in ("cuda", "new_tensor"):
        return True
    return name == "to" and any(isinstance(value, (torch.device, str)) for value in args[1:])


def _is_async(args: Any, kwargs: Any) -> bool:
    return bool(kwargs.get("non_blocking")) or any(value is True for value in args)


def _is_masked(args: Any) -> bool:
    return any(tensor.dtype == torch.bool and tensor.ndim for tensor in _tensors(args[1:2]))


def _num_values(value: Any) -> int:
    return value.numel() if isinstance(value, torch.Tensor) else 1


def _place() -> str:
    """Return the innermost line that is neither torch's nor of this file."""
    frame = sys._getframe(2)
    while frame.f_back and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    parts = frame.f_code.co_filename.split("/site-packages/")[-1].split("/")
    return f"{'/'.join(parts[-4:])}:{frame.f_lineno} {frame.f_code.co_name}"


counted = Counted()


def collate_in_python(module: Any) -> None:
    """Let what torch's data loader collates lie with Python, whatever device a collator names."""
    fetch = module._MapDatasetFetcher.fetch

    def fetched(self: Any, rows: Any) -> Any:
        counted.is_collating = True
        try:
            return fetch(self, rows)
        finally:
            counted.is_collating = False

    module._MapDatasetFetcher.fetch = fetched


def as_on_a_gpu(module: Any) -> None:
    """Let DeepSpeed's accelerator for CPUs be one that works behind Python, and count what is waited for."""
    accelerator = module.CPU_Accelerator
    no = lambda self: False  # noqa: E731
    accelerator.is_synchronized_device = accelerator.resolves_data_dependency = no
    accelerator.handles_memory_backpressure = no
    accelerator.Stream, accelerator.Event = (property(lambda self: _Behind) for _ in range(2))
    accelerator.current_stream = accelerator.default_stream = lambda self, device_index=None: _Behind()
    accelerator.synchronize = lambda self, device_index=None: _Behind().synchronize()
    for name in ("Byte", "Float", "Long", "Int"):
        setattr(
            accelerator, f"{name}Tensor", property(lambda self, name=name: _writing(getattr(torch, f"{name}Tensor")))
        )
    torch.Tensor.record_stream = lambda self, stream: None


def _writing(make: Callable[..., Any]) -> Callable[..., Any]:
    def made(*values: Any) -> Any:
        if counted.is_running:
            counted.wait("tensor")
        with torch._C.DisableTorchFunction():
            return make(*values)

    return made


class _Behind(SimpleNamespace):
    """A stream, or an event, that has always ended."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def synchronize(self) -> None:
        if counted.is_running:
            counted.wait("synchronize")

    def query(self) -> bool:
        return True

    def record(self, *_: Any) -> None: ...

    wait_stream = wait_event = wait = record_event = record
