"""After a run failed, its next attempt: a lighter one (`--on-oom retry`), or the same once more (`--max-restarts`).

It decides and says so in one line; `execute` starts the attempt. The launchers of several nodes decide together, in
their meeting: each node tells that its ranks have ended, and whether it objects. Node 0 decides: it writes the run.json
of the next attempt, or tells why no attempt follows.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING

from tuner.errors import Stopped, TunerError
from tuner.launch import preflight
from tuner.launch.checks import host
from tuner.launch.pins import Pins
from tuner.launch.remedies import ON_OOM, for_lost_node_0, lighter
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.progress import say
from tuner.runs import checkpoints, restarts
from tuner.runs.causes import GPU_MEMORY, HOST_MEMORY, NOT_A_NUMBER, SHARED_MEMORY
from tuner.runs.directory import RunDirectory
from tuner.runs.records import Attempt, DiagnosisRecord, EndedAttempt
from tuner.runs.resume_point import IncompatibleStates

if TYPE_CHECKING:  # asyncio, which a run of one node does not need
    from tuner.launch.meeting.caller import Caller
    from tuner.launch.meeting.leader import Leader

RESTARTS = "--max-restarts"
_OUT_OF_MEMORY = (GPU_MEMORY, HOST_MEMORY)
_COMES_AGAIN = (*_OUT_OF_MEMORY, NOT_A_NUMBER, SHARED_MEMORY)
"""Causes that would end the same attempt again."""
_MAY_PASS = (1, 124)
"""Exit codes of a crash and of a hang. Above 128 a rank was killed; other codes are a mistake, a full disk, a stop."""


class _Refused(Exception):
    """Why there is no other attempt."""


def next_attempt(
    resolved: ResolvedRun, run_dir: RunDirectory, code: int, meeting: Leader | Caller | None = None
) -> ResolvedRun | None:
    """Return the next attempt, or None: no retry was requested, it would not help, or it is not allowed.

    Args:
        code: The exit code of this node's attempt.
        meeting: The other nodes, which are told how this node's attempt ended.

    Raises:
        TunerError: the run was told to stop on another node, or whoever started all nodes has ended.
    """
    request = resolved.request
    if meeting:
        return _with_other_nodes(resolved, run_dir, code, meeting)
    flag = ON_OOM if request.on_oom == "retry" else RESTARTS
    if not code or (flag == RESTARTS and not request.max_restarts):
        return None
    try:
        status = run_dir.read_status()
        failure = status.diagnosis
        if status.signal:  # a run that was told to stop must not start again
            return None
        if request.on_oom == "retry" and failure:
            config, ranks = resolved.recipe.config, resolved.topology.world_size
            if change := lighter(config, resolved.level, ranks, failure.cause):
                return _announced(resolved, _resolve_lighter(resolved, run_dir, failure, change), ON_OOM)
        flag = RESTARTS
        if not request.max_restarts or not may_pass(code, failure):
            return None
        return _announced(resolved, _resolve_again(resolved, failure), RESTARTS)
    except (TunerError, _Refused) as error:
        say(f"{flag}: not possible: {error}")
    return None


def _with_other_nodes(
    resolved: ResolvedRun, run_dir: RunDirectory, code: int, meeting: Leader | Caller
) -> ResolvedRun | None:
    """Return what all nodes do next: node 0 decides when the ranks of every node have ended."""
    from tuner.launch.meeting.leader import Leader  # loaded already

    failure, objection = None, None
    # All ranks stop together, also where only the launcher of another node has been killed and took its ranks along.
    have_stopped = code == Stopped.exit_code
    try:
        status = meeting.own_status or run_dir.read_status()
        failure = status.diagnosis
        if status.signal or not (have_stopped or may_pass(code, failure)):
            objection = f"node {resolved.topology.node_rank} ended with code {code}"
        text = failure.what if failure else status.message or f"it ended with code {code}"
    except TunerError as error:
        text = objection = str(error)
    meeting.ended(code, text, failure.cause if failure else None, objection)
    if not resolved.request.max_restarts:
        return None
    try:
        if isinstance(meeting, Leader):
            if refusal := objection or meeting.await_ends():
                raise _Refused(refusal)
            if have_stopped and not meeting.has_failed_node:
                raise _Refused(f"node 0 ended with code {code}")
            return _announced(resolved, _resolve_again(resolved, failure), RESTARTS)
        if objection:
            return None
        if meeting.has_lost_node_0 and "again" in (record := run_dir.read_run()).next:
            again = record.on_node(record.next["again"], 0)
            say(for_lost_node_0(again, meeting.topology, meeting.names, run_dir.path))
        launch_id, refusal = meeting.await_next()
        if launch_id is None:
            raise _Refused(refusal)
        preflight.check(resolved)
        _tell_of_this_node(resolved)
        # Node 0 has chosen and hashed the checkpoint; all ranks read its path in run.json.
        return replace(resolved, launch_id=launch_id)
    except (TunerError, _Refused) as error:
        if isinstance(error, TunerError) and error.code == Stopped.code:  # the run was told to stop meanwhile
            raise
        if isinstance(meeting, Leader):
            meeting.refuse(str(error))
        elif isinstance(error, TunerError):
            meeting.fail(error)
        if not ((objection or have_stopped) and isinstance(error, _Refused)):  # how this node ended is printed already
            say(f"{RESTARTS}: not possible: {error}")
    return None


def may_pass(code: int, failure: DiagnosisRecord | None) -> bool:
    """Return whether another attempt may succeed: the failure is neither a mistake nor one that would come again."""
    return (code in _MAY_PASS or code > 128) and (failure is None or failure.cause not in _COMES_AGAIN)


def _resolve_again(resolved: ResolvedRun, failure: DiagnosisRecord | None) -> ResolvedRun:
    """Return the same attempt once more, or raise `_Refused`: too many restarts without progress.

    A checkpoint is hashed once, for the attempt and for the check of progress.
    """
    again = _resolve(_same_request(resolved, failure), resolved)
    earlier = again.request.attempts
    saved_steps = [*(attempt.began for attempt in earlier[1:]), _resume_step(again)]
    ended = [
        EndedAttempt(cause=attempt.cause, step=attempt.step, began=attempt.began, saved=saved)
        for attempt, saved in zip(earlier, saved_steps, strict=True)
        if attempt.cause not in _OUT_OF_MEMORY
    ]
    if refusal := restarts.refusal(ended, resolved.request.max_restarts):
        raise _Refused(refusal)
    return again


def _resolve_lighter(
    resolved: ResolvedRun, run_dir: RunDirectory, failure: DiagnosisRecord, change: Pins
) -> ResolvedRun:
    same = _same_request(resolved, failure)
    request = same._replace(
        pins=(*same.pins, change),
        command=(*same.command, *change.flags) if same.command else (),
    )
    with contextlib.suppress(IncompatibleStates):  # if all checkpoints are damaged that is another error
        return _resolve(request, resolved)
    checkpoints.set_aside(run_dir.checkpoints, len(request.attempts))
    return _resolve(request, resolved)


def _same_request(resolved: ResolvedRun, failure: DiagnosisRecord | None) -> Request:
    request, batch = resolved.request, resolved.batch
    # With a smaller batch `auto` might take a lower level than the one that ran out of memory.
    keeps_level = resolved.final.from_catalog and not resolved.topology.min_nodes  # a checkpoint keeps its own
    kept = (Pins("the level of the first attempt", level=resolved.level),) if keeps_level else ()
    attempt = Attempt(
        deepspeed=resolved.level,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        began=_resume_step(resolved),
    )
    if failure:
        attempt = attempt.model_copy(update=failure.model_dump(include={"cause", "what", "rank", "step"}))
    return request._replace(
        pins=(*request.pins, *kept),
        work_dir=resolved.run_path,
        resume="auto",
        attempts=(*request.attempts, attempt),
    )


def _resume_step(resolved: ResolvedRun) -> int:
    return resolved.resume.checkpoint.step if resolved.resume else 0


def _resolve(request: Request, resolved: ResolvedRun) -> ResolvedRun:
    environ, hardware, topology = resolved.environ, resolved.hardware, resolved.topology
    following = resolve_run(request, environ, hardware, datetime.now().astimezone(), topology)
    preflight.check(following)
    _tell_of_this_node(following)
    return following


def _tell_of_this_node(resolved: ResolvedRun) -> None:
    """Print what the failure may have come from; other warnings of the checks were told at the first start."""
    for finding in host.is_well(resolved):
        if isinstance(finding, str):
            say(f"WARNING: {finding}")


def _announced(before: ResolvedRun, following: ResolvedRun, flag: str) -> ResolvedRun:
    batch, attempts_so_far = following.batch, following.request.attempts
    now, then = following.recipe.config.split, before.recipe.config.split
    recomputes = now.recompute and (not then.recompute or now.recomputed_layers != then.recomputed_layers)
    split = f"micro-batch {batch.micro_batch} x accumulation {batch.accumulation} (global batch {batch.global_batch})"
    lighter_by = f" with {split} at {following.level}{', recomputing activations' if recomputes else ''}"
    change = lighter_by if flag == ON_OOM else ""
    begin = following.resume.path.name if following.resume else "the start"
    cause = attempts_so_far[-1].cause or "a stop"
    say(f"{flag} after {cause}: attempt {len(attempts_so_far) + 1}{change}, from {begin}.")
    return following
