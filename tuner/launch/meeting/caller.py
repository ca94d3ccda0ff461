"""The part of the other nodes in the meeting: they call node 0, and again when the connection is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Container
from pathlib import Path
from typing import Any

from tuner.errors import Option, RunDirectoryError, TunerError
from tuner.launch.meeting import messages
from tuner.launch.meeting.messages import Message, OtherVersion, Plan
from tuner.launch.meeting.part import CALL, FOLDER, LOST, Meeting, NodeError, connected, secret_in
from tuner.launch.meeting.secret_lines import Broken, Lines, present
from tuner.runs.diagnose import OtherNode
from tuner.runs.directory import MEETING, RunDirectory


class _NoNext(Exception):
    """Why this node takes part in no attempt that follows."""


class Caller(Meeting):
    """Another node's part: it calls node 0 until it answers, and again when the connection is lost."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._lines: Lines | None = None
        self._state = "not called yet"
        self._leader: messages.Process | None = None
        self._leader_name = self.names[0] if self.names else str(self.topology.master_addr)
        self._told_folder_s: float | None = None
        self._shown: bytes | None = None
        """The folder's secret that node 0 was shown, since it told that it has one."""
        self._shared_s = 0.0
        self._others: dict[str, str] = {}
        """Whom node 0 waits for, and why."""
        self._runs_on = 0
        """The nodes that train, as node 0 tells; 0: none does."""
        self._lost: messages.Process | None = None
        self._other_folder = ""
        self._shares = False
        self._has_left = self._is_done = self._knows = False
        self._gone_s: float | None = None
        self._refusal: str | None = None

    def share(self, folder: Path) -> None:
        self._shared_s, self.folder = time.monotonic(), folder

    def go(self, launch_id: str) -> None:
        pass

    @property
    def has_lost_node_0(self) -> bool:
        """Whether node 0 is gone, and has not come back."""
        return self._lost is not None

    @property
    def keeps_status(self) -> bool:
        is_alone = self.has_lost_node_0 or not (self._lines or self._has_left)
        record = RunDirectory(self.folder).run_or_none if is_alone and self.folder else None
        return is_alone and (record is None or self.launched in (None, record.launch_id))

    def _has_other_ended(self) -> bool:
        return self._has_left

    def await_next(self) -> tuple[str | None, str | None]:
        """Wait for node 0's decision after an attempt.

        Returns:
            The next attempt's launch id; or None, and the reason against another attempt.

        Raises:
            TunerError: as `wait`.
        """
        try:
            return super().wait(), None
        except _NoNext as reason:
            return None, str(reason)

    def _missing(self) -> list[tuple[str, str]]:
        if self._refusal is not None:
            raise _NoNext(self._refusal)
        if self.launched is not None and self.own_end is None:
            return []
        if self._has_left and self._is_done and self.launched is None:
            raise _NoNext("node 0 was started anew, and the run is done")
        if self._has_left:
            raise NodeError("it has ended", where="node 0")
        address = f"{self.topology.master_addr}:{self.port}"
        if self._stands_by:
            nodes = f"{self._runs_on} node{'s' * (self._runs_on > 1)}"
            return [("node 0", f"{address}, it trains on {nodes}, and this one joins at their next restart")]
        if self._lines and self._shares:
            other_nodes = [
                (name, state) for name, state in self._others.items() if name != f"node {self.topology.node_rank}"
            ]
            return other_nodes or [("node 0", f"{address}, its checks are not done")]
        return [("node 0", f"{address}, {self._state}")]

    @property
    def _stands_by(self) -> bool:
        return bool(self.topology.min_nodes and self._lines and self._shares and self._runs_on)

    def wait(self, refused: Container[int] = ()) -> str | None:
        try:
            return super().wait(refused)
        except _NoNext as reason:
            if self._refusal is None:  # the run is done
                return None
            raise NodeError(str(reason), where="node 0") from None

    async def _main(self) -> None:
        self.spawn(self._look_around())
        while not self._has_left:
            try:
                await self._call()
            except OtherVersion as error:
                self._knows = True  # node 0 refuses this node too
                self.end(error.refusal)
            except Broken as error:
                self._state = f"what answers is not node 0 of this run: {error}; the port may be in use there"
            except TimeoutError:
                self._state = "does not answer"
            except socket.gaierror as error:
                self._state = f"the name does not resolve: {error.strerror}"
            except OSError as error:
                self._state = os.strerror(error.errno).lower() if error.errno else str(error)
            with self.changed:
                self._lines, self._shares = None, False
                if self._gone_s is None:
                    self._gone_s = time.monotonic()
            await asyncio.sleep(self.times.again)

    async def _call(self) -> None:
        reader, writer = await connected(str(self.topology.master_addr), self.port)
        try:
            secret = self._read_secret()
            lines = await present(reader, writer, {**({FOLDER: secret} if secret else {}), CALL: self.key})
            rank, nodes = self.topology.node_rank, self.topology.num_nodes
            messages.send(lines, messages.Hello(process=self.process, rank=rank, nodes=nodes, lost=self._lost))
            while True:
                self._hear(lines, await messages.read(lines, self.times.silent))
        except Broken:
            if self._lines is None:
                raise
            self._state = "the connection was lost"
        finally:
            writer.close()

    def _hear(self, lines: Lines, message: Message) -> None:
        with self.changed:
            match message:
                case messages.Welcome(process=leader):
                    if self._leader and self._leader.instance != leader.instance:
                        self.interrupt(OtherNode("node 0 was started anew", LOST, 1))
                        self.launched = self.own_end = None
                    self._leader, self._lines, self._gone_s = leader, lines, None
                    self._leader_name = f"{leader.host}, {lines.address}"
                    self._state = "has not seen the run directory yet"
                    self._told_folder_s = self._shown = None
                    if self.told_error and self.error_of_all is None:
                        self.tell_error(self.told_error)
                case messages.LeaderBeat():
                    self._others, self._runs_on = message.missing, message.runs_on
                case messages.Folder(path=path):
                    self._told_folder_s, self._shown, self._other_folder = time.monotonic(), None, path
                case messages.Shared():
                    self._shares = True
                    self._send_plan()
                case messages.Go() if self.launched != message.launch:
                    self.launched, self.own_end, self._lost = message.launch, None, None
                    self.members = tuple(sorted({*message.nodes, self.topology.node_rank}))
                    self.begin()
                case messages.Stop():
                    self.interrupt(OtherNode(message.text, message.cause, message.exit_code))
                case messages.Refused(why=why):
                    self._refusal = why
                case messages.Error():
                    self.end(NodeError.of(message))
                case messages.Bye(is_done=is_done):
                    self._has_left, self._is_done = True, is_done
            self.changed.notify_all()

    def _set_plan(self, plan: Plan) -> None:
        self.plan = plan
        if self._shares:
            self._send_plan()

    def _send_plan(self) -> None:
        """Tell node 0 that this node is ready: not before the ranks of an earlier launch have ended."""
        if self.plan and not self.runs:
            messages.send(self._lines, messages.Planned(plan=self.plan, launch=self.launched))
        if self.own_end:
            messages.send(self._lines, self.own_end)

    def tell_error(self, message: messages.Error) -> None:
        messages.send(self._lines, message)
        with self.changed:
            self.told_error, self._knows = message, self._knows or self._lines is not None
            self.changed.notify_all()

    def _all_know(self) -> bool:
        return self._knows or isinstance(self.error_of_all, NodeError)

    def _tell_ended(self, message: messages.Ended) -> None:
        if self._shares:
            self._send_plan()  # node 0 may have gone on without this node, which is ready now

    def _read_secret(self) -> bytes | None:
        """Return the folder's secret; None: it is not to be seen, or the folder is not known yet."""
        if self.folder is None:
            return None
        with contextlib.suppress(OSError):  # a listing makes NFS ask the server
            list((self.folder if self.folder.is_dir() else self.folder.parent).iterdir())
        return secret_in(self.folder / MEETING)

    async def _look_around(self) -> None:
        """Send signs of life, look for the folder's secret, and see whether node 0 is gone."""
        while True:
            await asyncio.sleep(min(self.times.again, self.times.beat / 2))
            messages.send(self._lines, messages.Beat(is_adrift=self.is_adrift))
            if self._lines and not self._shares and self.folder:
                secret = self._read_secret()
                if secret and secret != self._shown:
                    self._shown = secret
                    messages.send(self._lines, messages.Seen(proof=self._lines.proof(secret)))
                if (
                    self._told_folder_s
                    and time.monotonic() - max(self._told_folder_s, self._shared_s) >= self.times.folder
                ):
                    error = self._no_shared_folder(bool(secret))
                    self.tell_error(messages.Error.of(error))
                    self.end(error)
            if self.runs and self._gone_s and time.monotonic() - self._gone_s >= self.times.back and not self._has_left:
                self._lost = self._leader
                self.interrupt(OtherNode(f"node 0 ({self._leader_name}) is gone", LOST, 1))

    def _no_shared_folder(self, has_another: bool) -> TunerError:
        sees = "another file" if has_another else "no file"
        problem = f"this node sees {sees} {self.folder}/{MEETING}, and node 0 wrote {self._other_folder}/{MEETING}"
        fix = f"Put the run directory into a folder that all nodes share: {Option('work_dir', 'FOLDER')}."
        return RunDirectoryError(problem, where=Option("work_dir"), fix=fix)

    async def leave(self) -> None:
        messages.send(self._lines, messages.Bye())
        if self._lines:
            await self._lines.closed()
