"""What happens at the trainer's steps: metrics, the progress bar, stop requests, sealed checkpoints."""

from __future__ import annotations

import math
import time
from typing import Any, TextIO

import torch
import torch.distributed as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import TrainerCallback

from tuner.errors import TunerError
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory
from tuner.worker.guard import Guard

Logs = dict[str, Any]


class Stop(TrainerCallback):  # type: ignore[misc]
    """All ranks agree at a step's end whether one of them was asked to stop; then all save that step and stop."""

    def __init__(self, guard: Guard, device: torch.device) -> None:
        self.guard, self.device, self.step = guard, device, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard.can_stop_at_a_step = True

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.guard.step = state.global_step + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        flag = torch.tensor(int(self.guard.stop_requested), device=self.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if flag.item():
            self.step = state.global_step
            control.should_save = control.should_training_stop = True


class FreshAdam(TrainerCallback):  # type: ignore[misc]
    """Undo the step with zero gradients that DeepSpeed's stage 0 takes in 16 bits when it is set up.

    It counts in Adam's bias correction, which makes the first updates a quarter smaller than at any ZeRO stage, and it
    decays the weights once (measured on 0.19.8: loss 7.285 instead of 7.257 after one update).
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        wrapper = self.trainer.deepspeed.optimizer
        if state.global_step or not isinstance(wrapper, FP16_UnfusedOptimizer):
            return
        wrapper.optimizer.state.clear()
        for masters, weights in zip(wrapper.fp32_groups, wrapper.fp16_groups, strict=True):
            for master, weight in zip(masters, weights, strict=True):
                master.data.copy_(weight.data)


class AsWritten(TrainerCallback):  # type: ignore[misc]
    """deepspeed.json is what training uses: a library that changed a value on the way is a bug to be seen."""

    def __init__(self, trainer: Any, zero: dict[str, Any]) -> None:
        self.trainer, self.zero = trainer, zero

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        used = self.trainer.deepspeed.config
        differs = {key for key in used.keys() | self.zero.keys() if used.get(key) != self.zero.get(key)}
        assert not differs, f"DeepSpeed was given other values than deepspeed.json holds: {sorted(differs)}"


class Seal(TrainerCallback):  # type: ignore[misc]
    """A checkpoint becomes valid when every rank has written its part; older ones go only after that."""

    def __init__(self, run: RunDirectory, facts: dict[str, Any], keep: int) -> None:
        self.run, self.facts, self.keep = run, facts, keep

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            folder = self.run.checkpoints / f"checkpoint-{state.global_step}"
            checkpoints.seal(folder, {**self.facts, "step": state.global_step})
            checkpoints.prune(self.run.checkpoints, self.keep)
        dist.barrier()


class Metrics(TrainerCallback):  # type: ignore[misc]
    """metrics.jsonl and the progress bar, on rank 0; a loss that is no number ends the run on every rank."""

    def __init__(self, run: RunDirectory, show: Bar | None) -> None:
        self.run, self.show = run, show
        self.tokens, self.since = 0.0, time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.since, self.tokens = time.monotonic(), float(state.num_input_tokens_seen)
        if self.show:
            self.show.start(state.max_steps, state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.show:
            self.show.step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Logs | None = None, **_: Any) -> None:
        logs = dict(logs or {})
        for key in ("loss", "eval_loss"):
            if not math.isfinite(logs.get(key, 0.0)):
                raise TunerError(f"{key} is {logs[key]} at step {state.global_step}", fix="Lower the learning rate.")
        if dist.get_rank() != 0 or not {"loss", "eval_loss"} & logs.keys():
            return
        if "loss" in logs:
            # TRL's trainers count in this session, but for the one that leaves it to transformers, which counts in all.
            logs["tokens_per_second"] = self._speed(float(logs.get("num_tokens", state.num_input_tokens_seen)))
        self.run.log_metrics({"step": state.global_step, **_finite(logs)})
        if self.show:
            self.show.log(state.global_step, state.max_steps, logs)

    def _speed(self, tokens: float) -> float:
        """Return tokens per second of all ranks since the last call."""
        now = time.monotonic()
        speed = (tokens - self.tokens) / max(now - self.since, 1e-9)
        self.tokens, self.since = tokens, now
        return round(speed, 1)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.show:
            self.show.stop()


def _finite(logs: Logs) -> Logs:
    # The gradient norm of a step that fp16's loss scaling skips is infinite, and JSON has no infinity.
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in logs.items()
    }


def _margin(logs: Logs, prefix: str = "") -> str:
    """Return by how much chosen answers are scored above rejected ones, where an objective says it."""
    found = [logs[key] for key in (f"{prefix}rewards/margins", f"{prefix}margin") if key in logs]
    return f"  margin {found[0]:.3f}" if found else ""


class Bar:
    """A bar with loss, learning rate, tokens/s and time left on a terminal; plain lines in the log without one."""

    def __init__(self, terminal: TextIO | None) -> None:
        self.is_terminal = terminal is not None
        self.text = ""
        self.progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), expand=True,
            # What others print stays in the log, from where it is shown above the bar.
            console=Console(file=terminal), redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip

    def start(self, total: int, done: int) -> None:
        self.began, self.first = time.monotonic(), done
        if self.is_terminal:
            self.task = self.progress.add_task("train", total=total, completed=done, text="")
            self.progress.start()

    def step(self, step: int) -> None:
        if self.is_terminal:
            self.progress.update(self.task, completed=step)

    def log(self, step: int, total: int, logs: Logs) -> None:
        if "loss" in logs:
            speed, rate = logs["tokens_per_second"], logs.get("learning_rate", 0.0)
            self.text = f"loss {logs['loss']:.4f}{_margin(logs)}  lr {rate:.2e}  {speed:,.0f} tokens/s"
        text = self.text
        if "eval_loss" in logs:
            text = f"validation loss {logs['eval_loss']:.4f}{_margin(logs, 'eval_')}"
        if self.is_terminal:
            self.progress.update(self.task, text=self.text)
            if "eval_loss" in logs:
                print(text, flush=True)
        else:
            left = (time.monotonic() - self.began) / max(step - self.first, 1) * (total - step)
            print(f"step {step}/{total}  {text}  {left:.0f} s left", flush=True)

    def stop(self) -> None:
        if self.is_terminal:
            self.progress.stop()
