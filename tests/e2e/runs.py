"""Start the real command line in a session of its own, and look at what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.warm import ROOT, WORKER, Forked, warm
from tuner.machine.hardware import detect
from tuner.machine.launchers import without_variables

COMMAND = [sys.executable, "-m", "tuner"]
Started = subprocess.Popen[str] | Forked
# A learning rate above 0 from the first step on, and every loss in metrics.jsonl.
QUICK = """
_base_ = "tiny_{method}_sample_e1"
train_dataloader = dict(batch_size=2, dataset=dict(max_length=128, pack_length=None))
val_dataloader = None
optim_wrapper = dict(optimizer=dict(lr=3e-3), accumulative_counts=2, dtype="fp32")
param_scheduler = dict(type="constant", warmup_ratio=0.0)
train_cfg = dict(max_steps=4)
checkpoint = dict(interval=2)
log = dict(interval=1, num_samples=0)
"""


@dataclass(frozen=True)
class Finished:
    """A run that has ended."""

    code: int
    text: str
    path: Path

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.metrics if "loss" in line]

    @property
    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "metrics.jsonl").read_text().splitlines()]

    def json(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / name).read_text())
        return found


Once = Callable[..., Finished]
"""What `once` of this folder's conftest is."""


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without what a launcher or a test runner put there."""
    return without_variables(os.environ) | {"OMP_NUM_THREADS": "1"} | more


def quick(folder: Path, method: str) -> Path:
    """Write a recipe of four steps on the tiny model."""
    path = folder / f"quick_{method}.py"
    path.write_text(QUICK.format(method=method))
    return path


def start(*arguments: object, ranks: int = 2, command: Sequence[str] = COMMAND, **env: str) -> subprocess.Popen[str]:
    """Start `tuner train` in a new session, in a folder that nobody minds (a JSON may name relative ones)."""
    variables = environment(NPROC_PER_NODE=str(ranks), **env) if ranks else environment(**env)
    return subprocess.Popen(
        [*command, "train", *map(str, arguments)],
        env=variables,
        cwd=tempfile.gettempdir(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def fork(*arguments: object, ranks: int = 2, worker: str = WORKER, **env: str) -> Started:
    """Start `tuner train` as `start` does, but forked if it can be, to be looked at or disturbed while it runs."""
    variables = environment(NPROC_PER_NODE=str(ranks), **env)
    if _has_gpus() or not warm().suits(variables):
        assert worker == WORKER, "such a run is forked"
        return start(*arguments, ranks=ranks, **env)
    return warm().start(["train", *arguments], env=variables, worker=worker)


def finish(process: Started, work_dir: Path, timeout_s: float = 900) -> Finished:
    """Wait for a run; whatever happens, no process of it survives the test."""
    try:
        text, _ = process.communicate(timeout=timeout_s)
        return Finished(process.returncode, text, work_dir)
    finally:
        for left in processes_of(work_dir):
            left.kill()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@cache
def _has_gpus() -> bool:
    return detect(os.environ).device != "cpu"


def train(
    recipe: object,
    work_dir: Path,
    *arguments: object,
    ranks: int = 2,
    command: Sequence[str] = COMMAND,
    worker: str = WORKER,
    **env: str,
) -> Finished:
    """Run `tuner train` to its end: forked on a CPU, unless it is a rank itself or imports read other variables."""
    words = (recipe, "--work-dir", work_dir, *arguments)
    variables = environment(NPROC_PER_NODE=str(ranks), **env) if ranks else environment(**env)
    is_forked = command == COMMAND and "--launcher" not in arguments and not _has_gpus()
    if not is_forked or (worker == WORKER and not warm().suits(variables)):
        return finish(start(*words, ranks=ranks, command=command, **env), work_dir)
    ended = warm(has_bitsandbytes=is_quantized(words)).run(["train", *words], env=variables, worker=worker)
    return Finished(ended.returncode, ended.stdout + ended.stderr, work_dir)


def is_quantized(words: Sequence[object], folder: Path = ROOT) -> bool:
    """Return whether a recipe seems to need bitsandbytes: if that is wrong, its ranks start as a user's do."""
    recipe = folder / str(words[0])
    lines = recipe.read_text(encoding="utf-8").splitlines() if recipe.is_file() else []
    texts = [*map(str, words), *(line.partition("#")[0] for line in lines)]
    return any(name in text for text in texts for name in ("qlora", "8bit", "bits=4", "bits=8"))


def processes_of(work_dir: Path) -> list[psutil.Process]:
    """Return the living processes that name a run directory on their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and str(work_dir) in (process.info["cmdline"] or []):
            found.append(process)
    return found


def wait_until(condition: Callable[[], bool], timeout_s: float = 300) -> None:
    """Poll a condition with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


def free_port() -> int:
    """Return a port that nobody listens to on this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def written_lines(path: Path) -> int:
    """Return the number of lines in a file that may not be there yet."""
    return len(path.read_text().splitlines()) if path.is_file() else 0


def ok(run: Finished) -> Finished:
    """Return the run if it succeeded; show what it printed otherwise."""
    assert run.code == 0, run.text
    return run


def distance(left: Mapping[str, Any], right: Mapping[str, Any]) -> float:
    """Return the relative 2-norm of the difference of two sets of tensors with the same names."""
    assert left.keys() == right.keys()
    squares = sum(float(((left[name] - right[name]).double() ** 2).sum()) for name in left)
    return float((squares / sum(float((weight.double() ** 2).sum()) for weight in right.values())) ** 0.5)
