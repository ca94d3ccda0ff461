"""Start the ranks of a machine; forward signals, watch to the end, and return the exit code of the cause."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TextIO

import psutil

from tuner.errors import DiskError, MachineError, Stopped, TunerError, exit_code_of
from tuner.launch import builds, render
from tuner.launch.resolved_run import ResolvedRun
from tuner.launch.warm import Forked, Warm, runs
from tuner.machine.hostfile import MEETING
from tuner.machine.kernel import INSISTING, die_with_parent, heard, killed_for_memory, num_oom_kills, stopped
from tuner.machine.ports import listening
from tuner.machine.topology import AGENT_STORE, STORE_FD
from tuner.machine.variables import without_leftovers
from tuner.progress import POLL_S, say
from tuner.runs import beats, checkpoints, ending, shared_folder, swapped
from tuner.runs.beats import Phase
from tuner.runs.diagnose import OtherNode, Watched
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import Follower
from tuner.runs.records import RunStatus, State
from tuner.runs.time_limits import TimeLimits
from tuner.zero.config import swap_paths

if TYPE_CHECKING:  # asyncio, which a run of one node does not need
    from tuner.launch.meeting.part import Meeting

_REAP_S = 10.0
"""A killed process in a slow write, or in a driver's call, ends only when that returns."""
_LOOK_S = 1.0
_TELL_S = 10.0
"""How often the user is told what ranks do that were told to stop."""
_AFTER_FAILURE_S = 10.0
"""Time for the other ranks to end once one has failed; they save nothing any more."""
_STACKS_S = 1.0
_WORD_S = 15.0
"""How long the verdict waits to hear that another node is gone, or that its ranks have failed."""
_SAVES = 3.0
"""Ranks that are told to stop get at least this many times the longest save so far."""
_STDOUT = 1


def run_ranks(
    resolved: ResolvedRun,
    directory: RunDirectory,
    *,
    shows_rank_0: bool = True,
    tells_failure: bool = True,
    meeting: Meeting | None = None,
    warm: Warm | None = None,
) -> int:
    """Compile what the ranks need, run them to their end and return the run's exit code.

    Args:
        shows_rank_0: Show the output of rank 0 on `resolved.request.output`; it is in its log in any case.
        tells_failure: Print a failure; it is in status.json in any case.
        meeting: Tells that another node has failed.
        warm: Forks the ranks if it is ready, and is made ready for a restart while they train.

    Raises:
        MachineError: an op of DeepSpeed does not compile, or another run swaps to the same folder.
    """
    env = _environment(resolved)
    _compile(resolved, env, directory)
    standard_error = contextlib.nullcontext() if tells_failure else contextlib.redirect_stderr(StringIO())
    swaps_to = swap_paths(resolved.final.config)
    with swapped.removed_afterwards(swaps_to, resolved.launch_id) as kept, standard_error:
        for line in kept:
            say(line)
        return run(
            render.argv(resolved),
            env,
            directory,
            node_rank=resolved.topology.node_rank,
            ranks=render.of_ranks(resolved.topology),
            grace_s=resolved.request.grace_s,
            folder_limit_s=TimeLimits(resolved.recipe.config.train_cfg.hang_timeout).of(Phase.SAVES),
            shows_rank_0=shows_rank_0,
            output=resolved.request.output,
            meeting=meeting,
            warm=warm,
        )


def become_rank(resolved: ResolvedRun, directory: RunDirectory) -> NoReturn:
    """Turn this process, a task of Slurm, MPI or a cluster, into its rank; never return.

    Raises:
        MachineError: an op of DeepSpeed does not compile.
    """
    argv, env, topology = render.argv(resolved), _environment(resolved), resolved.topology
    # Under Slurm not the local rank: of tasks that see one GPU each, every one has 0.
    position = (
        int(resolved.environ.get("SLURM_LOCALID", "0")) if topology.launcher == "slurm" else topology.local_rank or 0
    )
    if position == 0:  # once on a node
        _compile(resolved, env, directory)
    os.execve(argv[0], argv, env)  # noqa: S606 (a list built by us, no shell)


def _environment(resolved: ResolvedRun) -> dict[str, str]:
    environ = {name: value for name, value in resolved.environ.items() if name != MEETING}
    return without_leftovers(environ) | render.environment(resolved)


def _compile(resolved: ResolvedRun, env: dict[str, str], directory: RunDirectory) -> None:
    builds.build(resolved, env, directory.ranks / f"build-{resolved.topology.node_rank}.log")


def run(
    argv: Sequence[str],
    env: Mapping[str, str],
    directory: RunDirectory,
    node_rank: int = 0,
    *,
    ranks: Sequence[Mapping[str, str]],
    grace_s: float,
    folder_limit_s: float = math.inf,
    shows_rank_0: bool = True,
    output: TextIO | None = None,
    meeting: Meeting | None = None,
    warm: Warm | None = None,
) -> int:
    """Run the ranks of this machine to their end and return the run's exit code; leave no process behind.

    A failure is printed in three lines on standard error and written to status.json. Signals are handled only in the
    main thread, as Python requires.

    Args:
        argv: The command of each rank.
        ranks: The variables of each rank beside `env`.
        grace_s: How long ranks have to end when they are told to stop, in seconds; longer if saves take long.
        folder_limit_s: This process ends when the run directory has not answered for so long, in seconds.
        shows_rank_0: What rank 0 prints is shown, and not in its log alone.
        output: Where it is shown: a notebook's cell is a stream. None: on standard output's descriptor.

    Raises:
        MachineError: a process cannot be started.
    """
    watch = _Watch(directory, grace_s, int(ranks[0]["RANK"]), meeting, warm)
    shows = shows_rank_0 and node_rank == 0
    shown = Follower(directory.log_of(0), output or _STDOUT, partial(beats.log_before_failure, directory))
    with signals_go_to(watch.receive), shared_folder.watched(directory.path, folder_limit_s, watch.kill_known_ranks):
        directory.ranks.mkdir(exist_ok=True)
        with directory.launcher_log(node_rank).open("wb") as log, Path(os.devnull).open("wb") as nothing:
            # A terminal is where rank 0 draws its bar; what is shown on a stream comes from the log.
            inherited = log.fileno() if output else _STDOUT
            stdout = inherited if shows_rank_0 else nothing.fileno()
            with rank_starts(env, ranks) as starts:
                for rank_start in starts:
                    watch.start(argv, env, rank_start, stdout, log.fileno())
            if shows:
                shown.start()
            watch.reap()
            while watch.alive:
                watch.forward()
                watch.heed_other_nodes()
                if watch.look_each_second():
                    watch.prepare(argv, env, directory.ranks / f"warm-{node_rank}.log")
                time.sleep(POLL_S)
                watch.reap()
        watch.kill_ranks()
        watch.check_forking()
    if node_rank == 0:  # a rank that found the disk full removed it too, while another may still have written
        checkpoints.clear_unfinished(directory.checkpoints)
    if shows:
        shown.stop()
    return watch.end()


@contextmanager
def signals_go_to(receive: Callable[[int, FrameType | None], object], *, but: int | None = None) -> Iterator[None]:
    """Let a function of the main thread receive the signals that ask a run to stop; give them back at the end."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = [number for number in heard() if is_main and number != but]
    before = {number: signal.signal(number, receive) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watch:
    """The ranks of this machine: starts them, tells or makes them end, and says how the run has ended."""

    def __init__(
        self, directory: RunDirectory, grace_s: float, first_rank: int, meeting: Meeting | None, warm: Warm | None
    ) -> None:
        self.directory, self.num_oom_kills, self.grace_s = directory, num_oom_kills(), grace_s
        self.began_s = time.monotonic()
        self.first_rank = first_rank
        self.warm = warm
        self.are_orphans = False
        """The process that forked the ranks has ended: they got SIGTERM from that, not from a stop of the run."""
        self.children: list[subprocess.Popen[bytes] | Forked] = []
        self.exits: dict[int, int] = {}
        """The exit codes of the ranks that have ended, in the order in which they were seen to end."""
        self.killed: set[int] = set()
        """The ranks that did not end when they had to."""
        self.told_to_end = False
        """SIGTERM was sent to the ranks."""
        self.ranks: set[psutil.Process] = set()
        """The children and their descendants."""
        self.received: list[int] = []
        """The signals of this process that ask for a stop."""
        self.forwarded = 0
        """The signal for which the ranks were told to end; 0: none was."""
        self.user_told_s = 0.0
        """When the user was last told what the ranks still do."""
        self.ending_since_s: float | None = None
        """When the ranks were told to stop, or the first of them failed."""
        self.failed = False
        """A rank has failed: the others have a short time to end."""
        self.looked_s = 0.0
        self.frozen: list[int] = []
        """The ranks that stood still, by SIGSTOP or a debugger, when another failed."""
        self.overdue: list[int] = []
        """The ranks that were killed because they did not end within `overdue_s`."""
        self.overdue_s = 0.0
        self.meeting = meeting
        self.interruption: OtherNode | None = None
        """What happened to another node, for which the ranks of this one were ended."""

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Note a signal that asks for a stop."""
        if number == signal.SIGHUP and self.meeting and self.meeting.names:  # ssh of `--hostfile`: see `lab.hosts`
            self.meeting.is_adrift = True
        elif not self.received or number in INSISTING:
            self.received.append(number)

    @property
    def insisted(self) -> bool:
        return sum(number in INSISTING for number in self.received) > 1

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], rank_start: RankStart, stdout: int, stderr: int
    ) -> None:
        """Start a rank and watch it; if that fails, end the ranks that were started."""
        child: subprocess.Popen[bytes] | Forked | None = None
        try:
            if self.warm:
                child = self.warm.fork(env, rank_start.env, rank_start.fds, stdout, stderr)
            child = child or subprocess.Popen(  # new session: Ctrl-C of the terminal reaches the ranks once, through us
                list(argv),
                env=dict(rank_start.env),
                pass_fds=rank_start.fds,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                # It has nothing to save before its guard asks for another signal, and until it runs its own program a
                # handler of this one would take SIGTERM and do nothing.
                preexec_fn=partial(die_with_parent, signal.SIGKILL, os.getpid()),
            )
        except OSError as error:
            self.kill_ranks()
            for started in self.children:
                started.wait()
            fix = "See the limits of processes and memory: ulimit -a."
            raise MachineError(f"a rank cannot be started: {error.strerror}", where=argv[0], fix=fix) from error
        self.children.append(child)
        with contextlib.suppress(psutil.NoSuchProcess):  # a forked one has ended, and its parent knows
            self.ranks.add(psutil.Process(child.pid))

    def reap(self) -> None:
        """Note the ranks that have ended; the first that fails ends the others."""
        for number, child in enumerate(self.children, start=self.first_rank):
            if number not in self.exits and (code := child.poll()) is not None:
                self.exits[number] = code
                if code not in (0, Stopped.exit_code) and not self.told_to_end:
                    self.tell_to_end()
                    self.begin_short_grace()

    @property
    def alive(self) -> dict[int, subprocess.Popen[bytes] | Forked]:
        """The ranks that have not ended."""
        ranks = enumerate(self.children, start=self.first_rank)
        return {rank: child for rank, child in ranks if rank not in self.exits}

    @property
    def were_forked(self) -> bool:
        return any(isinstance(child, Forked) for child in self.children)

    def prepare(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        """Once the ranks train, have the libraries loaded that those of a restart need."""
        # Ranks that were forked end with their parent, and a new one would not know their exit codes.
        is_needed = self.warm and self.warm.is_gone and not (self.ending_since_s or self.were_forked)
        if self.warm and is_needed and any(beat.phase == Phase.STEPS for beat in beats.here(self.directory).values()):
            self.warm.begin(argv, env, log)

    def check_forking(self) -> None:
        """Fork no more ranks if those that were forked did not train, or lost their parent before the end."""
        last_beats = beats.here(self.directory).values()
        self.are_orphans = self.were_forked and self.warm is not None and self.warm.is_gone
        have_trained = any(beat.phase == Phase.STEPS or beat.seconds.get(Phase.STEPS) for beat in last_beats)
        if self.warm and self.were_forked and (self.are_orphans or not (have_trained or self.received)):
            self.warm.distrust()

    def tell_to_end(self) -> None:
        """Tell the children to end: SIGTERM, once."""
        self.told_to_end = True
        for child in self.alive.values():
            child.send_signal(signal.SIGTERM)

    def begin_short_grace(self) -> None:
        """Give the ranks that a failed one has left behind a short time to end."""
        if self.failed:
            return
        self.failed, self.ending_since_s = True, time.monotonic()
        pids = {rank: beat.pid for rank, beat in beats.here(self.directory).items()}
        self.frozen = stopped(pids)
        for process in self._of(pids[rank] for rank in self.frozen):
            _send(process, signal.SIGCONT)  # until then they handle no SIGTERM and write no stacks

    def heed_other_nodes(self) -> None:
        """End the ranks of this node if another node has failed or is gone: they would wait for its ranks.

        If the command that started all nodes over ssh has ended, they stop as at SIGHUP.
        """
        if self.meeting and self.meeting.is_abandoned and not self.received:
            self.received.append(signal.SIGHUP)
        interruption = self.meeting and self.meeting.interruption()
        if interruption and not (self.interruption or self.failed or self.told_to_end):
            self.interruption = interruption
            say(f"{interruption.text}: the ranks of this node are stopped.")
            self.remember_ranks()
            self.tell_to_end()
            self.begin_short_grace()

    def remember_ranks(self) -> None:
        """Note the children's descendants while they have a parent: orphans cannot be found later."""
        for child in self.alive.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.ranks |= _children(psutil.Process(child.pid))

    def forward(self) -> None:
        """Pass the first signal on as SIGTERM (finish the step, save, stop); at the second, kill at once."""
        if self.insisted:  # the ranks are killed as soon as these are gone
            for child in self.alive.values():
                child.send_signal(signal.SIGSTOP)  # it may be starting a rank, which could not be found afterwards
            self.remember_ranks()
            for child in self.alive.values():
                child.send_signal(signal.SIGKILL)
        elif self.received and not self.forwarded:
            self.forwarded, self.ending_since_s = self.received[0], time.monotonic()
            doing = self._doing()  # before they are told: what comes later may be their end
            self.tell_to_end()
            once_more = {signal.SIGINT: "A second Ctrl-C kills", signal.SIGTERM: "A second SIGTERM kills"}
            # A machine may send SIGTERM after SIGUSR2 or SIGHUP: it must not end the save.
            again = once_more.get(signal.Signals(self.forwarded), "Two SIGTERMs kill")
            say(
                f"Stopping at {signal.Signals(self.forwarded).name}: {doing}. "
                f"In a step, the step ends and a checkpoint is saved first. {again} the run."
            )
            self.user_told_s = time.monotonic()

    def look_each_second(self) -> bool:
        """Note the ranks and end late ones, once a second: the search reads every process of the machine.

        Returns:
            Whether it was time for that.
        """
        now_s = time.monotonic()
        if now_s - self.looked_s < _LOOK_S:
            return False
        self.looked_s = now_s
        self.remember_ranks()
        self.end_late_ranks()
        if self.forwarded and self.ending_since_s is not None and now_s - self.user_told_s >= _TELL_S:
            self.user_told_s = now_s
            waited_s, killed_s = now_s - self.ending_since_s, self._grace_s(beats.here(self.directory))
            say(f"Still stopping after {waited_s:.0f} s (killed after {killed_s:.0f} s): {self._doing()}.")
        return True

    def _doing(self) -> str:
        """Return what the ranks of this machine do by their last signs of life, ranks that do the same together."""
        ranks: dict[str, list[str]] = {}
        alive = {process.pid for process in self.ranks if runs(process)}
        last_beats = sorted(beats.here(self.directory).items())
        for rank, beat in last_beats:
            if beat.pid in alive:
                ranks.setdefault(beat.doing, []).append(str(rank))
        parts = [f"rank{'s' * (len(names) > 1)} {', '.join(names)}: {doing}" for doing, names in ranks.items()]
        return "; ".join(parts) or ("the ranks have ended" if last_beats else "the ranks are starting")

    def end_late_ranks(self) -> None:
        """Kill the ranks that do not end in time: after the failure of another, or when told to stop."""
        if not self.failed and any(report.exit_code != Stopped.exit_code for report in self.directory.failures()):
            self.begin_short_grace()
        if self.ending_since_s is None or self.overdue_s:
            return
        waited_s, last_beats = time.monotonic() - self.ending_since_s, beats.here(self.directory)
        if waited_s >= self._grace_s(last_beats):
            self.overdue_s = waited_s
            self._kill_late_ranks(last_beats)

    def _kill_late_ranks(self, last_beats: Mapping[int, beats.Beat]) -> None:
        alive = {process.pid for process in self.ranks if runs(process)}
        self.overdue = [rank for rank, beat in sorted(last_beats.items()) if beat.pid in alive]
        if not self.interruption:  # else it is known whom they wait for
            for process in self._of(last_beats[rank].pid for rank in self.overdue):
                _send(process, signal.SIGCONT)
                _send(process, signal.SIGQUIT)  # its stacks, into its log
            time.sleep(_STACKS_S)
        self.killed = set(self.alive)
        for process in self.ranks:
            _send(process, signal.SIGKILL)

    def _grace_s(self, last_beats: Mapping[int, beats.Beat]) -> float:
        """Return how long the ranks have to end, in seconds."""
        longest_s = max((beat.save_s for beat in last_beats.values()), default=0.0)
        return _AFTER_FAILURE_S if self.failed else max(self.grace_s, _SAVES * longest_s)

    def _of(self, pids: Iterable[int]) -> list[psutil.Process]:
        wanted = set(pids)
        return [process for process in self.ranks if process.pid in wanted]

    def kill_ranks(self) -> None:
        """Kill the remaining ranks and their descendants; a psutil.Process never means a reused pid.

        They are stopped first: what a rank starts while it is killed could not be found afterwards.
        """
        to_stop = {process for process in self.ranks if runs(process)}
        while to_stop:
            for process in to_stop:
                _send(process, signal.SIGSTOP)
            to_stop = {child for process in to_stop for child in _children(process)} - self.ranks
            self.ranks |= to_stop
        for process in self.ranks:
            _send(process, signal.SIGKILL)
        deadline = time.monotonic() + _REAP_S
        while any(runs(process) for process in self.ranks) and time.monotonic() < deadline:
            time.sleep(POLL_S / 10)

    def kill_known_ranks(self) -> None:
        """Kill the children, and the ranks that were seen, without a look at anything else."""
        for process in tuple(self.ranks):  # the main thread may add some meanwhile
            _send(process, signal.SIGKILL)
        for child in tuple(self.children):
            child.send_signal(signal.SIGKILL)

    def end(self) -> int:
        """Write status.json, print what went wrong, and return the run's exit code."""
        reports = self.directory.failures()
        child_code = next((code for code in self.exits.values() if code), 0)
        status = self.directory.status_or_none
        if status and status.state == "done":  # rank 0 wrote it: the result is complete, whatever happens later
            if reports or (child_code != 0 and not self.forwarded):
                say("WARNING: the run is done and its result is complete, but the cleanup after it was interrupted.")
            if self.received and self._keeps_status:  # it could not stop any more; `api` raises the signal again
                with contextlib.suppress(DiskError):
                    self.directory.write_status(status.model_copy(update={"signal": self._signal}))
            return 0
        if self.insisted:
            return self._write_end("failed", exit_code_of(self.received[-1]), "killed at the second signal")
        if child_code == 0 and not reports and not self.overdue:
            return 0
        if self.are_orphans and not self.received:
            text = "the process that had forked the ranks has ended, and they ended with it"
            return self._write_end("failed", TunerError.exit_code, text)
        if self.forwarded and not reports and not self.overdue:
            text = f"stopped by {signal.Signals(self.forwarded).name}"
            return self._write_end("failed", exit_code_of(self.forwarded), text)
        # Ranks that were told to end because another node is gone may still have stopped together with its ranks.
        was_asked = self.received or not self.interruption
        if was_asked and reports and reports[0].exit_code == Stopped.exit_code:
            message = reports[0].message
            # If a node's command alone is killed, its ranks stop all others as if somebody had asked.
            if self.meeting and not self.received and (word := self.meeting.await_word()):
                message = f"{message.rstrip('.')}; {word.text}."
            return self._write_end("stopped", Stopped.exit_code, message)
        return self._diagnose(child_code)

    def _diagnose(self, child_code: int) -> int:
        num_now = num_oom_kills()
        if num_now is None:  # no control group counts them
            pids = {beat.pid for beat in beats.here(self.directory).values()}
            kills = len(pids & killed_for_memory(self.began_s))
        else:
            kills = num_now - (self.num_oom_kills or 0)
        exits = [(rank, code) for rank, code in self.exits.items() if rank not in self.killed]
        watched = Watched(
            child_code=child_code,
            exits=exits,
            num_oom_kills=max(kills, 0),
            frozen=self.frozen,
            overdue=self.overdue,
            overdue_s=self.overdue_s,
            other_node=self.interruption,
            node_rank=self._node_rank,
        )
        if self.meeting and not self.interruption and ending.has_lost_others(self.directory, watched):
            watched = replace(watched, other_node=self._await_word(self.meeting))
        return self._exit_code(ending.fail(self.directory, say, watched, signal=self._signal, keeps=self._keeps_status))

    def _await_word(self, meeting: Meeting) -> OtherNode | None:
        """Wait for what has happened to another node: ranks often notice that they lost theirs before the nodes do."""
        deadline = time.monotonic() + _WORD_S
        while not (word := meeting.interruption()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return word

    def _write_end(self, state: State, code: int, text: str) -> int:
        node_rank, keeps = self._node_rank, self._keeps_status
        return self._exit_code(
            ending.end(self.directory, say, state, code, text, signal=self._signal, node_rank=node_rank, keeps=keeps)
        )

    def _exit_code(self, status: RunStatus) -> int:
        """Return the exit code of a status that is written; the other nodes are told of it later."""
        if self.meeting:
            self.meeting.own_status = status
        return status.exit_code or TunerError.exit_code

    @property
    def _node_rank(self) -> int | None:
        """The rank of this node among all, of which the attempt may have fewer."""
        return self.meeting.topology.node_rank if self.meeting else None

    @property
    def _keeps_status(self) -> bool:
        if self.meeting is None:
            return True
        # A node that stood still must not write over what node 0 has told meanwhile.
        status = None if self.meeting.topology.leads else self.directory.status_or_none
        # Node 0 may be unable to write where the others are not: its folder is read-only, or its connection to it gone.
        is_needed = self.interruption is not None and self.interruption.cause == DiskError.code
        return (self.meeting.keeps_status or is_needed) and (status is None or status.state == "running")

    @property
    def _signal(self) -> int | None:
        return self.received[0] if self.received else None


def _children(process: psutil.Process) -> set[psutil.Process]:
    """Return all descendants of a process."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return set(process.children(recursive=True))
    return set()


def _send(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


class RankStart(NamedTuple):
    """What a rank starts with: its environment, and the descriptors that it inherits."""

    env: Mapping[str, str]
    fds: tuple[int, ...] = ()


@contextmanager
def rank_starts(env: Mapping[str, str], ranks: Sequence[Mapping[str, str]]) -> Iterator[list[RankStart]]:
    """Yield what each rank of this machine starts with; where rank 0 is here, a socket is open until it has started.

    Rank 0 inherits the socket, and serves torch's store there: no other process can take the port in between.

    Raises:
        MachineError: the port of several nodes is taken.
    """
    port = int(env.get("MASTER_PORT", "0"))
    of_all = {**env, AGENT_STORE: "True"}
    if ranks[0]["RANK"] != "0":
        yield [RankStart({**of_all, **rank_env}) for rank_env in ranks]
        return
    loopback = "127.0.0.1"  # the address that other nodes call may not lead back to this one: behind a NAT, by a name
    store_socket = (
        listening(port, "where ranks meet") if port else socket.create_server((loopback, 0), backlog=socket.SOMAXCONN)
    )
    with store_socket as listener:
        fd, of_all["MASTER_ADDR"], of_all["MASTER_PORT"] = listener.fileno(), loopback, str(listener.getsockname()[1])
        first, *other_envs = [{**of_all, **rank_env} for rank_env in ranks]
        yield [RankStart({**first, STORE_FD: str(fd)}, (fd,)), *map(RankStart, other_envs)]
