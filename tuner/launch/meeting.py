"""Where the ranks of one machine meet: a free port, at which a socket listens before the first of them is started."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tuner.machine.topology import AGENT_STORE, STORE_FD


class Process(NamedTuple):
    """The environment of a process to start, and the descriptors that it inherits."""

    env: Mapping[str, str]
    fds: tuple[int, ...] = ()


@contextmanager
def opened(env: Mapping[str, str], ranks: Sequence[Mapping[str, str]]) -> Iterator[list[Process]]:
    """Give a process for each rank, or one with `env` alone where there are none.

    Rank 0 inherits the socket, and serves torch's store there: no other process can take the port in between.

    Args:
        env: What all ranks get.
        ranks: What each gets beside it.
    """
    if not ranks:
        yield [Process(env)]
        return
    with socket.create_server(("127.0.0.1", 0), backlog=socket.SOMAXCONN) as listener:
        fd, port = listener.fileno(), listener.getsockname()[1]
        of_all = {**env, "MASTER_PORT": str(port), AGENT_STORE: "True"}
        first, *others = [{**of_all, **own} for own in ranks]
        yield [Process({**first, STORE_FD: str(fd)}, (fd,)), *map(Process, others)]
