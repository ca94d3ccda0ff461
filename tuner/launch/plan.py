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
from tuner.errors import RunDirectoryError
from tuner.files import dump_json, sha256
from tuner.fit.advice import Fit
from tuner.launch import local, remedies, slurm
from tuner.launch.settled import settle
from tuner.machine.hardware import Hardware, tool_path
from tuner.machine.libraries import versions
from tuner.machine.topology import Batch, LaunchFlags, Topology, resolve
from tuner.recipes import paths, recipe
from tuner.recipes.recipe import Overrides, Recipe
from tuner.runs import checkpoints, directory
from tuner.zero import merge, precision
from tuner.zero.jsonfile import Document

WORK_DIRS = Path("work_dirs")
_MAX_COUNTED_BYTES = 64 * 1024**2


@dataclass(frozen=True)
class Request:
    """What the user asked for."""

    recipe: str
    overrides: Overrides = field(default_factory=Overrides)
    deepspeed: str | None = None
    flags: LaunchFlags = field(default_factory=LaunchFlags)
    work_dir: Path | None = None
    resume: str | None = None
    allow_code: bool = False
    ignore_fit: bool = False
    command: tuple[str, ...] = ()
    on_oom: str = "stop"
    attempts: tuple[dict[str, Any], ...] = ()
    """What ended the earlier attempts of this start, with --on-oom retry."""


@dataclass(frozen=True)
class LaunchPlan:
    """What would run: the same object is printed by --dry-run and started without it."""

    request: Request
    recipe: Recipe
    final: merge.FinalConfig
    topology: Topology
    hardware: Hardware
    batch: Batch
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
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    fit: Fit | None = None


def make(request: Request, environ: Mapping[str, str], hardware: Hardware, now: datetime) -> LaunchPlan:
    """Decide everything about one run.

    Raises:
        TunerError: whatever is wrong with the recipe, the DeepSpeed config, the geometry, the paths or the directory.
    """
    loaded = recipe.load(request.recipe, request.overrides, allow_code=request.allow_code)
    paths.check_model(loaded.config)
    paths.check_data(loaded.config)
    topology = resolve(request.flags, environ, len(hardware.gpus))
    remedies.check_on_oom(request.on_oom, topology)
    settled = settle(loaded, request.deepspeed, topology, hardware, ignore_fit=request.ignore_fit)
    run_path, resume, notes = _run_directory(request, loaded.name, topology, now)
    argv, env = _command(topology, run_path)
    env |= _environment(environ, topology, hardware)
    plan = LaunchPlan(
        request=request,
        recipe=loaded,
        final=settled.final,
        topology=topology,
        hardware=hardware,
        batch=settled.batch,
        precision=settled.precision,
        level=settled.level,
        level_reason=settled.level_reason,
        run_path=run_path,
        resume=resume,
        launch_id=_launch_id(topology, environ, now, [loaded.values, settled.final.config, str(resume)]),
        argv=argv,
        env=env,
        files={},
        resumes=request.resume is not None and directory.is_run(run_path),
        notes=tuple(notes),
        warnings=settled.warnings,
        fit=settled.fit,
    )
    plan.files.update(_files(plan, settled.document, now))
    return plan


def _command(topology: Topology, run_path: Path) -> tuple[list[str], dict[str, str]]:
    if topology.launcher == "torchrun":
        return local.torchrun(topology, run_path), {}
    return slurm.one_rank(topology, run_path)


def _environment(environ: Mapping[str, str], topology: Topology, hardware: Hardware) -> dict[str, str]:
    env = {
        # A torch.py or datasets.py in the working directory must not be imported in place of the real one.
        "PYTHONSAFEPATH": "1",
        "DS_ACCELERATOR": "cuda" if hardware.gpus else "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
    defaults = {"OMP_NUM_THREADS": str(max(1, hardware.num_cpus // topology.nproc_per_node))}
    if topology.launcher == "torchrun":
        defaults |= local.ENVIRONMENT
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


def _run_directory(
    request: Request, name: str, topology: Topology, now: datetime
) -> tuple[Path, Path | None, list[str]]:
    """Return the run directory, the checkpoint to resume from, and what to tell the user about it."""
    home = WORK_DIRS / name
    fresh = (request.work_dir or home / _default_name(topology, now)).absolute()
    if request.resume is None:
        directory.check_free(fresh, resume=_already_started(fresh, topology))
        return fresh, None, []
    if request.resume == "auto":
        return _resume_auto(request.work_dir, home, fresh, topology)
    owner, checkpoint, passed = _resume_from(Path(request.resume).absolute())
    target = fresh if request.work_dir or not directory.is_run(owner) else owner
    directory.check_free(target, resume=target == owner or _already_started(target, topology))
    return _resumed(target, checkpoint, passed, topology)


def _resume_from(folder: Path) -> tuple[Path, Path, list[str]]:
    """Return the run that a run directory or one of its checkpoints belongs to, and the checkpoint."""
    if not directory.is_run(folder):
        return folder.parent.parent, checkpoints.require_valid(folder), []
    found, passed = checkpoints.newest_valid(folder / "checkpoints")
    if found is None:
        fix = " ".join((*passed, "Start new without --resume."))
        raise RunDirectoryError(f"{folder} has no valid checkpoint", where="--resume", fix=fix)
    return folder, found, passed


def _resume_auto(
    work_dir: Path | None, home: Path, fresh: Path, topology: Topology
) -> tuple[Path, Path | None, list[str]]:
    known = fresh if work_dir or topology.job else directory.newest_run(home.absolute())
    if known is None or not directory.is_run(known):
        directory.check_free(fresh, resume=_already_started(fresh, topology))
        return fresh, None, ["--resume auto: no earlier run here, so this one starts new."]
    found, passed = checkpoints.newest_valid(known / "checkpoints")
    if found is None and passed:
        fix = f"{' '.join(passed)} Start new with another --work-dir."
        raise RunDirectoryError(f"{known} has no valid checkpoint", where="--resume auto", fix=fix)
    if found is None:
        return known, None, [f"--resume auto: {known} never saved a checkpoint, so it starts again."]
    return _resumed(known, found, passed, topology)


def _resumed(
    target: Path, checkpoint: Path, passed: list[str], topology: Topology
) -> tuple[Path, Path | None, list[str]]:
    saved = checkpoints.facts(checkpoint).get("world_size")
    if saved not in (None, topology.world_size):
        raise RunDirectoryError(
            f"{checkpoint.name} was saved by {saved} ranks, this run has {topology.world_size}",
            where="--resume",
            fix=f"Start {saved} ranks.",
        )
    return target, checkpoint, [*passed, f"Resuming from {checkpoint}."]


def _already_started(path: Path, topology: Topology) -> bool:
    # The leader may have written the directory, or half of it, before another task or node looks.
    return not topology.leads and path.is_dir()


def _files(plan: LaunchPlan, document: Document, now: datetime) -> dict[str, str]:
    pinned: str | dict[str, Any] = plan.level
    if not plan.final.from_catalog:
        pinned = document.value
    whole = recipe.anchored(plan.recipe, pinned)
    return {
        "recipe.py": whole.standalone(f" As run; the values of {plan.recipe.name} with what the command line changed."),
        "deepspeed.json": dump_json(plan.final.config),
        "run.json": dump_json(_run_facts(plan, now)),
    }


def _run_facts(plan: LaunchPlan, now: datetime) -> dict[str, Any]:
    request, config = plan.request, plan.recipe.config
    typed = request.command or ("tuner", "train", request.recipe)
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
        "world_size": plan.topology.world_size,
        "num_nodes": plan.topology.num_nodes,
        "batch": batch_json(plan),
        "warnings": list(plan.warnings),
        "hardware": plan.hardware.to_json(),
        "versions": {"tuner": __version__, "python": platform.python_version(), **versions()},
        "platform": platform.platform(),
        "interpreter": sys.executable,
    }


def batch_json(plan: LaunchPlan) -> dict[str, int | str | None]:
    """Return the batch arithmetic: counts of samples, and optimizer steps an epoch where they are known on paper."""
    batch, dataset = plan.batch, plan.recipe.config.train_dataloader.dataset
    rows = _num_rows(dataset.path)
    steps = batch.steps_per_epoch(rows) if rows is not None else None
    if rows is None:
        note = "known once the data is read"
    elif dataset.packing:
        note = "at most: packing makes fewer samples of these rows"
    else:
        note = "exact"
    return {
        "micro_batch": batch.micro_batch,
        "accumulation": batch.accumulation,
        "ranks": batch.ranks,
        "global_batch": batch.global_batch,
        "rows": rows,
        "steps_per_epoch": steps,
        "steps_per_epoch_is": note,
        "epochs": plan.recipe.config.train_cfg.max_epochs,
        "max_steps": plan.recipe.config.train_cfg.max_steps,
    }


def _num_rows(path: str | None) -> int | None:
    """Count the rows of a local JSONL of ordinary size; anything else is left to the worker."""
    file = paths.local(path) if path else None
    if file is None or file.suffix != ".jsonl" or not file.is_file() or file.stat().st_size > _MAX_COUNTED_BYTES:
        return None
    with file.open("rb") as stream:
        return sum(1 for line in stream if line.strip())
