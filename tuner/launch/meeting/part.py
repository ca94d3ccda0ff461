"""What every node does in the meeting: it prepares, prints whom it waits for, and hears how other nodes end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tuner.errors import Hang, Option, Stopped, TunerError, exit_code_of, shortened, together
from tuner.files import read_json_object, sha256
from tuner.launch.meeting import messages
from tuner.launch.meeting.messages import MAX_TEXT, MAX_TEXTS, Plan
from tuner.launch.meeting.secret_lines import GREETING_S
from tuner.machine.topology import Topology
from tuner.progress import POLL_S, say
from tuner.runs.diagnose import OtherNode
from tuner.runs.records import RunStatus
from tuner.runs.resume_advice import resume_advice

START_TIMEOUT_S = 600.0
CALL_S = 5.0
"""To connect to an address."""
LONGEST_PAUSE_S = 120.0
_OF_ONE_NODE = ("--node-rank", "--master-addr")
FOLDER, CALL = "folder", "call"
"""The names of the two secrets."""
LOST = "lost-peer"
"""The cause of an end without one of its own: a node that is gone."""


class Times(NamedTuple):
    """How patient the nodes are with each other, in seconds.

    Args:
        beat: Between two signs of life.
        silent: A node that has sent nothing for so long is gone: its host was cut off or stands still.
        back: A node that lost its connection has this time to call again.
        linger: A node that fails while the others are still starting waits so long for them to call.
        folder: A shared folder may show a new file this much later on another node.
        again: Between two calls.
        notice: Until the user is first told who is missing; each further time comes after twice that pause.
        settled: With `--nnodes MIN:MAX`, so long no node has come or gone before the others begin without those that
            are missing. Who comes later can only join at the next restart.
    """

    beat: float = 2.0
    silent: float = 20.0
    back: float = 5.0
    linger: float = 5.0
    folder: float = 15.0
    again: float = 0.5
    notice: float = 5.0
    settled: float = 30.0


def secret_in(path: Path) -> bytes | None:
    """Return the secret in a run's `meeting` file; None if this node sees no such file."""
    try:
        return bytes.fromhex(str(read_json_object(path).get("secret", ""))) or None
    except (OSError, ValueError):
        return None


class NodeError(TunerError):
    """The error of another node, with its code and exit code."""

    @classmethod
    def of(cls, message: messages.Error, who: str = "") -> NodeError:
        """Return the error that a message tells of; `who` is the node, if the message does not name it."""
        texts = [text for text in message.texts if text][:MAX_TEXTS] or ["it failed"]
        errors = [cls(shortened(text, MAX_TEXT).rstrip("."), where=who or message.who) for text in texts]
        error = together(errors)
        error.code, error.exit_code = message.code, message.exit_code
        return error


def call_key(sent: str, words: Sequence[str] = (), master_port: int | None = None) -> bytes:
    """Return the secret that a node has before it has seen the shared folder.

    Args:
        sent: What `--hostfile` sent over ssh; empty without it.
        words: The command, which is the same on every node but for its rank, and how it reaches node 0.
    """
    kept, skips = [], False
    for word in words:
        if not skips and word.partition("=")[0] not in _OF_ONE_NODE:
            kept.append(word)
        skips = not skips and word in _OF_ONE_NODE
    key_text = sent or json.dumps([kept, master_port])
    return bytes.fromhex(sha256(key_text.encode()))


def port_of(master_port: int) -> int:
    """Return the port at which node 0 listens: the one after the master port."""
    return master_port + 1 if master_port < 65535 else master_port - 1


class Meeting(ABC):
    """One node's part in the meeting. The network is served by a thread; the methods are for the launcher's own.

    Args:
        names: The nodes' hosts, where the hostfile tells them.
        start_timeout_s: How long a start waits for the others.
        say: Shows a line to the user.
    """

    def __init__(
        self,
        topology: Topology,
        key: bytes,
        names: Sequence[str] = (),
        start_timeout_s: float = START_TIMEOUT_S,
        say: Callable[[str], None] = say,
        times: Times = Times(),  # noqa: B008 (a tuple of numbers)
    ) -> None:
        self.times = times
        self.topology, self.key, self._timeout_s, self.say = topology, key, start_timeout_s, say
        self.names = names
        self.is_adrift = False
        """The ssh connection over which `--hostfile` started this node is gone."""
        self.port = port_of(topology.master_port or 0)
        self.process = messages.Process(host=socket.gethostname(), pid=os.getpid(), instance=os.urandom(16).hex())
        self.changed = threading.Condition()
        self.told_error: messages.Error | None = None
        """What ends all nodes, for those that come later."""
        self.error_of_all: TunerError | None = None
        """The error of another node, or the nodes' own about each other."""
        self._interruption: OtherNode | None = None
        self.plan: Plan | None = None
        self.folder: Path | None = None
        self.runs = False
        """Between `go` and the end of the attempt."""
        self.launched: str | None = None
        """The launch that runs, or ran last."""
        self.own_end: messages.Ended | None = None
        """How it ended on this node, as the others are told."""
        self.own_status: RunStatus | None = None
        """How it ended on this node; status.json is that of node 0."""
        self.members: tuple[int, ...] = tuple(range(topology.num_nodes))
        """The nodes of the launch that runs, or is about to, by their ranks among all."""
        self._waits_since_s: float | None = None
        self._interrupts = False
        self._is_decided = False
        self._closes = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="meeting")

    # For the launcher's thread

    def listen(self) -> None:
        """Begin to listen, or to call.

        Raises:
            TunerError: this node can take no part.
        """
        self.loop = asyncio.new_event_loop()
        self._thread.start()

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """While this process prepares: another node's error ends it at once, as Ctrl-C would.

        Raises:
            TunerError: another node's error.
        """
        is_main = threading.current_thread() is threading.main_thread()
        with self.changed:
            self._interrupts = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        try:
            try:
                self.raise_error()
                yield
                self.raise_error()
            finally:  # while it waits for the lock, the interrupt may still come
                with self.changed:
                    self._interrupts = False
        except KeyboardInterrupt:
            self.raise_error()
            raise

    def decided(self) -> None:
        """How this node ends is decided: from now on no other node's error ends it, or is raised here."""
        try:
            with self.changed:
                self._interrupts, self._is_decided = False, True
        except KeyboardInterrupt:  # as in `interrupting`
            self._interrupts, self._is_decided = False, True
            if self.error_of_all is None:
                raise

    @abstractmethod
    def share(self, folder: Path) -> None:
        """Tell the run directory: node 0 writes the secret there, and the others look for it.

        Raises:
            DiskError: it cannot be written.
        """

    def agree(self, plan: Plan) -> None:
        """Tell what this node is about to run, once all its checks are done."""
        self.soon(self._set_plan, plan)

    def wait(self, refused: Container[int] = ()) -> str | None:
        """Wait until every node is ready (node 0), or until node 0 has told the launch to run; print who is missing.

        With `--nnodes MIN:MAX`, node 0 waits for MIN nodes or more and a time in which none comes or goes. `members`
        are the nodes of the launch then.

        Args:
            refused: Numbers of nodes that the run cannot go on with.

        Returns:
            The launch's id for other nodes, None for node 0, and for a node that the others were done without.

        Raises:
            TunerError: another node's error; the nodes do not fit each other; the time is over.
        """
        began_s = self._waits_since_s = self._waits_since_s or time.monotonic()
        pause_s, has_told = self.times.notice, False
        limited_s, next_s = began_s, time.monotonic() + pause_s
        while True:
            now_s = time.monotonic()
            with self.changed:
                self.raise_error()
                self.raise_abandoned()
                missing, launch_id = self._missing(), None if self.topology.leads else self.launched
                if self._stands_by:  # its time begins when the others have stopped training
                    limited_s = now_s
                is_late = now_s - limited_s >= self._timeout_s
                if not missing or self._begin_without(refused, is_late=is_late):
                    break
                self.changed.wait(POLL_S)
            if is_late:
                raise self._too_late(missing)
            if now_s >= next_s:
                self.say(self._waiting(missing, now_s - began_s))
                pause_s, has_told = min(2 * pause_s, LONGEST_PAUSE_S), True
                next_s = now_s + pause_s
        waited_s = time.monotonic() - began_s
        if missing:
            without = ", ".join(f"{name} ({state})" for name, state in missing[:MAX_TEXTS])
            present_text = f"{len(self.members)} of {self.topology.num_nodes} nodes are there after {waited_s:.0f} s"
            self.say(f"{present_text}: the run goes on without {without}.")
            return launch_id
        if self.topology.leads:
            self.members = tuple(range(self.topology.num_nodes))
        if has_told:
            self.say(f"All {len(self.members)} nodes are there after {waited_s:.0f} s.")
        return launch_id

    @property
    def place(self) -> Topology:
        """Where this node stands among the members of the launch."""
        return self.topology.among(self.members)

    @abstractmethod
    def go(self, launch_id: str) -> None:
        """Begin a launch: its files are in the run directory now. Node 0 tells the other nodes."""

    def vouches(self, host: str, pid: int) -> bool:
        """Return whether all other nodes say that they have lost this process, their node 0."""
        return False

    @property
    def is_abandoned(self) -> bool:
        """Whether this node knows that every node of the launch is adrift: whoever started them has ended."""
        return False

    @property
    def keeps_status(self) -> bool:
        """Whether this node writes status.json: node 0 does, and the others where it is gone."""
        return True

    def interruption(self) -> OtherNode | None:
        """Return why this node's ranks must end now; None: nothing has happened."""
        return self._interruption

    def await_word(self) -> OtherNode | None:
        """Wait for what has happened to another node after all ranks stopped, and nobody asked this node.

        Returns:
            None if another node has told that it stopped: it was asked.
        """
        deadline = time.monotonic() + self.times.back + 2 * self.times.beat
        while not (word := self.interruption()) and not self._has_other_ended() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return word

    @abstractmethod
    def _has_other_ended(self) -> bool:
        """Return whether another node has told how the launch ended there."""

    def fail(self, error: TunerError) -> None:
        """Tell all nodes of this node's error, which ends them; those that are starting have a short time to come."""
        if error is not self.error_of_all:
            self.soon(self.tell_error, messages.Error.of(error))
        deadline_s = time.monotonic() + self.times.linger
        with self.changed:
            while not self._all_know() and time.monotonic() < deadline_s:
                self.changed.wait(POLL_S)

    def ended(self, code: int, text: str, cause: str | None, objection: str | None) -> None:
        """Tell the other nodes that this node's ranks have ended, and what speaks against another attempt."""
        with self.changed:
            message = messages.Ended(
                launch=self.launched or "", code=code, text=shortened(text, MAX_TEXT), cause=cause, objection=objection
            )
            self.runs, self.own_end = False, message
        self.soon(self._tell_ended, message)

    def close(self) -> None:
        """Tell the other nodes that this one leaves, so that they do not wait for it."""
        if self._closes or not self._thread.is_alive():
            return
        self._closes = True
        with contextlib.suppress(RuntimeError, TimeoutError):
            asyncio.run_coroutine_threadsafe(self.leave(), self.loop).result(GREETING_S)
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(GREETING_S)

    @property
    def _stands_by(self) -> bool:
        """Whether the others train without this node, which may join at their next restart."""
        return False

    def _begin_without(self, refused: Container[int], *, is_late: bool) -> bool:
        """Begin without the missing nodes if those that are there may; return whether they do."""
        return False

    def raise_error(self) -> None:
        if self.error_of_all and not self._is_decided:
            raise self.error_of_all

    def raise_abandoned(self) -> None:
        if self.is_abandoned:
            stopped = Stopped("whoever started all nodes has ended")
            stopped.exit_code = exit_code_of(signal.SIGHUP)
            raise stopped

    def _waiting(self, missing: Sequence[tuple[str, str]], waited_s: float) -> str:
        first, state = missing[0]
        if len(missing) == 1:
            return f"waiting for {first} of {self.topology.num_nodes} since {waited_s:.0f} s ({state})"
        states = "; ".join(f"{name}: {node_state}" for name, node_state in missing[:MAX_TEXTS])
        more = f"; and {len(missing) - MAX_TEXTS} more" if len(missing) > MAX_TEXTS else ""
        return f"waiting for {len(missing)} of {self.topology.num_nodes} nodes since {waited_s:.0f} s ({states}{more})"

    def _too_late(self, missing: Sequence[tuple[str, str]]) -> TunerError:
        states = "; ".join(f"{name}: {node_state}" for name, node_state in missing[:MAX_TEXTS])
        longer = Option("start_timeout_s", "SECONDS")
        fix = f"Start the same command on every node, or wait longer: {longer}."
        if self.folder and self.launched is not None:
            fix = f"Wait longer ({longer}), or go on with: {resume_advice(self.folder, self.topology.node_rank)}"
        return Hang(f"not all nodes were there within {self._timeout_s:.0f} s: {states}", fix=fix)

    @abstractmethod
    def _missing(self) -> list[tuple[str, str]]: ...

    @abstractmethod
    def _all_know(self) -> bool:
        """Return whether every other node knows of this node's error."""

    # For the network's thread

    @abstractmethod
    async def _main(self) -> None: ...

    @abstractmethod
    async def leave(self) -> None: ...

    @abstractmethod
    def _set_plan(self, plan: Plan) -> None: ...

    @abstractmethod
    def tell_error(self, message: messages.Error) -> None: ...

    @abstractmethod
    def _tell_ended(self, message: messages.Ended) -> None: ...

    def _serve(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.spawn(self._main())
        self.loop.run_forever()
        self._turn()  # a connection whose task has not begun would stay open
        while tasks := asyncio.all_tasks(self.loop):  # again: a task may lose a cancellation (Python 3.11's wait_for)
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=POLL_S))
        self._turn()  # connections are closed in the turn after
        self.loop.close()

    def _turn(self) -> None:
        for _ in range(2):
            self.loop.run_until_complete(asyncio.sleep(0))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def soon(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(function, *arguments)

    def end(self, error: TunerError) -> None:
        """End this node with an error: at once while it prepares, and by its supervisor while its ranks run."""
        with self.changed:
            if self.error_of_all or self._closes or self._is_decided:
                return
            self.error_of_all = error
            if self.runs:
                self.interrupt(OtherNode(error.message, error.code, error.exit_code))
            self.changed.notify_all()
            if self._interrupts and not self.runs:
                os.kill(os.getpid(), signal.SIGINT)

    def interrupt(self, interruption: OtherNode) -> None:
        with self.changed:
            if self.runs and self._interruption is None:
                self._interruption = interruption

    def begin(self) -> None:
        with self.changed:
            self.runs, self._interruption, self._waits_since_s = True, None, None
            self.own_status = None


async def connected(name: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to a host, at the first of its addresses that answers.

    Raises:
        OSError: the name does not resolve, or no address answers.
    """
    failure: OSError = TimeoutError()
    for address in await asyncio.wait_for(_resolve(name, port), 2 * CALL_S):
        try:
            return await asyncio.wait_for(asyncio.open_connection(address, port), CALL_S)
        except OSError as error:
            failure = error
    raise failure


async def _resolve(name: str, port: int) -> list[str]:
    """Return the addresses of a host. In a thread of its own, because a resolver may take a minute."""
    future: Future[list[str]] = Future()
    future.set_running_or_notify_cancel()  # who waits may give up, and the thread goes on

    def look_up() -> None:
        try:
            future.set_result([str(info[4][0]) for info in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)])
        except OSError as error:
            future.set_exception(error)

    threading.Thread(target=look_up, daemon=True, name="resolver").start()
    return await asyncio.wrap_future(future)
