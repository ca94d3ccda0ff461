"""From Enter to the end of the first optimizer step, and the processor's seconds of all processes until then.

    python -m bench start [--ranks 1 2] [--dtypes bf16] [--rounds 3]

All train a Llama of about 50M parameters with random weights in full, at the same settings: ZeRO-2, rows of 256
tokens, micro-batch 2, accumulation 2. The hand-written script and the Trainer start under torchrun; each tool starts
with its own command. A first round, in which caches fill, is not counted. Reach: tuner at 1.00 of the loop.
"""

from __future__ import annotations

import itertools
import subprocess
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from bench.jobs import SMALL, TINY, Setting, llama, make_job, make_model
from bench.steps import cells
from bench.table import Spent, Table, arguments, failed, in_turns, summary
from bench.tools import LONGEST_S, NAMES, Job, end, start, ticks

PEERS = ("loop", "trainer", "trl", "llamafactory", "tuner")
POLL_S = 0.02


def first_step(tool: str, job: Job) -> list[Spent]:
    """Start a tool, wait for its first step, end it."""
    with tempfile.TemporaryDirectory(prefix=f"{tool}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        clock, began = folder / "clock.jsonl", time.monotonic()
        process = start(tool, job, folder, clock)
        try:
            while not (clock.is_file() and clock.read_text().endswith("\n")):
                if process.poll() is not None or time.monotonic() - began > LONGEST_S:
                    raise failed(tool, end(process))
                time.sleep(POLL_S)
            cpu = _cpu(process)
            return [Spent(ticks(clock)[0].wall - began, cpu)]
        finally:
            if process.returncode is None:
                end(process)


def _cpu(process: subprocess.Popen[str]) -> float:
    """Return the processor's seconds of a process and of all below it, those that have ended included."""
    total, root = 0.0, psutil.Process(process.pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            spent = process.cpu_times()
            total += spent.user + spent.system + spent.children_user + spent.children_system
    return total


def main() -> None:
    parser = arguments(__doc__, rounds=3, has_tiny=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], default=["bf16"])
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=PEERS)
    given = parser.parse_args()
    table = Table("start", f"{summary(__doc__)} Medians of {given.rounds}. Seconds of the wall (cpu).")
    with tempfile.TemporaryDirectory(prefix="start-") as scratch:
        model = make_model(Path(scratch) / "model", llama(**(TINY if given.tiny else SMALL)))
        for ranks, dtype in itertools.product(given.ranks, given.dtypes):
            setting = Setting(ranks, dtype, "full")
            job = make_job(Path(scratch), setting, 2, model)
            in_turns(given.peers, 1, partial(first_step, job=job))
            found = in_turns(given.peers, given.rounds, partial(first_step, job=job))
            table.add({"setting": str(setting), **cells(found)})
    table.show(given.json)


if __name__ == "__main__":
    main()
