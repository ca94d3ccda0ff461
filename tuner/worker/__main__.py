"""`python -m tuner.worker RUN`: one rank of the run in the directory RUN."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

from tuner import hooks
from tuner.machine.slurm import Job
from tuner.machine.topology import Rank
from tuner.progress import show_on
from tuner.runs.directory import RunDirectory
from tuner.worker.guard import Guard
from tuner.worker.quiet import quiet_libraries


def main() -> None:
    run_dir, rank = RunDirectory(Path(sys.argv[1])), Rank.of(os.environ)
    guard = Guard(run_dir, rank, Job.of(os.environ), hooks.run_has_ended)
    guard.install()
    guard.take_output()
    if rank.local_rank == 0:
        show_on(guard.terminal or sys.stdout)
    quiet_libraries()
    guard.finish(lambda: _train(run_dir, rank, guard))


def _train(run_dir: RunDirectory, rank: Rank, guard: Guard) -> None:
    record = run_dir.read_run()
    if record.swaps_to and not rank.supervised:  # otherwise the supervisor claims them
        for line in guard.swapped.claim(record.swaps_to, record.launch_id):
            print(line, file=sys.stderr)
    if not record.needs_bitsandbytes:
        # PEFT imports bitsandbytes if it is installed, and that imports torch's compiler: 0.6 s of a rank's start.
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
    gc.disable()  # imported objects stay: searching them for garbage took a fifth of the import time
    from tuner.worker.train import run_rank  # heavy: signals are handled before torch is imported

    gc.freeze()
    gc.enable()
    run_rank(run_dir, rank, guard)


main()
