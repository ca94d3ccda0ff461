"""Nodes in one process that meet over real sockets, with clocks that run fast."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tuner.launch.meeting.caller import Caller
from tuner.launch.meeting.leader import Leader
from tuner.launch.meeting.messages import Plan
from tuner.launch.meeting.part import Meeting, Times, call_key
from tuner.machine.topology import Topology

FAST = Times(beat=0.05, silent=20.0, back=0.2, linger=0.2, folder=20.0, again=0.05, notice=0.05)
"""What must not happen on a busy machine, where a thread may wait for seconds, is as patient as in use."""
UNSHARED = FAST._replace(folder=0.3)
PLAN = Plan.of("tuner train x", {"lr": 1e-4})
Result = TypeVar("Result")


def free_port() -> int:
    """Return a port after which another one is free."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = int(first.getsockname()[1])
            with contextlib.suppress(OSError):
                second.bind(("", port + 1))
                return port


class Place:
    """Nodes on this machine that meet at one port."""

    def __init__(self) -> None:
        self.port, self.nodes, self.said = free_port(), list[Meeting](), list[str]()

    def node(
        self,
        rank: int,
        *,
        nodes: int = 2,
        min_nodes: int = 0,
        address: str = "127.0.0.1",
        words: Sequence[str] = (),
        sent: str = "",
        **more: Any,
    ) -> Any:
        topology = Topology("local", nodes, rank, 1, nodes, master_addr=address, master_port=self.port)
        topology = topology._replace(min_nodes=min_nodes)
        settings = {"start_timeout_s": 30.0, "say": self.said.append, "times": FAST, **more}
        key = call_key(sent, words, self.port)
        made = (Leader if rank == 0 else Caller)(topology, key, **settings)
        self.nodes.append(made)
        made.listen()
        return made


@pytest.fixture
def place() -> Iterator[Place]:
    place = Place()
    yield place
    for node in reversed(place.nodes):
        node.close()
    assert "meeting" not in {thread.name for thread in threading.enumerate()}, "a node still calls, in other tests too"


def kill(node: Meeting) -> None:
    """End a node without a word, as SIGKILL does."""
    node.leave = silent  # type: ignore[method-assign]
    node.close()


async def silent() -> None:
    pass


def at_once(*functions: Callable[[], Result]) -> list[Result | BaseException]:
    """Call functions at the same time; return their results, or what they raised."""
    results: list[Any] = [None] * len(functions)

    def call(at: int) -> None:
        try:
            results[at] = functions[at]()
        except BaseException as error:
            results[at] = error

    threads = [threading.Thread(target=call, args=(at,)) for at in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def ready(node: Meeting, folder: Path, plan: Plan = PLAN) -> Meeting:
    node.share(folder)
    node.agree(plan)
    return node


def met(place: Place, folder: Path, num_nodes: int = 2, launch: str = "first", **more: Any) -> list[Any]:
    """Return nodes that have met and run."""
    nodes = [ready(place.node(rank, nodes=num_nodes, **more), folder) for rank in range(num_nodes)]
    assert at_once(nodes[0].wait) == [None]
    nodes[0].go(launch)
    assert at_once(*(node.wait for node in nodes[1:])) == [launch] * (num_nodes - 1)
    return nodes
