"""What DeepSpeed measures where its config asks for it: kept in the run directory, as data if possible, not printed."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import psutil
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger
from transformers import TrainerCallback

from tuner.runs.directory import RunDirectory
from tuner.worker import compat


class KeepMeasurements(TrainerCallback):  # type: ignore[misc]
    """Of rank 0: the times of each step's parts, memory between them, and what was sent."""

    def __init__(self, trainer: Any, run: RunDirectory, zero: dict[str, Any]) -> None:
        self.trainer, self.run, self.zero = trainer, run, zero
        self.logs_communication = bool((zero.get("comms_logger") or {}).get("enabled"))
        if zero.get("memory_breakdown") is True:
            compat.on_memory_breakdown(self._log_memory)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.logs_communication:  # not sooner: transformers sets the logger's level when it makes the engine
            _send_log(self.run)
        if self.zero.get("wall_clock_breakdown") is True:
            timers = self.trainer.deepspeed.timers
            # Its own `log` prints, whatever the level of its logger.
            timers.log = partial(_log_times, timers, self.run)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.logs_communication:
            found = comms_logger.log_all(print_log=False, return_dict=True)
            self.run.log_measured("communication.jsonl", {"step": state.global_step, **found["summary"]})

    def _log_memory(self, where: str) -> None:
        device = get_accelerator()
        line = {"at": where, "allocated": device.memory_allocated(), "max_allocated": device.max_memory_allocated()}
        self.run.log_measured("memory.jsonl", {**line, "host_available": psutil.virtual_memory().available})
        device.reset_peak_memory_stats()


def _send_log(run: RunDirectory) -> None:
    """Write DeepSpeed's log to a file; what is printed of it stays what `quiet` lets through."""
    run.measurements.mkdir(exist_ok=True)
    logger = logging.getLogger("DeepSpeed")
    for handler in logger.handlers:
        handler.setLevel(max(handler.level, logger.level))
    to_file = logging.FileHandler(run.measurements / "deepspeed.log")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(to_file)
    logger.setLevel(logging.INFO)


def _log_times(timers: Any, run: RunDirectory, names: list[str], normalizer: float = 1.0, **options: Any) -> None:
    """Keep the milliseconds of each timer since the last time, as `SynchronizedWallClockTimer.log` prints them."""
    known = {name: timers.timers[name] for name in names if name in timers.timers}
    reset = options.get("reset", True)
    line = {name: round(timer.elapsed(reset=reset) / normalizer, 3) for name, timer in known.items()}
    run.log_measured("wall_clock.jsonl", line)
