"""A run's part in the meeting of its nodes: what a request and its plan say to the others. One node has none."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from tuner import __version__
from tuner.errors import TunerError, exit_code_of
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine import launchers
from tuner.machine.hardware import Hardware
from tuner.machine.hostfile import MEETING
from tuner.machine.topology import Topology

if TYPE_CHECKING:
    from tuner.launch.meeting.caller import Caller
    from tuner.launch.meeting.leader import Leader
    from tuner.launch.meeting.messages import Plan
    from tuner.launch.meeting.part import Meeting


class Others:
    """The other nodes of a run; `meeting` is None on one node, and where another launcher starts the ranks."""

    def __init__(self, request: Request, environ: Mapping[str, str], stack: ExitStack) -> None:
        self._request, self._environ, self._stack = request, environ, stack
        self.meeting: Leader | Caller | None = None

    def join(self, topology: Topology) -> None:
        """Take part, if there are other nodes and this process does not yet."""
        if self.meeting is not None or topology.num_nodes == 1 or not topology.is_supervised:
            return
        # asyncio, which a run of one node does not need
        from tuner.launch.meeting.caller import Caller
        from tuner.launch.meeting.leader import Leader
        from tuner.launch.meeting.part import call_key

        secret, *names = self._environ.get(MEETING, "").split(" ")  # `--hostfile` sends them, with the hosts' names
        words = self._request.command or (str(self._request.recipe), repr(self._request.overrides))
        part: type[Leader | Caller] = Leader if topology.leads else Caller
        meeting = part(topology, call_key(secret, words, topology.master_port), names, self._request.start_timeout_s)
        meeting.listen()
        self._stack.callback(meeting.close)
        self._stack.enter_context(_errors_told_to(meeting))
        self._stack.enter_context(meeting.interrupting())
        self.meeting = meeting

    def planned(self, run: ResolvedRun) -> None:
        """Tell the others where the run directory is."""
        self.join(run.topology)  # not before, if only the plan knew the nodes: from a file of accelerate
        if self.meeting:
            self.meeting.share(run.run_path)

    def ready(self, run: ResolvedRun) -> None:
        """Tell the others that this node's checks are done, and what it is about to run."""
        if self.meeting:
            self.meeting.agree(plan_of(run))


@contextmanager
def joined(request: Request, environ: Mapping[str, str], hardware: Hardware) -> Iterator[Others]:
    """Take part in the meeting of a run's nodes while it prepares and runs.

    An error of this node that leaves the block ends all nodes, and one of another node ends this one: at once while it
    prepares, if this is the main thread.

    Raises:
        TunerError: as the block; or another node's error.
    """
    with ExitStack() as stack:
        others = Others(request, environ, stack)
        topology: Topology | None = None
        with suppress(TunerError):  # the plan raises it again, after what is wrong with the recipe
            topology = launchers.resolve(request.flags, environ, len(hardware.gpus))
        if topology:
            others.join(topology)
        yield others


@contextmanager
def _errors_told_to(meeting: Meeting) -> Iterator[None]:
    try:
        yield
    except TunerError as error:
        meeting.fail(error)
        raise
    except KeyboardInterrupt:
        stopped = TunerError("stopped by Ctrl-C")
        stopped.exit_code = exit_code_of(signal.SIGINT)
        meeting.fail(stopped)
        raise


def plan_of(run: ResolvedRun) -> Plan:
    """Return what all nodes must be about to run: what was asked for, and not what this machine makes of it."""
    from tuner.launch.meeting.messages import Plan

    request, recipe, topology = run.request, run.recipe, run.topology
    command = shlex.join(request.command)
    parts: dict[str, object] = {
        **recipe.asked,
        "ds": recipe.ds,
        "--nvme": recipe.nvme,
        "--deepspeed": request.deepspeed,
        "--max-restarts": request.max_restarts,
        "--nproc-per-node": topology.nproc_per_node,
        "MIN of --nnodes": topology.min_nodes,
        "tuner": __version__,
    }
    return Plan.of(command, parts)
