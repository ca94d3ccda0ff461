"""Whole runs that are killed at random: part of `bench/faults.py`, for tuner and for plain torchrun with the Trainer.

Each attempt has one random process of the run killed (launcher, torchrun or a rank) at a random moment and is then
started again; a run's final weights must be those of one that nobody disturbed, to the bit.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PLAIN = Path(__file__).with_name("plain_trainer.py")
RANKS, STEPS, INTERVAL = 2, 40, 5
RECIPE = """
_base_ = "tiny_full_sample_e1"
train_dataloader = dict(batch_size=2, dataset=dict(max_length=128))
val_dataloader = None
optim_wrapper = dict(optimizer=dict(lr=3e-3), accumulative_counts=2, dtype="fp32")
param_scheduler = dict(type="constant", warmup_ratio=0.0)
train_cfg = dict(max_steps={steps})
checkpoint = dict(interval={interval})
log = dict(interval=1, num_samples=0)
"""
_LEFT_S = 60
"""How long processes may live on after one of them was killed, before they count as left behind."""
_POLL_S = 0.01


@dataclass(frozen=True)
class Program:
    """A way to train: its command for a folder, and where that folder then has steps, weights and checkpoints."""

    name: str
    command: Callable[[Path, int, int], list[str]]
    steps: str
    weights: str
    sealed: str
    """A pattern of the file that is written last in a checkpoint."""

    def start(self, folder: Path, steps: int = STEPS, interval: int = INTERVAL) -> subprocess.Popen[bytes]:
        folder.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "NPROC_PER_NODE": str(RANKS), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with (folder / "output.log").open("ab") as log:
            return subprocess.Popen(
                self.command(folder, steps, interval), env=env, stdout=log, stderr=log, start_new_session=True
            )

    def step(self, folder: Path) -> int:
        """Return the last step that the run has recorded."""
        try:
            lines = (folder / self.steps).read_text().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (OSError, IndexError, ValueError):
            return 0

    def digest(self, folder: Path) -> str | None:
        """Return the hash of the result's weights, or None where there is none."""
        file = folder / self.weights
        return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def _tuner(folder: Path, steps: int, interval: int) -> list[str]:
    recipe = folder / "recipe_of_the_bench.py"
    recipe.write_text(RECIPE.format(steps=steps, interval=interval))
    to = ["--work-dir", str(folder / "run"), "--deepspeed", "zero2", "--resume", "auto"]
    return [sys.executable, "-m", "tuner", "train", str(recipe), *to]


def _trainer(folder: Path, steps: int, interval: int) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    return [*launcher, str(PLAIN), "--", str(folder), str(steps), str(interval)]


TUNER = Program(
    "tuner", _tuner, "run/metrics.jsonl", "run/final/model.safetensors", "run/checkpoints/checkpoint-*/manifest.json"
)
TRAINER = Program(
    "torchrun + Trainer", _trainer, "steps.jsonl", "final/model.safetensors", "checkpoint-*/trainer_state.json"
)


@dataclass
class Outcome:
    """What became of the runs that were killed."""

    kills: int = 0
    left_behind: int = 0
    """Kills after which processes of the run lived on."""
    runs: int = 0
    not_resumed: int = 0
    """Runs that could not go on."""
    identical: int = 0
    details: list[str] = field(default_factory=list)


def disturb(program: Program, scratch: Path, num_kills: int, seed: int = 0) -> Outcome:
    """Train run after run, killing processes, until `num_kills` have been killed; then let the last run end."""
    rng, outcome = random.Random(seed), Outcome()
    began = time.monotonic()
    if program.start(scratch / "undisturbed").wait():
        raise SystemExit(f"the undisturbed run failed: {scratch / 'undisturbed' / 'output.log'}")
    whole_s, wanted = time.monotonic() - began, program.digest(scratch / "undisturbed")
    while outcome.kills < num_kills:
        folder = scratch / f"run-{outcome.runs}"
        outcome.runs += 1
        code = None
        while code is None:
            moment = rng.uniform(0, whole_s) if outcome.kills < num_kills else None
            code = _attempt(program, folder, moment, rng, outcome)
        if code:
            outcome.not_resumed += 1
            outcome.details.append(f"{folder.name}: exit {code}: {_last_line(folder)}")
        elif program.digest(folder) == wanted:
            outcome.identical += 1
        else:
            outcome.details.append(f"{folder.name}: other weights")
    return outcome


def _attempt(program: Program, folder: Path, moment: float | None, rng: random.Random, outcome: Outcome) -> int | None:
    """Start a run and kill one of its processes after `moment` seconds; return its exit code if it ended before."""
    with _started(program, folder) as process:
        try:
            return process.wait(moment)
        except subprocess.TimeoutExpired:
            pass
        tree = _tree(process)
        if not tree:
            return process.wait()
        rng.choice(tree).kill()
        outcome.kills += 1
        _, alive = psutil.wait_procs(tree, timeout=_LEFT_S)
        outcome.left_behind += bool(alive)
    return None


@contextmanager
def _started(program: Program, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a run; whatever happens, nothing of it lives on."""
    process = program.start(folder)
    try:
        yield process
    finally:
        for process in psutil.process_iter(["cmdline"]):
            if str(folder) in " ".join(process.info["cmdline"] or []):
                process.kill()
        process.wait()


def _tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        whole = psutil.Process(process.pid)
        return [whole, *whole.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _last_line(folder: Path) -> str:
    lines = (folder / "output.log").read_text(errors="replace").strip().splitlines()
    return lines[-1][:160] if lines else ""


@dataclass(frozen=True)
class Times:
    """Seconds; None where a program has no such thing. Medians of several measurements."""

    stop_s: float | None
    """From SIGTERM to a committed checkpoint of the step at work."""
    lost_s: float
    """From the kill of a rank, through a restart, until the step that it had reached is reached again."""
    step_s: float
    save_s: float


def times(program: Program, scratch: Path, rounds: int = 3) -> Times:
    """Measure stopping, restarting and saving on this machine."""
    stops = [_stop(program, scratch / f"stop-{number}") for number in range(rounds)]
    lost = [_lose(program, scratch / f"lose-{number}") for number in range(rounds)]
    step_s, save_s = _cost_of_saving(program, scratch / "saving")
    committed = [seconds for seconds in stops if seconds is not None]
    stop_s = statistics.median(committed) if len(committed) == rounds else None
    return Times(stop_s, statistics.median(lost), step_s, save_s)


def _stop(program: Program, folder: Path) -> float | None:
    with _started(program, folder) as process:
        _wait(lambda: program.step(folder) >= 7, process)
        before = set(folder.glob(program.sealed))
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        while process.poll() is None and set(folder.glob(program.sealed)) == before:
            time.sleep(_POLL_S)
        return time.monotonic() - began if set(folder.glob(program.sealed)) != before else None


def _lose(program: Program, folder: Path) -> float:
    with _started(program, folder) as process:
        _wait(lambda: program.step(folder) >= INTERVAL + 3, process)
        reached = program.step(folder)
        began = time.monotonic()
        _tree(process)[-1].kill()
        process.wait()
    with _started(program, folder) as process:
        _wait(lambda: program.step(folder) < reached, process)  # records of steps after the checkpoint are cut
        _wait(lambda: program.step(folder) >= reached, process)
        return time.monotonic() - began


def _cost_of_saving(program: Program, folder: Path) -> tuple[float, float]:
    """Return the median seconds of a step, and those that a save adds to the step after it."""
    process = program.start(folder, steps=24, interval=3)
    seen: dict[int, float] = {}
    while process.poll() is None:
        step = program.step(folder)
        seen.setdefault(step, time.monotonic())
        time.sleep(_POLL_S / 2)
    gaps = {step: seen[step] - seen[step - 1] for step in seen if step - 1 in seen and step > 2}
    plain = statistics.median(gap for step, gap in gaps.items() if step % 3 != 1)
    saving = statistics.median(gap for step, gap in gaps.items() if step % 3 == 1)
    return plain, saving - plain


def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    while not condition() and process.poll() is None:
        time.sleep(_POLL_S)


def table(scratch: Path, num_kills: int) -> list[str]:
    """Return the rows of a markdown table: who, kills, runs and what became of them; then what went wrong."""
    rows = [
        "| runs of | killed | runs | could not go on | weights as undisturbed, to the bit | left after a kill |",
        "|---|---|---|---|---|---|",
    ]
    details = []
    for program, number in ((TUNER, num_kills), (TRAINER, num_kills // 2)):
        found = disturb(program, scratch / program.name.partition(" ")[0], number)
        counts = (found.kills, found.runs, found.not_resumed, found.identical, found.left_behind)
        rows.append(f"| {program.name} | {' | '.join(map(str, counts))} |")
        details += [f"{program.name}: {text}" for text in found.details]
    return [*rows, "", *details]


def times_table(scratch: Path) -> list[str]:
    """Return the rows of a markdown table of seconds; the share is that of a save after every 500 steps."""
    rows = [
        "| seconds | SIGTERM to checkpoint | lost by a killed rank | one step | one save | share at interval 500 |",
        "|---|---|---|---|---|---|",
    ]
    for program in (TUNER, TRAINER):
        found = times(program, scratch / program.name.partition(" ")[0])
        stop = f"{found.stop_s:.1f}" if found.stop_s is not None else "none is written"
        share = found.save_s / (500 * found.step_s + found.save_s)
        cells = (stop, f"{found.lost_s:.1f}", f"{found.step_s:.2f}", f"{found.save_s:.2f}", f"{share:.2%}")
        rows.append(f"| {program.name} | {' | '.join(cells)} |")
    return rows
