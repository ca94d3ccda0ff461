"""The lines that a run, --dry-run and `tuner plan` begin with: at most eight of them, then the warnings.

It prints nothing. A line holds one subject, and no fact stands in two of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tuner.errors import Option, Text, marked
from tuner.fit.levels import Costs
from tuner.fit.parameters import count, has_formula, num_parameters
from tuner.launch import memory, row_counts
from tuner.launch.resolved_run import ResolvedRun
from tuner.launch.steps import Steps, estimate_tokens
from tuner.machine.topology import Batch, Topology
from tuner.recipes.names import MODELS
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import MixtureEntry, RecipeConfig, Rows
from tuner.zero.config import expert_ranks

_MAX_PATHS = 3


def announcement(run: ResolvedRun, warnings: Iterable[str]) -> list[Text]:
    """Return the lines about the run that starts now, then its own warnings and `warnings` about the machine."""
    cwd = Path.cwd()
    lines = [
        *of_recipe(run.recipe, run.steps, run.batch),
        _machines(run),
        *filter(None, [memory.line(run)]),
        *memory.without_offloading(run.level_and_split),
        f"run directory: {run.run_path.relative_to(cwd) if run.run_path.is_relative_to(cwd) else run.run_path}",
        *run.notes,
        *(f"WARNING: {marked(warning)}" for warning in dict.fromkeys((*run.warnings, *warnings))),
    ]
    return [Text(line) for line in lines]


def of_recipe(recipe: Recipe, steps: Steps, batch: Batch) -> list[Text]:
    """Return the lines that need no machine: model and method, data, steps, batch size."""
    config = recipe.config
    lines = [
        f"model: {_model(recipe)}",
        f"data: {_data(config, steps)}",
        f"steps: {steps.describe()}",
        f"batch size: {_generated(config, batch)}{_batch(batch, config.train_cfg.ranks_a_sample)}",
        *_several_steps(config, batch.global_batch),
        *_measured_together(config, batch),
    ]
    return [Text(line) for line in lines]


def _model(recipe: Recipe) -> str:
    config, architecture = recipe.config, recipe.config.architecture
    method = f"{_method(config)}, {config.objective.facts.title}"
    request = recipe.arguments
    has_no_recipe = request and (request.name is None or request.name.kind in MODELS)
    if request and has_no_recipe and request.overrides.method is None:
        method += f"; {Option('method')} chooses another"
    joined = f" and {config.model.vision.path}" if config.model.vision else ""
    continued = f" with the adapter {config.adapter.path}" if config.adapter and config.adapter.path else ""
    text = f"{config.model.path}{joined}{continued} ({method})"
    if architecture is None or not has_formula(architecture):
        return text
    trained, total = count(config, architecture).trainable, num_parameters(architecture)
    counted = f"all {_number(total)}" if trained == total else f"{_number(trained)} of {_number(total)}"
    return f"{text}, {counted} parameters trained"


def _method(config: RecipeConfig) -> str:
    if config.adapter is None:
        layers = config.train_cfg.trainable_layers
        of_tower = " with LoRA on the vision tower" if config.model.vision_lora else ""
        return f"the last {layers} layer{'s' * (layers > 1)}" if layers else f"full fine-tuning{of_tower}"
    name = "DoRA" if config.adapter.use_dora else "LoRA"
    if config.quantization is None:
        return name
    return f"Q{name}" if config.quantization.bits == 4 else f"{name} on {config.quantization.bits}-bit weights"


def _number(value: int) -> str:
    """Return a count with three digits, such as '43.6 M'."""
    for unit, size in (("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:#.3g} {unit}".replace(". ", " ")
    return f"{value:,}"


def _data_set(rows: Rows) -> str:
    """Return a data set as the plan names it: its path, with its weight and its limit if it has them."""
    weight = f" x {rows.weight:g}" if isinstance(rows, MixtureEntry) and rows.weight != 1 else ""
    limit = f" (first {rows.max_rows:,} rows)" if isinstance(rows, MixtureEntry) and rows.max_rows else ""
    return f"{rows.path}{weight}{limit}"


def _data(config: RecipeConfig, steps: Steps) -> str:
    dataset = config.train_dataloader.dataset
    if not dataset.mixture and dataset.path is None:
        return f"none is given yet ({Option('data', 'FILE')})"
    names = [_data_set(data_set) for data_set in dataset.data_sets]
    text = ", ".join(names[:_MAX_PATHS])
    if len(names) > _MAX_PATHS:
        text += f" and {len(names) - _MAX_PATHS} more"
    if steps.rows.value is not None:
        text += f", {steps.rows.value:,} row{'s' * (steps.rows.value != 1)}"
        tokens = estimate_tokens(config, row_counts.dataset_sizes(config))
        text += f", about {_number(round(tokens))} tokens per epoch" if tokens else ""
    if copied := row_counts.num_copies(dataset, config.objective.type):
        text += f"; {copied[0]:,} of the {copied[1]:,} rows have the same question and answer as another"
    val = config.val_dataloader
    return f"{text}; validation: {val.dataset.path}" if val and val.dataset.path and not dataset.val_split else text


def _generated(config: RecipeConfig, batch: Batch) -> str:
    """Return what the samples of a step are if they are generated, before their number."""
    generations = config.objective.samples_a_row
    if not config.objective.facts.generates or generations == 1:
        return ""
    return f"{_counted(batch.global_batch // generations, 'prompt')} x {generations} completions = "


def _several_steps(config: RecipeConfig, size: int) -> list[str]:
    """Return a line about completions on which several steps train."""
    at_once, steps = config.objective.generated_at_once(size), config.objective.steps_per_generation(size)
    if steps == 1:
        return []
    passes = _counted(steps * size // at_once, "pass", "es")
    return [f"generation: {at_once} completions at once, then {steps} steps on them, {passes} over each"]


def _measured_together(config: RecipeConfig, batch: Batch) -> list[str]:
    """Return a line about a loss that depends on the split of the global batch."""
    if not config.depends_on_micro_batch:
        return []
    samples, split = f"{_counted(batch.micro_batch, 'sample')} of a micro-batch", "size per device"
    if config.objective.depends_on_ranks:
        samples, split = f"{samples} and of all processes together", f"{split} or number of processes"
    return [f"split: the loss is measured over the {samples}, so another {split} changes what is learned"]


def _batch(batch: Batch, shared_by: int) -> str:
    processes = _counted(batch.ranks, "process", "es")
    if shared_by > 1:
        processes = f"{_counted(batch.ranks, 'group')} of {shared_by} processes"
    accumulation = _counted(batch.accumulation, "accumulation step")
    return f"{batch.global_batch} ({batch.micro_batch} per device x {accumulation} x {processes})"


def _machines(run: ResolvedRun) -> str:
    if run.hardware.gpus:
        gpus = f"{run.hardware.describe()}, {_processes(run.topology)}"
        return f"DeepSpeed: {_level(run)}, {run.precision.dtype}, on {gpus}{_split(run)}"
    where = f" with {_processes(run.topology)}" if run.topology.world_size > 1 else ""
    return f"No GPU found: training on the CPU{where} in {run.precision.dtype}, {_level(run)}{_split(run)}"


def _split(run: ResolvedRun) -> str:
    size = run.recipe.config.train_cfg.autotp_size
    if size > 1:
        return f", each layer split over {_counted(size, 'process', 'es')} (AutoTP)"
    size = expert_ranks(run.final.config)
    return f", experts divided over {_counted(size, 'process', 'es')} (AutoEP)" if size > 1 else ""


def _processes(topology: Topology) -> str:
    nodes = f"{topology.num_nodes} nodes, " if topology.num_nodes > 1 else ""
    started = "" if topology.launcher == "local" else f" ({topology.launcher})"
    return f"{nodes}{_counted(topology.world_size, 'process', 'es')}{started}"


def _level(run: ResolvedRun) -> str:
    """Return the ZeRO stage, the config that it comes from, and why `auto` took it."""
    costs = Costs.of_config(run.final.config)
    if not costs.stage:
        return "without ZeRO" if run.level == "none" else f"without ZeRO ({run.level})"
    offloaded = " with offloading" if costs.offloads else ""
    why = (run.level_and_split.level_reason or "") if run.hardware.gpus else ""
    level = run.level if run.final.from_catalog else f"from {run.level}"
    before = "" if run.hardware.gpus else "with "
    return f"{before}ZeRO-{costs.stage}{offloaded} ({', '.join(filter(None, [level, why]))})"


def _counted(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{ending * (number != 1)}"
