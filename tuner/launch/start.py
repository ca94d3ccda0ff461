"""Start a plan: write its run directory, then become the rank or watch the ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tuner.launch import supervise
from tuner.launch.plan import LaunchPlan
from tuner.runs import directory


def start(plan: LaunchPlan, environ: Mapping[str, str]) -> int:
    """Run the plan and return its exit code; as one rank of Slurm (or the only rank), never return.

    Raises:
        TunerError: the run directory cannot be written.
    """
    env = {**environ, **plan.env}
    if plan.topology.leads:
        run = directory.create(plan.run_path, plan.files, resume=plan.resumes)
    else:
        run = directory.wait_for(plan.run_path, plan.launch_id)
    if plan.topology.launcher == "torchrun":
        return supervise.run(plan.argv, env, run, plan.topology.node_rank)
    os.execve(plan.argv[0], plan.argv, env)  # noqa: S606 (a list built by us, no shell)
