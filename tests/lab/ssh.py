"""A script in ssh's place: each host is a shell on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.lab import hosts as over_ssh
from tuner.machine.hostfile import Host

# What ssh does, without its options: the last words are the host and one text for its shell.
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
case "$1" in lost*) echo ready; trap "" TERM; exec sleep 300;; esac
case "$1" in dies*) exit 255;; esac
case "$1" in once*) if mkdir "$(dirname "$0")/started" 2>/dev/null; then exit 255; fi;; esac
case "$1" in gone*) echo "ssh: connect to host $1: No route" >&2; exit 255;; esac
exec sh -c "$2"
"""


def launch(folder: Path, *hosts: str, **more: Any) -> over_ssh.Launch:
    """Return a launch of `tuner`, which is whatever the folder's tuner.py does."""
    ssh = folder / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    named = tuple(Host(name, (0, 1), is_whole=True) for name in hosts or ("n1", "n2"))
    environ = {"PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "SECRET": "not sent"}
    return over_ssh.plan(named, str(ssh), ("train", "x"), folder, environ, more.pop("variables", {}), **more)
