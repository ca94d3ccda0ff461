"""The ports at which other nodes reach this one."""

from __future__ import annotations

import errno
import os
import socket
import time
from contextlib import suppress

from tuner.errors import MachineError
from tuner.progress import POLL_S

_HIGHEST = 65535


def listening(port: int, purpose: str, patience_s: float = 0.0) -> socket.socket:
    """Return a socket that listens at a port of all addresses.

    Args:
        purpose: For what, in words.
        patience_s: So long it is tried again, in seconds: processes that are ending may still have it.

    Raises:
        MachineError: another process has it, or only root may.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            return _listening(port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            if error.errno == errno.EACCES or time.monotonic() >= deadline_s:
                other = max(port, 1024) + 10
                fix = f"Use another one on all nodes, such as --master-port {other if other < _HIGHEST else port - 10}."
                problem = f"cannot listen on port {port}, {purpose}: {os.strerror(error.errno)}"
                raise MachineError(problem, where="--master-port / MASTER_PORT / PORT", fix=fix) from None
        time.sleep(POLL_S)


def _listening(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
            )
    return socket.create_server(("", port), backlog=socket.SOMAXCONN)
