"""What the kernel does to processes: ends, stops, lets threads wait, counts memory and those killed for lack of it.

Callers choose the process.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from tuner.files import read_bytes, read_text

INSISTING = (signal.SIGTERM, signal.SIGINT)
"""A run finishes its step and saves at the first of these signals; the second ends it at once.

Not SIGHUP: a terminal that closes sends it twice. Not SIGUSR2: Slurm may send it before SIGTERM or after.
"""
STOPS = (*INSISTING, signal.SIGHUP, signal.SIGUSR2)
"""The signals that ask a run to stop."""
_PR_SET_PDEATHSIG = 1
# Loaded here and not where it is called: that is in a child between fork and exec, where the loader's lock may be held
# by a thread that was not copied, and is never given back.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
_SPINS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_PEAK = re.compile(r"^VmHWM:\s*(\d+) kB$", re.MULTILINE)
_KILLED = re.compile(rb"^\d+,\d+,(\d+),[^\n]*?Killed process (\d+) ", re.MULTILINE)
"""Source: Linux, Documentation/ABI/testing/dev-kmsg: level, number, microseconds; and mm/oom_kill.c."""
_MAX_RECORD = 8192
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def die_with_parent(number: int = signal.SIGTERM, parent: int | None = None) -> None:
    """Ask for a signal to this process when its parent ends, however it ends.

    Args:
        parent: The parent that this process was forked from: if it has ended already, this process ends now.
    """
    if _prctl:  # elsewhere nothing tells a child
        _prctl(_PR_SET_PDEATHSIG, number)
    if parent is not None and os.getppid() != parent:
        os._exit(1)  # effect: of a child that nobody waits for


def short_spins(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that lets idle threads of torch sleep soon; empty if the user has set how they wait.

    libgomp, torch's OpenMP on Linux, lets a thread spin about 300,000 times at every barrier before it sleeps. Where
    two processes share the cores, each spins on a core that the other needs. Measured on two cores with
    the small model of the package, tokens/s of a process alone and of each of two: 3,749 and 362 without the variable,
    3,232 and 2,458 with 1000, 3,404 and 1,331 with 10000, 2,644 and 2,583 with 100, 2,290 and 1,533 with
    OMP_WAIT_POLICY=PASSIVE. SmolLM2-135M: 76 and 7 without, 75 and 42 with 1000. It must be set before torch is loaded.
    """
    return {} if any(name in environ for name in _SPINS) else {"GOMP_SPINCOUNT": "1000"}


def heard() -> tuple[int, ...]:
    """Return the signals of `STOPS` to listen to: all but a SIGHUP that is ignored, since `nohup` wants it so."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return tuple(number for number in STOPS if not (ignored and number == signal.SIGHUP))


def stopped(pids: Mapping[int, int]) -> list[int]:
    """Return which of some processes, by whatever they are called, a signal has stopped: SIGSTOP, a debugger."""
    import psutil  # what only plans or shows asks of no process

    names = []
    for name, pid in pids.items():
        with suppress(psutil.Error):
            if psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                names.append(name)
    return names


def parents_words() -> list[str]:
    """Return the command lines of all parents of this process, and the names of their variables where readable."""
    import psutil  # what only plans or shows asks of no process

    words: list[str] = []
    for process in psutil.Process().parents():
        with suppress(psutil.Error, OSError):
            words += process.cmdline()
            words += process.environ()
    return words


def peak_resident_bytes(root: Path = Path("/")) -> int:
    """Return the most memory that this process has held since it began to run its program, without its children.

    That is VmHWM, which misses no peak between two looks. `ru_maxrss` also counts what the process that started this
    one held at that moment (measured: 611 MiB in a new Python of 11 MiB, started by one of 600 MiB).
    """
    with suppress(OSError, ValueError, AttributeError):
        status = read_bytes(root / "proc/self/status").decode(errors="replace")
        return int(_PEAK.search(status)[1]) * 1024  # type: ignore[index]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def num_oom_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes of this control group were ever killed for lack of memory.

    None where the kernel does not say. Its count of the whole machine, in /proc/vmstat, is no answer: the processes may
    be another's.
    """
    for file in (folder / name for folder in control_groups(root) for name in ("memory.events", "memory.oom_control")):
        with suppress(OSError):
            if match := _COUNT.search(read_text(file)):
                return int(match[1])
    return None


def killed_for_memory(since_s: float, log: Path = Path("/dev/kmsg")) -> set[int]:
    """Return the processes that the kernel's log says were killed for lack of memory; empty if it cannot be read.

    Args:
        since_s: By `time.monotonic`, the clock of the log.
    """
    records = log_records(log)
    return {int(pid) for record in records for at, pid in _KILLED.findall(record) if int(at) / 1e6 >= since_s}


def log_records(log: Path = Path("/dev/kmsg")) -> Iterator[bytes]:
    """Yield the records of the kernel's log, each with level, number and microseconds first; none if it is unreadable.

    Its clock is that of `time.monotonic`.
    """
    try:
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return
    with os.fdopen(handle, "rb", buffering=0) as records:
        while True:
            try:
                record = records.read(_MAX_RECORD)
            except BrokenPipeError:  # the kernel has overwritten the record: the next read gives the oldest
                continue
            except OSError:
                return
            if not record:
                return
            yield record


def control_groups(root: Path = Path("/")) -> list[Path]:
    """Return where this process's control group may stand: version 2, a container's root, version 1's of memory."""
    base = root / "sys/fs/cgroup"
    try:
        lines = read_text(root / "proc/self/cgroup").splitlines()
    except OSError:
        lines = []
    groups = {kinds: path.lstrip("/") for _, kinds, path in (line.split(":", 2) for line in lines if ":" in line)}
    return list(dict.fromkeys((base / groups.get("", ""), base, base / "memory" / groups.get("memory", ""))))
