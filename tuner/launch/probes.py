"""The heavy probes of `tuner doctor`: each in processes of its own, with a deadline, its end told whatever it is.

It starts and ends children; what they find is `tuner.worker.probe`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

DEADLINE_S = 60.0
_AT_ONCE = 2
_POLL_S = 0.05


@dataclass(frozen=True)
class Row:
    """One line of the report. `status`: 'ok', 'warning', 'failed', or 'absent' for what nobody needs to have."""

    name: str
    status: str
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class Probe:
    """One probe: what the report calls it, its processes' arguments, and what to do where it fails."""

    name: str
    processes: Sequence[Sequence[str]]
    fix: str
    module: str = "tuner.worker.probe"


def run_all(probes: Sequence[Probe], env: Mapping[str, str], deadline_s: float = DEADLINE_S) -> list[Row]:
    """Run the probes, a few at once, each for at most `deadline_s`; the rows stand in the order of the probes."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda probe: run(probe, env, deadline_s), probes))


def run(probe: Probe, env: Mapping[str, str], deadline_s: float = DEADLINE_S) -> Row:
    """Run one probe to its end, to its crash or to the deadline; leave no process behind."""
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(_child(probe, arguments, env)) for arguments in probe.processes]
        deadline = time.monotonic() + deadline_s
        while any(child.poll() is None for child, _, _ in children) and time.monotonic() < deadline:
            if any(child.poll() not in (None, 0) for child, _, _ in children):
                break  # the others would wait for it until the deadline
            time.sleep(_POLL_S)
        told = [_told(child, out, err, deadline_s) for child, out, err in children]
    status, text = max(told, key=lambda one: ("ok", "warning", "unheard", "failed").index(one[0]))
    status = "failed" if status == "unheard" else status
    return Row(probe.name, status, text, probe.fix if status == "failed" else None)


@contextlib.contextmanager
def _child(
    probe: Probe, arguments: Sequence[str], env: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # a pipe that nobody reads would fill
        argv = [sys.executable, "-m", probe.module, *arguments]
        child = subprocess.Popen(argv, stdout=out, stderr=err, env=dict(env), start_new_session=True)
        try:
            yield child, out, err
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _told(child: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes], deadline_s: float) -> tuple[str, str]:
    """Return a status and a text of one process: its answer, or how it ended without one."""
    answer = _answer(_text(out))
    if answer:
        return str(answer["status"]), str(answer["text"])
    code = child.poll()
    if code is None:  # 'unheard' where another process of the probe is to blame
        return "unheard", f"no answer within {deadline_s:g} s"
    if code < 0:
        return "failed", f"the process died of {signal.Signals(-code).name}"
    lines = [line.strip() for line in _text(err).splitlines() if line.strip()]
    return "failed", lines[-1] if lines else f"the process ended with code {code} and said nothing"


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _answer(text: str) -> dict[str, Any] | None:
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and {"status", "text"} <= found.keys():
                return found
    return None


def heavy(num_gpus: int, *, has_flash: bool, meeting: Path) -> list[Probe]:
    """Return the probes for so many visible GPUs; ranks of the all-reduce meet in a file of the folder `meeting`."""
    ranks = max(num_gpus, 1) if num_gpus else 2
    between = [["all-reduce", str(rank), str(ranks), str(meeting / "store")] for rank in range(ranks)]
    again = "Install it again for this machine: make install, or pip install --force-reinstall "
    network = (
        "NCCL_DEBUG=INFO shows what it tried; NCCL_P2P_DISABLE=1 and NCCL_SOCKET_IFNAME are what helps most often."
    )
    local = "Check that this machine's host name resolves, or name a network interface: GLOO_SOCKET_IFNAME=lo."
    return [
        Probe("torch", [["torch"]], f"{again}torch."),
        Probe("training libraries", [["trainers"]], f"{again}-r requirements.txt."),
        Probe("DeepSpeed", [["deepspeed"]], f"{again}deepspeed."),
        Probe("bitsandbytes", [["bitsandbytes"]], f"{again}bitsandbytes; only quantized recipes need it."),
        *([Probe("flash attention", [["flash-attention"]], f"{again}flash-attn.")] if has_flash and num_gpus else []),
        Probe("all-reduce", between, network if num_gpus else local),
    ]
