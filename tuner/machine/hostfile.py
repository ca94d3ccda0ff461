"""DeepSpeed's hostfile, its --include and --exclude, and its .deepspeed_env: which GPUs of which hosts, with what set.

It reads files and reaches no host. DeepSpeed's own parser comes with torch, seconds that a launcher does not need.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from tuner.errors import UsageError

# ssh takes a host that begins with a dash for an option.
_LINE = re.compile(r"([^-#\s]\S*)\s+slots=([0-9]{1,4})(?:\s.*)?")
_VARIABLE = re.compile(r"([A-Za-z_]\w*)=(.*)")
_NAMED = re.compile(r"([^:@]+)(?::([0-9]{1,4}(?:,[0-9]{1,4})*))?")
_ENVIRONMENT = ".deepspeed_env"
NODE = "TUNER_HOST"
"""Set on each host to its name: what is started there is a node, whatever hostfile its command names."""


class Host(NamedTuple):
    """A host by its name for ssh, and which of its GPUs are used, counted from 0."""

    name: str
    gpus: tuple[int, ...]
    is_whole: bool
    """All that the hostfile gives it."""


def read(path: Path, include: str | None, exclude: str | None) -> tuple[Host, ...]:
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
    flag, named = ("--include", _filter(include, "--include", slots)) if include else ("--exclude", None)
    left_out = _filter(exclude, flag, slots) if exclude else {}
    hosts = []
    for name, number in slots.items():
        every = tuple(range(number))
        gpus = every if named is None else named.get(name, ())
        gpus = tuple(gpu for gpu in gpus if gpu not in left_out.get(name, ()))
        if gpus:
            hosts.append(Host(name, gpus, gpus == every))
    if not hosts:
        raise UsageError("no GPU is left", where=f"{path} / {flag}", fix="Exclude fewer.")
    return tuple(hosts)


def _slots(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fix = "It must be a file with a line `NAME slots=N` for each host."
        raise UsageError(f"{path} cannot be read: {error}", where="--hostfile", fix=fix) from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
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
    named: dict[str, tuple[int, ...]] = {}
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
        named[name] = tuple(sorted({*named.get(name, ()), *(every if gpus is None else gpus)}))
    return named


def variables(folders: Iterable[Path], name: str | None = None) -> dict[str, str]:
    """Return what the .deepspeed_env files in some folders set, a later folder's over an earlier one's.

    Args:
        name: Their name, where DS_ENV_FILE says another.

    Raises:
        UsageError: a line that sets no variable.
    """
    values: dict[str, str] = {}
    for file in (folder / (name or _ENVIRONMENT) for folder in folders):
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
        for number, line in enumerate(lines, start=1):
            variable = _VARIABLE.fullmatch(line.strip())
            if variable:
                values[variable[1]] = variable[2]
            elif line.strip() and not line.strip().startswith("#"):
                raise UsageError(
                    f"{line.strip()!r} does not set a variable", where=f"{file}:{number}", fix="Use: NAME=VALUE."
                )
    return values
