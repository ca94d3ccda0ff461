"""`python -m tuner.worker RUN`: one rank of the run in the directory RUN."""

from __future__ import annotations

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
from tuner.worker.warm import training


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
    training(needs_bitsandbytes=record.needs_bitsandbytes).run_rank(run_dir, rank, guard)


main()
