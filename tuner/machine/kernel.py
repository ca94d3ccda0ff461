"""What the kernel does to processes: it ends them with their parent, and counts those it kills for lack of memory.

It asks and is asked; which process is meant, its callers know.
"""

from __future__ import annotations

import ctypes
import re
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def die_with_parent() -> None:
    """Ask for a SIGTERM to this process when its parent ends, however it ends."""
    if sys.platform == "linux":  # elsewhere nothing tells a child
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def num_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes were ever killed for lack of memory: in this control group, else on this machine.

    None where the kernel does not say.
    """
    for file in (*_group_files(root), root / "proc/vmstat"):
        try:
            found = _COUNT.search(file.read_text(encoding="utf-8"))
        except OSError:
            continue
        if found:
            return int(found[1])
    return None


def _group_files(root: Path) -> list[Path]:
    """Return where a control group's own count stands: version 2 first, then version 1, then a container's root."""
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    groups = {kinds: path.lstrip("/") for _, kinds, path in (line.split(":", 2) for line in lines if ":" in line)}
    files = [base / groups[""] / "memory.events"] if "" in groups else []
    files += [base / "memory" / groups["memory"] / "memory.oom_control"] if "memory" in groups else []
    return [*files, base / "memory.events"]
