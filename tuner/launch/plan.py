"""Everything below -> argv, environment and files of one run. It looks and decides; it writes and starts nothing."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tuner import __version__
from tuner.files import dump_json, sha256
from tuner.fit.advice import Fit
from tuner.launch import changes, counting, fitting, local, remedies, resuming, slurm, steps
from tuner.launch.settled import settle
from tuner.machine import leftovers
from tuner.machine.hardware import Hardware, tool_path
from tuner.machine.libraries import versions
from tuner.machine.topology import Batch, LaunchFlags, Topology, resolve
from tuner.recipes import paths, recipe
from tuner.recipes.recipe import Overrides, Recipe
from tuner.runs import checkpoints, directory
from tuner.zero import merge, precision

WORK_DIRS = Path("work_dirs")
_UNSAFE_LOAD = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_ALLOCATOR = "PYTORCH_ALLOC_CONF"
_ALLOCATORS = (_ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Every name that torch 2.9 to 2.13 reads settings of CUDA's allocator from; of two that are set, an older one may win.

Source: torch, c10/cuda/CUDAAllocatorConfig.h and c10/core/AllocatorConfig.h.
"""


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    recipe: str | None
    overrides: Overrides = field(default_factory=Overrides)
    deepspeed: str | None = None
    flags: LaunchFlags = field(default_factory=LaunchFlags)
    work_dir: Path | None = None
    resume: str | None = None
    resume_weights: bool = False
    allow_code: bool = False
    ignore_fit: bool = False
    command: tuple[str, ...] = ()
    on_oom: str = "stop"
    max_restarts: int = 0
    attempts: tuple[dict[str, Any], ...] = ()
    """What ended the earlier attempts of this start, with --on-oom retry or --max-restarts."""
    grace_s: float = local.GRACE_S
    """What ranks that are told to stop have, to finish the step and save, before they are killed."""
    tells_events: bool = False
    """Standard output gets one JSON object for each thing that happens, in place of what rank 0 prints."""


@dataclass(frozen=True)
class LaunchPlan:
    """What would run: the same object is printed by --dry-run and started without it."""

    request: Request
    recipe: Recipe
    final: merge.FinalConfig
    topology: Topology
    hardware: Hardware
    batch: Batch
    steps: steps.Steps
    precision: precision.Precision
    level: str
    level_reason: str | None
    run_path: Path
    resume: Path | None
    launch_id: str
    argv: list[str]
    env: dict[str, str]
    files: dict[str, str]
    resumes: bool = False
    resume_as: str | None = None
    """How the checkpoint is loaded: see `resuming`."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """What this run's checkpoints are made of."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    fit: Fit | None = None


def make(
    request: Request,
    environ: Mapping[str, str],
    hardware: Hardware,
    now: datetime,
    topology: Topology | None = None,
) -> LaunchPlan:
    """Decide everything about one run.

    Args:
        topology: Where a job that still has to start will run; None: what flags and environment say of this process.

    Raises:
        TunerError: whatever is wrong with the recipe, the DeepSpeed config, the geometry, the paths or the directory.
    """
    asked = recipe.load(request.recipe, request.overrides, allow_code=request.allow_code)
    recipe.refuse_functions(asked, allow_code=request.allow_code)
    paths.check_model(asked.config)
    paths.check_data(asked.config)
    topology = topology or resolve(request.flags, environ, len(hardware.gpus))
    remedies.check_on_oom(request.on_oom, topology)
    remedies.check_max_restarts(request.max_restarts, topology)
    found = resuming.find(
        request.resume, request.work_dir, WORK_DIRS / asked.name, _default_name(topology, now), topology
    )
    loaded, batch_notes = resuming.keep_global_batch(asked, found, topology.world_size)
    deepspeed = resuming.level(loaded, request.deepspeed, found)
    settled = settle(loaded, deepspeed, topology, hardware, ignore_fit=request.ignore_fit)
    loaded = settled.recipe
    state = resuming.state_of(settled, asked)
    resume_as, state_notes = resuming.how(found, state, weights=request.resume_weights)
    final = resuming.marked(settled.final, resume_as)
    whole = recipe.anchored(loaded, settled.level if final.from_catalog else settled.document.value)
    changed = changes.compare(found.recipe, whole)
    run_path, resume = found.run_path, found.checkpoint
    what = [loaded.values, final.config, str(resume), request.max_restarts, len(request.attempts)]
    argv, env = _command(topology, run_path)
    env |= _environment(environ, topology, hardware, request.grace_s)
    plan = LaunchPlan(
        request=request,
        recipe=loaded,
        final=final,
        topology=topology,
        hardware=hardware,
        batch=settled.batch,
        steps=steps.count(loaded.config, settled.batch, counting.sources(loaded.config), resuming.place(found)),
        precision=settled.precision,
        level=settled.level,
        level_reason=settled.level_reason,
        run_path=run_path,
        resume=resume,
        launch_id=_launch_id(topology, environ, now, what),
        argv=argv,
        env=env,
        files={},
        resumes=request.resume is not None and directory.is_run(run_path),
        resume_as=resume_as,
        state=state,
        notes=(*asked.notes, *found.notes, *changed, *batch_notes, *state_notes),
        warnings=(*settled.warnings, *filter(None, [leftovers.warning(environ)])),
        fit=settled.fit,
    )
    plan.files.update(_files(plan, whole, now))
    return plan


def _command(topology: Topology, run_path: Path) -> tuple[list[str], dict[str, str]]:
    if topology.launcher == "torchrun":
        return local.torchrun(topology, run_path), {}
    return slurm.one_rank(topology, run_path)


def _environment(environ: Mapping[str, str], topology: Topology, hardware: Hardware, grace_s: float) -> dict[str, str]:
    env = {
        # A torch.py or datasets.py in the working directory must not be imported in place of the real one.
        "PYTHONSAFEPATH": "1",
        "DS_ACCELERATOR": "cuda" if hardware.gpus else "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        # Checkpoints are pickles: whatever asks torch.load for more, they hold no code that is run.
        "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    }
    if _UNSAFE_LOAD in environ:
        env[_UNSAFE_LOAD] = "0"
    defaults = {"OMP_NUM_THREADS": str(max(1, hardware.num_cpus // topology.nproc_per_node))}
    if topology.launcher == "torchrun":
        defaults |= local.environment(grace_s)
    if hardware.gpus and not any(name in environ for name in _ALLOCATORS):
        # Batches of different lengths leave holes that a segment of fixed size cannot give to a longer one.
        defaults[_ALLOCATOR] = "expandable_segments:True"
    env |= {name: value for name, value in defaults.items() if name not in environ}
    path = tool_path(environ)
    return env if path == environ.get("PATH") else {**env, "PATH": path}


def _default_name(topology: Topology, now: datetime) -> str:
    """Return a name that every task of a job and every node agrees on unasked."""
    if topology.job:
        return f"slurm-{topology.job}"
    if topology.num_nodes > 1:
        return f"nodes-{topology.master_addr}-{topology.master_port}"
    return f"{now:%Y%m%d_%H%M%S}"


def _launch_id(topology: Topology, environ: Mapping[str, str], now: datetime, what: list[Any]) -> str:
    """Return what tells this launch from earlier ones in the same directory, the same for all its tasks and nodes."""
    if topology.job:
        return f"{topology.job}-{environ.get('SLURM_STEP_ID')}-{environ.get('SLURM_RESTART_COUNT', 0)}"
    if topology.num_nodes > 1:
        return sha256(dump_json([topology.master_addr, topology.master_port, *what]).encode())
    return f"{now:%Y%m%dT%H%M%S%f}"


def _files(plan: LaunchPlan, whole: Recipe, now: datetime) -> dict[str, str]:
    return {
        "recipe.py": whole.standalone(f" As run; the values of {plan.recipe.name} with what the command line changed."),
        "deepspeed.json": dump_json(plan.final.config),
        "run.json": dump_json(_run_facts(plan, now)),
    }


def _run_facts(plan: LaunchPlan, now: datetime) -> dict[str, Any]:
    request, config = plan.request, plan.recipe.config
    typed = request.command or ("tuner", "train", *([request.recipe] if request.recipe else []))
    return {
        "name": plan.recipe.name,
        "launch_id": plan.launch_id,
        "started": now.isoformat(timespec="seconds"),
        "command": list(request.command),
        "argv": plan.argv,
        "next": remedies.commands(typed, config, plan.level, plan.topology, len(plan.hardware.gpus), plan.run_path),
        "attempts": list(request.attempts),
        "seed": config.randomness.seed,
        "deepspeed": plan.level,
        "precision": {"dtype": plan.precision.dtype, "reason": plan.precision.reason},
        "resume": str(plan.resume) if plan.resume else None,
        "resume_as": plan.resume_as,
        "resume_step": checkpoints.step_of(plan.resume) if plan.resume else None,
        "world_size": plan.topology.world_size,
        "num_nodes": plan.topology.num_nodes,
        "batch": batch_json(plan),
        "state": dict(plan.state),
        "arithmetic": fitting.arithmetic(config, plan.hardware, plan.precision.dtype),
        "fit": plan.fit.to_json() if plan.fit else None,
        "warnings": list(plan.warnings),
        "hardware": plan.hardware.to_json(),
        "versions": {"tuner": __version__, "python": platform.python_version(), **versions()},
        "platform": platform.platform(),
        "interpreter": sys.executable,
    }


def batch_json(plan: LaunchPlan) -> dict[str, int | str | None]:
    """Return the batch arithmetic: counts of rows and samples of an epoch, and of optimizer steps."""
    batch, cfg, found = plan.batch, plan.recipe.config.train_cfg, plan.steps
    return {
        "micro_batch": batch.micro_batch,
        "accumulation": batch.accumulation,
        "ranks": batch.ranks,
        "global_batch": batch.global_batch,
        "rows": found.rows.value,
        "rows_are": str(found.rows),
        "samples": found.samples.value,
        "steps_per_epoch": found.per_epoch.value,
        "steps_per_epoch_is": str(found.per_epoch),
        "epochs": cfg.max_epochs,
        "max_steps": cfg.max_steps,
        "steps": found.total.value,
        "steps_are": str(found.total),
        "steps_done": found.done,
        "steps_left": found.left,
    }
