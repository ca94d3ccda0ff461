"""One rank of bench/memory.py: tuner's own worker, with a look at what it holds while it takes its second step.

It changes nothing in training but for one thing: on a CPU, TRL's loss has the tensors that it has on a GPU. It writes
what it saw into the run directory and ends there, before anything is saved.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from bench.gpu_loss import as_on_a_gpu
from bench.live import Live
from tuner.machine.topology import Rank
from tuner.runs.directory import RunDirectory
from tuner.worker.guard import Guard
from tuner.worker.quiet import quiet_libraries

STEP = 2
"""The step to look at. Optimizers make their states in the first step."""


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return bytes by address of the storages below some tensors, each once; None and empty ones are left out."""
    found = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


def weights(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield what keeps the weights: whole ones, ZeRO-3's share of them, and the scales of 4-bit ones."""
    for parameter in module.parameters():
        yield getattr(parameter, "ds_tensor", parameter.data)
        yield from scales(getattr(parameter, "quant_state", None))


def modules(engine: Any) -> list[torch.nn.Module]:
    """Return the model that is trained, and the reference model where there is one."""
    return [engine.module, *(thing for thing in gc.get_objects() if isinstance(thing, PreTrainedModel))]


def scales(state: Any) -> Iterator[torch.Tensor]:
    if state is not None:
        yield from (state.absmax, state.code, state.offset)
        yield from scales(state.state2)


def states(wrapper: Any, optimizer: Any) -> Iterator[torch.Tensor]:
    yield from optimizer.state  # by the tensors that it updates, at every stage
    yield from getattr(wrapper, "param_buffer_of_bit16_for_cpu_offload_groups", ())
    for kept in optimizer.state.values():
        yield from (value for value in kept.values() if torch.is_tensor(value))


def gradients(module: torch.nn.Module, wrapper: Any, optimizer: Any) -> Iterator[Any]:
    """Yield gradients wherever DeepSpeed 0.19 keeps them until its step: whole, in shares, in fp32 on the host."""
    for parameter in (*module.parameters(), *optimizer.state):
        yield from (parameter.grad, getattr(parameter, "grad_accum", None))
    for partition in getattr(wrapper, "averaged_gradients", {}).values():
        yield from partition or ()
    yield getattr(wrapper, "grad_partitions_flat_buffer", None)
    yield from getattr(wrapper, "accumulated_grads_in_cpu", {}).values()


def held(engine: Any) -> dict[str, int]:
    """Return the bytes that this rank holds, by kind; a storage counts once, under the first kind that has it."""
    wrapper = engine.optimizer
    optimizer = getattr(wrapper, "optimizer", wrapper)
    gc.collect()
    kinds = {
        "weights": (tensor for module in modules(engine) for tensor in weights(module)),
        "optimizer_states": states(wrapper, optimizer),
        "gradients": gradients(engine.module, wrapper, optimizer),
        "other": (thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and not thing.is_meta),
    }
    seen: set[int] = set()
    sizes = {}
    for kind, tensors in kinds.items():
        new = {address: size for address, size in storages(tensors).items() if address not in seen}
        sizes[kind] = sum(new.values())
        seen |= new.keys()
    return sizes


class Watch:
    """Notes what is held after each backward of one step, and the allocator's peak over that step."""

    def __init__(self, report: Path) -> None:
        self.report, self.step = report, 1
        self.live: Live | None = None
        self.held: list[dict[str, int]] = []

    def after_backward(self, engine: Any) -> None:
        if self.step == STEP:
            self.held.append(held(engine))

    def after_step(self) -> None:
        if self.step == STEP:
            self.leave()
        self.step += 1
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        elif self.step == STEP:
            self.live = Live().__enter__()  # the process ends inside it

    def leave(self) -> None:
        peak = self.live.peak if self.live else torch.cuda.max_memory_allocated()
        self.report.write_text(json.dumps({"held": self.held, "peak": peak}), encoding="utf-8")
        dist.barrier()
        os._exit(0)  # torch 2.13's gloo may abort in its destructors


def train(run: RunDirectory, rank: Rank, guard: Guard) -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine

    from tuner.worker.train import run_rank

    watch = Watch(run.path / f"memory-{rank.rank}.json")
    backward, step = DeepSpeedEngine.backward, DeepSpeedEngine.step

    def watched_backward(engine: Any, *arguments: Any, **options: Any) -> Any:
        result = backward(engine, *arguments, **options)
        watch.after_backward(engine)
        return result

    def watched_step(engine: Any, *arguments: Any, **options: Any) -> None:
        step(engine, *arguments, **options)
        watch.after_step()

    DeepSpeedEngine.backward, DeepSpeedEngine.step = watched_backward, watched_step
    with nullcontext() if torch.cuda.is_available() else as_on_a_gpu():
        run_rank(run, rank, guard)


def main() -> None:
    run, rank = RunDirectory(Path(sys.argv[1])), Rank.of(os.environ)
    guard = Guard(run, rank)
    guard.install()
    guard.take_output()
    quiet_libraries()
    guard.finish(lambda: train(run, rank, guard))


if __name__ == "__main__":
    main()
