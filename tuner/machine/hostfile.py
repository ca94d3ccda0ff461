"""DeepSpeed's hostfile, its --include and --exclude, and its .deepspeed_env: which GPUs of which hosts, with what set.

It reads files and reaches no host. DeepSpeed's own parser comes with torch, seconds that a launcher does not need.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tuner.errors import Option, UsageError
from tuner.files import read_named_text

# ssh takes a host that begins with a dash for an option.
_LINE = re.compile(r"([^-#\s]\S*)\s+slots=([0-9]{1,4})(?:\s.*)?")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)")
_NAMED = re.compile(r"([^:@]+)(?::([0-9]{1,4}(?:,[0-9]{1,4})*))?")
_ENVIRONMENT = ".deepspeed_env"
_MAX_BYTES = 1_000_000
NODE = "TUNER_HOST"
"""Set on each host to its name: what is started there is a node, whatever hostfile its command names."""

MEETING = "TUNER_MEETING"
"""Set on each host to the secret by which the nodes know each other, and the hosts' names; ranks do not get it."""

RESTARTED_NODE = "TUNER_AGAIN"
"""Set on a host where a lost node is started again: its command goes on in the run that it began."""


class Host(NamedTuple):
    """A host by its name for ssh, and which of its GPUs are used, counted from 0."""

    name: str
    gpus: tuple[int, ...]
    is_whole: bool
    """All that the hostfile gives it."""


def read_hostfile(path: Path, include: str | None, exclude: str | None) -> tuple[Host, ...]:
    """Return the hosts of a file of lines `NAME slots=N`, in its order.

    Args:
        include: `NAME@NAME:0,2`: only these hosts, and of some only these GPUs.
        exclude: In the same form what is left out; one of both at most.

    Raises:
        UsageError: the file cannot be read or a line of it understood, or a filter names what is not in it.
    """
    slots = _slots(path)
    if include and exclude:
        fix = "Keep one of them."
        raise UsageError("--include and --exclude cannot be combined", where="--include / --exclude", fix=fix)
    flag, included = ("--include", _filter(include, "--include", slots)) if include else ("--exclude", None)
    left_out = _filter(exclude, flag, slots) if exclude else {}
    hosts = []
    for name, number in slots.items():
        every = tuple(range(number))
        gpus = every if included is None else included.get(name, ())
        gpus = tuple(gpu for gpu in gpus if gpu not in left_out.get(name, ()))
        if gpus:
            hosts.append(Host(name, gpus, gpus == every))
    if not hosts:
        raise UsageError("no GPU is left", where=f"{path} / {flag}", fix="Exclude fewer.")
    return tuple(hosts)


def _slots(path: Path) -> dict[str, int]:
    fix = "It must be a file with a line `NAME slots=N` for each host."
    text = read_named_text(path, UsageError, max_bytes=_MAX_BYTES, fix=fix, name=str(path))
    slots: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.strip().startswith("#"):
            continue
        match, where = _LINE.fullmatch(line.strip()), f"{path}:{number}"
        if not match or not int(match[2]):
            fix = "Example: worker-1 slots=8 (a name that ssh knows, and its number of GPUs)."
            raise UsageError(f"{line.strip()!r} is not a host with its slots", where=where, fix=fix)
        if match[1] in slots:
            raise UsageError(f"{match[1]} is listed twice", where=where, fix="Keep one of the lines.")
        slots[match[1]] = int(match[2])
    if not slots:
        raise UsageError(f"{path} lists no host", where="--hostfile", fix="Example: worker-1 slots=8.")
    return slots


def _filter(text: str, flag: str, slots: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    gpus_of_host: dict[str, tuple[int, ...]] = {}
    for part in text.split("@"):
        match = _NAMED.fullmatch(part)
        if not match:
            fix = f"Example: {flag} worker-1@worker-2:0,1."
            raise UsageError(f"{part!r} is not a host with its GPUs", where=flag, fix=fix)
        name, gpus = match[1], [int(number) for number in match[2].split(",")] if match[2] else None
        if name not in slots:
            raise UsageError(f"{name} is not in the hostfile", where=flag, fix=f"It has {', '.join(slots)}.")
        beyond = [str(gpu) for gpu in gpus or () if gpu >= slots[name]]
        if beyond:
            fix = f"Its {slots[name]} slots are 0 to {slots[name] - 1}."
            raise UsageError(f"{name} has no slot {', '.join(beyond)}", where=flag, fix=fix)
        every = tuple(range(slots[name]))
        gpus_of_host[name] = tuple(sorted({*gpus_of_host.get(name, ()), *(every if gpus is None else gpus)}))
    return gpus_of_host


_HARMLESS = frozenset(
    (
        *("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL", "NCCL_SOCKET_IFNAME"),
        *("NCCL_SOCKET_FAMILY", "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD", "NCCL_CROSS_NIC", "NCCL_IB_DISABLE"),
        *("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_SL", "NCCL_IB_TC"),
        *("NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_PCI_RELAXED_ORDERING", "NCCL_IB_ADAPTIVE_ROUTING"),
        *("NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE"),
        *("NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NVLS_ENABLE"),
        *("NCCL_ASYNC_ERROR_HANDLING", "NCCL_BLOCKING_WAIT", "NCCL_TIMEOUT", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        *("TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
        *("GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "OMP_NUM_THREADS"),
    )
)
"""Interfaces, debugging and timeouts of NCCL, gloo and torch: none names a file, a program or a library.

A list of harmful names would leak: NCCL_NET_PLUGIN, NCCL_DEBUG_FILE, CC, TORCH_EXTENSIONS_DIR. Source of the names:
NCCL's "Environment Variables", torch's "torch.distributed" and "ProcessGroupNCCL Environment Variables".
"""


def variables(home: Path, cwd: Path, name: str | None = None, *, allow_code: bool = False) -> dict[str, str]:
    """Return what .deepspeed_env of the home folder sets, and over it that of the working directory.

    The working directory may be a stranger's: from its file only harmless names pass, unless code is allowed.

    Args:
        name: Their name, where DS_ENV_FILE says another; a whole path is the user's own choice.
        allow_code: Take every variable.

    Raises:
        UsageError: a file that cannot be read, a line that sets no variable, or a variable that may run code.
    """
    files = dict.fromkeys((home / (name or _ENVIRONMENT), cwd / (name or _ENVIRONMENT)))
    values: dict[str, str] = {}
    for file in files:
        assignments = _variables(file)
        may_run = [key for key in assignments if key not in _HARMLESS]  # a value may be a secret
        is_trusted = file.parent.resolve() == home.resolve() or Path(name or "").is_absolute()
        if may_run and not (allow_code or is_trusted):
            fix = f"Read {file}. Then move them to {home / _ENVIRONMENT}, or add {Option('allow_code', True)}."
            message = f"a file of the working directory sets {', '.join(may_run)} on every host, which may run code"
            raise UsageError(message, where=file, fix=fix)
        values |= assignments
    return values


def _variables(file: Path) -> dict[str, str]:
    values: dict[str, str] = {}
    if not file.is_file():
        return values
    fix = "It must be text with a line NAME=VALUE for each variable."
    text = read_named_text(file, UsageError, max_bytes=_MAX_BYTES, fix=fix, name=str(file))
    for number, line in enumerate(text.splitlines(), start=1):
        variable = _VARIABLE.fullmatch(line.strip())
        if variable:
            values[variable[1]] = variable[2]
        elif line.strip() and not line.strip().startswith("#"):
            problem = f"{line.strip()!r} does not set a variable"
            raise UsageError(problem, where=f"{file}:{number}", fix="Use: NAME=VALUE.")
    return values
