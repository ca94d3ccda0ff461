"""Hosts on one machine: each has a name, an address, a network card, mounts and a process tree of its own.

A host is a set of Linux namespaces, and a bridge in another one joins their cards. Nothing of it is in the machine's
own network. The file system and /dev/shm are shared. It needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.runs import environment

NETWORK = "10.77.0"
_TOOLS = ("ip", "nsenter", "unshare", "mount")


def why_not() -> str:
    """Return why there can be no hosts here, or an empty text."""
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} is not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = "ip link add probe type bridge && ip link add left type veth peer name right"
    done = subprocess.run(
        ["unshare", "--net", "--uts", "--pid", "--fork", "sh", "-c", probe], capture_output=True, text=True
    )
    return f"no network namespaces here: {done.stderr.strip()}" if done.returncode else ""


@dataclass(frozen=True)
class Host:
    """One host.

    Args:
        init: Its process 1, by the number that it has outside.
        switch: The process whose network joins the hosts.
    """

    name: str
    address: str
    init: int
    switch: int
    port: str
    """Of the switch, where this host's card is."""

    def inside(self, *command: object) -> list[str]:
        """Return a command that runs on this host, in the current folder."""
        namespaces = ["--net", "--uts", "--mount", "--pid"]
        return ["nsenter", f"--target={self.init}", *namespaces, f"--wd={tempfile.gettempdir()}", *map(str, command)]

    def start(self, *command: object, **env: str) -> subprocess.Popen[str]:
        """Start a command on this host, in a session of its own; its outputs are one."""
        return subprocess.Popen(
            self.inside(*command), env=environment(**env), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def ask(self, *command: object) -> str:
        """Run a command on this host and return what it prints."""
        return _run(self.inside(*command))

    def replace(self, path: Path, by: Path) -> None:
        """Show this host another file, or folder, at a path."""
        self.ask("mount", "--bind", by, path)

    def cut(self) -> None:
        """Cut this host's network: packets are lost, and nobody is told."""
        _run(["nsenter", f"--target={self.switch}", "--net", "ip", "link", "set", self.port, "down"])

    def join(self) -> None:
        """Connect it again."""
        _run(["nsenter", f"--target={self.switch}", "--net", "ip", "link", "set", self.port, "up"])

    def kill(self) -> None:
        """Let this host die, with all its processes."""
        os.kill(self.init, signal.SIGKILL)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


@contextmanager
def hosts(number: int, folder: Path) -> Iterator[list[Host]]:
    """Make this many hosts, h0, h1, ..., which know each other by name; end all their processes afterwards."""
    with ExitStack() as at_the_end:
        switch = at_the_end.enter_context(_namespaces("--net"))
        on_switch = ["nsenter", f"--target={switch}", "--net", "ip", "link"]
        _run([*on_switch, "add", "bridge", "type", "bridge", "forward_delay", "0"])
        _run([*on_switch, "set", "bridge", "up"])
        addresses = [f"{NETWORK}.{place + 1}" for place in range(number)]
        names = folder / "hosts"
        names.write_text(
            "127.0.0.1 localhost\n" + "".join(f"{address} h{place}\n" for place, address in enumerate(addresses))
        )
        made = []
        for place, address in enumerate(addresses):
            kinds = ("--mount", "--uts", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
            host = Host(f"h{place}", address, at_the_end.enter_context(_namespaces(*kinds)), switch, f"port{place}")
            _run([*on_switch, "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", str(host.init)])
            _run([*on_switch, "set", host.port, "master", "bridge", "up"])
            host.ask("hostname", host.name)
            host.ask("mount", "--bind", names, "/etc/hosts")
            host.ask("ip", "address", "add", f"{address}/24", "dev", "eth0")
            for card in ("lo", "eth0"):
                host.ask("ip", "link", "set", card, "up")
            made.append(host)
        yield made


@contextmanager
def _namespaces(*kinds: str) -> Iterator[int]:
    """Yield a process in new namespaces; with one of processes, its process 1, whose death ends all others there."""
    ready = "echo; exec sleep infinity"
    process = subprocess.Popen(
        ["unshare", *kinds, "sh", "-c", ready], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout
    try:
        assert process.stdout.readline(), "unshare failed"
        yield _child(process.pid) if "--fork" in kinds else process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _child(pid: int) -> int:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if children := Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("unshare has no child")
