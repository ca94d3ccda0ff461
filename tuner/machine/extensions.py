"""What torch compiles at first use (DeepSpeed's ops): where, whether it is up to date, and who holds its lock.

It asks ninja, files and processes; it compiles and removes nothing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from tuner.machine import disks
from tuner.machine.hardware import tool_path
from tuner.machine.libraries import torch_cuda_version


def folder(op: str, environ: Mapping[str, str]) -> Path:
    """Return where torch compiles an op. Source: torch/utils/cpp_extension.py, _get_build_directory."""
    if named := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named) / op
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache")
    built_for = f"cu{cuda.replace('.', '')}" if (cuda := torch_cuda_version()) else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return cache / "torch_extensions" / f"{python}_{built_for}" / op


def lock(op: str, environ: Mapping[str, str]) -> Path:
    """Return the file that whoever compiles an op makes, keeps open and removes at the end."""
    return folder(op, environ) / "lock"


def is_compiled(op: str, environ: Mapping[str, str]) -> bool:
    """Return whether an op came compiled with DeepSpeed, or was compiled here and nothing of it has changed since."""
    if came_compiled(op):
        return True
    place, ninja = folder(op, environ), shutil.which("ninja", path=tool_path(environ))
    plan, torch = place / "build.ninja", importlib.util.find_spec("torch")
    if not (place / f"{op}.so").is_file() or not plan.is_file() or ninja is None or torch is None:
        return False
    if str(Path(str(torch.origin)).parent) not in plan.read_text(encoding="utf-8"):  # another environment's
        return False
    import subprocess  # most runs compile nothing

    dry_run = subprocess.run([ninja, "-C", str(place), "-n"], capture_output=True, text=True, check=False)
    return dry_run.returncode == 0 and "no work to do" in dry_run.stdout


def came_compiled(op: str) -> bool:
    """Return whether DeepSpeed was installed with an op compiled (DS_BUILD_OPS)."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return False
    ops = Path(spec.origin).parent / "ops"
    return bool([*ops.glob(f"*/{op}_op*.so"), *ops.glob(f"{op}_op*.so")])


def holder(file: Path) -> int | None:
    """Return the process that has a file open, or None; of other users' processes nothing is seen."""
    import psutil  # what only plans asks of no process

    wanted = str(file.resolve())
    for process in psutil.process_iter():
        try:
            if wanted in (opened.path for opened in process.open_files()):
                return int(process.pid)
        except (psutil.Error, OSError):  # it has ended, or is another user's
            continue
    return None


def may_be_held_unseen(file: Path) -> bool:
    """Return whether a process that cannot be seen from here may have a file open: another's, on another machine."""
    return disks.is_network(file) or (os.getuid() != 0 and file.stat().st_uid != os.getuid())
