"""Run a resolved run: write its directory, start its ranks or become one, report events, and try again if asked.

Events are for programs that watch a run: `train --json` prints them, one JSON object a line, and functions of Python's
callers get them. They are read from the run directory; a reader that stops reading holds up only these lines.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from typing import NoReturn

from tuner import hooks
from tuner.errors import TunerError
from tuner.files import JsonObject, read_json_object
from tuner.launch import builds, render, retry, supervise
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import leftovers, slurm
from tuner.runs import checkpoints, directory, lock, swapped
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import Growing, Poller, write_all
from tuner.zero import needs

OnEvent = Callable[[JsonObject], None]
_STDOUT = 1
_STARTED = ("name", "launch_id", "started", "world_size", "resume_step")
"""The keys of run.json in the first event."""


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
                    become_rank(resolved, run)
            prints_events, on_event = resolved.request.prints_events, resolved.request.on_event
            events = Events(run, on_event=on_event) if (prints_events or on_event) and leads else None
            shown = events.printed() if events else nullcontext()
            with _failure_kept(run, leads, events), shown:
                code = run_ranks(resolved, run, shows_rank_0=not prints_events)  # else its lines are in its log
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
    """Write the reason why no rank was started to status.json, the user's command and the last event."""
    try:
        yield
    except TunerError as error:
        run.write_status("failed", exit_code=error.exit_code, message=str(error))
        if leads:
            hooks.start_has_failed(run, error.exit_code)
        if events:
            events.end(error.exit_code)
        raise


def run_ranks(
    resolved: ResolvedRun, run: RunDirectory, *, shows_rank_0: bool = True, tells_failure: bool = True
) -> int:
    """Compile what the ranks need, run them to their end and return the run's exit code.

    Args:
        run: The run directory, with its files.
        shows_rank_0: Show the output of rank 0 on `resolved.request.output`; it is in its log in any case.
        tells_failure: Print a failure; it is in status.json in any case.

    Raises:
        MachineError: an op of DeepSpeed does not compile, or another run swaps to the same folder.
    """
    env = _environment(resolved)
    _compile(resolved, env, run)
    printed = nullcontext() if tells_failure else redirect_stderr(StringIO())
    swaps_to = needs.swap_paths(resolved.final.config)
    with swapped.removed_afterwards(swaps_to, resolved.launch_id) as kept, printed:
        for line in kept:
            print(line, file=sys.stderr)
        return supervise.run(
            render.argv(resolved),
            env,
            run,
            node_rank=resolved.topology.node_rank,
            ranks=render.of_ranks(resolved.topology),
            grace_s=resolved.request.grace_s,
            shows_rank_0=shows_rank_0,
            output=resolved.request.output,
        )


def become_rank(resolved: ResolvedRun, run: RunDirectory) -> NoReturn:
    """Turn this process, a task of Slurm, MPI or a cluster, into its rank; never return.

    Raises:
        MachineError: an op of DeepSpeed does not compile.
    """
    argv, env, here = render.argv(resolved), _environment(resolved), resolved.topology
    # Under Slurm not the local rank: of tasks that see one GPU each, every one has 0.
    position = int(resolved.environ.get("SLURM_LOCALID", "0")) if here.launcher == "slurm" else here.local_rank or 0
    if position == 0:  # once on a node
        _compile(resolved, env, run)
    os.execve(argv[0], argv, env)  # noqa: S606 (a list built by us, no shell)


def _environment(resolved: ResolvedRun) -> dict[str, str]:
    return leftovers.without(resolved.environ) | render.environment(resolved)


def _compile(resolved: ResolvedRun, env: dict[str, str], run: RunDirectory) -> None:
    builds.build(resolved, env, run.ranks / f"build-{resolved.topology.node_rank}.log")


class Events:
    """The events of one attempt: started, then each step, validation and checkpoint.

    Args:
        run: The run directory, before the ranks start.
        target: The file descriptor to print to.
        on_event: Called with each event instead, in a thread of this process.
    """

    def __init__(self, run: RunDirectory, target: int = _STDOUT, on_event: OnEvent | None = None) -> None:
        self._run, self._target, self._on_event = run, target, on_event
        self._metrics = Growing(run.metrics, run.metrics.stat().st_size if run.metrics.is_file() else 0)
        self._reported = {path for _, path in checkpoints.newest_first(run.checkpoints)}

    @contextmanager
    def printed(self) -> Iterator[None]:
        """Print the events of an attempt from its start until its ranks have ended."""
        facts = read_json_object(self._run.run)
        self._write("started", {"run": str(self._run.path), **{key: facts[key] for key in _STARTED if key in facts}})
        poller = Poller(self._look, "events")
        poller.start()
        try:
            yield
        finally:
            poller.stop()

    def end(self, code: int) -> None:
        """Print how the run ended, as the last event."""
        self._write("ended", self._run.ending(code))

    def _look(self, _: bool) -> None:
        while lines := self._metrics.read():
            for text in filter(bytes.strip, lines.splitlines()):
                line = json.loads(text)
                self._write("step" if "loss" in line else "validation", line)
        for step, path in reversed(checkpoints.newest_first(self._run.checkpoints)):
            if path not in self._reported and checkpoints.inspect(path, hashes=False) is None:
                self._reported.add(path)
                self._write("checkpoint", {"step": step, "path": str(path)})

    def _write(self, event: str, facts: JsonObject) -> None:
        if self._on_event:
            self._on_event({"event": event, **facts})
            return
        write_all(self._target, (json.dumps({"event": event, **facts}) + "\n").encode())
