"""When each optimizer step ends, in rank 0 of any tool on the Trainer, without a change to the tool.

`BENCH_CLOCK` names the file that gets a line a step: the wall's clock (one for all processes of a machine), the
processor's seconds of this rank, and the peak of a GPU's memory. `BENCH_COUNTS` names one for what a step would wait
for on a GPU and the operations it starts (bench_counts), `BENCH_PROFILE` one for the seconds of its operations on a
GPU, by torch's profiler. `BENCH_SNAPSHOTS` names a folder that gets the trained weights after some of the steps;
the line of such a step has the seconds that writing took. `BENCH_STOP_S` ends training after the step in which that
many seconds of the wall have passed since the first step's end. It imports nothing that the tool has not imported
already, and needs no package.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_PROFILED_STEP = 5
_PARTS = (1 / 8, 1 / 4, 1 / 2, 3 / 4)
"""The parts of all steps after which the weights are written; a tool writes those of the last step itself."""
_steps = 0
_began = 0.0
_num_tokens = 0
_profiler: Any = None
_forever = ExitStack()


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
        stream.write(json.dumps(line | _of_state(state)) + "\n")
    if "BENCH_COUNTS" in os.environ:
        _count()
    if "BENCH_PROFILE" in os.environ:
        _profile()


def _of_state(state: Any) -> dict[str, float]:
    """Return what the Trainer's state knows: the tokens are those of the steps before. A loop has no state."""
    global _num_tokens
    if not state:
        return {}
    logged = [line["num_tokens"] for line in state.log_history if "num_tokens" in line]
    before, _num_tokens = _num_tokens, state.num_input_tokens_seen
    return {"max_steps": state.max_steps, "num_tokens": float(logged[-1] if logged else before)}


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


def _count() -> None:
    counted = _counts().counted
    if _steps == _PROFILED_STEP - 2:
        counted.start()
    elif _steps == _PROFILED_STEP - 1:
        counted.reset()
    elif _steps == _PROFILED_STEP:
        counted.stop()
        found = {"waits": counted.waits, "operations": counted.operations}
        Path(os.environ["BENCH_COUNTS"]).write_text(json.dumps(found))


def _profile() -> None:
    """Profile one step, between two moments in which the GPU has nothing to do."""
    global _profiler
    from torch.profiler import profile

    if _steps == _PROFILED_STEP - 1:
        profiler = profile()
        profiler.start()
        _profiler = (profiler, _time_of_idle_gpu())
    elif _steps == _PROFILED_STEP:
        profiler, began = _profiler
        wall_s = _time_of_idle_gpu() - began
        profiler.stop()
        # An operation on the CPU has the seconds of its kernels too, which are events of their own.
        of_gpu = [
            event
            for event in profiler.key_averages()
            if event.device_type.name != "CPU" and not event.is_user_annotation
        ]
        each = [[event.key[:120], event.count, event.self_device_time_total / 1e6] for event in of_gpu]
        Path(os.environ["BENCH_PROFILE"]).write_text(json.dumps({"wall_s": wall_s, "operations": each}))


def _time_of_idle_gpu() -> float:
    """Wait for a GPU, and return the time."""
    cuda: Any = sys.modules["torch"].cuda
    if cuda.is_initialized():
        cuda.synchronize()
    return time.perf_counter()


def watch() -> None:
    """Have the Trainer's callbacks tick at each step's end, and see what is counted; once libraries are imported."""
    hooks = {"transformers.trainer_callback": _watch_trainer}
    if "BENCH_COUNTS" in os.environ:
        hooks |= {
            "deepspeed.accelerator.cpu_accelerator": lambda module: _counts().as_on_a_gpu(module),
            "torch.utils.data._utils.fetch": lambda module: _counts().collate_in_python(module),
            "trl.trainer.utils": _lose_as_on_a_gpu,
        }
    for name in sys.modules.keys() & hooks:
        hooks.pop(name)(sys.modules[name])
    sys.meta_path.insert(0, _Finder(hooks))


def _watch_trainer(module: ModuleType) -> None:
    handler: Any = module.CallbackHandler
    on_step_end = handler.on_step_end

    def timed(handler: Any, args: Any, state: Any, control: Any) -> Any:
        control = on_step_end(handler, args, state, control)
        tick(handler.model, state, control)
        return control

    handler.on_step_end = timed


def _counts() -> Any:
    import bench_counts

    return bench_counts


def _lose_as_on_a_gpu(module: ModuleType) -> None:
    """Let TRL's loss take the tensors that it has on a GPU."""
    sys.path.append(str(Path(__file__).parents[2]))
    from bench.gpu_loss import as_on_a_gpu

    _forever.enter_context(as_on_a_gpu())


class _Finder(MetaPathFinder):
    """Calls a function with each of some modules once it is imported."""

    def __init__(self, hooks: dict[str, Callable[[ModuleType], None]]) -> None:
        self.hooks = hooks

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.hooks:
            return None
        hook = self.hooks.pop(fullname)
        spec = find_spec(fullname)
        assert spec is not None and spec.loader is not None
        spec.loader = _Hooked(spec.loader, hook)
        return spec


class _Hooked(Loader):
    def __init__(self, loader: Any, hook: Callable[[ModuleType], None]) -> None:
        self.loader, self.hook = loader, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self.loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.hook(module)
