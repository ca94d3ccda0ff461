"""Whether this machine is well: its GPUs by NVML and the kernel's log, the folder that nodes share, its clock.

It asks the driver and opens no CUDA context. Nothing here could be tried on a GPU that is ill; the values are those of
NVIDIA's documents (NVML API reference; "XID errors", https://docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tuner.files import read_bytes
from tuner.machine import hardware, kernel

LIMIT_S = 10.0
"""A folder that does not answer for this long hangs."""
_SLOW_S = 2.0
_OFF_S = 60.0
"""Clocks may differ by this from that of the shared folder; Kerberos and munge allow 300 s."""
_SLOWED = {
    0x08: "slowed by its hardware (power or temperature)",
    0x20: "slowed for its temperature",
    0x40: "slowed by its hardware for its temperature",
    0x80: "slowed by its hardware for its power supply",
}
"""The bits of nvmlDeviceGetCurrentClocksEventReasons that mean that something is wrong: not idle, not a power cap."""
_XIDS = {
    48: "an uncorrectable memory error",
    62: "a halt of its controller",
    63: "a memory row to be replaced at the next reset",
    64: "a memory row that could not be replaced",
    74: "an NVLink error",
    79: "it fell off the bus",
    94: "a contained memory error",
    95: "an uncontained memory error",
    119: "its system processor did not answer",
    120: "an error of its system processor",
}
"""XIDs of the hardware; others (13, 31, 43, 45) come from programs too."""
_XID = re.compile(rb"^\d+,\d+,(\d+),[^\n]*?NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", re.MULTILINE)
_RESET = "Reset it (nvidia-smi --gpu-reset) when nothing uses it, or leave the node out."


class Ailment(NamedTuple):
    """What is wrong, and what to do. `is_fatal`: no run can succeed here; else it may be slow, or end soon."""

    what: str
    fix: str
    is_fatal: bool = False


# GPUs


def gpus(uuids: Sequence[str], log: Path = Path("/dev/kmsg")) -> list[Ailment]:
    """Return what is wrong with some of this machine's GPUs; what the driver does not tell is left out.

    Args:
        uuids: Those of the run; of an instance of MIG nothing is told.
        log: The kernel's log, which may be unreadable.
    """
    return hardware.with_nvml(lambda nvml: list(_gpus(nvml, uuids, xids(log)))) or []


def _gpus(nvml: Any, uuids: Sequence[str], xids_of: dict[str, set[int]]) -> Iterator[Ailment]:
    links: dict[int, int] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        if str(nvml.nvmlDeviceGetUUID(handle)) not in uuids:
            continue
        yield from (ailment._replace(what=f"GPU {index}: {ailment.what}") for ailment in _gpu(nvml, handle, xids_of))
        active = _asked(nvml, partial(_num_links, nvml, handle))
        links |= {} if active is None else {index: active}
    max_links = max(links.values(), default=0)
    for index, active in links.items():
        if active < max_links:
            problem = f"GPU {index}: {active} of its NVLinks are up, and {max_links} of another GPU here"
            yield Ailment(problem, "nvidia-smi nvlink --status shows them. " + _RESET)


def _gpu(nvml: Any, handle: Any, xids_of: dict[str, set[int]]) -> Iterator[Ailment]:
    def ask(name: str, *arguments: Any) -> Any:
        return _asked(nvml, lambda: getattr(nvml, name)(handle, *arguments))

    rows = ask("nvmlDeviceGetRemappedRows")
    if rows is not None and rows[3]:
        yield Ailment("its memory has a row that cannot be replaced", "Have it exchanged.", is_fatal=True)
    elif rows is not None and rows[2]:
        yield Ailment("its memory has a row to be replaced, which a reset does", _RESET)
    errors = ask("nvmlDeviceGetTotalEccErrors", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    if errors:
        yield Ailment(f"{errors} uncorrectable memory errors (ECC) since it was reset", _RESET)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons") or 0
    if slowed := [words for bit, words in _SLOWED.items() if reasons & bit]:
        yield Ailment(f"its clock is {', '.join(slowed)}", "Look at its cooling and power supply: nvidia-smi -q.")
    width, max_width = ask("nvmlDeviceGetCurrPcieLinkWidth"), ask("nvmlDeviceGetMaxPcieLinkWidth")
    if width and max_width and width < max_width:
        yield Ailment(f"its PCIe link has {width} of {max_width} lanes", "Have its seat and its cable looked at.")
    if bus := ask("nvmlDeviceGetPciInfo"):
        name = bus.busId.decode() if isinstance(bus.busId, bytes) else str(bus.busId)
        faults = [f"{number} ({_XIDS[number]})" for number in sorted(xids_of.get(_bus(name), ()))]
        if faults:
            yield Ailment(f"the kernel's log has XID {', '.join(faults)}", _RESET)


def _asked(nvml: Any, ask: Callable[[], Any]) -> Any:
    """Return NVML's answer, or None where this GPU or this driver has none."""
    try:
        return ask()
    except (nvml.NVMLError, AttributeError):
        return None


def _num_links(nvml: Any, handle: Any) -> int:
    return sum(int(nvml.nvmlDeviceGetNvLinkState(handle, link)) for link in range(nvml.NVML_NVLINK_MAX_LINKS))


def xids(log: Path = Path("/dev/kmsg")) -> dict[str, set[int]]:
    """Return the hardware's XIDs that the kernel's log has, by the GPU's bus; empty if the log cannot be read."""
    by_bus: dict[str, set[int]] = {}
    for record in kernel.log_records(log):
        for _, bus, number in _XID.findall(record):
            if int(number) in _XIDS:
                by_bus.setdefault(_bus(bus.decode()), set()).add(int(number))
    return by_bus


def _bus(name: str) -> str:
    """Return the bus of a PCI address without its function, and with a domain of four digits: NVML's has eight."""
    domain, _, rest = name.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


# Folders and the clock


def folder(path: Path, limit_s: float = LIMIT_S) -> list[Ailment]:
    """Write and read a file in a folder, and return what is wrong: it hangs, is slow, or has another time than we.

    A hanging mount holds what asks it for ever, so a thread asks, and is left behind.

    Raises:
        OSError: it cannot be written.
    """
    answers: list[Ailment | OSError] = []
    asking = threading.Thread(target=lambda: answers.extend(_folder(path)), daemon=True)
    asking.start()
    asking.join(limit_s)
    if asking.is_alive():
        fix = "Look at its mount on this machine: mount, dmesg."
        return [Ailment(f"{path} did not answer for {limit_s:g} s", fix, is_fatal=True)]
    for answer in answers:
        if isinstance(answer, OSError):
            raise answer
    return [answer for answer in answers if isinstance(answer, Ailment)]


def _folder(path: Path) -> Iterator[Ailment | OSError]:
    probe = path / f".probe-{socket.gethostname()}-{os.getpid()}-{time.monotonic_ns()}"
    began_s = time.monotonic()
    try:
        with probe.open("xb") as stream:  # effect: nothing else shows that a folder of several machines works
            stream.write(b"tuner")
            os.fsync(stream.fileno())
        is_read = read_bytes(probe) == b"tuner"
        off_s = time.time() - probe.stat().st_mtime
    except OSError as error:
        yield error
        return
    finally:
        with suppress(OSError):
            probe.unlink()  # effect: of its own file
    took_s = time.monotonic() - began_s
    if not is_read:
        yield Ailment(f"{path} gives back other bytes than were written", "Choose another folder.", is_fatal=True)
    if took_s > _SLOW_S:
        yield Ailment(f"{path} took {took_s:.1f} s to write and read 5 bytes", "Each save takes as long for each file.")
    if abs(off_s) > _OFF_S + took_s:
        offset = f"{abs(off_s):.0f} s {'ahead of' if off_s > 0 else 'behind'}"
        yield Ailment(f"the clock is {offset} that of {path}", "Let a time service set it (chrony, ntpd).")
