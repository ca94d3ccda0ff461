"""Saves that are killed at a random moment: part of `bench/faults.py`, for tuner and for the Trainer alone.

One rank trains a small model and saves after every step; each attempt resumes, is killed by SIGKILL, and is followed by
the next. Both train with transformers' Trainer on DeepSpeed ZeRO-2: only who saves and who picks the checkpoint differ.
The libraries are loaded once, and every attempt is a fork of this process.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
os.environ |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}

import deepspeed.ops
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory
from tuner.worker.checkpointing import CheckpointSaver
from tuner.worker.trainers import CheckpointHooks

ZERO = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 1,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
}
SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4}
KEEP = 2
_ROWS = [{"input_ids": torch.arange(16), "labels": torch.arange(16)}] * 64
_LONGEST_S, _POLL_S = 120, 0.005


@dataclass(frozen=True)
class Program:
    """Who saves: where the trainer writes and how many it keeps, what takes its place, and what is resumed from."""

    name: str
    output: Callable[[Path], Path]
    limit: int | None
    attach: Callable[[Trainer, Path], object]
    pick: Callable[[Path], str | None]


TUNER = Program(
    "tuner",
    checkpoints.unfinished,
    None,
    lambda made, home: CheckpointSaver(made, RunDirectory(home.parent), {}, KEEP),
    lambda home: _newest(home),
)
TRAINER = Program("Trainer", Path, KEEP, lambda made, home: None, lambda home: get_last_checkpoint(str(home)))


def _newest(home: Path) -> str | None:
    found, _ = checkpoints.newest_valid(home)
    return str(found.path) if found else None


@dataclass
class Outcome:
    """What became of the saves that were killed."""

    kills: int = 0
    """Those that struck while a save was under way."""
    not_loaded: int = 0
    """How often the checkpoint that was picked afterwards could not be resumed from."""
    lost: int = 0
    """How often an older one was picked than the last that was saved, or none."""
    seconds: float = 0.0
    details: list[str] = field(default_factory=list)


def kill_saves(program: Program, scratch: Path, num_kills: int, seed: int = 0) -> Outcome:
    """Kill until `num_kills` have struck a save; the next attempt shows what each of them has left."""
    rng, outcome, struck, began = random.Random(seed), Outcome(), False, time.monotonic()
    attempt = Attempt(program, scratch)
    while outcome.kills < num_kills or struck:
        with attempt.started():
            step = attempt.wait_until_resumed()
            if step is None:
                outcome.details.append(attempt.last_words())
                outcome.not_loaded += 1
                attempt.start_over()
            elif struck and step < attempt.last_saved()[0]:
                outcome.lost += 1
            struck = step is not None and outcome.kills < num_kills and attempt.kill_in_a_save(rng)
            outcome.kills += struck
    outcome.seconds = time.monotonic() - began
    return outcome


class Attempt:
    """A child that resumes, trains and saves until it is killed. It leaves word of where it is in small files."""

    def __init__(self, program: Program, scratch: Path) -> None:
        self.program, self.home, self.log = program, scratch / "checkpoints", scratch / "output.log"
        self.resumed, self.saving, self.saved = scratch / "resumed", scratch / "saving", scratch / "saved"
        self.child = 0
        self.start_over()

    def start_over(self) -> None:
        shutil.rmtree(self.home, ignore_errors=True)
        self.home.mkdir(parents=True)
        self.saved.write_text("")

    @contextmanager
    def started(self) -> Iterator[None]:
        """Fork; whatever happens, the child does not outlive the block."""
        self.resumed.unlink(missing_ok=True)
        self.saving.unlink(missing_ok=True)
        self.child = os.fork()
        if self.child == 0:
            self._be_the_child()
        try:
            yield
        finally:
            self._kill()

    def wait_until_resumed(self) -> int | None:
        """Return the step that the child goes on from, or None where it could not load the checkpoint."""
        deadline = time.monotonic() + _LONGEST_S
        while not (self.resumed.is_file() and (text := self.resumed.read_text())):
            if os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                return None
            if time.monotonic() > deadline:
                raise SystemExit(f"an attempt neither trains nor ends: {self.log}")
            time.sleep(_POLL_S)
        return int(text)

    def kill_in_a_save(self, rng: random.Random) -> bool:
        """Kill the child at a random moment of a save; return whether it was still under way."""
        while not self.saving.exists():
            time.sleep(_POLL_S / 5)
        time.sleep(rng.uniform(0, self.last_saved()[1]))
        self._kill()
        return self.saving.exists()

    def last_saved(self) -> tuple[int, float]:
        """Return the step of the last whole save, and the seconds that it took."""
        lines = self.saved.read_text().splitlines()
        return (int(lines[-1].split()[0]), float(lines[-1].split()[1])) if lines else (0, 0.5)

    def last_words(self) -> str:
        """Return the last line of the child's output; paths and steps differ from attempt to attempt."""
        line = self.log.read_text(errors="replace").strip().splitlines()[-1].replace(str(self.home), "...")
        return re.sub(r"\d+", "N", line)[:160]

    def _kill(self) -> None:
        if self.child:
            os.kill(self.child, signal.SIGKILL)
            os.waitpid(self.child, 0)
            self.child = 0

    def _be_the_child(self) -> NoReturn:
        with self.log.open("w") as log:
            for number in (1, 2):
                os.dup2(log.fileno(), number)
        try:
            self._train()
        except BaseException:
            traceback.print_exc()
        os._exit(1)

    def _train(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        deepspeed.ops.__compatible_ops__ = {}
        deepspeed.init_distributed(dist_backend="gloo")
        arguments = TrainingArguments(
            output_dir=str(self.program.output(self.home)),
            deepspeed=ZERO,
            per_device_train_batch_size=1,
            max_steps=10**6,
            save_steps=1,
            save_total_limit=self.program.limit,
            ignore_data_skip=True,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        told = _Told(self.resumed)
        trainer = _Trainer(
            model=LlamaForCausalLM(LlamaConfig(**SIZES)), args=arguments, train_dataset=_ROWS, callbacks=[told]
        )
        saver = self.program.attach(trainer, self.home)
        save = trainer._save_checkpoint

        def timed(*given: Any) -> None:
            began = time.monotonic()
            self.saving.touch()
            save(*given)
            if isinstance(saver, CheckpointSaver):
                saver.wait()
            with self.saved.open("a") as stream:
                stream.write(f"{trainer.state.global_step} {time.monotonic() - began}\n")
            self.saving.unlink()

        trainer._save_checkpoint = timed
        trainer.train(resume_from_checkpoint=self.program.pick(self.home))


class _Trainer(CheckpointHooks, Trainer):  # type: ignore[misc]
    """The plain one; hooks that nobody fills change nothing."""


class _Told(TrainerCallback):
    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.file.write_text(str(state.global_step))


def table(scratch: Path, num_kills: int) -> list[str]:
    """Return the rows of a markdown table: who, saves killed, not loaded, lost, seconds; then what went wrong."""
    rows = [
        "| saves by | killed in a save | next resume failed | older than the last saved | s |",
        "|---|---|---|---|---|",
    ]
    details = []
    for program, number in ((TUNER, num_kills), (TRAINER, num_kills // 2)):
        found = kill_saves(program, scratch / program.name, number)
        rows.append(f"| {program.name} | {found.kills} | {found.not_loaded} | {found.lost} | {found.seconds:.0f} |")
        details += [f"{program.name}: {times} x {text}" for text, times in Counter(found.details).most_common(3)]
    return [*rows, "", *details]
