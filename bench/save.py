"""What a checkpoint costs training: DeepSpeed's save_checkpoint, the plain Trainer and tuner, in turns.

    python -m bench save [--ranks 1 2] [--dtypes bf16] [--methods full lora] [--rounds 3]

All train a Llama of about 50M parameters with random weights at the same settings (ZeRO-2) and save every fourth step.
A figure is the median, over all saves, of the four steps that begin with one, less four times a step that comes last of
its four, which no save disturbs: what is written in the background after a step is in it as far as it slows the next
ones. The content differs: the loop writes DeepSpeed's states; the Trainer the model once more, to be loaded
without DeepSpeed, and the random states; tuner the same with hashes, and a checkpoint counts only once all of it is on
the disk.
Reach: tuner at 1.00 of the Trainer.
"""

from __future__ import annotations

import itertools
import tempfile
from functools import partial
from pathlib import Path

from bench.jobs import SMALL, TINY, Setting, llama, make_job, make_model
from bench.steps import cells, intervals
from bench.table import Spent, Table, arguments, in_turns, median, summary
from bench.tools import Job, train

PEERS = ("loop", "trainer", "tuner")
EVERY = 4
STEPS = 18
"""The first window starts with the save at step 4; the last one has ended when the run ends."""


def saves(found: list[Spent]) -> list[Spent]:
    """Return what each save cost, from the intervals after step 4, 5, 6 ..."""
    windows = [found[at : at + EVERY] for at in range(0, len(found) - EVERY + 1, EVERY)]
    plain = median(window[-1] for window in windows)
    return [
        Spent(
            sum(spent.wall for spent in window) - EVERY * plain.wall,
            sum(spent.cpu for spent in window) - EVERY * plain.cpu,
        )
        for window in windows
    ]


def measured(tool: str, job: Job, sizes: dict[str, int]) -> list[Spent]:
    with tempfile.TemporaryDirectory(prefix=f"{tool}-") as folder:
        found = intervals(train(tool, job, Path(folder)))
        sizes[tool] = newest_bytes(Path(folder) / "run")
    return saves(found)


def newest_bytes(run: Path) -> int:
    """Return the bytes of the newest checkpoint below a run; a file that two names have is counted once."""
    newest = max(run.rglob("checkpoint-*"), key=lambda path: (path.is_dir(), path.stat().st_mtime))
    stats = {file.stat().st_ino: file.stat().st_size for file in newest.rglob("*") if file.is_file()}
    return sum(stats.values())


def main() -> None:
    parser = arguments(__doc__, rounds=3, has_tiny=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", choices=["bf16", "fp32"], default=["bf16"])
    parser.add_argument("--methods", nargs="+", default=["full", "lora"])
    given = parser.parse_args()
    table = Table("save", f"{summary(__doc__)} Rounds: {given.rounds}. Seconds of the wall (cpu).")
    with tempfile.TemporaryDirectory(prefix="save-") as scratch:
        model = make_model(Path(scratch) / "model", llama(**(TINY if given.tiny else SMALL)))
        for ranks, dtype, method in itertools.product(given.ranks, given.dtypes, given.methods):
            setting, sizes = Setting(ranks, dtype, method), dict[str, int]()
            job = make_job(Path(scratch), setting, STEPS, model, save_every=EVERY)
            found = in_turns(PEERS, given.rounds, partial(measured, job=job, sizes=sizes))
            written = {f"{tool}, MB": round(size / 1e6, 1) for tool, size in sizes.items()}
            table.add({"setting": str(setting), **cells(found, floor="trainer"), **written})
    table.show(given.json)


if __name__ == "__main__":
    main()
