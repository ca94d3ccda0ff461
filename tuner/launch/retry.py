"""After a run failed, the plan of its next attempt: a lighter one (`--on-oom retry`), or the same (`--max-restarts`).

It decides and says so in one line; starting it is `start`'s work. Several nodes decide together (`nodes`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from tuner.errors import DiskError, TunerError
from tuner.launch import nodes, preflight
from tuner.launch import plan as plans
from tuner.launch.plan import LaunchPlan, Request
from tuner.launch.remedies import Lighter, lighter
from tuner.launch.resuming import Immovable
from tuner.runs import attempts, checkpoints
from tuner.runs.causes import GPU_MEMORY, HOST_MEMORY, NOT_A_NUMBER, SHARED_MEMORY
from tuner.runs.directory import RunDirectory

ON_OOM = "--on-oom retry"
RESTARTS = "--max-restarts"
_OUT_OF_MEMORY = (GPU_MEMORY, HOST_MEMORY)
_COMES_AGAIN = (*_OUT_OF_MEMORY, NOT_A_NUMBER, SHARED_MEMORY)
"""Causes that the same attempt would meet again."""
_MAY_PASS = (1, 124)
"""A crash and a hang; above 128 a rank was killed. All other codes are a mistake, a full disk, or a stop."""


def next_plan(plan: LaunchPlan, run: RunDirectory, environ: Mapping[str, str], code: int) -> LaunchPlan | None:
    """Return the plan of the next attempt, or None: nobody asked for one, it would not help, or it may not be.

    Args:
        code: How this node's attempt ended.
    """
    if plan.request.max_restarts and plan.topology.num_nodes > 1:
        return _with_other_nodes(plan, run, environ, code)
    flag = ON_OOM if plan.request.on_oom == "retry" else RESTARTS
    if not code or (flag == RESTARTS and not plan.request.max_restarts):
        return None
    try:
        status = run.read_json(run.status)
        found = status.get("diagnosis") or {}
        change = _lighter(plan, found)
        if "signal" in status:  # who asked a run to stop does not want it to start again
            return None
        if change:
            return _say(_made_lighter(_lighter_request(plan, change, found), plan, run, environ), ON_OOM)
        flag = RESTARTS
        if not plan.request.max_restarts or not _may_pass(code, found):
            return None
        made, refusal = _made_again(plan, run, environ, found)
        if made:
            return _say(made, RESTARTS)
    except TunerError as error:
        refusal = str(error)
    _tell(f"{flag}: not possible: {refusal}")
    return None


def _with_other_nodes(plan: LaunchPlan, run: RunDirectory, environ: Mapping[str, str], code: int) -> LaunchPlan | None:
    """Return what all nodes do next: node 0 decides when the ranks of every node have ended."""
    here, launch_id, refusal = plan.topology.node_rank, None, None
    patience_s = nodes.patience_s(plan.recipe.config.train_cfg.hang_timeout, plan.request.grace_s)
    try:
        status = run.read_json(run.status)
        found = status.get("diagnosis") or {}
        goes_on = "signal" not in status and _may_pass(code, found)
        objection = None if goes_on else f"node {here} ended with code {code}"
        nodes.ended(run, here, objection)
        if objection and not plan.topology.leads:
            return None
        if plan.topology.leads:
            refusal = objection or nodes.objection(run, plan.topology.num_nodes, patience_s)
            made, refusal = (None, refusal) if refusal else _made_again(plan, run, environ, found)
            if made:
                return _say(made, RESTARTS)
        else:
            launch_id, refusal = nodes.decision(run, plan.launch_id, patience_s)
            if launch_id:
                return replace(_made(_same_request(plan, found), plan, environ), launch_id=launch_id)
    except TunerError as error:
        refusal, objection = str(error), None
    if plan.topology.leads:
        with contextlib.suppress(DiskError):
            nodes.refuse(run, str(refusal))
    if not objection:  # one of its own is told by how it ended
        _tell(f"{RESTARTS}: not possible: {refusal}")
    return None


def _may_pass(code: int, found: Mapping[str, Any]) -> bool:
    """Say whether a failure may be gone the next time: not a mistake, and nothing that comes again."""
    return (code in _MAY_PASS or code > 128) and found.get("cause") not in _COMES_AGAIN


def _made_again(
    plan: LaunchPlan, run: RunDirectory, environ: Mapping[str, str], found: Mapping[str, Any]
) -> tuple[LaunchPlan | None, str | None]:
    """Return the plan of the same attempt once more, or why there is none; a checkpoint is verified once for both."""
    restarts = [attempt for attempt in plan.request.attempts if attempt["cause"] not in _OUT_OF_MEMORY]
    num, limit = len(restarts), plan.request.max_restarts
    if refusal := attempts.too_often(num, limit):
        return None, refusal
    made = _made(_same_request(plan, found), plan, environ)
    refusal = attempts.refusal(run, num, limit, checkpoints.step_of(made.resume) if made.resume else 0)
    return (None, refusal) if refusal else (made, None)


def _lighter(plan: LaunchPlan, found: Mapping[str, Any]) -> Lighter | None:
    if plan.request.on_oom != "retry":
        return None
    return lighter(plan.recipe.config, plan.level, plan.topology.world_size, str(found.get("cause")))


def _lighter_request(plan: LaunchPlan, change: Lighter, found: Mapping[str, Any]) -> Request:
    asked = _same_request(plan, found)
    pairs = (*asked.overrides.pairs, *((ON_OOM, text) for text in change.sets))
    return replace(
        asked,
        overrides=replace(asked.overrides, pairs=pairs),
        deepspeed=change.level or asked.deepspeed,
        command=(*asked.command, *change.flags) if asked.command else (),
    )


def _same_request(plan: LaunchPlan, found: Mapping[str, Any]) -> Request:
    asked = plan.request
    ended = {key: found.get(key) for key in ("cause", "what", "rank", "step")}
    ran = {"deepspeed": plan.level, "micro_batch": plan.batch.micro_batch, "accumulation": plan.batch.accumulation}
    return replace(
        asked,
        # Pinned: with a smaller batch `auto` might take a lower level than the one that ran out of memory.
        deepspeed=plan.level if plan.final.from_catalog else asked.deepspeed,
        work_dir=plan.run_path,
        resume="auto",
        attempts=(*asked.attempts, {**ended, **ran}),
    )


def _made(request: Request, plan: LaunchPlan, environ: Mapping[str, str]) -> LaunchPlan:
    made = plans.make(request, environ, plan.hardware, datetime.now().astimezone())
    preflight.check(made, environ)
    return made


def _made_lighter(request: Request, plan: LaunchPlan, run: RunDirectory, environ: Mapping[str, str]) -> LaunchPlan:
    with contextlib.suppress(Immovable):  # where all are damaged it is another error: nobody asked to begin anew
        return _made(request, plan, environ)
    checkpoints.set_aside(run.checkpoints, len(request.attempts))
    return _made(request, plan, environ)


def _say(made: LaunchPlan, flag: str) -> LaunchPlan:
    batch, where = made.batch, made.resume.name if made.resume else "the start"
    cause = made.request.attempts[-1]["cause"]
    lighter_by = (
        f" with micro-batch {batch.micro_batch} x accumulation {batch.accumulation} "
        f"(global batch {batch.global_batch}) at {made.level}"
    )
    how = lighter_by if flag == ON_OOM else ""
    _tell(f"{flag} after {cause}: attempt {len(made.request.attempts) + 1}{how}, from {where}.")
    return made


def _tell(line: str) -> None:
    print(line, file=sys.stderr)
