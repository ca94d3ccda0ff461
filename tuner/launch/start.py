"""Start a plan: write its run directory, then become the rank or watch the ranks, as often as was asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from tuner.launch import retry, supervise
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
            code = supervise.run(plan.argv, env, run, plan.topology.node_rank, grace_s=plan.request.grace_s)
            following = retry.next_plan(plan, run, environ, code)
            if following is None:
                if plan.topology.leads:
                    end.write(run)
                return code
            plan = following
    finally:
        lock.release(plan.run_path)


def _directory(plan: LaunchPlan, environ: Mapping[str, str]) -> RunDirectory:
    if plan.topology.leads:
        has_ended = slurm.has_ended
        return directory.create(plan.run_path, plan.files, resume=plan.resumes, environ=environ, has_ended=has_ended)
    return directory.wait_for(plan.run_path, plan.launch_id)
