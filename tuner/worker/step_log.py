"""What a run shows and records at its steps.

    metrics.jsonl   LogsSteps decides which steps are logged, MetricsCallback writes the lines
    the terminal    ProgressBar
    trackers        TensorBoard, Weights & Biases ..., through transformers' integrations
    measurements    what DeepSpeed measures if its config asks for it

An error in any of these never ends a run; only a validation loss that is not finite does.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial, partialmethod
from typing import Any, Literal, TextIO, TypeVar

import psutil
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.optim import Optimizer
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from tuner.errors import DiskError, NotANumber
from tuner.files import JsonObject
from tuner.machine.kernel import peak_resident_bytes
from tuner.runs import metrics
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunRecord
from tuner.runs.verdict import REWARD
from tuner.worker import compat
from tuner.worker.process import warn
from tuner.worker.trainer_types import BuiltTrainer

Logs = dict[str, Any]
Result = TypeVar("Result")
GIB = 1024**3
SHORT_RUN_STEPS = 100
INTERVAL = 10
"""With `log.interval = 'auto'`: a run of fewer steps than SHORT_RUN_STEPS logs each one, others every tenth."""
_BESIDE = 40
"""Columns of a terminal that the bar, the steps and the time left take."""
PATIENCE_S = 60.0
"""A call of a tracker that takes longer hangs: trackers send in the background."""


def logs_step(step: int, args: TrainingArguments, state: TrainerState) -> bool:
    """Return whether a step will be logged, as far as that is known before the step."""
    intervals = [state.logging_steps, state.save_steps] + [state.eval_steps] * (args.eval_strategy == "steps")
    return step in (1, state.max_steps) or any(step % interval == 0 for interval in intervals)


class LogsSteps(TrainerCallback):  # type: ignore[misc]
    """Decides which steps are logged: all steps of a short run, the first, the last, and those that validate or save.

    A logged loss is the mean since the last logged step. A save always logs, so a resumed run logs the same losses as
    one that never stopped. transformers' own callback runs first; it knows only the first step and the interval.
    """

    def __init__(self, interval: int | Literal["auto"]) -> None:
        self.interval = interval

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        # Also in a resumed run: its state comes from the checkpoint and has the old interval.
        short = state.max_steps < SHORT_RUN_STEPS
        state.logging_steps = (1 if short else INTERVAL) if self.interval == "auto" else self.interval

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        is_known = logs_step(state.global_step, args, state)
        control.should_log |= is_known or control.should_save or control.should_training_stop

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        control.should_log |= control.should_evaluate


class MetricsCallback(TrainerCallback):  # type: ignore[misc]
    """Writes metrics.jsonl and the progress bar on rank 0; a validation loss that is not finite ends the run."""

    def __init__(self, run_dir: RunDirectory, record: RunRecord, show: ProgressBar | None) -> None:
        self.run_dir, self.show = run_dir, show
        self.world_size, self.arithmetic = record.world_size, record.arithmetic
        self.tokens, self.since, self.learning_rate = 0.0, time.monotonic(), 0.0
        self.earlier_peak = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self.since, self.tokens = time.monotonic(), float(state.num_input_tokens_seen)
        self.earlier_peak = metrics.peak_bytes(self.run_dir)
        if self.show:
            self.show.start(state.max_steps, state.global_step)

    def on_step_begin(self, *_: object, optimizer: Optimizer | None = None, **__: object) -> None:
        # After the update the scheduler may already have the rate of the next step (DeepSpeed's own optimizers).
        assert optimizer is not None, "the Trainer passes it"
        self.learning_rate = float(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if self.show:
            self.show.step(state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, *_: object, logs: Logs | None = None, **__: object
    ) -> None:
        logs = {} if logs is None else logs  # the trackers see the added keys too
        if not math.isfinite(logs.get("eval_loss", 0.0)):
            message = f"eval_loss is {logs['eval_loss']} at step {state.global_step}"
            raise NotANumber(message, rank=0, fix="Lower the learning rate.")
        if dist.get_rank() != 0 or not {"loss", "eval_loss"} & logs.keys():
            return
        if "loss" in logs:
            logs["learning_rate"] = self.learning_rate
            # TRL's own number starts at 0 in each process, and counts stand-ins.
            logs["num_tokens"] = state.num_input_tokens_seen
            logs |= self._measured(float(state.num_input_tokens_seen))
        # The speed is that of training alone; a validation follows the line of its step.
        self.since += logs.get("eval_runtime", 0.0)
        if "eval_num_tokens" in logs:
            logs["eval_num_tokens"] = state.num_input_tokens_seen
        # The gradient norm of a step that fp16's loss scaling skips is infinite, and JSON has no infinity.
        infinite = {key: None for key, value in logs.items() if isinstance(value, float) and not math.isfinite(value)}
        self._record({"step": state.global_step, **logs, **infinite})
        if self.show:
            self.show.log(state.global_step, state.max_steps, logs, self.world_size)

    def _record(self, line: Logs) -> None:
        try:
            self.run_dir.log_metrics(line)
        except DiskError as error:  # a full disk must not cost the steps since the last checkpoint
            warn(self.run_dir, f"{error} Training continues without this line: {line}")

    def _measured(self, tokens: float) -> Logs:
        """Return tokens per second of all ranks since the last call, the MFU if known, and the memory."""
        now = time.monotonic()
        speed = (tokens - self.tokens) / max(now - self.since, 1e-9)
        self.tokens, self.since = tokens, now
        measured: Logs = {"tokens_per_second": round(speed, 1), "memory_bytes": max(peak_bytes(), self.earlier_peak)}
        if self.arithmetic:
            used = speed / self.world_size * self.arithmetic.flops_per_token
            measured["mfu"] = round(used / self.arithmetic.peak_flops_per_gpu, 4)
        return measured

    def on_train_end(self, *_: object, **__: object) -> None:
        if self.show:
            self.show.stop()


def peak_bytes() -> int:
    """Return the peak memory of this rank: tensors on its device, or the whole process, without children, on a CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return int(accelerator.max_memory_allocated())
    return peak_resident_bytes()


_BESIDE_LOSS = {"rewards/margins": "margin", "margin": "margin", REWARD: REWARD}
"""By how much chosen answers are scored above rejected ones; the mean reward of the completions, around a loss of 0."""


def _beside_loss(logs: Logs, prefix: str = "") -> str:
    """Return what the objective logs that says more than its loss, if there is such a value."""
    values = ((word, logs.get(prefix + key)) for key, word in _BESIDE_LOSS.items())
    return next((f"  {word} {value:.3f}" for word, value in values if value is not None), "")


def _answers(logs: Logs) -> str:
    """Return the generation metrics of a validation, if it has any."""
    formats = {"exact_match": "{:.0%} of answers exact", "rouge_l": "ROUGE-L {:.3f}", "bleu": "BLEU {:.1f}"}
    return "".join(f"  {text.format(logs[f'eval_{key}'])}" for key, text in formats.items() if f"eval_{key}" in logs)


class ProgressBar:
    """A bar with the last values and the time left on a terminal that can draw it; otherwise plain lines in the log."""

    def __init__(self, terminal: TextIO | None) -> None:
        console = Console(file=terminal)
        self.is_terminal = terminal is not None and not console.is_dumb_terminal
        self.text = ""
        self.progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(), TextColumn("left"), expand=True,
            # The speed over all steps so far: rich takes the last 30 s, too short for two steps of a large model.
            speed_estimate_period=math.inf,
            # Other output stays in the log, from which it is shown above the bar.
            console=console, redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip

    def start(self, total: int, done: int) -> None:
        self.began, self.first = time.monotonic(), done
        if self.is_terminal:
            self.task = self.progress.add_task("train", total=total, completed=done, text="")
            self.progress.start()

    def step(self, step: int) -> None:
        if self.is_terminal:
            self.progress.update(self.task, completed=step)

    def log(self, step: int, total: int, logs: Logs, num_ranks: int = 1) -> None:
        if "loss" in logs:
            self.text = "  ".join(_step_values(logs, num_ranks))
        text = self.text
        if f"eval_{REWARD}" in logs:  # the loss is minus that
            reward = logs[f"eval_{REWARD}"]
            text = f"validation {REWARD} {reward:.3f}" if reward is not None else f"validation without a {REWARD}"
        elif "eval_loss" in logs:
            text = f"validation loss {logs['eval_loss']:.4f}{_beside_loss(logs, 'eval_')}{_answers(logs)}"
        if step == self.first:  # a validation before the first step does not count as time of steps
            self.began = time.monotonic()
            if self.is_terminal:
                self.progress.reset(self.task, completed=step)
        if self.is_terminal:
            self.progress.update(self.task, text=self._fitting())
        if self.is_terminal and "eval_loss" not in logs:
            return
        if self.is_terminal or step == self.first:
            print(f"step {step}/{total}  {text}", flush=True)
        else:
            seconds = (time.monotonic() - self.began) / max(step - self.first, 1) * (total - step)
            print(f"step {step}/{total}  {text}  {timedelta(seconds=round(seconds))} left", flush=True)

    def _fitting(self) -> str:
        """Return the values that fit in one line beside the bar; a second line would be drawn twice."""
        room = self.progress.console.width - _BESIDE
        return self.text if len(self.text) <= room else self.text[: max(room, 0) + 1].rpartition("  ")[0]

    def stop(self) -> None:
        if self.is_terminal:
            self.progress.stop()


def _step_values(logs: Logs, num_ranks: int) -> Iterator[str]:
    """Yield the values that a person watches during a run, without unknown ones."""
    yield f"loss {logs['loss']:.4f}{_beside_loss(logs)}"
    if logs.get("grad_norm") is not None:
        yield f"grad {logs['grad_norm']:.3g}"
    yield f"lr {logs.get('learning_rate', 0.0):.2e}"
    yield f"{logs['tokens_per_second'] / num_ranks:,.0f} tokens/s" + (" per rank" if num_ranks > 1 else "")
    if "mfu" in logs:
        yield f"MFU {logs['mfu']:.0%}"
    yield f"{logs['memory_bytes'] / GIB:.1f} GiB"


# Trackers


class Tracker(TrainerCallback):  # type: ignore[misc]
    """One integration of transformers. If it raises an error or hangs, it gives one warning and is switched off."""

    def __init__(self, name: str, run_dir: RunDirectory) -> None:
        self.name, self._run_dir = name, run_dir
        self._inner: TrainerCallback | None = None
        # All calls run in one thread, because a call may hang, and MLflow and Trackio keep one run per thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        folder = run_dir.path  # unless the user has set another place
        places = {"TENSORBOARD_LOGGING_DIR": folder / "tensorboard", "WANDB_DIR": folder, "WANDB_PROJECT": "tuner"}
        for variable, place in places.items():
            os.environ.setdefault(variable, str(place))
        self._inner = self._within_patience(INTEGRATION_TO_CALLBACK[name])

    def _forward(self, event: str, *args: object, **kwargs: object) -> None:
        if self._inner is not None:
            self._within_patience(partial(getattr(self._inner, event), *args, **kwargs))
        if event == "on_train_end" and self._inner is not None and self.name == "wandb":
            # A rank skips Python's exit functions, in which wandb marks its run as finished.
            self._within_patience(sys.modules["wandb"].finish)

    def _within_patience(self, call: Callable[[], Result]) -> Result | None:
        try:
            return self._thread.submit(call).result(PATIENCE_S)
        except TimeoutError:
            why = f"it took more than {PATIENCE_S:.0f} s"
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}"
        self._inner = None
        self._thread.shutdown(wait=False, cancel_futures=True)
        warn(self._run_dir, f"the tracker {self.name} is disabled for the rest of the run: {why}")
        return None


for _event in (name for name in dir(TrainerCallback) if name.startswith("on_")):
    setattr(Tracker, _event, partialmethod(Tracker._forward, _event))


# DeepSpeed's own measurements


class KeepMeasurements(TrainerCallback):  # type: ignore[misc]
    """Stores what DeepSpeed measures on rank 0: times of the parts of a step, memory between them, communication."""

    def __init__(self, trainer: BuiltTrainer, run_dir: RunDirectory, zero: JsonObject) -> None:
        self.trainer, self.run_dir, self.zero = trainer, run_dir, zero
        self.logs_communication = bool((zero.get("comms_logger") or {}).get("enabled"))
        if zero.get("memory_breakdown") is True:
            compat.on_memory_breakdown(self._log_memory)

    def on_train_begin(self, *_: object, **__: object) -> None:
        if self.logs_communication:  # not earlier: transformers sets the logger's level when it builds the engine
            _send_log(self.run_dir)
        if self.zero.get("wall_clock_breakdown") is True:
            # The timers' own `log` prints at any log level.
            self.trainer.deepspeed.timers.log = self._log_times

    def on_train_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        if self.logs_communication:
            communication = comms_logger.log_all(print_log=False, return_dict=True)
            self.run_dir.log_measured("communication.jsonl", {"step": state.global_step, **communication["summary"]})

    def _log_times(self, names: list[str], normalizer: float = 1.0, reset: bool = True, **_: bool) -> None:
        """Store the milliseconds of each timer since the last call, as `SynchronizedWallClockTimer.log` prints them."""
        timers = self.trainer.deepspeed.timers.timers
        elapsed_ms = {name: timers[name].elapsed(reset=reset) for name in names if name in timers}
        line = {name: round(elapsed / normalizer, 3) for name, elapsed in elapsed_ms.items()}
        self.run_dir.log_measured("wall_clock.jsonl", line)

    def _log_memory(self, where: str) -> None:
        device = get_accelerator()
        line = {"at": where, "allocated": device.memory_allocated(), "max_allocated": device.max_memory_allocated()}
        self.run_dir.log_measured("memory.jsonl", {**line, "host_available": psutil.virtual_memory().available})
        device.reset_peak_memory_stats()


def _send_log(run_dir: RunDirectory) -> None:
    """Write DeepSpeed's log to a file; the part that is printed stays as `quiet` has set it."""
    run_dir.measurements.mkdir(exist_ok=True)
    logger = logging.getLogger("DeepSpeed")
    for handler in logger.handlers:
        handler.setLevel(max(handler.level, logger.level))
    to_file = logging.FileHandler(run_dir.measurements / "deepspeed.log")
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(to_file)
    logger.setLevel(logging.INFO)
