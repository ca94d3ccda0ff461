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
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TextIO

import psutil
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from tuner.errors import DiskError, NotANumber
from tuner.runs.directory import RunDirectory
from tuner.worker import compat
from tuner.worker.process import warn

Logs = dict[str, Any]
GIB = 1024**3
SHORT_RUN_STEPS = 100
INTERVAL = 10
"""With `log.interval = 'auto'`: a run of fewer steps than SHORT_RUN_STEPS logs each one, others every tenth."""
_BESIDE = 40
"""Columns of a terminal that the bar, the steps and the time left take."""
PATIENCE_S = 60.0
"""A call of a tracker that takes longer hangs: trackers send in the background."""
_EVENTS = [name for name in dir(TrainerCallback) if name.startswith("on_")]


def logs_step(step: int, args: Any, state: Any) -> bool:
    """Return whether a step will be logged, as far as that is known before it: the last one of a run is."""
    intervals = [state.logging_steps, state.save_steps] + [state.eval_steps] * (args.eval_strategy == "steps")
    return step in (1, state.max_steps) or any(step % interval == 0 for interval in intervals)


class LogsSteps(TrainerCallback):  # type: ignore[misc]
    """Decides which steps are logged: every one of a short run, the first, the last, and those that validate or save.

    A logged loss is the mean since the last logged step, so a run that resumes from a checkpoint logs the same losses
    as one that never stopped. transformers' own callback comes first; it knows the first step and the interval alone.
    """

    def __init__(self, interval: int | Literal["auto"]) -> None:
        self.interval = interval

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # Also of a resumed run: its state is the checkpoint's, with the interval of then.
        short = state.max_steps < SHORT_RUN_STEPS
        state.logging_steps = (1 if short else INTERVAL) if self.interval == "auto" else self.interval

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        is_known = logs_step(state.global_step, args, state)
        control.should_log |= is_known or control.should_save or control.should_training_stop

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_log |= control.should_evaluate


class MetricsCallback(TrainerCallback):  # type: ignore[misc]
    """metrics.jsonl and the progress bar, on rank 0; a validation loss that is no number ends the run on every rank."""

    def __init__(self, run: RunDirectory, facts: dict[str, Any], show: ProgressBar | None) -> None:
        self.run, self.show = run, show
        self.world_size, self.arithmetic = int(facts["world_size"]), facts.get("arithmetic")
        self.tokens, self.since, self.learning_rate = 0.0, time.monotonic(), 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.since, self.tokens = time.monotonic(), float(state.num_input_tokens_seen)
        if self.show:
            self.show.start(state.max_steps, state.global_step)

    def on_step_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        # After the update the scheduler may already say the next step's: DeepSpeed's own optimizers take it along.
        self.learning_rate = float(optimizer.param_groups[0]["lr"])

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.show:
            self.show.step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Logs | None = None, **_: Any) -> None:
        logs = {} if logs is None else logs  # what is added here the trackers see too
        if not math.isfinite(logs.get("eval_loss", 0.0)):
            what = f"eval_loss is {logs['eval_loss']} at step {state.global_step}"
            raise NotANumber(what, rank=0, fix="Lower the learning rate.")
        if dist.get_rank() != 0 or not {"loss", "eval_loss"} & logs.keys():
            return
        if "loss" in logs:
            logs["learning_rate"] = self.learning_rate
            # TRL's own number counts the tokens of this process's life, and stand-ins among them.
            logs["num_tokens"] = state.num_input_tokens_seen
            logs |= self._measured(float(state.num_input_tokens_seen))
        # Speed is that of training; a validation comes after the line of its step.
        self.since += logs.get("eval_runtime", 0.0)
        if "eval_num_tokens" in logs:
            logs["eval_num_tokens"] = state.num_input_tokens_seen
        self._record({"step": state.global_step, **_finite(logs)})
        if self.show:
            self.show.log(state.global_step, state.max_steps, logs, self.world_size)

    def _record(self, line: Logs) -> None:
        try:
            self.run.log_metrics(line)
        except DiskError as error:  # a full disk is no reason to lose the steps since the last checkpoint
            warn(self.run, f"{error} Training continues without this line: {line}")

    def _measured(self, tokens: float) -> Logs:
        """Return tokens per second of all ranks since the last call, what of the GPUs that uses, and memory."""
        now = time.monotonic()
        speed = (tokens - self.tokens) / max(now - self.since, 1e-9)
        self.tokens, self.since = tokens, now
        measured: Logs = {"tokens_per_second": round(speed, 1), "memory_bytes": _peak_bytes()}
        if self.arithmetic:
            used = speed / self.world_size * self.arithmetic["flops_per_token"]
            measured["mfu"] = round(used / self.arithmetic["peak_flops_per_gpu"], 4)
        return measured

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.show:
            self.show.stop()


def _peak_bytes() -> int:
    """Return the most memory that this rank has held so far: tensors on its device, or all of the process on a CPU."""
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        return int(accelerator.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _finite(logs: Logs) -> Logs:
    # The gradient norm of a step that fp16's loss scaling skips is infinite, and JSON has no infinity.
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in logs.items()
    }


def _margin(logs: Logs, prefix: str = "") -> str:
    """Return by how much chosen answers are scored above rejected ones, where an objective says it."""
    found = [logs[key] for key in (f"{prefix}rewards/margins", f"{prefix}margin") if key in logs]
    return f"  margin {found[0]:.3f}" if found else ""


def _answers(logs: Logs) -> str:
    """Return the generation metrics of a validation, where it has any."""
    named = {"exact_match": "{:.0%} of answers exact", "rouge_l": "ROUGE-L {:.3f}", "bleu": "BLEU {:.1f}"}
    return "".join(f"  {text.format(logs[f'eval_{key}'])}" for key, text in named.items() if f"eval_{key}" in logs)


class ProgressBar:
    """A bar with the last values and the time left on a terminal; plain lines in the log without one that can draw."""

    def __init__(self, terminal: TextIO | None) -> None:
        console = Console(file=terminal)
        self.is_terminal = terminal is not None and not console.is_dumb_terminal
        self.text = ""
        self.progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(), TextColumn("left"), expand=True,
            # Over all steps so far: rich takes the last 30 seconds, in which a large model takes no two steps.
            speed_estimate_period=math.inf,
            # What others print stays in the log, from where it is shown above the bar.
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
            self.text = "  ".join(_said(logs, num_ranks))
        text = self.text
        if "eval_loss" in logs:
            text = f"validation loss {logs['eval_loss']:.4f}{_margin(logs, 'eval_')}{_answers(logs)}"
        if step == self.first:  # a validation before the first step tells nothing of the time that steps take
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
        """Return as many of the values as stand in one line beside the bar; more than a line would be drawn twice."""
        room = self.progress.console.width - _BESIDE
        return self.text if len(self.text) <= room else self.text[: max(room, 0) + 1].rpartition("  ")[0]

    def stop(self) -> None:
        if self.is_terminal:
            self.progress.stop()


def _said(logs: Logs, num_ranks: int) -> Iterator[str]:
    """Yield what a person looks at while a run goes on; what is not known is left out."""
    yield f"loss {logs['loss']:.4f}{_margin(logs)}"
    if logs.get("grad_norm") is not None:
        yield f"grad {logs['grad_norm']:.3g}"
    yield f"lr {logs.get('learning_rate', 0.0):.2e}"
    yield f"{logs['tokens_per_second'] / num_ranks:,.0f} tokens/s" + (" per rank" if num_ranks > 1 else "")
    if "mfu" in logs:
        yield f"MFU {logs['mfu']:.0%}"
    yield f"{logs['memory_bytes'] / GIB:.1f} GiB"


# Trackers


class Tracker(TrainerCallback):  # type: ignore[misc]
    """One integration. Whatever it raises, and a call that hangs, is one warning, and it is off from then on."""

    def __init__(self, name: str, run: RunDirectory) -> None:
        self.name, self._run, self._inner = name, run, None
        # One thread for all calls, because a call may hang; MLflow and Trackio keep the run of a thread.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        _set_places(run)
        self._inner = self._within_patience(INTEGRATION_TO_CALLBACK[name])

    def _forward(self, event: str, *args: Any, **kwargs: Any) -> None:
        if self._inner is not None:
            self._within_patience(partial(getattr(self._inner, event), *args, **kwargs))
        if event == "on_train_end" and self._inner is not None and self.name == "wandb":
            # A rank ends without Python's exit functions, in which wandb marks its run as finished.
            self._within_patience(_finish_wandb)

    def _within_patience(self, call: Callable[[], Any]) -> Any:
        try:
            return self._thread.submit(call).result(PATIENCE_S)
        except TimeoutError:
            why = f"it took more than {PATIENCE_S:.0f} s"
        except (Exception, SystemExit) as error:
            why = f"{type(error).__name__}: {error}"
        self._inner = None
        self._thread.shutdown(wait=False, cancel_futures=True)
        warn(self._run, f"the tracker {self.name} is disabled for the rest of the run: {why}")
        return None


def _forwarding(event: str) -> Callable[..., None]:
    return lambda self, *args, **kwargs: self._forward(event, *args, **kwargs)


for _event in _EVENTS:
    setattr(Tracker, _event, _forwarding(_event))


def trackers(names: Iterable[str], run: RunDirectory) -> list[Tracker]:
    """Return a callback for each tracker; only rank 0 needs them."""
    return [Tracker(name, run) for name in names]


def _set_places(run: RunDirectory) -> None:
    """Say where trackers keep their files: in the run directory, where the user has not said something else."""
    places = {"TENSORBOARD_LOGGING_DIR": run.path / "tensorboard", "WANDB_DIR": run.path, "WANDB_PROJECT": "tuner"}
    for name, value in places.items():
        os.environ.setdefault(name, str(value))


def _finish_wandb() -> None:
    import wandb  # type: ignore[import-not-found]  # only who tracks with it has it

    wandb.finish()


# DeepSpeed's own measurements


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
