"""What the small processes that stand in for ranks can do; imported by each of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

__all__ = ["beat", "os", "report", "said", "signal", "spawn", "sys", "time", "until"]

_ROOT = str(Path(__file__).parents[2])
_PRELUDE = f"import sys\nsys.path.insert(0, {_ROOT!r})\nfrom tests.launch.rank import *\n"


def process(folder: Path, code: str) -> list[str]:
    """Return the argv of a process that runs `code` with this module's names; the folder on it is how it is found."""
    return [sys.executable, "-c", _PRELUDE + code, str(folder)]


def _folder() -> Path:
    return Path(sys.argv[1])


def report(rank: int, code: int, message: str, **facts: object) -> None:
    """Leave word of how a rank ended, as a worker does."""
    if "cause" in facts:
        facts["what"] = message.partition(": ")[2]
    text = json.dumps({"rank": rank, "exit_code": code, "message": message, **facts})
    (_folder() / "ranks" / f"{rank}.json").write_text(text)


def beat(rank: int, **facts: Any) -> None:
    """Leave this process's sign of life, as a worker does; `tuner.runs.beats` takes 0.4 s to import."""
    of_process = {"rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "at_s": time.monotonic()}
    made = {"count": 0, "doing": "starting", "save_s": 0.0, **of_process, **facts}
    (_folder() / "ranks" / f"{rank}.beat").write_bytes(json.dumps(made).encode().ljust(511) + b"\n")


def said(name: str) -> None:
    """Tell whoever waits for `name`."""
    (_folder() / name).touch()


def until(name: str) -> None:
    """Wait until somebody said `name`."""
    while not (_folder() / name).exists():
        time.sleep(0.02)


def spawn(code: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start one more such process."""
    return subprocess.Popen(process(_folder(), code), **options)
