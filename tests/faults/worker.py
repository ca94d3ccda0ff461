"""One rank of a run that goes wrong on purpose: `tuner.worker` with a fault from TUNER_FAULT=kind@rank:step.

Several, with commas between, strike in one attempt each: the first in the first. It strikes after the first
micro-batch of the step. In place of a step: `start` (before the data is prepared), `result` (trained, and nothing of
the result is written) or `report` (the result is in its place); `validation-N`, in the validation after step N, or
`generation-N`, before the first token of the completions that are generated after step N.

Kinds: `oom`, `host-oom`, `kill`, `bus`, `bug`, `fill` (the run's disk, but for 1 MiB), `full` (to its last byte),
`eat` (memory, until there is none); `save-fill` fills the disk in the middle of the step's save, `save-hold` stops
there until RUN/held is removed; `usr2` (a signal to this rank alone); `freeze` (SIGSTOP), `ignore-term` (sleeps, deaf
to SIGTERM), `block` (C code that never gives up the interpreter, and deaf too); `nan-loss`, `nan-grad`, `inf-grad` in
the last row of the micro-batch that follows. `KIND>N` strikes only while the micro-batch is above N.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank, in which optimizer step (from 1) or at which other moment of a run."""

    kind: str
    rank: int
    step: int | str

    @classmethod
    def of(cls, environ: Mapping[str, str], attempt: int = 0) -> Fault | None:
        faults = environ["TUNER_FAULT"].split(",")
        if attempt >= len(faults) > 1:
            return None
        kind, _, place = faults[attempt if len(faults) > 1 else 0].partition("@")
        rank, step = place.split(":")
        return cls(kind, int(rank), int(step) if step.isdecimal() else step)

    def strike(self, micro_batch: int, model: Any) -> None:
        name, _, most = self.kind.partition(">")
        if micro_batch > int(most or 0):
            _SPOILS[name](model) if name in _SPOILS else _KINDS[name]()

    def at(self, moment: str) -> None:
        if self.step == moment:
            _KINDS[self.kind]()


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


def _signal(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _fill_the_disk() -> None:
    run = Path(sys.argv[1])
    free = os.statvfs(run).f_bavail * os.statvfs(run).f_frsize
    with (run / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free - 2**20)


def _fill_to_the_last_byte() -> None:
    with (Path(sys.argv[1]) / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def _eat() -> None:
    eaten = []
    while True:
        eaten.append(b"x" * 2**22)


def _hold() -> None:
    held = Path(sys.argv[1]) / "held"
    held.touch()
    while held.exists():
        time.sleep(0.05)


def _while_saving(strike: Callable[[], None]) -> Callable[[], None]:
    """Return what makes `strike` happen in the middle of the next save, once for all micro-batches."""

    @cache
    def prepare() -> None:
        import torch

        real = torch.save

        def save(*given: Any, **options: Any) -> None:
            torch.save = real
            strike()
            real(*given, **options)

        torch.save = save

    return prepare


def _ignore_term() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", flush=True)
    time.sleep(600)


def _block() -> None:
    library, lock = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)  # for ever; no signal interrupts it


def _spoil(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return what changes the output of the next micro-batch, and of each that holds its last row again."""

    def strike(model: Any) -> None:
        known: list[list[int]] = []

        def spoil(_: Any, __: Any, given: Mapping[str, Any], output: Any) -> None:
            rows = _rows_of(given)
            if not known:
                known.append(rows[-1])
                print("spoilt:", rows[-1], flush=True)
            if known[0] in rows:
                change(output)

        model.register_forward_hook(spoil, with_kwargs=True)

    return strike


def _rows_of(batch: Mapping[str, Any]) -> list[list[int]]:
    """Return the tokens of each row of a batch, side by side or end to end, up to the last that carries loss."""
    rows, all_trained, all_positions = [], batch["labels"] != -100, batch.get("position_ids")
    for at, (ids, trained) in enumerate(zip(batch["input_ids"], all_trained, strict=True)):
        positions = None if all_positions is None else all_positions[at]
        begins = [0] if positions is None else (positions == 0).nonzero().flatten().tolist()
        begins = [*begins, len(ids)]
        for begin, end in itertools.pairwise(begins):
            carries = trained[begin:end].nonzero().flatten().tolist()
            rows += [ids[begin : begin + carries[-1] + 1].tolist()] if carries else []
    return rows


def _spoil_loss(output: Any) -> None:
    output.loss = output.loss * float("nan")


def _spoil_gradients(number: float) -> Callable[[Any], None]:
    def change(output: Any) -> None:
        if output.loss.requires_grad:
            output.loss.register_hook(lambda gradient: gradient * number)

    return change


_SPOILS: dict[str, Callable[[Any], Any]] = {
    "nan-loss": _spoil(_spoil_loss),
    "nan-grad": _spoil(_spoil_gradients(float("nan"))),
    "inf-grad": _spoil(_spoil_gradients(1e38)),
}
_KINDS: dict[str, Callable[[], Any]] = {
    "oom": _out_of_gpu_memory,
    "host-oom": _out_of_host_memory,
    "kill": _signal(signal.SIGKILL),
    "bus": _signal(signal.SIGBUS),
    "bug": _bug,
    "fill": cache(_fill_the_disk),
    "full": cache(_fill_to_the_last_byte),
    "eat": _eat,
    "save-fill": _while_saving(_fill_the_disk),
    "save-hold": _while_saving(_hold),
    "usr2": _signal(signal.SIGUSR2),
    "freeze": _signal(signal.SIGSTOP),
    "ignore-term": _ignore_term,
    "block": _block,
}


def inject(fault: Fault) -> None:
    """Add the fault to the trainer's callbacks of this rank."""
    from transformers import TrainerCallback

    from tuner.worker import train

    class Strike(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            if state.global_step + 1 == fault.step:
                fault.strike(args.per_device_train_batch_size, model)

        def on_prediction_step(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            fault.at(f"validation-{state.global_step}")

        def on_step_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            fault.at(f"generation-{state.global_step}")

        def on_train_end(self, *_: Any, **__: Any) -> None:
            fault.at("result")

    original = train._callbacks
    train._callbacks = lambda *given: (*original(*given), Strike())  # type: ignore


def _faulty(fault: Fault, work: Callable[[], None]) -> None:
    fault.at("start")
    inject(fault)
    work()
    fault.at("report")


def main() -> None:
    from tuner.worker.guard import Guard

    attempts = json.loads((Path(sys.argv[1]) / "run.json").read_text())["attempts"]
    fault = Fault.of(os.environ, len(attempts))
    finish = Guard.finish
    if fault and fault.rank == int(os.environ["RANK"]):
        # Only once the rank's signals and output are taken: a rank imports nothing heavy before that.
        Guard.finish = lambda guard, work: finish(guard, lambda: _faulty(fault, work))  # type: ignore
    import_module("tuner.worker.__main__")  # it is the program


if __name__ == "__main__":
    main()
