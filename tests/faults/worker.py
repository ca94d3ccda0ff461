"""One rank of a run that goes wrong on purpose: `tuner.worker` with a fault from TUNER_FAULT=kind@rank:step.

Kinds: `oom`, `host-oom`, `kill`, `bus`, `bug`; `KIND>N` strikes only while the micro-batch is above N.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank, in which optimizer step (from 1)."""

    kind: str
    rank: int
    step: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Fault:
        kind, _, place = environ["TUNER_FAULT"].partition("@")
        rank, step = place.split(":")
        return cls(kind, int(rank), int(step))

    def strike(self, micro_batch: int) -> None:
        name, _, most = self.kind.partition(">")
        if micro_batch > int(most or 0):
            _KINDS[name]()


def _out_of_gpu_memory() -> None:
    import torch  # in a rank it is loaded by now

    raise torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.25 GiB of which 1.12 GiB is "
        "free. Including non-PyTorch memory, this process has 78.12 GiB memory in use."
    )


def _out_of_host_memory() -> None:
    bytearray(1 << 60)


def _bug() -> None:
    raise KeyError("labels")


def _die_by(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


_KINDS: dict[str, Callable[[], Any]] = {
    "oom": _out_of_gpu_memory,
    "host-oom": _out_of_host_memory,
    "kill": _die_by(signal.SIGKILL),
    "bus": _die_by(signal.SIGBUS),
    "bug": _bug,
}


def inject(fault: Fault) -> None:
    """Add the fault to the trainer's callbacks of this rank."""
    from transformers import TrainerCallback

    from tuner.worker import train

    class Strike(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step + 1 == fault.step:
                fault.strike(args.per_device_train_batch_size)

    original = train._callbacks
    train._callbacks = lambda *given: (*original(*given), Strike())  # type: ignore


def main() -> None:
    from tuner.worker.guard import Guard

    fault = Fault.of(os.environ)
    finish = Guard.finish
    if fault.rank == int(os.environ["RANK"]):
        # Only once the rank's signals and output are taken: a rank imports nothing heavy before that.
        Guard.finish = lambda guard, work: finish(guard, lambda: (inject(fault), work())[1])  # type: ignore
    import_module("tuner.worker.__main__")  # it is the program


if __name__ == "__main__":
    main()
