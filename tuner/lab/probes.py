"""The heavy probes of `tuner doctor`: each in a process of its own, with a deadline, its end told whatever it is.

It starts and ends children; what they find is `tuner.lab.probe`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

DEADLINE_S = 60.0
_AT_ONCE = 2


@dataclass(frozen=True)
class Row:
    """One line of the report. `status`: 'ok', 'warning', 'failed', or 'absent' for what nobody needs to have."""

    name: str
    status: str
    text: str
    fix: str | None = None


@dataclass(frozen=True)
class Probe:
    """One probe: what the report calls it, its process's arguments, and what to do where it fails."""

    name: str
    arguments: Sequence[str]
    fix: str
    module: str = "tuner.lab.probe"


def run_all(probes: Sequence[Probe], env: Mapping[str, str], deadline_s: float = DEADLINE_S) -> list[Row]:
    """Run the probes, a few at once, each for at most `deadline_s`; the rows stand in the order of the probes."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda probe: run(probe, env, deadline_s), probes))


def run(probe: Probe, env: Mapping[str, str], deadline_s: float = DEADLINE_S) -> Row:
    """Run one probe to its end, to its crash or to the deadline; leave no process behind."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # a pipe that nobody reads would fill
        argv = [sys.executable, "-m", probe.module, *probe.arguments]
        child = subprocess.Popen(argv, stdout=out, stderr=err, env=dict(env), start_new_session=True)
        try:
            code = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        status, text = _answer(_text(out)) or ("failed", _end(code, _text(err), deadline_s))
    return Row(probe.name, status, text, probe.fix if status == "failed" else None)


def _end(code: int | None, stderr: str, deadline_s: float) -> str:
    """Return how a process ended that gave no answer."""
    if code is None:
        return f"no answer within {deadline_s:g} s"
    if code < 0:
        return f"the process was killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    return lines[-1] if lines else f"the process ended with code {code} and no output"


def _text(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read().decode(errors="replace")


def _answer(text: str) -> tuple[str, str] | None:
    for line in reversed(text.splitlines()):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict) and {"status", "text"} <= found.keys():
                return str(found["status"]), str(found["text"])
    return None


def heavy(num_gpus: int, *, has_flash: bool) -> list[Probe]:
    """Return the probes for so many visible GPUs."""
    again = "Reinstall it for this machine: make install, or pip install --force-reinstall "
    network = "NCCL_DEBUG=INFO shows what it tried; NCCL_P2P_DISABLE=1 and NCCL_SOCKET_IFNAME help most often."
    local = "Check that this machine's host name resolves, or set a network interface: GLOO_SOCKET_IFNAME=lo."
    return [
        Probe("torch", ["torch"], f"{again}torch."),
        Probe("training libraries", ["trainers"], f"{again}-r requirements.txt."),
        Probe("DeepSpeed", ["deepspeed"], f"{again}deepspeed."),
        Probe("bitsandbytes", ["bitsandbytes"], f"{again}bitsandbytes; only quantized recipes need it."),
        *([Probe("flash attention", ["flash-attention"], f"{again}flash-attn.")] if has_flash and num_gpus else []),
        Probe("all-reduce", ["all-reduce", str(num_gpus or 2)], network if num_gpus else local),
    ]
