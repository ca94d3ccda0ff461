"""Run a resolved run: write its directory, then become the rank or watch the ranks, as often as was asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

from tuner.errors import TunerError
from tuner.launch import builds, render, retry, supervise, swapped
from tuner.launch.events import Events
from tuner.launch.resolve import resolve_run
from tuner.launch.run import ResolvedRun
from tuner.machine import leftovers, slurm
from tuner.report import end
from tuner.runs import directory, lock
from tuner.runs.directory import RunDirectory


def execute(resolved: ResolvedRun) -> int:
    """Train and return the exit code; as one rank of Slurm (or the only rank), never return.

    Raises:
        TunerError: the run directory cannot be written, or an op of DeepSpeed does not compile.
    """
    try:
        while True:
            run = _directory(resolved)
            argv, env = render.argv(resolved), leftovers.without(resolved.environ) | render.environment(resolved)
            with _failure_kept(run):
                _build(resolved, run, env)
            if not resolved.topology.is_supervised:
                os.execve(argv[0], argv, env)  # noqa: S606 (a list built by us, no shell)
            prints_events, leads = resolved.request.prints_events, resolved.topology.leads
            events = Events(run) if prints_events and leads else None
            shown = events.printed() if events else nullcontext()
            with shown, _failure_kept(run), swapped.removed_afterwards(resolved):
                code = supervise.run(
                    argv,
                    env,
                    run,
                    resolved.topology.node_rank,
                    is_rank=resolved.topology.launcher == "direct",
                    grace_s=resolved.request.grace_s,
                    shows_rank_0=not prints_events,  # its lines are in its log
                )
            following = retry.next_attempt(resolved, run, code, resolve_run)
            if following is None:
                if leads:
                    end.write(run)
                if events:
                    events.end(code)
                return code
            resolved = following
    finally:
        lock.release(resolved.run_path)


def _directory(resolved: ResolvedRun) -> RunDirectory:
    if not resolved.topology.leads:
        return directory.wait_for(resolved.run_path, resolved.launch_id)
    files, resume = render.files(resolved), resolved.is_known_run
    return directory.create(
        resolved.run_path, files, resume=resume, environ=resolved.environ, has_ended=slurm.has_ended
    )


def _build(resolved: ResolvedRun, run: RunDirectory, env: Mapping[str, str]) -> None:
    """Compile DeepSpeed's ops for this run; of several tasks on a node the first one does."""
    here = resolved.topology
    # Under Slurm not the local rank: of tasks that see one GPU each, every one has 0.
    position = int(resolved.environ.get("SLURM_LOCALID", "0")) if here.launcher == "slurm" else here.local_rank or 0
    if not here.is_supervised and position != 0:
        return
    builds.build(resolved, env, run.ranks / f"build-{here.node_rank}.log")


@contextmanager
def _failure_kept(run: RunDirectory) -> Iterator[None]:
    """Let status.json say why no rank was started."""
    try:
        yield
    except TunerError as error:
        run.write_status("failed", exit_code=error.exit_code, message=str(error))
        raise
