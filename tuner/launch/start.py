"""Start a plan: write its run directory, then become the rank or watch the ranks, as often as was asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from tuner.launch import events, retry, supervise
from tuner.launch.plan import LaunchPlan
from tuner.machine import leftovers, slurm
from tuner.report import end
from tuner.runs import directory, lock
from tuner.runs.directory import RunDirectory


def start(plan: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Run the plan and return its exit code; as one rank of Slurm (or the only rank), never return.

    Raises:
        TunerError: the run directory cannot be written.
    """
    try:
        while True:
            run, env = _directory(plan, environ), {**leftovers.without(environ), **plan.env}
            if plan.topology.launcher != "torchrun":
                os.execve(plan.argv[0], plan.argv, env)  # noqa: S606 (a list built by us, no shell)
            told = events.Events(run) if plan.request.tells_events and plan.topology.leads else None
            code = _watched(plan, env, run, told)
            following = retry.next_plan(plan, run, environ, code)
            if following is None:
                if plan.topology.leads:
                    end.write(run)
                if told:
                    told.end(code)
                return code
            plan = following
    finally:
        lock.release(plan.run_path)


def _watched(plan: LaunchPlan, env: Mapping[str, str], run: RunDirectory, told: events.Events | None) -> int:
    def watch(**options: Any) -> int:
        return supervise.run(plan.argv, env, run, plan.topology.node_rank, grace_s=plan.request.grace_s, **options)

    if not plan.request.tells_events:
        return watch()
    with told.told() if told else nullcontext():
        return watch(out=None)  # standard output is the events': rank 0's lines are in its log


def _directory(plan: LaunchPlan, environ: Mapping[str, str]) -> RunDirectory:
    if plan.topology.leads:
        has_ended = slurm.has_ended
        return directory.create(plan.run_path, plan.files, resume=plan.resumes, environ=environ, has_ended=has_ended)
    return directory.wait_for(plan.run_path, plan.launch_id)
