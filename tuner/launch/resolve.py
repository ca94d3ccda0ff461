"""Decide everything about a run: a request on these machines becomes a resolved run, step by step.

It writes and starts nothing. `launch.render` turns the result into argv, environment and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from tuner.errors import RecipeError, UsageError
from tuner.files import dump_json, sha256
from tuner.fit.shares import data_parallel_ranks, refuse_tiles
from tuner.launch import admit, batch_size, data_rows, final_config, fitting, resuming
from tuner.launch.admit import Admission, Grant
from tuner.launch.level_and_split import choose_level_and_split
from tuner.launch.machine_facts import RunPlace
from tuner.launch.resolved_run import Request, ResolvedRecipe, ResolvedRun, Start, batch_settings, is_already_started
from tuner.launch.steps import Resumed, Steps, count_steps
from tuner.machine.hardware import Hardware, decide_precision
from tuner.machine.launchers import contradiction, filled, resolve
from tuner.machine.topology import Batch, Topology
from tuner.machine.variables import leftovers_warning
from tuner.recipes import loading
from tuner.recipes.merging import Kind, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig
from tuner.runs import directory
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.directory import RunDirectory
from tuner.zero.config import Document, FinalConfig, stage, with_measurement_folders
from tuner.zero.recipe_values import is_auto

WORK_DIRS = Path("work_dirs")
_NOT_OURS = "what starts the ranks binds them to cores, and here that is not this command"
_ATTEMPT = ("PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that differ between two starts of Open MPI or torchrun, and are equal for all ranks of one."""


def resolve_run(
    request: Request,
    environ: Mapping[str, str],
    hardware: Hardware,
    now: datetime,
    topology: Topology | None = None,
    admissions: Sequence[Admission] = admit.OF_A_RUN,
) -> ResolvedRun:
    """Decide everything about one run.

    Args:
        topology: Where a job will run that has not started; None: flags and environment decide.
        admissions: What the recipe must hold; none if the caller has asked already.

    Raises:
        TunerError: an error in the recipe, the DeepSpeed config, the geometry, the paths or the directory.
    """
    recipe = _load(request, admissions, of_run=True)
    flags = filled(request.flags, final_config.launch_flags(recipe, request.deepspeed), environ)
    topology = topology or resolve(flags, environ, len(hardware.gpus))
    _check_retries(request.on_oom, request.max_restarts, topology)
    if request.bind_cores and not topology.is_supervised:
        raise UsageError(_NOT_OURS, where="--bind-cores-to-rank", fix="srun --cpu-bind=cores, mpirun --bind-to core.")
    home = WORK_DIRS / recipe.name
    fresh = (request.work_dir or home / _default_name(topology, now)).absolute()
    if request.resume is None:
        start = _new_start(fresh, topology, is_named=request.work_dir is not None)
    else:
        start = resuming.find_start(request.resume, request.work_dir, home, fresh, topology)
    checkpoint, point = start.checkpoint, None
    if checkpoint:
        recipe = resuming.keep_split(recipe, checkpoint)
    recipe = data_rows.hold_out(recipe)
    on_ranks, level, notes = recipe, request.deepspeed, start.notes
    if checkpoint:
        ranks = data_parallel_ranks(recipe.config, topology.world_size)
        on_ranks, batch_notes = resuming.keep_global_batch(recipe, checkpoint, ranks)
        level = resuming.level(on_ranks, request.deepspeed, checkpoint)
    resolved = decide(on_ranks, level, RunPlace.of(hardware, topology), ignore_fit=request.ignore_fit)
    state = _state(resolved, recipe, _day(start, now, goes_on=request.resume is not None))
    if checkpoint:
        point, final, state_notes = resuming.load_into(
            resolved.final, checkpoint, state, weights=request.resume_weights
        )
        resolved = replace(resolved, final=final)
    measured = with_measurement_folders(resolved.final, RunDirectory(start.run_path).measurements)
    resolved = replace(resolved, final=measured)
    if warning := leftovers_warning(environ, request.flags.launcher):
        resolved = replace(resolved, warnings=(*resolved.warnings, warning))
    as_run = loading.anchored(resolved.recipe, resolved.document.pinned)
    if checkpoint:
        notes = (*notes, *resuming.compare_recipes(checkpoint.recipe, as_run), *batch_notes, *state_notes)
    # The request itself, not what this machine made of it: the nodes of one run may differ.
    identity: list[object] = [
        recipe.values,
        recipe.ds,
        request.deepspeed,
        str(point and point.path),
        request.max_restarts,
        len(request.attempts),
    ]
    return ResolvedRun(
        **vars(resolved),
        request=request,
        environ=environ,
        recipe_as_run=as_run,
        steps=_steps(resolved, checkpoint),
        run_path=start.run_path,
        is_known_run=request.resume is not None and directory.is_run(start.run_path),
        resume=point,
        state=state,
        started=now,
        launch_id=_launch_id(topology, environ, now, identity),
        notes=(*recipe.notes, *notes),
    )


def load(request: Request) -> Recipe:
    """Load the recipe of a request as a new run would, with its validation rows; check its paths and code.

    Raises:
        TunerError: the recipe is wrong, or not admissible.
    """
    return data_rows.hold_out(_load(request, admit.OF_A_RUN, of_run=False))


def _load(request: Request, admissions: Sequence[Admission], *, of_run: bool) -> Recipe:
    loaded = loading.load(request.recipe, request.overrides, allow_code=request.allow_code)
    admit.require(loaded, Grant(code=request.allow_code, of_run=of_run), admissions)
    return loaded


def _new_start(fresh: Path, topology: Topology, *, is_named: bool) -> Start:
    """Return the start of a new run.

    Raises:
        RunDirectoryError: the directory is taken.
    """
    if not is_named and not topology.is_shared:  # a run of the same second may have the directory
        names = (fresh, *(fresh.with_name(f"{fresh.name}_{number}") for number in range(2, 100)))
        fresh = next((path for path in names if not path.exists()), fresh)
    directory.check_free(fresh, resume=is_already_started(fresh, topology))
    return Start(fresh)


def _day(start: Start, now: datetime, *, goes_on: bool) -> str:
    """Return the date of a run's first start: chat templates render it, and a resumed run has the same samples."""
    today = now.astimezone().date()  # of this place, as `strftime_now` has it
    if start.checkpoint:
        owner = RunDirectory(start.checkpoint.path.parent.parent)
        return str(start.checkpoint.facts.get("date") or owner.day or today)
    return str((goes_on and RunDirectory(start.run_path).day) or today)


def _state(resolved: ResolvedRecipe, recipe: Recipe, day: str) -> dict[str, object]:
    """Return what decides which runs can load this run's checkpoints; their manifests hold it.

    Args:
        resolved: The recipe on its ranks.
        recipe: The recipe before its batch was made to fit a checkpoint.
        day: The date of the run's first start.
    """
    zero = resolved.final.config.get("zero_optimization", {})
    states, weights = ((zero.get(key) or {}).get("device") for key in ("offload_optimizer", "offload_param"))
    return {
        "world_size": resolved.topology.world_size,
        "global_batch": resolved.batch.global_batch,
        "asked_batch": batch_settings(recipe),
        "batch": batch_settings(resolved.recipe),
        "deepspeed": resolved.level,
        "stage": zero.get("stage", 0),
        "nvme": states == "nvme",
        "nvme_weights_alone": weights == "nvme" != states,
        "dtype": resolved.precision.dtype,
        "optimizer": resolved.recipe.config.optim_wrapper.optimizer.type,
        "date": day,
    }


def _steps(resolved: ResolvedRecipe, checkpoint: Checkpoint | None) -> Steps:
    config = resolved.recipe.config
    num_samples = (checkpoint.facts.get("data") or {}).get("rows") if checkpoint else None
    resumed = Resumed(checkpoint.step, num_samples) if checkpoint else None
    return count_steps(config, resolved.batch, data_rows.sources(config), resumed)


def _default_name(topology: Topology, now: datetime) -> str:
    """Return the name of a new run directory; every task of a job and every node computes the same."""
    if topology.job:
        return f"slurm-{topology.job}"
    if topology.is_shared:
        who = "nodes" if topology.is_supervised else topology.launcher
        return f"{who}-{topology.master_addr}-{topology.master_port}"
    return f"{now:%Y%m%d_%H%M%S}"


def _launch_id(topology: Topology, environ: Mapping[str, str], now: datetime, identity: list[object]) -> str:
    if topology.job:
        return f"{topology.job}-{environ.get('SLURM_STEP_ID')}-{environ.get('SLURM_RESTART_COUNT', 0)}"
    if topology.is_shared:
        attempt = [environ.get(name) for name in _ATTEMPT]
        return sha256(dump_json([topology.master_addr, topology.master_port, *attempt, *identity]).encode())
    return f"{now:%Y%m%dT%H%M%S%f}"


def _check_retries(on_oom: str, max_restarts: int, topology: Topology) -> None:
    """Refuse --on-oom retry and --max-restarts if this process cannot start the ranks again.

    Raises:
        UsageError: another launcher starts the ranks, or, for --on-oom, they run on several nodes.
    """
    if on_oom == "retry" and (not topology.is_supervised or topology.num_nodes > 1):
        fix = (
            "Remove it: after a failure the command that needs less memory is printed. Or "
            "start one node without --launcher."
        )
        raise UsageError(f"retry on {topology.describe()}", where="--on-oom", fix=fix)
    if max_restarts and not topology.is_supervised:
        fix = (
            "Remove it: whatever starts the ranks must restart them, as `tuner submit --max-requeues` does with Slurm."
        )
        raise UsageError(f"restarts with {topology.describe()}", where="--max-restarts", fix=fix)


def decide(loaded: Recipe, deepspeed: str | None, place: RunPlace, *, ignore_fit: bool = False) -> ResolvedRecipe:
    """Decide what a recipe leaves to the machines: compute type, kernels, batch, level, split, loss, DeepSpeed config.

    Args:
        deepspeed: The value of `--deepspeed`; None if the recipe decides.
        ignore_fit: Take a level even if no level fits.

    Raises:
        DeepSpeedConfigError: no such preset or file, or a config that does not hold.
        RecipeError: the ranks cannot share the global batch, or samples.
        MachineError: the machine lacks what the recipe or the config needs, or nothing fits.
    """
    topology, hardware = place.topology, place.hardware
    loaded = data_rows.hold_out(loaded)
    ranks = data_parallel_ranks(loaded.config, topology.world_size)
    refuse_tiles(loaded.config)
    named = None if is_auto(loaded, deepspeed) else final_config.open_document(loaded, deepspeed)
    if named:
        for of_document in (batch_size.with_dtype, batch_size.with_compile, batch_size.with_batch):
            loaded = of_document(loaded, named)
    precision = decide_precision(loaded.config.optim_wrapper.dtype, hardware)
    loaded = fitting.choose_kernels(loaded, hardware, precision.dtype)
    loaded = batch_size.choose_global_batch(loaded, ranks)

    def opened(level: str) -> Document:
        return final_config.open_document(loaded, level)

    def merged(config: RecipeConfig, document: Document) -> FinalConfig:
        batch = Batch(*config.split[:2], ranks)
        return final_config.merged(replace(loaded, config=config), document, batch, precision, hardware)

    chosen = choose_level_and_split(loaded.config, named, opened, merged, place, precision)
    if named is None and not ignore_fit:
        fitting.refuse_hopeless(chosen)
    loaded = batch_size.with_split(loaded, chosen.split, chosen.split_reason)
    if chosen.loss:
        loaded = loaded.settled({"train_cfg.loss": chosen.loss}, Place(Kind.DERIVED, chosen.loss_reason))
    batch = Batch(*loaded.config.split[:2], ranks)
    loaded = batch_size.share_generation(loaded, batch)
    final = merged(loaded.config, chosen.document)
    _refuse_compiled_chunks(loaded, final.config)
    warnings = (
        *loaded.warnings,
        *final.warnings,
        *filter(None, [contradiction(chosen.document.launch, topology), fitting.warning(chosen.fit)]),
    )
    of_data = tuple(data_rows.warnings(loaded.config))
    return ResolvedRecipe(loaded, place, batch, precision, chosen, final, (*warnings, *of_data), of_data)


def _refuse_compiled_chunks(loaded: Recipe, deepspeed: Mapping[str, object]) -> None:
    """Refuse the loss in chunks in a compiled model at ZeRO-3, which gathers weights again for the backward pass.

    Measured, torch 2.13 and DeepSpeed 0.19.8: the head's weight "has been modified by an inplace operation".
    """
    train_cfg, key = loaded.config.train_cfg, "train_cfg.loss"
    if train_cfg.torch_compile and train_cfg.loss == "chunked" and stage(dict(deepspeed)) == 3:
        message = "torch.compile with the loss in chunks does not work at ZeRO stage 3"
        fix = "Use --set train_cfg.loss=whole, --set torch_compile=False, or --deepspeed zero2."
        raise RecipeError(message, where=f"{key} ({loaded.origins[key].source})", fix=fix)
