"""The hosts of this folder are what they stand for: names, addresses, and a network that can be cut."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cluster.hosts import Host

# A host serves one connection; another one connects and prints what it hears.
SERVE = (
    "import socket, sys; s = socket.create_server(('', 29000)); print(1, flush=True); s.accept()[0].sendall(b'hello')"
)
CONNECT = "import socket; print(socket.create_connection(('{host}', 29000), timeout=1).recv(9).decode())"


def test_hosts_have_names_and_addresses_and_reach_each_other(hosts: list[Host]) -> None:
    assert [host.ask("hostname").strip() for host in hosts] == ["h0", "h1"]
    server = hosts[0].start(sys.executable, "-c", SERVE)
    assert server.stdout and server.stdout.readline() == "1\n"

    assert hosts[1].ask(sys.executable, "-c", CONNECT.format(host="h0")) == "hello\n"
    assert server.wait(20) == 0
    server.stdout.close()


def test_a_cut_network_is_silent_and_can_be_joined_again(hosts: list[Host]) -> None:
    server = hosts[0].start(sys.executable, "-c", SERVE)
    assert server.stdout and server.stdout.readline() == "1\n"
    hosts[0].cut()

    with pytest.raises(AssertionError, match="timed out"):
        hosts[1].ask(sys.executable, "-c", CONNECT.format(host="h0"))
    hosts[0].join()

    assert hosts[1].ask(sys.executable, "-c", CONNECT.format(host="h0").replace("timeout=1", "timeout=20")) == "hello\n"
    assert server.wait(20) == 0
    server.stdout.close()


def test_a_host_that_dies_takes_its_processes_along_and_no_others(hosts: list[Host]) -> None:
    sleeps = [host.start("sleep", "60") for host in hosts]

    hosts[0].kill()

    assert sleeps[0].wait(20) != 0
    assert sleeps[1].poll() is None
    hosts[1].kill()
    for process in sleeps:
        process.communicate()


def test_a_host_sees_another_file_at_the_same_path(hosts: list[Host], tmp_path: Path) -> None:
    for name in ("shared", "other"):
        (tmp_path / name).write_text(name)

    hosts[1].replace(tmp_path / "shared", tmp_path / "other")

    assert [host.ask("cat", tmp_path / "shared") for host in hosts] == ["shared", "other"]
