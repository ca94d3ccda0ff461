"""Run a resolved run: write its directory, then become the rank or watch the ranks, as often as was asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tuner import hooks
from tuner.errors import TunerError
from tuner.launch import ranks, render, retry
from tuner.launch.events import Events
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import slurm
from tuner.runs import directory, lock
from tuner.runs.directory import RunDirectory


def execute(resolved: ResolvedRun) -> int:
    """Train and return the exit code; as one rank of Slurm (or the only rank), never return.

    Raises:
        TunerError: the run directory cannot be written, or an op of DeepSpeed does not compile.
    """
    try:
        while True:
            run, leads = _directory(resolved), resolved.topology.leads
            if not resolved.topology.is_supervised:
                with _failure_kept(run, leads):
                    ranks.become(resolved, run)
            prints_events, on_event = resolved.request.prints_events, resolved.request.on_event
            events = Events(run, on_event=on_event) if (prints_events or on_event) and leads else None
            shown = events.printed() if events else nullcontext()
            with _failure_kept(run, leads, events), shown:
                code = ranks.run(resolved, run, shows_rank_0=not prints_events)  # else its lines are in its log
            following = retry.next_attempt(resolved, run, code, resolve_run)
            if following is None:
                if leads:
                    wait = hooks.run_has_ended(run, code)
                    wait()
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


@contextmanager
def _failure_kept(run: RunDirectory, leads: bool, events: Events | None = None) -> Iterator[None]:
    """Let status.json, the user's command and the last event say why no rank was started."""
    try:
        yield
    except TunerError as error:
        run.write_status("failed", exit_code=error.exit_code, message=str(error))
        if leads:
            hooks.start_has_failed(run, error.exit_code)
        if events:
            events.end(error.exit_code)
        raise
