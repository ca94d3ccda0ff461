"""What a step asks of a GPU beside its arithmetic, counted on a CPU: values that Python reads, and operations.

    python -m bench counts [--zero 0 2 3] [--methods full lora] [--peers loop trainer trl tuner]

Python waits for a GPU at each value that it reads from a tensor, and starts a kernel for each operation; so both can be
counted without a GPU. One step of one rank in bf16, of two micro-batches of a Llama of two layers, by torch's profiler.
P is the number of tensors that are trained: what grows with it does not stay small.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from bench.jobs import TINY, Setting, llama, make_job, make_model
from bench.steps import operations_of
from bench.table import Table, Unmeasured, arguments
from bench.tools import NAMES, Job

PEERS = ("loop", "trainer", "trl", "tuner")
_STEPS = 5
READ = "aten::_local_scalar_dense"


def counted(tool: str, job: Job, folder: Path) -> str:
    """Return the values read and the operations of one step, or why there are none."""
    folder.mkdir()
    try:
        operations = operations_of(tool, job, folder)
    except Unmeasured as problem:
        return str(problem)
    num_operations = sum(count for name, count in operations.items() if name.startswith("aten::"))
    return f"{operations.get(READ, 0)} / {num_operations}"


def main() -> None:
    parser = arguments(__doc__, rounds=1)
    parser.add_argument("--zero", type=int, nargs="+", default=[0, 2, 3])
    parser.add_argument("--methods", nargs="+", default=["full", "lora"])
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=PEERS)
    given = parser.parse_args()
    what = (__doc__ or "").split("\n\n")[2].replace("\n", " ") + " A cell: values read / operations."
    table = Table("counts", what)
    with tempfile.TemporaryDirectory(prefix="counts-") as scratch:
        model = make_model(Path(scratch) / "model", llama(**TINY))
        for zero, method in itertools.product(given.zero, given.methods):
            setting = Setting(1, "bf16", method, zero, preset=None if zero else "none")
            job = make_job(Path(scratch), setting, _STEPS, model)
            cells = {NAMES[tool]: counted(tool, job, Path(scratch) / f"{tool}-{zero}-{method}") for tool in given.peers}
            table.add({"setting": str(setting), **cells})
    table.show(given.json)


if __name__ == "__main__":
    main()
