"""The ports at which other nodes reach this one."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress

from tuner.errors import MachineError


def listening(port: int, what: str) -> socket.socket:
    """Return a socket that listens at a port of all addresses.

    Args:
        what: For what, in words.

    Raises:
        MachineError: another process has it, or only root may.
    """
    try:
        if socket.has_dualstack_ipv6():
            with suppress(OSError):
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=socket.SOMAXCONN
                )
        return socket.create_server(("", port), backlog=socket.SOMAXCONN)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        fix = f"Use another one on all nodes, such as --master-port {max(port, 1024) + 10}."
        problem = f"cannot listen on port {port}, {what}: {os.strerror(error.errno or 0)}"
        raise MachineError(problem, where="--master-port / MASTER_PORT / PORT", fix=fix) from None
