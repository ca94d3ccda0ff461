"""Node 0's part in the meeting: it listens, knows all nodes, and tells them to go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import time
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.errors import RunDirectoryError, TunerError, UsageError, shortened
from tuner.files import disk_errors
from tuner.launch.meeting import messages
from tuner.launch.meeting.messages import MAX_TEXT, MAX_TEXTS, Message, OtherVersion, Plan
from tuner.launch.meeting.part import (
    CALL,
    CALL_S,
    FOLDER,
    LONGEST_PAUSE_S,
    LOST,
    Meeting,
    NodeError,
    connected,
    secret_in,
)
from tuner.launch.meeting.secret_lines import GREETING_S, Broken, Lines, address_of, admit, present
from tuner.machine.ports import listening
from tuner.progress import POLL_S
from tuner.runs import lock
from tuner.runs.diagnose import OtherNode
from tuner.runs.directory import MEETING

_MAX_STRANGERS = 128
_MAX_TOLD = 3
_GONE = messages.Ended(launch="", code=1)
"""How a launch has ended on a node that is gone."""


@dataclass
class _Node:
    """What node 0 knows of another node."""

    rank: int
    name: str = ""
    """By the hostfile; then its host and address."""
    process: messages.Process | None = None
    """None: it was never seen."""
    lines: Lines | None = None
    since_s: float = 0.0
    """When its connection was closed."""
    shares: bool = False
    plan: Plan | None = None
    is_ready: bool = False
    knows: bool = False
    """It was told of this node's error."""
    lost: messages.Process | None = None
    """An earlier node 0 that it has lost."""
    launched: str | None = None
    """The launch that it was told to run."""
    ended: messages.Ended | None = None
    """How that ended there."""
    is_adrift: bool = False

    @property
    def who(self) -> str:
        return f"node {self.rank} ({self.name})" if self.name else f"node {self.rank}"

    @property
    def has_told_its_end(self) -> bool:
        return self.ended not in (None, _GONE)

    @property
    def is_gone(self) -> bool:
        return self.lines is None

    def state(self, now_s: float) -> str:
        if self.process is None:
            return "never seen"
        if self.lines is None:
            return f"gone since {now_s - self.since_s:.0f} s"
        if not self.shares:
            return "has not seen the run directory yet"
        if self.is_ready:
            return "ready"
        return "its ranks have not ended" if self.launched else "its checks are not done"


class Leader(Meeting):
    """Node 0's part: it listens, knows all nodes, and tells them to go on."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        names = dict(enumerate(self.names))
        self._nodes = {rank: _Node(rank, names.get(rank, "")) for rank in range(1, self.topology.num_nodes)}
        self._secret: bytes | None = None
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._turned_away: set[str] = set()
        self._listener: socket.socket | None = None
        self._has_made_folder = False
        self._place = names.get(0, "")
        self._ready: tuple[int, ...] = ()
        """The nodes that are ready, with `--nnodes MIN:MAX`."""
        self._ready_since_s = 0.0
        """Since when they are the same."""
        self._stop: messages.Stop | None = None
        """Why the ranks of the launch must end, for a node that calls again: it may not have been told."""

    def listen(self) -> None:
        self._listener = listening(self.port, "where the nodes meet")
        super().listen()

    def share(self, folder: Path) -> None:
        path = folder / MEETING
        # A file that is there already may be that of a live run, whose lock decides later, or of a node 0 that is lost.
        secret = secret_in(path) or os.urandom(32)
        with disk_errors(folder):
            self._has_made_folder = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{MEETING}.{os.urandom(4).hex()}.tmp")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                json.dump({"secret": secret.hex()}, stream)
            temporary.replace(path)
        self.folder = folder
        self.soon(self._set_secret, secret)

    def go(self, launch_id: str) -> None:
        self.soon(self._tell_to_go, launch_id)

    def vouches(self, host: str, pid: int) -> bool:
        with self.changed:
            lost = [node.lost for node in self._nodes.values()]
            return all(process and (process.host, process.pid) == (host, pid) for process in lost)

    @property
    def is_abandoned(self) -> bool:
        other_nodes = [self._nodes[rank] for rank in self.members if rank]
        return self.is_adrift and all(node.is_adrift or self._is_lost(node) for node in other_nodes)

    def _answering(self) -> list[int]:
        """Return the nodes that are there, or have told how their ranks have ended."""
        with self.changed:
            other_nodes = self._nodes.values()
            return [0, *(node.rank for node in other_nodes if not self._is_lost(node) or node.has_told_its_end)]

    def _has_other_ended(self) -> bool:
        with self.changed:
            return any(node.has_told_its_end for node in self._nodes.values() if node.launched == self.launched)

    def await_ends(self) -> str | None:
        """Wait until the ranks of all present nodes end, and print which are late; return the first objection."""
        began_s, pause_s = time.monotonic(), self.times.notice
        next_s = began_s + pause_s
        while True:
            with self.changed:
                self.raise_error()
                self.raise_abandoned()
                ran = [node for node in self._nodes.values() if node.launched == self.launched]
                ends = [node.ended for node in ran if node.ended]
                running = [node.who for node in ran if not (node.ended or self._is_lost(node))]
                if not running:
                    return next((end.objection for end in ends if end.objection), None)
                self.changed.wait(POLL_S)
            if (now_s := time.monotonic()) >= next_s:
                self.say(f"waiting for the ranks of {', '.join(running)} to end since {now_s - began_s:.0f} s")
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                next_s = now_s + pause_s

    @property
    def has_failed_node(self) -> bool:
        """Whether another node is gone, or its ranks have failed, in the launch that has ended."""
        with self.changed:
            ran = [node for node in self._nodes.values() if node.launched == self.launched]
            return any(self._is_lost(node) or node.ended is None or node.ended.has_failed for node in ran)

    @property
    def keeps_status(self) -> bool:
        # A spare may have taken the place, and the lock, of a node 0 that stood still.
        holder = lock.holder(self.folder) if self.folder else None
        return holder is None or (holder.host, holder.pid) == (self.process.host, self.process.pid)

    def refuse(self, why: str) -> None:
        """Tell the other nodes that there is no other attempt."""
        self.soon(self._broadcast, messages.Refused(why=shortened(why, MAX_TEXT)))

    def close(self) -> None:
        super().close()
        if self._listener:
            self._listener.close()
        if self.folder and self._secret:
            path = self.folder / MEETING
            with contextlib.suppress(OSError, RunDirectoryError):
                if secret_in(path) == self._secret and lock.holder(self.folder) is None:  # else a run is at work there
                    path.unlink()
            if self._has_made_folder:
                with contextlib.suppress(OSError):  # not empty: the run has begun
                    self.folder.rmdir()

    def _missing(self) -> list[tuple[str, str]]:
        now_s = time.monotonic()
        missing = [
            (f"node {node.rank}", ", ".join(filter(None, (node.name, node.state(now_s)))))
            for node in self._nodes.values()
            if node.is_gone or not node.is_ready
        ]
        if missing and self._turned_away:
            away = ", ".join(sorted(self._turned_away)[:_MAX_TOLD])
            name, state = missing[-1]
            why = "where neither the command is known nor the run directory seen"
            missing[-1] = (name, f"{state}; turned away: {away}, {why}")
        return missing

    def _begin_without(self, refused: Container[int], *, is_late: bool) -> bool:
        least, now_s = self.topology.min_nodes, time.monotonic()
        if not least:
            return False
        ready = (0, *(node.rank for node in self._nodes.values() if node.is_ready and not node.is_gone))
        if self._ready != ready:
            self._ready, self._ready_since_s = ready, now_s
        is_settled = now_s - self._ready_since_s >= self.times.settled
        if len(ready) < least or len(ready) in refused or not (is_late or (is_settled and not self._prepares())):
            return False
        self.members = ready
        return True

    def _prepares(self) -> bool:
        """Return whether a node is there that has not done its checks."""
        return any(not (node.is_gone or node.is_ready) for node in self._nodes.values())

    def _waiting(self, missing: Sequence[tuple[str, str]], waited_s: float) -> str:
        text, least, num_ready = super()._waiting(missing, waited_s), self.topology.min_nodes, len(self._ready)
        if not least or num_ready < least or self._prepares():
            return text
        rest_s = max(self.times.settled - (time.monotonic() - self._ready_since_s), 0)
        flag = f"--nnodes {least}:{self.topology.num_nodes}"
        return f"{text}; {num_ready} are there, which {flag} allows: they go on when none has come for {rest_s:.0f} s"

    def _is_lost(self, node: _Node) -> bool:
        return node.is_gone and (node.process is None or time.monotonic() - node.since_s >= self.times.back)

    async def _main(self) -> None:
        assert self._listener
        server = await asyncio.start_server(self._serve_one, sock=self._listener, backlog=socket.SOMAXCONN)
        self.spawn(self._look_for_another_leader())
        while server.is_serving():
            await asyncio.sleep(min(self.times.beat, self.times.back / 4))
            missing = {} if self.runs else dict(self._missing()[:MAX_TEXTS])
            self._broadcast(messages.LeaderBeat(missing=missing, runs_on=len(self.members) if self.runs else 0))
            for node in self._nodes.values():
                if self.runs and node.launched == self.launched and not node.ended and self._is_lost(node):
                    self._lose(node)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._greet(reader, writer)
        except asyncio.CancelledError:  # at the end; asyncio would print it as a failure
            writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._strangers) >= _MAX_STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        self._strangers[writer] = None
        keys = {FOLDER: self._secret} if self._secret else {}
        try:
            lines = await admit(reader, writer, {**keys, CALL: self.key})
            opening = await messages.read(lines, GREETING_S)
        except OtherVersion as error:
            self._refuse_caller(lines, error.refusal)
            lines.close()
            return
        except Broken as error:
            if "secret" in str(error) and len(self._turned_away) < _MAX_STRANGERS:
                self._turned_away.add(address_of(writer))
            writer.close()
            return
        finally:
            self._strangers.pop(writer, None)
        await self._attend(lines, opening)

    async def _attend(self, lines: Lines, opening: Message) -> None:
        node = None
        try:
            if isinstance(opening, messages.Who):
                await self._answer(lines)
            elif isinstance(opening, messages.Hello):
                node = self._join(lines, opening)
            while node:
                message = await messages.read(lines, self.times.silent)
                if node.lines is not lines:
                    break
                self._hear(node, lines, message)
        except Broken:
            pass
        finally:
            lines.close()
            with self.changed:
                if node and node.lines is lines:
                    node.lines, node.since_s = None, time.monotonic()
                    self.changed.notify_all()

    async def _answer(self, lines: Lines) -> None:
        """Answer a process that is no node; another node 0 tells then that two nodes claim its rank."""
        messages.send(lines, messages.Answering(process=self.process, ranks=self._answering()))
        answer = await messages.read(lines, GREETING_S)
        if isinstance(answer, messages.Error) and self.launched is None:
            self._end_all(NodeError.of(answer))

    def _join(self, lines: Lines, hello: messages.Hello) -> _Node | None:
        """Take a node in; None if it is refused, and then the start ends."""
        node, process = self._nodes.get(hello.rank), hello.process
        name = ", ".join(dict.fromkeys((process.host, lines.address)))
        problem = self._objection(node, name, hello)
        if problem or node is None:
            assert problem
            self._refuse_caller(lines, problem)
            return None
        with self.changed:
            self._turned_away.discard(lines.address)
            if node.process != process:
                if self.runs and node.launched == self.launched and not node.ended:
                    self._lose(node)  # it was started anew, before anyone saw that it had gone
                node.process, node.shares, node.plan, node.is_ready = process, False, None, False
                node.launched = node.ended = None
            if node.lines:
                node.lines.close()
            node.name, node.lines, node.lost = name, lines, hello.lost
            node.shares = node.shares or lines.by == FOLDER
            self.changed.notify_all()
        self._welcome(node, lines)
        return node

    def _refuse_caller(self, lines: Lines, problem: TunerError) -> None:
        messages.send(lines, messages.Error.of(problem, self._who()))
        if self.launched is None:  # a run at work goes on without a newcomer that does not fit
            self._end_all(problem)

    def _objection(self, node: _Node | None, name: str, hello: messages.Hello) -> TunerError | None:
        """Return why a caller is refused; None: it is `node`."""
        if hello.nodes != self.topology.num_nodes:
            text = f"node {hello.rank} ({name}) was started as one of {hello.nodes} nodes, and node 0 as one of "
            return UsageError(f"{text}{self.topology.num_nodes}", where="--nnodes / NNODES")
        if node is None:
            return UsageError(f"{name} claims node rank {hello.rank}", where="--node-rank / NODE_RANK")
        known = node.process
        if known in (None, hello.process) or node.is_gone or not (node.shares or self.launched is None):
            return None
        known_process, new_process = f"{node.name}, process {known.pid}", f"{name}, process {hello.process.pid}"
        fix = "Give each node a --node-rank of its own."
        problem = f"two nodes claim node rank {hello.rank}: {known_process}, and {new_process}"
        return UsageError(problem, where="--node-rank", fix=fix)

    def _welcome(self, node: _Node, lines: Lines) -> None:
        """Tell a node that has come, or has come back, what it may have missed."""
        messages.send(lines, messages.Welcome(process=self.process))
        self._tell_folder(node)
        if self.told_error:
            messages.send(lines, self.told_error)
            node.knows = True
            return
        if self.launched and node.launched == self.launched:
            messages.send(lines, self._go(self.launched))
            stop = self._stop
        else:  # it may still run an earlier one
            stop = messages.Stop(text="the other nodes have gone on without this one", cause=LOST, exit_code=1)
        if stop and self.launched:
            messages.send(lines, stop)

    def _hear(self, node: _Node, lines: Lines, message: Message) -> None:
        with self.changed:
            match message:
                case messages.Beat():
                    node.is_adrift = message.is_adrift
                case messages.Error() if self.launched is None or (node.shares and node.launched):
                    self._end_all(NodeError.of(message, node.who))
                case messages.Seen() if self._secret and message.proof == lines.proof(self._secret):
                    node.shares = True
                    messages.send(lines, messages.Shared())
                # A plan of before the launch may be read after it: it does not say that the node's ranks have ended.
                case messages.Planned() if node.shares and node.launched in (None, message.launch):
                    node.plan, node.is_ready = message.plan, False
                    self._compare(node)
                case messages.Ended() if node.shares and message.launch == self.launched:
                    self._note_end(node, message)
                case messages.Bye() if node.shares:
                    end = messages.Ended(launch=self.launched or "", code=0, objection="it has ended")
                    node.ended = node.ended or end
            self.changed.notify_all()

    def _note_end(self, node: _Node, end: messages.Ended) -> None:
        if node.ended and node.ended.launch == end.launch:
            return
        node.ended, node.is_ready = end, True
        if end.has_failed and self.runs:
            self._stop_all(f"{node.who}: {end.text}", end.cause, end.code, but=node)

    def _lose(self, node: _Node) -> None:
        node.is_ready = False
        node.ended = _GONE
        self._stop_all(f"{node.who} is gone", LOST, 1, but=node)

    def _stop_all(self, text: str, cause: str | None, code: int, but: _Node | None = None) -> None:
        exit_code = code if 0 < code < 256 else 1
        stop = messages.Stop(text=shortened(text, MAX_TEXT), cause=cause or LOST, exit_code=exit_code)
        self.interrupt(OtherNode(stop.text, stop.cause, stop.exit_code))
        self._stop = self._stop or stop
        for node in self._nodes.values():
            if node is not but and not node.ended:
                messages.send(node.lines, stop)

    def _compare(self, node: _Node) -> None:
        """Compare a node's plan with node 0's."""
        if self.plan is None or node.plan is None:
            return
        plan, node_plan = self.plan, node.plan
        if plan.digest == node_plan.digest:
            node.is_ready = True
            return
        keys = [key for key in {**plan.values, **node_plan.values} if plan.values.get(key) != node_plan.values.get(key)]
        differences = ", ".join(
            f"{key} = {plan.values.get(key, '(nothing)')} on node 0 and {node_plan.values.get(key, '(nothing)')} there"
            for key in keys[:_MAX_TOLD]
        )
        problem = f"{node.who} would run something else: {differences or f'{plan.command} | {node_plan.command}'}"
        error = UsageError(problem, where="the nodes differ", fix="Start the same command on every node.")
        if self.launched:
            messages.send(node.lines, messages.Error.of(error, self._who()))
        else:
            self._end_all(error)

    def _set_plan(self, plan: Plan) -> None:
        with self.changed:
            self.plan = plan
            for node in self._nodes.values():
                self._compare(node)
            self.changed.notify_all()

    def _set_secret(self, secret: bytes) -> None:
        self._secret = secret
        for node in self._nodes.values():
            self._tell_folder(node)

    def _tell_folder(self, node: _Node) -> None:
        if self._secret and not node.shares:
            messages.send(node.lines, messages.Folder(path=str(self.folder)))
        elif node.shares:
            messages.send(node.lines, messages.Shared())

    def _tell_to_go(self, launch_id: str) -> None:
        self.launched, self._ready, self._stop = launch_id, (), None
        self.begin()
        for node in self._nodes.values():
            is_member = node.rank in self.members
            with self.changed:
                node.ended, node.launched = None, launch_id if is_member else None
            if is_member:
                messages.send(node.lines, self._go(launch_id))

    def _go(self, launch_id: str) -> messages.Go:
        return messages.Go(launch=launch_id, nodes=[*self.members])

    def tell_error(self, message: messages.Error) -> None:
        message = message.model_copy(update={"who": message.who or self._who()})
        self._broadcast(message)
        with self.changed:
            self.told_error = self.told_error or message
            for node in self._nodes.values():
                node.knows = node.knows or node.lines is not None
            self.changed.notify_all()

    def _all_know(self) -> bool:
        return all(node.knows for node in self._nodes.values())

    def _tell_ended(self, message: messages.Ended) -> None:
        if message.has_failed:
            self._stop_all(f"{self._who()}: {message.text}", message.cause, message.code)

    def _end_all(self, error: TunerError) -> None:
        """End all nodes with an error: that of another node, or what node 0 finds of two nodes."""
        who = str(error.where) if isinstance(error, NodeError) else self._who()
        self.tell_error(messages.Error.of(error, who))
        self.end(error)

    def _who(self) -> str:
        return f"node 0 ({self._place or socket.gethostname()})"

    def _broadcast(self, message: Message) -> None:
        for node in self._nodes.values():
            messages.send(node.lines, message)

    async def _look_for_another_leader(self) -> None:
        """Call the address that the other nodes call: it must be this process that answers."""
        while not (self.runs or self.error_of_all):
            with contextlib.suppress(OSError, Broken, TimeoutError):
                reader, writer = await connected(str(self.topology.master_addr), self.port)
                try:
                    keys = {FOLDER: self._secret} if self._secret else {}
                    lines = await present(reader, writer, {**keys, CALL: self.key})
                    messages.send(lines, messages.Who())
                    answer = await messages.read(lines, GREETING_S)
                    if not isinstance(answer, messages.Answering) or answer.process == self.process:
                        return
                    other = f"{answer.process.host}, {lines.address}, process {answer.process.pid}"
                    problem = f"two nodes claim node rank 0: {other}, and {self.process}"
                    fix = "Give each node a --node-rank of its own."
                    error = UsageError(problem, where="--node-rank", fix=fix)
                    messages.send(lines, messages.Error.of(error, self._who()))
                    self._end_all(error)
                except OtherVersion as refused:
                    self._end_all(refused.refusal)
                finally:
                    writer.close()
            await asyncio.sleep(CALL_S)

    async def leave(self) -> None:
        self._broadcast(messages.Bye(is_done=bool(self.own_end and self.own_end.code == 0)))
        await asyncio.gather(*(node.lines.closed() for node in self._nodes.values() if node.lines))
