"""When each optimizer step ends, in rank 0 of any tool on the Trainer, without a change to the tool.

`BENCH_CLOCK` names the file that gets a line a step: the wall's clock (one for all processes of a machine), the
processor's seconds of this rank, and the peak of a GPU's memory. `BENCH_OPERATIONS` names one for the operations of
one step, by torch's profiler. `BENCH_SNAPSHOTS` names a folder that gets the trained weights after some of the steps;
the line of such a step has the seconds that writing took. `BENCH_STOP_S` ends training after the step in which that
many seconds of the wall have passed since the first step's end. It imports nothing that the tool has not imported
already, and needs no package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PROFILED_STEP = 4
_HOOKED = "transformers.trainer_callback"
_PARTS = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""The parts of all steps after which the weights are written; a tool writes those of the last step itself."""
_steps = 0
_began = 0.0
_profiler: Any = None


def tick(model: Any = None, state: Any = None, control: Any = None) -> None:
    """Write down that an optimizer step has ended; the model, the Trainer's state and its control are known to it."""
    global _steps, _began
    if os.environ.get("RANK", "0") != "0":
        return
    _steps += 1
    line = {"wall": time.monotonic(), "cpu": time.process_time(), "gpu_peak_bytes": _gpu_peak()}
    _began = _began or line["wall"]
    if "BENCH_SNAPSHOTS" in os.environ and _steps in {round(part * state.max_steps) for part in _PARTS}:
        _snapshot(model, Path(os.environ["BENCH_SNAPSHOTS"]) / str(_steps))
    line |= {"aside_wall": time.monotonic() - line["wall"], "aside_cpu": time.process_time() - line["cpu"]}
    if line["wall"] - _began >= float(os.environ.get("BENCH_STOP_S", "inf")):
        control.should_training_stop = True
    with Path(os.environ["BENCH_CLOCK"]).open("a") as stream:
        stream.write(json.dumps(line | {"max_steps": state.max_steps if state else 0}) + "\n")
    if "BENCH_OPERATIONS" in os.environ:
        _profile()


def _snapshot(model: Any, folder: Path) -> None:
    """Write each trained parameter into a file of its own, so that no second copy of all of them is in memory."""
    torch = sys.modules["torch"]
    folder.mkdir(parents=True)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.save(parameter.detach().cpu().clone(), folder / f"{name}.pt")


def _gpu_peak() -> int:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.max_memory_allocated()) if cuda and cuda.is_initialized() else 0


def _profile() -> None:
    global _profiler
    from torch.profiler import profile

    if _steps == _PROFILED_STEP - 1:
        _profiler = profile()
        _profiler.start()
    elif _steps == _PROFILED_STEP:
        _profiler.stop()
        counts = {one.key: one.count for one in _profiler.key_averages()}
        Path(os.environ["BENCH_OPERATIONS"]).write_text(json.dumps(counts))


def watch_trainer() -> None:
    """Have the Trainer's callbacks tick at each step's end, once it is imported."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _HOOKED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        assert spec is not None and spec.loader is not None
        spec.loader = _Hooked(spec.loader)
        return spec


class _Hooked(Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self.loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        handler: Any = module.CallbackHandler
        on_step_end = handler.on_step_end

        def timed(handler: Any, args: Any, state: Any, control: Any) -> Any:
            control = on_step_end(handler, args, state, control)
            tick(handler.model, state, control)
            return control

        handler.on_step_end = timed
