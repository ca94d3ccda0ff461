"""Start a plan: write its run directory, then become the rank or watch the ranks, as often as was asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tuner.launch import retry, supervise
from tuner.launch.plan import LaunchPlan
from tuner.runs import directory
from tuner.runs.directory import RunDirectory


def start(plan: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Run the plan and return its exit code; as one rank of Slurm (or the only rank), never return.

    Raises:
        TunerError: the run directory cannot be written.
    """
    while True:
        run, env = _directory(plan), {**environ, **plan.env}
        if plan.topology.launcher != "torchrun":
            os.execve(plan.argv[0], plan.argv, env)  # noqa: S606 (a list built by us, no shell)
        code = supervise.run(plan.argv, env, run, plan.topology.node_rank)
        following = retry.next_plan(plan, run, environ) if code else None
        if following is None:
            return code
        plan = following


def _directory(plan: LaunchPlan) -> RunDirectory:
    if plan.topology.leads:
        return directory.create(plan.run_path, plan.files, resume=plan.resumes)
    return directory.wait_for(plan.run_path, plan.launch_id)
