"""Decide everything about a run: a request on these machines becomes a resolved run, step by step.

It writes no file of the run and starts no rank. `launch.render` turns the result into argv, environment and files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial

from tuner.errors import TunerError
from tuner.files import dump_json, sha256
from tuner.fit.splits import data_parallel_ranks
from tuner.launch import admit, batch_size, kernels, measured, memory, pins, resuming, row_counts
from tuner.launch.level_and_split import choose_level_and_split, final_config
from tuner.launch.machines import RunMachines, find_topology, refuse_unsupervised
from tuner.launch.pins import Pins
from tuner.launch.resolved_run import Request, ResolvedRecipe, ResolvedRun, Start, batch_settings
from tuner.launch.steps import Steps, count_steps
from tuner.launch.validation_rows import hold_out
from tuner.machine.hardware import Hardware, decide_precision
from tuner.machine.hostfile import RESTARTED_NODE
from tuner.machine.launchers import contradiction
from tuner.machine.topology import Batch, Topology
from tuner.machine.variables import leftovers_warning
from tuner.recipes import loading
from tuner.recipes.merging import Kind, Place
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import four_bit_experts
from tuner.recipes.schema.long_context import refuse_tiles
from tuner.recipes.schema.tensor_parallel import refuse_across_nodes, uneven_heads
from tuner.runs import directory
from tuner.runs.checkpoints import Checkpoint
from tuner.runs.directory import RunDirectory
from tuner.runs.records import CheckpointState
from tuner.runs.resume_point import ResumePoint
from tuner.zero import choice
from tuner.zero.config import expert_ranks, with_measurement_folders

_ATTEMPT = ("PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
"""Variables that differ between two starts of Open MPI or torchrun, and are equal for all ranks of one."""


def resolve_run(
    request: Request,
    environ: Mapping[str, str],
    hardware: Hardware,
    now: datetime,
    topology: Topology | None = None,
    recipe: Recipe | None = None,
    *,
    starts: bool = False,
) -> ResolvedRun:
    """Decide everything about one run.

    Args:
        topology: Where a job will run that has not started; None: flags and environment decide.
        recipe: It is loaded and admissible; None: it is loaded from the request.
        starts: It begins next: what a kill left beside its place is put back before a checkpoint is chosen.

    Raises:
        TunerError: an error in the recipe, the DeepSpeed config, the geometry, the paths or the directory.
    """
    recipe = recipe or _admitted(request, of_run=True)
    machines = RunMachines.of(hardware, topology) if topology else find_machines(recipe, request, environ, hardware)
    topology = machines.topology
    refuse_unsupervised(topology, request.on_oom, request.max_restarts, bind_cores=request.bind_cores)
    if RESTARTED_NODE in environ and topology.leads:  # node 0 was lost, and its command runs again on another host
        request = resuming.started_again(request, recipe.name, topology, now)
    start = resuming.find_start(request, recipe.name, topology, now, starts=starts)
    pinned = resuming.all_pins(request, recipe, start.checkpoint, topology)
    resolved = decide(recipe, request.deepspeed, machines, pinned)
    state = _state(resolved, recipe, _day(start, now, goes_on=request.resume is not None))
    fewer_nodes_notes: tuple[str, ...] = ()
    if request.state_on_all_nodes is None:  # with --nnodes MIN:MAX: could fewer nodes go on with this run?
        lack_of_memory = partial(_lack_of_memory, request, recipe, start.checkpoint, state, resolved.machines)
        fewer_nodes_notes = resuming.check_fewer_nodes(resolved.recipe.config, topology, state, lack_of_memory)
    resume, final, state_notes = resuming.point_and_config(
        resolved.final, start.checkpoint, state, weights=request.resume_weights
    )
    final = with_measurement_folders(final, RunDirectory(start.run_path).measurements)
    leftovers = leftovers_warning(environ, request.flags.launcher)
    resolved = replace(resolved, final=final, warnings=(*resolved.warnings, *filter(None, [leftovers])))
    as_run = loading.anchored(resolved.recipe, resolved.document.recipe_value)
    changes = resuming.compare_recipes(start.checkpoint, as_run)
    return ResolvedRun(
        **vars(resolved),
        request=request,
        environ=environ,
        recipe_as_run=as_run,
        steps=steps_of(resolved, start.checkpoint),
        run_path=start.run_path,
        is_known_run=request.resume is not None and directory.is_run(start.run_path),
        resume=resume,
        state=state,
        started=now,
        launch_id=_launch_id(request, recipe, resume, topology, environ, now),
        notes=(*resolved.recipe.notes, *start.notes, *changes, *pins.notes(pinned), *state_notes, *fewer_nodes_notes),
    )


def decide(
    recipe: Recipe, deepspeed: str | None, machines: RunMachines, pinned: Sequence[Pins] = (), *, compares: bool = False
) -> ResolvedRecipe:
    """Decide what a recipe leaves to the machines: compute type, kernels, batch, level, split, loss, DeepSpeed config.

    What does not fit is taken as well; `memory.hopeless` says so.

    Args:
        deepspeed: The value of `--deepspeed`; None if the recipe decides.
        pinned: What is decided already.
        compares: Estimate the levels of `auto` also if a config is named.

    Raises:
        DeepSpeedConfigError: no such preset or file, or a config that does not hold.
        RecipeError: the ranks cannot share the global batch, or samples.
        MachineError: the machine lacks what the recipe or the config needs.
    """
    topology, hardware, level_pin = machines.topology, machines.hardware, pins.of_level(pinned)
    recipe = hold_out(pins.laid_on(recipe, pinned))
    recipe = measured.with_tried_packing(measured.with_warning_if_unknown(recipe))
    if hardware.gpus:  # the measurement takes seconds, and on CPUs memory decides little
        recipe = measured.with_measured_model(recipe)
    if recipe.config.architecture:
        refuse_tiles(recipe.config, recipe.config.architecture.model_type)
    if recipe.config.packs_experts:
        four_bit_experts.refuse(recipe.config)
    deepspeed = level_pin.level if level_pin else deepspeed
    recipe = choice.with_tensor_parallel(recipe, deepspeed)
    named_document = choice.open_named(recipe, deepspeed)
    recipe = batch_size.with_document(recipe, named_document)
    precision = decide_precision(recipe.config.optim_wrapper.dtype, hardware)
    known_document = named_document or choice.document_of_flags(recipe)  # of a level that is 'auto' only --ds is known
    divides_experts = expert_ranks(known_document.value) > 1
    recipe = kernels.choose_kernels(recipe, hardware, precision.dtype, divides_experts=divides_experts)
    ranks = data_parallel_ranks(recipe.config, topology.world_size)
    refuse_across_nodes(recipe.config, topology.nproc_per_node, topology.num_nodes)
    recipe = batch_size.choose_global_batch(recipe, ranks)
    pinned_by = level_pin and level_pin.reason
    level_and_split = choose_level_and_split(recipe, named_document, machines, precision, pinned_by, compares=compares)
    recipe = batch_size.with_split(recipe, level_and_split.split, level_and_split.split_reason)
    if level_and_split.loss:
        why = Place(Kind.DERIVED, level_and_split.loss_reason)
        recipe = recipe.settled({"train_cfg.loss": level_and_split.loss}, why)
    split = recipe.config.split
    batch = Batch(split.micro_batch, split.accumulation, ranks)
    recipe = batch_size.share_generation(recipe, batch)
    document, buckets = level_and_split.document, level_and_split.buckets
    final = final_config(recipe, document, batch, precision, machines, buckets)
    launch = contradiction(document.launch, topology)
    data_warnings = tuple(row_counts.warnings(recipe.config))
    of_machines = filter(None, [launch, memory.warning(level_and_split.fit), uneven_heads(recipe.config)])
    warnings = (*recipe.warnings, *final.warnings, *of_machines, *data_warnings)
    return ResolvedRecipe(recipe, machines, batch, precision, level_and_split, final, warnings, data_warnings)


def find_machines(recipe: Recipe, request: Request, environ: Mapping[str, str], hardware: Hardware) -> RunMachines:
    """Return where a run of a request starts: flags and environment decide, then the chosen accelerate config.

    Raises:
        UsageError: they contradict each other, or what this machine has.
        DeepSpeedConfigError: as `choice.open_chosen`.
    """
    of_config = choice.launch_flags(recipe, request.deepspeed)
    return RunMachines.of(hardware, find_topology(request.flags, of_config, environ, hardware))


def resolve_start(
    request: Request, environ: Mapping[str, str], hardware: Hardware, now: datetime, topology: Topology | None = None
) -> ResolvedRun:
    """Decide everything about a run that starts now or is queued; what a plan reads of hub models is fetched first.

    Raises:
        TunerError: as `resolve_run`.
    """
    return resolve_run(request, environ, hardware, now, topology, recipe=_to_start(request, of_run=True), starts=True)


def load_for_trial(request: Request) -> Recipe:
    """Load a request's recipe for `tuner tune` or `smoke` as a new run would, with its validation rows; check it.

    Raises:
        TunerError: the recipe is wrong, or not admissible.
    """
    return hold_out(_to_start(request, of_run=False))


def _to_start(request: Request, *, of_run: bool) -> Recipe:
    """Load a recipe whose ranks start next: what a plan reads of models on the hub is fetched first."""
    recipe = _admitted(request, of_run=of_run)
    return _admitted(request, of_run=of_run) if measured.fetch_configs(recipe) else recipe


def _admitted(request: Request, *, of_run: bool) -> Recipe:
    recipe = loading.load(request.recipe, request.overrides, allow_code=request.allow_code)
    admit.require(recipe, allow_code=request.allow_code, of_run=of_run)
    return recipe


def _lack_of_memory(
    request: Request,
    recipe: Recipe,
    checkpoint: Checkpoint | None,
    state: CheckpointState,
    machines: RunMachines,
    num_nodes: int,
) -> TunerError | None:
    """Return why the recipe as asked could not go on with fewer nodes, at its checkpoints' level; None: it could."""
    if request.ignore_fit:
        return None
    fewer = machines.topology._replace(node_rank=0).among(range(num_nodes))
    try:
        pinned = resuming.all_pins(request._replace(state_on_all_nodes=state), recipe, checkpoint, fewer)
        pinned = (*pinned, *filter(None, [resuming.kept_level(request, recipe, state)]))
        decided = decide(recipe, request.deepspeed, RunMachines.of(machines.hardware, fewer), pinned)
    except TunerError as error:
        return error
    return memory.hopeless(decided.level_and_split)


def _day(start: Start, now: datetime, *, goes_on: bool) -> str:
    """Return the date of a run's first start: chat templates render it, and a resumed run has the same samples."""
    saved = start.checkpoint.facts.state if start.checkpoint else None
    first = saved.date if saved else goes_on and RunDirectory(start.run_path).day
    return str(first or now.astimezone().date())  # of this place, as `strftime_now` has it


def _state(resolved: ResolvedRecipe, recipe: Recipe, day: str) -> CheckpointState:
    """Return what decides which runs can load this run's checkpoints; their manifests hold it.

    Args:
        resolved: The recipe on its ranks.
        recipe: As it was asked for, before its batch was made to fit a checkpoint; that in `resolved` is decided.
        day: The date of the run's first start.
    """
    zero = resolved.final.config.get("zero_optimization", {})
    states, weights = ((zero.get(key) or {}).get("device") for key in ("offload_optimizer", "offload_param"))
    return CheckpointState(
        world_size=resolved.topology.world_size,
        global_batch=resolved.batch.global_batch,
        asked_batch=batch_settings(recipe),
        batch=batch_settings(resolved.recipe),
        deepspeed=resolved.level,
        stage=zero.get("stage", 0),
        nvme=states == "nvme",
        tensor_parallel=resolved.recipe.config.train_cfg.autotp_size,
        expert_parallel=expert_ranks(resolved.final.config),
        nvme_weights_alone=weights == "nvme" != states,
        dtype=resolved.precision.dtype,
        optimizer=resolved.recipe.config.optim_wrapper.optimizer.type,
        date=day,
    )


def steps_of(resolved: ResolvedRecipe, checkpoint: Checkpoint | None = None) -> Steps:
    """Return the steps of a run, from its checkpoint on."""
    config = resolved.recipe.config
    done, trained = (checkpoint.step, checkpoint.facts.data) if checkpoint else (0, None)
    return count_steps(
        config, resolved.batch, row_counts.dataset_sizes(config), done, trained.rows if trained else None
    )


def _launch_id(
    request: Request,
    recipe: Recipe,
    resume: ResumePoint | None,
    topology: Topology,
    environ: Mapping[str, str],
    now: datetime,
) -> str:
    if topology.job:
        return f"{topology.job}-{environ.get('SLURM_STEP_ID')}-{environ.get('SLURM_RESTART_COUNT', 0)}"
    if not topology.is_shared:
        return f"{now:%Y%m%dT%H%M%S%f}"
    # The request itself, not what this machine made of it: the nodes of one run may differ.
    asked = [recipe.asked, recipe.ds, recipe.nvme, request.deepspeed]
    of_request = [*asked, str(resume and resume.path), request.max_restarts]
    attempt = [len(request.attempts), *(environ.get(name) for name in _ATTEMPT)]
    return sha256(dump_json([topology.master_addr, topology.master_port, *of_request, *attempt]).encode())
