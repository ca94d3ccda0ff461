"""Goodput of a run that loses a rank every minute: part of `bench/faults.py`.

Of the wall time, the share that went into optimizer steps which were not taken again: useful steps times the median
time of a step of the same run, so that a machine that is busy with other work slows both.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import psutil
from fault_runs import TUNER

_POLL_S = 0.02
RESTARTED = replace(TUNER, command=lambda *job: [*TUNER.command(*job), "--max-restarts", "3"])
_WORKER, _WARM = "tuner.worker", "tuner.worker.warm"


def table(scratch: Path, seconds: float, every_s: float, interval: int) -> list[str]:
    """Return the rows of a markdown table; what the run said about its restarts is on standard error."""
    folder = scratch / "goodput"
    process, kills, seen = RESTARTED.start(folder, 1_000_000, interval), 0, list[tuple[float, int]]()
    rng, began_s = random.Random(0), time.monotonic()
    try:
        while (now_s := time.monotonic() - began_s) < seconds and process.poll() is None:
            step = TUNER.step(folder)
            if not seen or seen[-1][1] != step:
                seen.append((now_s, step))
            if now_s >= (kills + 1) * every_s and (ranks := _ranks(process)):
                rng.choice(ranks).kill()
                kills += 1
            time.sleep(_POLL_S)
        wall_s, useful = time.monotonic() - began_s, TUNER.step(folder)
    finally:
        _end(process)
    text = (folder / "output.log").read_text(errors="replace")
    print("\n".join(line for line in text.splitlines() if "--max-restarts" in line), file=sys.stderr)
    step_s = statistics.median(later - at for (at, step), (later, next_step) in pairwise(seen) if next_step == step + 1)
    return [
        "| seconds | ranks killed | useful steps | median step, s | goodput |",
        "|---|---|---|---|---|",
        f"| {wall_s:.0f} | {kills} | {useful} | {step_s:.3f} | {useful * step_s / wall_s:.0%} |",
    ]


def _ranks(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return the ranks that are at work; none while the run starts again."""
    found = []
    for child in psutil.Process(process.pid).children():
        try:
            # After a restart the ranks are children of the process that has forked them.
            forked = child.children() if _WARM in child.cmdline() else [child]
            found += [rank for rank in forked if _WORKER in rank.cmdline()]
        except psutil.NoSuchProcess:
            continue
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the run: at the second signal at once."""
    for _ in range(2):
        if process.poll() is None:
            process.terminate()
            time.sleep(0.1)
    process.wait()
