"""`--on-oom retry`: after a run ended for lack of memory, a lighter plan of the same run, as often as there is one.

It plans the next attempt and says so in one line; starting it is `start`'s work.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from tuner.errors import RunDirectoryError, TunerError
from tuner.launch import plan as plans
from tuner.launch import preflight
from tuner.launch.plan import LaunchPlan, Request
from tuner.launch.remedies import Lighter, lighter, shares_checkpoints
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory

FLAG = "--on-oom retry"


def next_plan(plan: LaunchPlan, run: RunDirectory, environ: Mapping[str, str]) -> LaunchPlan | None:
    """Return the plan of the next attempt, or None: nobody asked for one, it would not help, or nothing is lighter."""
    if plan.request.on_oom != "retry":
        return None
    try:
        status = run.read_json(run.status)
        found = status.get("diagnosis") or {}
        cause = str(found.get("cause"))
        change = lighter(plan.recipe.config, plan.level, plan.topology.world_size, cause)
        if change is None or "signal" in status:  # who asked a run to stop does not want it to start again
            return None
        made = _make(_request(plan, change, found), plan, run, environ)
        preflight.check(made, environ)
    except TunerError as error:
        print(f"{FLAG}: not possible. {error}", file=sys.stderr)
        return None
    print(_line(made, cause), file=sys.stderr)
    return made


def _request(plan: LaunchPlan, change: Lighter, found: Mapping[str, Any]) -> Request:
    asked = plan.request
    ended = {key: found.get(key) for key in ("cause", "what", "rank", "step")}
    ran = {"deepspeed": plan.level, "micro_batch": plan.batch.micro_batch, "accumulation": plan.batch.accumulation}
    pairs = (*asked.overrides.pairs, *((FLAG, text) for text in change.sets))
    return replace(
        asked,
        overrides=replace(asked.overrides, pairs=pairs),
        # Pinned: with a smaller batch `auto` might take a lower level than the one that ran out of memory.
        deepspeed=change.level or (plan.level if plan.final.from_catalog else asked.deepspeed),
        work_dir=plan.run_path,
        resume="auto",
        command=(*asked.command, *change.flags) if asked.command else (),
        attempts=(*asked.attempts, {**ended, **ran}),
    )


def _make(request: Request, plan: LaunchPlan, run: RunDirectory, environ: Mapping[str, str]) -> LaunchPlan:
    now = datetime.now().astimezone()
    try:
        made = plans.make(request, environ, plan.hardware, now)
        if made.resume is None or shares_checkpoints(plan.level, made.level):
            return made
    except RunDirectoryError:
        if not run.checkpoints.is_dir():
            raise
        # No checkpoint is valid: the failure struck while the first one was written.
    checkpoints.set_aside(run.checkpoints, f"attempt {len(request.attempts)}")
    return plans.make(request, environ, plan.hardware, now)


def _line(made: LaunchPlan, cause: str) -> str:
    batch, where = made.batch, made.resume.name if made.resume else "the start"
    return (
        f"{FLAG} after {cause}: attempt {len(made.request.attempts) + 1} with micro-batch {batch.micro_batch} x "
        f"accumulation {batch.accumulation} (global batch {batch.global_batch}) at {made.level}, from {where}."
    )
