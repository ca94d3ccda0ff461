"""Torch's store, at which the ranks of one machine meet: rank 0 serves it where its supervisor already listens.

No other process can take the port in between, as it could if one that is free were looked for and given to the ranks.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from functools import cache

import torch.distributed as dist

from tuner.machine.topology import STORE_FD


def serve(environ: MutableMapping[str, str] = os.environ) -> None:
    """Serve it for as long as this process lives, where this is the rank that was given the socket."""
    fd = environ.pop(STORE_FD, None)
    if fd is not None:
        _served(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), int(fd))


@cache  # a store that nobody holds would be gone
def _served(address: str, port: int, fd: int) -> dist.TCPStore:
    return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=fd)
