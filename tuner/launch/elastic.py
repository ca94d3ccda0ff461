"""`--nnodes MIN:MAX`: the nodes of each attempt, and the plan for fewer of them than there should be.

The meeting says which nodes are there. Node 0 makes the plan anew for that number, on the same global batch; the other
nodes take over what it has written. `resuming` refuses the flag where no plan for fewer nodes could go on.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from tuner.errors import TunerError
from tuner.launch import preflight
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine.topology import Topology
from tuner.progress import say
from tuner.runs.directory import RunDirectory

if TYPE_CHECKING:  # asyncio, which a run of one node does not need
    from tuner.launch.meeting.caller import Caller
    from tuner.launch.meeting.leader import Leader


def gathered(resolved: ResolvedRun, meeting: Leader | Caller) -> ResolvedRun | None:
    """Wait for the nodes of an attempt, and return its plan for as many as are there; None: the others have done it.

    Args:
        resolved: Planned for all nodes, or for those of the attempt before.

    Raises:
        TunerError: as `Meeting.wait`, or the plan for all nodes cannot start.
    """
    refused: set[int] = set()
    while True:
        launch_id = meeting.wait(refused)
        if launch_id is None and not meeting.topology.leads:
            say("The run is done. This node was not needed for it.")
            return None
        topology = meeting.place
        if launch_id:
            return replace(resolved, launch_id=launch_id, machines=resolved.machines._replace(topology=topology))
        if topology == resolved.topology:
            return resolved
        try:
            return _planned_for(resolved, topology)
        except TunerError as error:
            if topology.num_nodes == meeting.topology.num_nodes:
                raise
            refused.add(topology.num_nodes)
            say(f"--nnodes: it cannot go on with {topology.num_nodes} nodes, so it waits: {error}")


def as_node_0_planned(resolved: ResolvedRun, run_dir: RunDirectory) -> ResolvedRun:
    """Return a node's attempt with the DeepSpeed config of node 0, which knew how many nodes there are."""
    if resolved.topology.leads or not resolved.topology.min_nodes:
        return resolved
    return replace(resolved, final=resolved.final._replace(config=run_dir.read_json(run_dir.deepspeed)))


def _planned_for(resolved: ResolvedRun, topology: Topology) -> ResolvedRun:
    state = resolved.request.state_on_all_nodes or resolved.state
    request = resolved.request._replace(work_dir=resolved.run_path, state_on_all_nodes=state)
    following = resolve_run(request, resolved.environ, resolved.hardware, datetime.now().astimezone(), topology)
    warnings = preflight.check(following)
    batch, new = following.batch, [line for line in (*following.notes, *warnings) if line not in resolved.notes]
    kept = " (kept: the checkpoint's optimizer states are those of its ZeRO stage)" if following.resume else ""
    first = (
        f"--nnodes: {topology.describe()}, {following.level}{kept}, batch size {batch.global_batch} "
        f"({batch.micro_batch} x {batch.accumulation} x {batch.ranks})."
    )
    say("\n".join((first, *new)))
    return following
