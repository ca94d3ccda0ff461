"""Run a resolved run: write its directory, start its ranks, report events, and try again if asked.

Events are for programs that watch a run: `train --json` prints them, one JSON object a line, and functions of Python's
callers get them. They are read from the run directory; a reader that stops reading holds up only these lines.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

from tuner import hooks, remote_code
from tuner.errors import DiskError, Stopped, TunerError, exit_code_of
from tuner.files import JSON_VERSION, JsonObject
from tuner.launch import elastic, render, retry, supervise
from tuner.launch.resolved_run import ResolvedRun
from tuner.launch.warm import Warm
from tuner.machine import slurm
from tuner.progress import say
from tuner.recipes import trust
from tuner.runs import checkpoints, creation, directory, ending, lock
from tuner.runs.beats import Phase
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import Growing, Poller, write_all
from tuner.runs.records import RunStatus, State
from tuner.runs.time_limits import TimeLimits

if TYPE_CHECKING:  # asyncio, which a run of one node does not need
    from tuner.launch.meeting.caller import Caller
    from tuner.launch.meeting.leader import Leader

OnEvent = Callable[[JsonObject], None]
_STDOUT = 1
_LEAST_WAIT_S = 300.0
"""How long the others wait at least for rank 0 to write the run directory, even if `hang_timeout` is shorter."""
_STARTED = {"name", "launch_id", "started", "world_size", "resume_step"}
"""The keys of run.json in the first event."""


def execute(resolved: ResolvedRun, meeting: Leader | Caller | None = None) -> int:
    """Train and return the exit code; as one rank of Slurm (or the only rank), never return.

    Args:
        meeting: The other nodes: no rank starts before all are there, and after `decided` no error of theirs ends this.

    Raises:
        TunerError: the run directory cannot be written, an op of DeepSpeed does not compile, or another node failed.
    """
    forks = resolved.request.max_restarts and (resolved.hardware.has_nvidia or not resolved.hardware.gpus)
    warm = Warm() if forks else None  # a trial fork knows CUDA and CPUs alone
    attempt: ResolvedRun | None = resolved
    code, is_first = 0, True
    with ExitStack() as at_end:
        at_end.callback(lock.release, resolved.run_path)
        if warm:
            at_end.callback(warm.close)
        if not resolved.topology.is_supervised:
            run_dir = _directory(resolved, meeting)
            try:
                supervise.become_rank(resolved, run_dir)
            except TunerError as error:
                _keep_failure(resolved, run_dir, error)
                raise
        while attempt:
            code, attempt = _attempt(attempt, meeting, warm, at_end, is_first=is_first)
            is_first = False
    return code


def _attempt(
    resolved: ResolvedRun, meeting: Leader | Caller | None, warm: Warm | None, at_end: ExitStack, *, is_first: bool
) -> tuple[int, ResolvedRun | None]:
    """Run one attempt to its end; return its exit code, and the next attempt if there is one."""
    run_dir, events, following = RunDirectory(resolved.run_path), Events.of(resolved), None
    try:
        with _stopped_while_no_rank_runs(meeting):
            if meeting:
                of_these_nodes = elastic.gathered(resolved, meeting)  # waits until all are ready; MIN:MAX: enough
                if of_these_nodes is None:  # they have done the run without this node
                    return 0, None
                resolved = of_these_nodes
            _directory(resolved, meeting)
            if meeting:
                meeting.go(resolved.launch_id)
                resolved = elastic.as_node_0_planned(resolved, run_dir)
            with events.printed() if events else nullcontext():  # in place of the lines of rank 0
                shows_rank_0 = not resolved.request.prints_events
                code = supervise.run_ranks(resolved, run_dir, shows_rank_0=shows_rank_0, meeting=meeting, warm=warm)
            following = retry.next_attempt(resolved, run_dir, code, meeting)
    except (_ToldToStop, TunerError) as reason:
        # Not what `_directory` returned: a signal can come when run.json is written and it has not returned yet.
        record = run_dir.run_or_none
        if is_first and not (record and record.launch_id == resolved.launch_id):
            if isinstance(reason, _ToldToStop):
                raise _sent_to_caller(reason) from None
            raise
        if meeting:
            meeting.decided()
        if isinstance(reason, TunerError):
            if reason.code != Stopped.code:
                _keep_failure(resolved, run_dir, reason, meeting, events, has_trained=not is_first)
                raise
            at_end.enter_context(_next_signal_ignored())  # another node was told to stop, perhaps by a signal to all
        code = _stopped(run_dir, reason, meeting)
    if following is None:
        if meeting:
            meeting.decided()
        if resolved.topology.leads:
            wait_for_command = hooks.run_has_ended(run_dir, code)
            wait_for_command()
        if events:
            events.end(code)
    return code, following


class _ToldToStop(BaseException):
    """A signal asks the run to stop while no rank runs: in a start, or between two attempts."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _stopped_while_no_rank_runs(meeting: Leader | Caller | None) -> Iterator[None]:
    """Raise `_ToldToStop` at a signal that asks for a stop; while ranks run, `supervise` takes these signals.

    Ctrl-C stays Python's KeyboardInterrupt until then: with a SIGINT the meeting interrupts this process.
    """

    def receive(number: int, _: object) -> None:
        if number == signal.SIGHUP and meeting and meeting.names:  # ssh of `--hostfile`: see `lab.hosts`
            meeting.is_adrift = True
        else:
            raise _ToldToStop(number)

    with supervise.signals_go_to(receive, but=signal.SIGINT):
        try:
            yield
        except KeyboardInterrupt:
            if meeting:
                meeting.raise_error()
            raise _ToldToStop(signal.SIGINT) from None


def _sent_to_caller(stop: _ToldToStop) -> Stopped:
    """Raise the signal for the caller's handler; return the error that ends the start if that handler returns."""
    signal.raise_signal(stop.number)
    stopped = Stopped(f"by {signal.Signals(stop.number).name} before the run began")
    stopped.exit_code = exit_code_of(stop.number)
    return stopped


def _next_signal_ignored() -> ExitStack:
    """Ignore one signal of those that ask for a stop, until the context ends."""
    until_the_first = ExitStack()
    until_the_first.enter_context(supervise.signals_go_to(lambda *_: until_the_first.close()))
    return until_the_first


def _stopped(run_dir: RunDirectory, reason: _ToldToStop | TunerError, meeting: Leader | Caller | None) -> int:
    """End a run that was told to stop while no rank ran, on all nodes, and return its exit code."""
    if (status := run_dir.status_or_none) and status.state == "done":
        return 0
    newest, _ = checkpoints.newest_valid(run_dir.checkpoints, hashes=False)
    is_here = meeting is None or meeting.error_of_all is None  # else another node was told
    if isinstance(reason, TunerError) and not is_here:
        number, error = None, Stopped(str(reason).removeprefix(f"{Stopped.code}: ").rstrip("."))
        error.exit_code = reason.exit_code
    else:
        number = reason.number if isinstance(reason, _ToldToStop) else signal.SIGHUP  # who started all nodes has ended
        saved = f"the checkpoint of step {newest.step}" if newest else "no step"
        error = Stopped(f"by {signal.Signals(number).name} while no rank ran; {saved} is saved")
        error.exit_code = exit_code_of(number)
    if newest:
        error.exit_code = Stopped.exit_code
    node_rank, keeps = (meeting.topology.node_rank, meeting.keeps_status) if meeting else (None, True)
    state: State = "stopped" if error.exit_code == Stopped.exit_code else "failed"
    ending.end(run_dir, say, state, error.exit_code, str(error), signal=number, node_rank=node_rank, keeps=keeps)
    if meeting and is_here:
        meeting.fail(error)
    return error.exit_code


def _directory(resolved: ResolvedRun, meeting: Leader | Caller | None) -> RunDirectory:
    """Write the run directory if this process leads; else wait until its leader has."""
    topology = resolved.topology
    if not topology.leads:
        starts_s = TimeLimits(resolved.recipe.config.train_cfg.hang_timeout).of(Phase.STARTUP)
        tell = say if topology.rank in (None, 1) else lambda _: None  # of the tasks, one says that it waits
        return directory.wait_for(resolved.run_path, resolved.launch_id, max(starts_s, _LEAST_WAIT_S), tell)
    files, resume = render.files(resolved), resolved.is_known_run
    if code := trust.check_bound(resolved.recipe.config):
        remote_code.record(code)
    return creation.create(
        resolved.run_path,
        files,
        resume=resume,
        environ=resolved.environ,
        has_ended=slurm.has_ended,
        is_gone=lambda holder: meeting is not None and meeting.vouches(holder.host, holder.pid),
    )


def _keep_failure(
    resolved: ResolvedRun,
    run_dir: RunDirectory,
    error: TunerError,
    meeting: Leader | Caller | None = None,
    events: Events | None = None,
    *,
    has_trained: bool = False,
) -> None:
    """Write the reason why no rank was started to status.json, the report, the user's command and the last event.

    Args:
        has_trained: An attempt was made, of which the report tells.
    """
    with suppress(DiskError):  # a full disk must not hide what went wrong before
        if meeting is None or meeting.keeps_status:
            run_dir.write_status(RunStatus(state="failed", exit_code=error.exit_code, message=str(error)))
    if resolved.topology.leads and has_trained:
        wait_for_command = hooks.run_has_ended(run_dir, error.exit_code)
        wait_for_command()
    elif resolved.topology.leads:
        hooks.start_has_failed(run_dir, error.exit_code)
    if events:
        events.end(error.exit_code)


class Events:
    """The events of one attempt: started, then each step, validation and checkpoint.

    Args:
        target: The file descriptor to print to.
        on_event: Called with each event instead, in a thread of this process.
    """

    def __init__(self, run_dir: RunDirectory, target: int = _STDOUT, on_event: OnEvent | None = None) -> None:
        self._run_dir, self._target, self._on_event = run_dir, target, on_event

    @classmethod
    def of(cls, resolved: ResolvedRun) -> Events | None:
        """Return the events of an attempt; None: no one asked for them, or another node leads."""
        prints_events, on_event = resolved.request.prints_events, resolved.request.on_event
        is_asked = (prints_events or on_event) and resolved.topology.leads
        return cls(RunDirectory(resolved.run_path), on_event=on_event) if is_asked else None

    @contextmanager
    def printed(self) -> Iterator[None]:
        """Print the events of an attempt from its start until its ranks have ended."""
        record, metrics = self._run_dir.run_or_none, self._run_dir.metrics
        self._metrics = Growing(metrics, metrics.stat().st_size if metrics.is_file() else 0)
        self._reported = {path for _, path in checkpoints.newest_first(self._run_dir.checkpoints)}
        started = record.model_dump(include=_STARTED, exclude_unset=True) if record else {}
        self._write("started", {"version": JSON_VERSION, "run": str(self._run_dir.path), **started})
        poller = Poller(self._look, "events")
        poller.start()
        try:
            yield
        finally:
            poller.stop()

    def end(self, code: int) -> None:
        """Print how the run ended, as the last event."""
        self._write("ended", self._run_dir.ending(code))

    def _look(self, _: bool) -> None:
        while lines := self._metrics.read():
            for text in filter(bytes.strip, lines.splitlines()):
                line = json.loads(text)
                self._write("step" if "loss" in line else "validation", line)
        for step, path in reversed(checkpoints.newest_first(self._run_dir.checkpoints)):
            if path not in self._reported and checkpoints.inspect(path, hashes=False) is None:
                self._reported.add(path)
                self._write("checkpoint", {"step": step, "path": str(path)})

    def _write(self, event: str, fields: JsonObject) -> None:
        if self._on_event:
            self._on_event({"event": event, **fields})
            return
        write_all(self._target, (json.dumps({"event": event, **fields}) + "\n").encode())
