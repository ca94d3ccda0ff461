"""What a step asks of a GPU beside its arithmetic, counted on a CPU: what Python waits for, and operations.

    python -m bench counts [--ranks 1] [--levels none 1 2 3] [--methods full lora]
                           [--peers loop trainer trl tuner] [--places]

Python waits for a GPU at each value that it reads and each copy that blocks, and starts a kernel for each operation.
A rank in bf16, two micro-batches of a Llama of two layers with 21 tensors (28 of LoRA); rows of one sample, SDPA, the
head that computes a GPU's losses (tuner, TRL). A cell: waits / operations. `bench/clock/bench_counts.py` counts.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

from bench.jobs import TINY, Setting, llama, make_job, make_model
from bench.steps import counts_of
from bench.table import Table, Unmeasured, arguments, summary
from bench.tools import NAMES, Job

LEVELS = ("none", "1", "2", "3")
PEERS = ("loop", "trainer", "trl", "tuner")
_STEPS = 7
"""Two more than until the counted step, so that it is not the last one, which logs and saves."""


def cell(tool: str, job: Job, folder: Path, *, shows_places: bool) -> str:
    """Return the waits and the operations of one step, or why there are none."""
    folder.mkdir()
    try:
        found = counts_of(tool, job, folder)
    except Unmeasured as problem:
        return str(problem)
    for place, count in found["waits"].items() if shows_places else ():
        print(f"{tool}: {count} x {place}", file=sys.stderr)
    return f"{sum(found['waits'].values())} / {sum(found['operations'].values())}"


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--levels", nargs="+", default=LEVELS, choices=LEVELS, help="ZeRO's; %(default)s")
    parser.add_argument("--methods", nargs="+", default=["full", "lora"])
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=PEERS)
    parser.add_argument("--places", action="store_true", help="show what was waited for, and where, on standard error")
    given = parser.parse_args()
    table = Table("counts", summary(__doc__))
    with tempfile.TemporaryDirectory(prefix="counts-") as scratch:
        model = make_model(Path(scratch) / "model", llama(**TINY))
        for level, method in itertools.product(given.levels, given.methods):
            preset = "none" if level == "none" else f"deepspeed_zero{level}"
            setting = Setting(given.ranks, "bf16", method, loss="chunked", preset=preset)
            job = make_job(Path(scratch), setting, _STEPS, model)
            folders = {tool: Path(scratch) / f"{tool}-{level}-{method}" for tool in given.peers}
            cells = {NAMES[tool]: cell(tool, job, folders[tool], shows_places=given.places) for tool in given.peers}
            where = f"{'no ZeRO' if level == 'none' else f'ZeRO-{level}'}, {method}"
            table.add({"setting": f"{where}, {given.ranks} ranks" if given.ranks > 1 else where, **cells})
    table.show(given.json)


if __name__ == "__main__":
    main()
