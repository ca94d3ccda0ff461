"""Seconds that `tuner runs` takes over 500 runs, and `tuner report` over one that logged 200,000 steps.

    python -m bench runs [--runs 500] [--lines 200000] [--rounds 5]

Each run has a recipe, a status, metrics and two checkpoints of 16 files; one of them is the long one.
A figure is the median of the rounds, which go over all commands in turn. Reach: about a second of the processor each.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from bench.table import Table, arguments, in_turns, median, spent, summary
from tuner.launch import render
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request
from tuner.machine.hardware import Hardware
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.runs import checkpoints, creation
from tuner.runs.directory import RunDirectory
from tuner.runs.records import ManifestFacts, RunStatus

SHORT_LINES, NUM_FILES, EVALUATE_EVERY = 400, 16, 500
TUNER = [sys.executable, "-m", "tuner"]


def make_run(path: Path) -> RunDirectory:
    """Write a run of one CPU that is done, with two checkpoints and no metrics."""
    asked = Request(identify("tiny_full_sample_e1"), Overrides(), work_dir=path)
    files = render.files(resolve_run(asked, os.environ, Hardware(host_memory_bytes=16 << 30), datetime.now(UTC)))
    run = creation.create(path, files, resume=False)
    run.write_status(RunStatus(state="done", exit_code=0, step=SHORT_LINES, seconds=60.0))
    state = run.read_run().state
    for step in (SHORT_LINES // 2, SHORT_LINES):
        folder = run.checkpoints / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        for number in range(NUM_FILES):
            (folder / f"rank_{number:02}_optim_states.pt").write_bytes(b"states")
        checkpoints.seal(folder, ManifestFacts(state=state, step=step))
    return run


def log_steps(run: RunDirectory, num_lines: int) -> None:
    """Write the metrics of so many steps, as training logs them."""
    with run.metrics.open("w", encoding="utf-8") as stream:
        for step in range(1, num_lines + 1):
            noise = math.sin(step * 7.3) * 0.06
            line = {"step": step, "loss": 2.2 * math.exp(-step / num_lines) + 0.5 + noise, "grad_norm": 1.2 + noise}
            line |= {"learning_rate": 2e-4 * (1 - step / num_lines), "mean_token_accuracy": 0.5 + noise}
            line |= {"entropy": 1.5 + noise, "num_tokens": 8192 * step, "epoch": step / num_lines}
            line |= {"tokens_per_second": 41_000.0 + 900 * noise, "memory_bytes": 52 << 30}
            stream.write(f"{json.dumps(line)}\n")
            if step % EVALUATE_EVERY == 0:
                stream.write(f"{json.dumps({'step': step, 'eval_loss': line['loss'] + 0.1})}\n")


def make_runs(folder: Path, num_runs: int, num_lines: int) -> Path:
    """Write `num_runs` runs below a folder, and return the one among them with `num_lines` steps."""
    first = make_run(folder / "run-0000")
    for number in range(1, num_runs):
        path = folder / f"run-{number:04}"
        shutil.copytree(first.path, path)
        log_steps(RunDirectory(path), SHORT_LINES)
    log_steps(first, num_lines)
    return first.path


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--runs", type=int, default=500, help="%(default)s")
    parser.add_argument("--lines", type=int, default=200_000, help="steps that the long run has logged; %(default)s")
    given = parser.parse_args()
    table = Table("runs", f"{summary(__doc__)} Rounds: {given.rounds}. Seconds of the wall (cpu).")
    with tempfile.TemporaryDirectory(prefix="runs-") as name:
        long = make_runs(Path(name), given.runs, given.lines)
        commands = {
            "tuner --help": [*TUNER, "--help"],
            f"tuner runs, {given.runs} runs": [*TUNER, "runs", name],
            f"tuner runs --json, {given.runs} runs": [*TUNER, "runs", name, "--json"],
            f"tuner report, {given.lines:,} steps": [*TUNER, "report", str(long)],
        }
        found = in_turns(commands, given.rounds, lambda title: [spent(commands[title])])
    for title, figures in found.items():
        table.add({"command": f"`{title}`", "seconds": figures if isinstance(figures, str) else median(figures)})
    table.show(given.json)


if __name__ == "__main__":
    main()
