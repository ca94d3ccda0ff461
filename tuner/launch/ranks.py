"""Start the ranks of a run, of a smoke test, or of a measurement of `tuner tune`."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, redirect_stderr
from io import StringIO
from typing import NoReturn

from tuner.launch import builds, render, supervise
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import leftovers
from tuner.runs import swapped
from tuner.runs.directory import RunDirectory
from tuner.zero.config import swap_paths


def run(
    resolved: ResolvedRun, directory: RunDirectory, *, shows_rank_0: bool = True, tells_failure: bool = True
) -> int:
    """Compile what the ranks need, run them to their end and return the run's exit code.

    Args:
        directory: The run directory, written.
        shows_rank_0: Show the output of rank 0 on `resolved.request.output`; it is in its log in any case.
        tells_failure: Print a failure; it is in status.json in any case.

    Raises:
        MachineError: an op of DeepSpeed does not compile, or another run swaps to the same folder.
    """
    env = _environment(resolved)
    _compile(resolved, env, directory)
    printed = nullcontext() if tells_failure else redirect_stderr(StringIO())
    swaps_to = swap_paths(resolved.final.config)
    with swapped.removed_afterwards(swaps_to, resolved.launch_id) as kept, printed:
        for line in kept:
            print(line, file=sys.stderr)
        return supervise.run(
            render.argv(resolved),
            env,
            directory,
            node_rank=resolved.topology.node_rank,
            ranks=render.of_ranks(resolved.topology),
            grace_s=resolved.request.grace_s,
            shows_rank_0=shows_rank_0,
            output=resolved.request.output,
        )


def become(resolved: ResolvedRun, directory: RunDirectory) -> NoReturn:
    """Turn this process, a task of Slurm, MPI or a cluster, into its rank; never return.

    Raises:
        MachineError: an op of DeepSpeed does not compile.
    """
    argv, env, here = render.argv(resolved), _environment(resolved), resolved.topology
    # Under Slurm not the local rank: of tasks that see one GPU each, every one has 0.
    position = int(resolved.environ.get("SLURM_LOCALID", "0")) if here.launcher == "slurm" else here.local_rank or 0
    if position == 0:  # once on a node
        _compile(resolved, env, directory)
    os.execve(argv[0], argv, env)  # noqa: S606 (a list built by us, no shell)


def _environment(resolved: ResolvedRun) -> dict[str, str]:
    return leftovers.without(resolved.environ) | render.environment(resolved)


def _compile(resolved: ResolvedRun, env: dict[str, str], directory: RunDirectory) -> None:
    builds.build(resolved, env, directory.ranks / f"build-{resolved.topology.node_rank}.log")
