"""Why runs end badly: each cause's name, how it is told, the signs of it in logs, and the next command to type.

It knows text and nothing of ranks; which of several causes came first is `diagnose`'s work.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

_AGAIN = "{again}"
_MAX_LINE = 300
_INDENTED = re.compile(r'^(?:\s{4,}|\s+File "|\s*[\^~]+$)')
_PREFIX = re.compile(r"^\[(?:rank|default)\d+\]:\s?")


class Role(IntEnum):
    """How a failure stands to others of the same run; a lower one explains a higher one."""

    CAUSE = 0
    WAITED = 1
    """It gave up waiting for another rank."""
    LOST = 2
    """It lost another rank, or was told to end."""


@dataclass(frozen=True)
class Cause:
    """One cause.

    Args:
        name: As it stands in status.json.
        says: What happened, in a few words.
        signs: Regular expressions; one of them in a line of a log means this cause.
        command: The next command; {again}, {log} (of the rank), {run} and {recipe} are filled in.
        exit_code: The run's exit code where the rank did not give one of its own (1 is not its own).
        role: How it stands to other ranks' failures.
    """

    name: str
    says: str
    signs: tuple[str, ...] = ()
    command: str = _AGAIN
    exit_code: int = 1
    role: Role = Role.CAUSE

    def found_in(self, text: str) -> str | None:
        """Return the line that shows this cause, or None."""
        for sign in self.signs:
            match = re.search(sign, text, re.MULTILINE)
            if match:
                begin = text.rfind("\n", 0, match.start()) + 1
                return _PREFIX.sub("", text[begin:].partition("\n")[0]).strip()[:_MAX_LINE]
        return None


GPU_MEMORY = "gpu-out-of-memory"
HOST_MEMORY = "host-out-of-memory"
SHARED_MEMORY = "shared-memory"
NOT_A_NUMBER = "not-a-number"
PORT = "port-in-use"
HANG = "hang"

TABLE: Sequence[Cause] = (
    Cause(
        GPU_MEMORY,
        "a GPU ran out of memory",
        (
            r"OutOfMemoryError",
            r"(?:CUDA|HIP|NPU|XPU) (?:error: )?out of memory",
            r"CUBLAS_STATUS_ALLOC_FAILED",
            r"cudaErrorMemoryAllocation",
            r"Failed to CUDA calloc|Cuda failure .*out of memory",
        ),
        "tuner plan {recipe}",
    ),
    Cause(
        SHARED_MEMORY,
        "/dev/shm is too small",  # noqa: S108
        (
            r"killed by signal: Bus error",
            r"unable to (?:allocate|open|write|resize|mmap|map) .*(?:shared memory|shm)",
            r"/dev/shm.*No space left on device|No space left on device.*/dev/shm",  # noqa: S108
            r"shared memory segment .*/dev/shm",
            r"out of shared memory",
        ),
        "df -h /dev/shm",
        3,
    ),
    Cause(
        HOST_MEMORY,
        "the machine ran out of memory",
        (
            r"^(?:\S+\.)?(?:_Array)?MemoryError\b",
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
            r"Cannot allocate memory",
            r"DataLoader worker .*killed by signal: Killed",
            r"oom[-_]kill event|Out of memory: Killed process",
            r"std::bad_alloc",
        ),
        "tuner plan {recipe}",
    ),
    Cause(
        NOT_A_NUMBER,
        "training diverged",
        (
            r"\b(?:eval_)?(?:loss|grad_norm) is (?:nan|-?inf)\b",
            r"Current loss scale already at minimum",
            r"probability tensor contains either `inf`, `nan`",
        ),
    ),
    Cause(
        PORT,
        "another process uses this port",
        (r"EADDRINUSE", r"[Aa]ddress already in use"),
        exit_code=3,
    ),
    Cause(
        "missing-compiler",
        "DeepSpeed needs ninja to compile an op",
        (r"ninja not being installed", r"Ninja is required to load C\+\+ extensions", r"ninja: (?:command )?not found"),
        "pip install ninja",
        3,
    ),
    Cause(
        "missing-compiler",
        "an op cannot be compiled",
        (
            r"(?:c\+\+|g\+\+|gcc|cc1plus|nvcc).*: (?:command )?not found",
            r"No such file or directory: '(?:[^']*/)?(?:c\+\+|g\+\+|gcc|nvcc)'",
            r"Failed to find C compiler",
            r"CUDA_HOME (?:environment variable is not set|does not exist)",
            r"fatal error: Python\.h: No such file",
            r"ninja: build stopped",
            r"Error building extension",
        ),
        "tuner doctor",
        3,
    ),
    Cause(
        "cuda-assert",
        "a value on the GPU is out of range, mostly a token id beyond the vocabulary",
        (r"device-side assert triggered", r"Assertion `.*` failed\.$", r"indexSelect.*Assertion"),
        "CUDA_LAUNCH_BLOCKING=1 {again}",
    ),
    Cause(
        "gpu-hardware",
        "a GPU is broken or no longer answers",
        (
            r"uncorrectable (?:NVLink|ECC) error",
            r"NVRM: Xid .*: (?:48|62|63|64|74|79|92|94|95|119|120)\b",
            r"GPU (?:has fallen off the bus|is lost)",
            r"CUDA error: (?:unknown error|hardware stack error|the launch timed out)",
        ),
        "nvidia-smi --query --display=ECC,PAGE_RETIREMENT,ROW_REMAPPER",
        3,
    ),
    Cause(
        "cuda-build",
        "this build of torch or of a kernel does not fit the GPU or its driver",
        (
            r"no kernel image is available",
            r"No CUDA GPUs are available",
            r"driver version is insufficient",
            r"NVIDIA driver on your system is too old",
            r"forward compatibility was attempted on non supported HW",
            r"PTX was compiled with an unsupported toolchain",
        ),
        "tuner doctor",
        3,
    ),
    Cause(
        "cuda-error",
        "a kernel failed on the GPU",
        (
            r"illegal memory access",
            r"misaligned address",
            r"unspecified launch failure",
            r"CUDA (?:kernel )?error",
            r"CUBLAS_STATUS_\w+",
            r"CUDNN_STATUS_\w+",
        ),
        "CUDA_LAUNCH_BLOCKING=1 {again}",
    ),
    Cause(
        HANG,
        "no rank made progress",
        (r"^Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$",),
        "tail -n 50 {log}",
        124,
        Role.WAITED,
    ),
    Cause(
        "collective-timeout",
        "a collective timed out",
        (
            r"Watchdog caught collective operation timeout",
            r"Timed out waiting \d+ ?ms for (?:recv|send) operation",
            r"failed to pass monitoredBarrier",
            r"wait timeout after \d+ ?ms",
            r"Timed out after \d+ seconds waiting for clients",
            r"client socket has timed out after",
        ),
        "tail -n 50 {log}",
        124,
        Role.WAITED,
    ),
    Cause(
        "lost-peer",
        "the connection to another rank was lost, and no rank says why",
        (
            r"Connection (?:closed by peer|reset by peer|refused)",
            r"remote process exit(?:ed|ing)",
            r"ncclRemoteError",
            r"failed to recv, got 0 bytes",
            r"recvValue failed|sendBytes failed",
            r"DistNetworkError",
            r"Application timeout caused pair closure",
            r"[Ww]atchdog .*(?:terminated|aborted)",
            r"NCCL communicator was aborted",
        ),
        role=Role.LOST,
    ),
    Cause(
        "nccl",
        "NCCL could not connect the GPUs",
        (
            r"Duplicate GPU detected",
            r"ncclInvalidUsage|ncclSystemError|ncclInternalError|ncclUnhandledCudaError",
            r"NCCL error",
            r"Bootstrap : no socket interface found",
        ),
        "NCCL_DEBUG=INFO {again}",
        3,
    ),
    Cause(
        "disk",
        "the disk is full",
        (
            r"No space left on device|os error 28\b|Errno 28\b",
            r"Disk quota exceeded|Errno 122\b",
            r"unexpected pos \d+ vs \d+",
            r"PytorchStreamWriter failed writing",
            r"basic_ios::clear: iostream error",
        ),
        "df -h {run}",
        74,
    ),
    Cause(
        "disk",
        "a file is larger than the limit (ulimit -f) or the file system allows",
        (r"File too large|os error 27\b|Errno 27\b",),
        "bash -c 'ulimit -f'",
        74,
    ),
    Cause(
        "library-mismatch",
        "installed libraries do not work together",
        (
            r"ImportError: cannot import name",
            r"No module named '?\w+",
            r"undefined symbol",
            r"version `(?:GLIBCXX|CXXABI|GLIBC)_[\d.]+' not found",
            r"cannot open shared object file",
            r"compiled using NumPy 1\.x|numpy\.dtype size changed",
            r"is required for a normal functioning of this module",
        ),
        "tuner doctor",
        3,
    ),
)
"""Searched from the top: the more special sign stands above the more general one."""

_SELF_EXPLAINING = (
    Cause("bad-data", "", (), "tuner data {recipe}"),
    Cause("bad-environment", "", (), "tuner doctor"),
)
KILLED = Cause("killed", "killed by SIGKILL, mostly for lack of memory", (), "dmesg --ctime | tail -n 20", 137)
CRASHED = Cause("crashed", "crashed", (), "tail -n 50 {log}", 139)
OVERDUE = Cause("did-not-stop", "did not stop when asked to", (), "tail -n 50 {log}", 137, Role.WAITED)
TOLD_TO_END = Cause("told-to-end", "received SIGTERM", exit_code=143, role=Role.LOST)
BUG = Cause("bug", "an error that tuner does not know", (), "tail -n 50 {log}")
SILENT = Cause("unknown", "ended without a report", (), "tail -n 50 {log}")


def every() -> Sequence[Cause]:
    """Return all causes; several of them can have one name."""
    return (*TABLE, *_SELF_EXPLAINING, KILLED, CRASHED, OVERDUE, TOLD_TO_END, BUG, SILENT)


def classify(text: str) -> tuple[Cause, str] | None:
    """Return the cause that a text shows and the line that shows it; source lines of tracebacks are no signs."""
    said = "\n".join(line for line in text.splitlines() if not _INDENTED.match(line))
    for cause in TABLE:
        line = cause.found_in(said)
        if line is not None:
            return cause, line
    return None


def named(name: str) -> Cause:
    """Return the first cause of that name, or a new one: the code of a TunerError that says all by itself."""
    by_name = {cause.name: cause for cause in reversed((*TABLE, *_SELF_EXPLAINING))}
    return by_name.get(name) or Cause(name, "")
