"""Is this node well: its GPUs, the folder that it shares, its clock. It is asked before each start and each restart."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress

from tuner.errors import MachineError
from tuner.launch.checks import Finding
from tuner.launch.checks.host import existing
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import health

_WHERE = "this node"


def is_well(run: ResolvedRun) -> Iterator[Finding]:
    """Find ill GPUs, a folder that hangs, and a wrong clock; once on each node, and by the node's name."""
    if run.topology.local_rank:
        return
    node, ailments = socket.gethostname(), health.gpus([gpu.uuid for gpu in run.hardware.gpus])
    with suppress(OSError):  # it cannot be written: the start tells why
        ailments += health.folder(existing(run.run_path))
    for ailment in ailments:
        problem = f"{node}: {ailment.what}"
        yield MachineError(problem, where=_WHERE, fix=ailment.fix) if ailment.is_fatal else f"{problem}. {ailment.fix}"
