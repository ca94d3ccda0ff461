"""Compile DeepSpeed's ops, which it needs at first use: once on a machine, before the ranks start, with progress.

Without this, the ranks would print nothing for minutes, and would wait without end for a lock that a killed build left.
`zero` knows which ops a config needs; `worker.compile_ops` compiles them in a process of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import MachineError
from tuner.files import lines, read_text
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import disks
from tuner.machine.hardware import tool_path
from tuner.machine.kernel import die_with_parent
from tuner.machine.libraries import torch_cuda_version
from tuner.progress import POLL_S, Work, say, shown
from tuner.zero import config

if TYPE_CHECKING:
    import subprocess

_LOOK_S = 1.0
_UNSEEN_S = 600.0
"""A lock of another user or machine counts as left over at this age: its process cannot be seen from here."""
_SECONDS = {"cpu_adam": 60, "pin_memory": 30, "async_io": 240}
"""Measured on two cores without a GPU, libraries imported."""
_OTHER_S = 120
"""For an op with CUDA kernels; not measured."""
_STEP = re.compile(r"^\[(\d+)/(\d+)\]", re.MULTILINE)
_OP = re.compile(r"^op (\w+)$", re.MULTILINE)
_ERROR = re.compile(r"^.*\b(?:error|undefined reference|cannot find|not found)\b.*$", re.MULTILINE | re.IGNORECASE)


def missing(run: ResolvedRun) -> tuple[str, ...]:
    """Return the ops that this run needs and that are not compiled here, or are locked."""
    needed_ops = config.ops(run.final.config, run.recipe.config.optim_wrapper.optimizer.type)
    return tuple(op for op in needed_ops if lock_file(op, run.environ).exists() or not is_compiled(op, run.environ))


def foretold(ops: Sequence[str]) -> str:
    """Return one line about the ops that will be compiled, and how long that takes."""
    seconds = sum(_SECONDS.get(op, _OTHER_S) for op in ops)
    names = ", ".join(config.OPS[op] for op in ops)
    return (
        f"DeepSpeed's {names} {'is' if len(ops) == 1 else 'are'} compiled before the ranks start, once on this "
        f"machine: about {seconds} s on two cores"
    )


def build(run: ResolvedRun, env: Mapping[str, str], log: Path) -> None:
    """Compile the ops that the run needs and this machine lacks; show progress on standard error.

    Args:
        env: The ranks' variables, so that the ranks find what is compiled here.
        log: The file for the compiler's output; only made if something is compiled.

    Raises:
        MachineError: an op does not compile.
    """
    ops = missing(run)
    locks = [lock_file(op, run.environ) for op in ops]
    for lock in filter(Path.exists, locks):
        if pid := holder(lock):
            say(f"waiting for process {pid}, which is compiling {lock.parent.name}.")
    _free(locks, waits_s=_LOOK_S / 2)
    ops = missing(run)
    if not ops:
        return
    import subprocess  # a dry run starts nothing

    say(f"{foretold(ops)}; the compiler's output is in {log}.")
    began_s = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        child = subprocess.Popen(
            _argv(ops),
            env=dict(env),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C ends it through us, with the compilers
            preexec_fn=die_with_parent,
        )
    try:
        _watch(child, log, locks)
    finally:  # also at Ctrl-C
        _kill(child)
        _free(locks)
    if child.returncode:
        raise _failure(ops, log)
    say(f"compiled in {time.monotonic() - began_s:.0f} s.")


def _kill(child: subprocess.Popen[bytes]) -> None:
    """End a build with its compilers: ninja starts each in a process group of its own."""
    import psutil  # only needed if something is compiled

    with contextlib.suppress(psutil.NoSuchProcess):
        for process in (child, *psutil.Process(child.pid).children(recursive=True)):  # the top first: it starts no more
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    child.wait()


def _argv(ops: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "tuner.worker.compile_ops", *ops]


def _watch(child: subprocess.Popen[bytes], log: Path, locks: Sequence[Path]) -> None:
    """Show how far the build is, and remove locks that it waits for once their processes have ended."""
    looked_s = time.monotonic()
    with shown("compiling") as work:
        while child.poll() is None:
            _read_step("".join(lines(log)), work)
            if time.monotonic() - looked_s >= _LOOK_S:
                _free(locks, waits_s=_LOOK_S / 2)
                looked_s = time.monotonic()
            time.sleep(POLL_S)


def _read_step(text: str, work: Work) -> None:
    """Read from the log which op is compiled, and how many of its files ninja has done."""
    ops = list(_OP.finditer(text))
    if not ops:
        return
    work.title = f"compiling DeepSpeed's {config.OPS[ops[-1][1]]}"
    steps = _STEP.findall(text, ops[-1].end())
    num_done, total = map(int, steps[-1]) if steps else (0, 0)
    work.unit, work.done, work.total = "files" if steps else "", num_done, total or None


def _free(locks: Sequence[Path], waits_s: float = 0.0) -> None:
    """Remove the locks of processes that have ended: torch waits for them without end.

    Args:
        waits_s: Look a second time after this wait: a lock that is just being removed has no process either.
    """
    if left_locks := [lock for lock in locks if is_left(lock)]:
        time.sleep(waits_s)
        for lock in filter(is_left, left_locks):
            lock.unlink(missing_ok=True)
            say(f"removed {lock}, left over from an interrupted build.")


def is_left(lock: Path) -> bool:
    """Return whether a lock is there and no process holds it any more."""
    try:
        unseen = may_be_held_unseen(lock)
        age_s = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return False
    return holder(lock) is None and not (unseen and age_s < _UNSEEN_S)


def _failure(ops: Sequence[str], log: Path) -> MachineError:
    text = "".join(lines(log))
    started = _OP.findall(text)
    op = started[-1] if started else ops[0]
    match = _ERROR.search(text[text.rfind(f"op {op}\n") :])
    line = match[0].strip() if match else next(filter(None, reversed(text.splitlines())), "no output")
    message = f"DeepSpeed's {config.OPS[op]} ({op}) does not compile here: {line}"
    fix = "Install what the compiler needs (tuner doctor checks compilers), or use a config without this op."
    return MachineError(message, where=log, fix=fix)


def folder(op: str, environ: Mapping[str, str]) -> Path:
    """Return where torch compiles an op. Source: torch/utils/cpp_extension.py, _get_build_directory."""
    if extensions_dir := environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(extensions_dir) / op
    cache = Path(environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache")
    built_for = f"cu{cuda.replace('.', '')}" if (cuda := torch_cuda_version()) else "cpu"
    python = f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}"
    return cache / "torch_extensions" / f"{python}_{built_for}" / op


def lock_file(op: str, environ: Mapping[str, str]) -> Path:
    """Return the file that whoever compiles an op makes, keeps open and removes at the end."""
    return folder(op, environ) / "lock"


def is_compiled(op: str, environ: Mapping[str, str]) -> bool:
    """Return whether an op came compiled with DeepSpeed, or was compiled here and nothing of it has changed since."""
    if came_compiled(op):
        return True
    op_folder, ninja = folder(op, environ), shutil.which("ninja", path=tool_path(environ))
    plan, torch = op_folder / "build.ninja", importlib.util.find_spec("torch")
    if not (op_folder / f"{op}.so").is_file() or not plan.is_file() or ninja is None or torch is None:
        return False
    if str(Path(str(torch.origin)).parent) not in read_text(plan):  # another environment's
        return False
    import subprocess  # most runs compile nothing

    dry_run = subprocess.run([ninja, "-C", str(op_folder), "-n"], capture_output=True, text=True, check=False)
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

    full_path = str(file.resolve())
    for process in psutil.process_iter():
        try:
            if full_path in (opened.path for opened in process.open_files()):
                return int(process.pid)
        except (psutil.Error, OSError):  # it has ended, or is another user's
            continue
    return None


def may_be_held_unseen(file: Path) -> bool:
    """Return whether a process that cannot be seen from here may have a file open: another's, on another machine."""
    return disks.is_network(file) or (os.getuid() != 0 and file.stat().st_uid != os.getuid())
