"""Seconds of an optimizer step: a minimal `deepspeed.initialize` loop, the plain Trainer, TRL and tuner, in turns.

    python -m bench steps [--ranks 1 2] [--zero 2] [--dtypes fp32 bf16] [--methods full lora] [--rounds 3] [--steps 12]

All train a Llama of about 50M parameters with random weights, at the same settings: rows of 256 tokens, micro-batch 2,
accumulation 2, learning rate, clipping and DeepSpeed config, fused AdamW, no recomputation. A figure is the median over
the steps of all rounds, the first ones left out. Reach: tuner at 1.00 of the loop.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from functools import partial
from pathlib import Path

from bench.jobs import SMALL, TINY, Setting, llama, make_job, make_model
from bench.table import Spent, Table, arguments, in_turns, median, summary
from bench.tools import NAMES, Job, Tick, train

WARM_STEPS = 3
PEERS = ("loop", "trainer", "trl", "tuner")


def intervals(ticks: list[Tick]) -> list[Spent]:
    """Return what each step took after the first ones."""
    pairs = itertools.pairwise(ticks[WARM_STEPS:])
    return [Spent(after.wall - before.wall, after.cpu - before.cpu) for before, after in pairs]


def counts_of(tool: str, job: Job, folder: Path) -> dict[str, dict[str, int]]:
    """Train, and return what one step of rank 0 `waits` for, by place, and its `operations` (bench/clock)."""
    file = folder / "counts.json"
    train(tool, job, folder, BENCH_COUNTS=str(file))
    found: dict[str, dict[str, int]] = json.loads(file.read_text())
    return found


def measured(tool: str, job: Job) -> list[Spent]:
    with tempfile.TemporaryDirectory(prefix=f"{tool}-") as folder:
        return intervals(train(tool, job, Path(folder)))


def main() -> None:
    parser = arguments(__doc__, rounds=3, has_tiny=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--zero", type=int, nargs="+", default=[2])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--methods", nargs="+", default=["full", "lora"])
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=PEERS)
    parser.add_argument("--steps", type=int, default=12)
    given = parser.parse_args()
    table = Table("steps", summary(__doc__) + f" Rounds: {given.rounds}. Seconds of the wall (cpu).")
    with tempfile.TemporaryDirectory(prefix="steps-") as scratch:
        model = make_model(Path(scratch) / "model", llama(**(TINY if given.tiny else SMALL)))
        for ranks, zero, dtype, method in itertools.product(given.ranks, given.zero, given.dtypes, given.methods):
            setting = Setting(ranks, dtype, method, zero)
            job = make_job(Path(scratch), setting, given.steps, model)
            found = in_turns(given.peers, given.rounds, partial(measured, job=job))
            table.add({"setting": str(setting), **cells(found)})
    table.show(given.json)


def cells(found: dict[str, list[Spent] | str], floor: str = "loop") -> dict[str, Spent | str]:
    """Return the floor's seconds and the others' multiples of it, or why a peer has none."""
    medians = {name: took if isinstance(took, str) else median(took) for name, took in found.items()}
    base, row = medians.get(floor), {}
    for name, took in medians.items():
        row[f"{NAMES[name]}, s"] = took
        if isinstance(base, Spent) and isinstance(took, Spent) and name != floor:
            row[f"{NAMES[name]} / {NAMES[floor]}"] = took.over(base)
    return row


if __name__ == "__main__":
    main()
