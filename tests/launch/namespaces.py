"""Hosts made of network namespaces: each with its own interface, address and host name, and a cable that can be cut."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"), reason="hosts need root and iproute2"
)
_BRIDGE = "switch"
_numbers = itertools.count()
_NAMED = 'hostname "$0" && exec "$@"'


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@dataclass(frozen=True)
class Host:
    """A host by the name of its namespace; `interface` is its end of the cable."""

    space: str
    name: str
    address: str
    interface: str

    def words(self, command: Sequence[str], *, mount: str = "true") -> list[str]:
        """Return the words that run a command on this host, after `mount` in mounts of its own."""
        shell = f"{mount} && {_NAMED}"
        return [
            "ip",
            "netns",
            "exec",
            self.space,
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            shell,
            self.name,
            *command,
        ]

    @property
    def variables(self) -> dict[str, str]:
        """What gloo needs to find its interface: the host's name resolves nowhere."""
        return {"GLOO_SOCKET_IFNAME": self.interface}

    def cut(self) -> None:
        """Cut the cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self.space, "link", "set", self.interface, "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", self.space, "link", "set", self.interface, "up")


@contextmanager
def hosts(number: int = 2) -> Iterator[list[Host]]:
    """Give hosts on one switch; nothing of them is left."""
    prefix = f"t{os.getpid()}x{next(_numbers)}"
    switch = f"{prefix}s"
    with ExitStack() as stack:

        def space(name: str) -> None:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            _ip("-n", name, "link", "set", "lo", "up")

        space(switch)
        _ip("-n", switch, "link", "add", _BRIDGE, "type", "bridge")
        _ip("-n", switch, "link", "set", _BRIDGE, "up")
        made = [Host(f"{prefix}h{at}", f"node-{at}", f"10.77.0.{at + 1}", "cable") for at in range(number)]
        for at, host in enumerate(made):
            space(host.space)
            _ip(
                "-n",
                host.space,
                "link",
                "add",
                host.interface,
                "type",
                "veth",
                "peer",
                "name",
                f"p{at}",
                "netns",
                switch,
            )
            _ip("-n", switch, "link", "set", f"p{at}", "master", _BRIDGE, "up")
            _ip("-n", host.space, "addr", "add", f"{host.address}/24", "dev", host.interface)
            host.mend()
        yield made
