"""`tuner plan`: whether a recipe fits, at every ZeRO level, on machines that need not be here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from tuner.cli import complete, targets
from tuner.cli.options import override_options, overrides
from tuner.cli.say import say, say_table, wrapped
from tuner.errors import UsageError

if TYPE_CHECKING:
    from tuner.errors import ModelError
    from tuner.fit.communication import Cluster
    from tuner.fit.gpu_catalog import KnownGpu
    from tuner.fit.levels import Fit, Machines
    from tuner.fit.max_context import Longest
    from tuner.fit.summary import Report
    from tuner.launch.steps import Steps
    from tuner.recipes.recipe import Recipe
    from tuner.recipes.schema import RecipeConfig

_PARTS = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer": ("optimizer_states", "step"),
    "activations": ("activations",),
    "logits": ("logits",),
    "buffers": ("buckets", "gathered_weights"),
    "context": ("context", "fragmentation"),
}
_ESTIMATES = (
    "Estimates: model states by the published formulas, activations as transformers saves them; "
    "see docs/plan.md for what was measured."
)


_LONGEST = (
    "Estimates: one row a micro-batch, recomputed, flash attention, the loss in chunks; that the model takes positions "
    "so far is its own matter. See docs/long-context.md."
)


@click.command()
@click.argument("recipe", required=False, shell_complete=complete.recipes, callback=targets.imported)
@targets.machine_options
@click.option("--gpu-memory", metavar="SIZE", help="Their memory, such as 80GB.")
@click.option("--host-memory", metavar="SIZE", help="Memory of each node, such as 512GB.")
@click.option("--nvme", metavar="PATH", help="A folder on each node's own disk, to swap to where nothing else fits.")
@click.option("--interconnect", metavar="RATE", help="Network of each node, such as 8x400Gb/s: adds seconds a step.")
@click.option("--utilisation", type=float, default=0.4, show_default=True, help="Part of the GPU's peak reached.")
@click.option("--max-context", is_flag=True, help="The longest rows that fit, shared by 1 to all ranks, instead.")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@override_options
def command(
    recipe: str | None,
    gpus: int | None,
    gpu: str | None,
    gpu_memory: str | None,
    nodes: int,
    host_memory: str | None,
    nvme: str | None,
    interconnect: str | None,
    utilisation: float,
    max_context: bool,
    as_json: bool,
    allow_code: bool,
    **changes: Any,
) -> None:
    """Show what RECIPE needs on each GPU and host, for every preset, and which fits."""
    from tuner.files import dump_json
    from tuner.fit import summary
    from tuner.fit.communication import Cluster
    from tuner.recipes import loading

    loaded = loading.load(recipe, overrides(**changes), allow_code=allow_code)
    dtype = loaded.config.optim_wrapper.dtype
    machines, product, said = _machines(gpus, gpu, gpu_memory, nodes, host_memory, dtype)
    machines = replace(machines, nvme_path=nvme or "")
    if max_context:
        _show_longest(loaded, machines, said, as_json=as_json)
        return
    if unknown := summary.unknown_size(loaded.config):
        _show_without_memory(loaded, machines, said, unknown, as_json=as_json)
        return
    assumed = Cluster.of(product, nodes) if product else None
    made = summary.make(loaded, machines, _cluster(nodes, interconnect, product, utilisation), assumed)
    counted, warnings = _steps(loaded, made.config, machines.world_size)
    split = [] if made.config == loaded.config else [f"split: {made.config.split}"]
    if as_json:
        value = summary.to_json(made) | {"batch": counted.to_json(), "notes": loaded.notes, "warnings": warnings}
        click.echo(dump_json(value), nl=False)
        return
    _print(
        made, said, [*loaded.notes, *split, f"steps: {counted.describe()}", *(f"WARNING: {one}" for one in warnings)]
    )


def _show_without_memory(loaded: Recipe, machines: Machines, said: str, why: ModelError, *, as_json: bool) -> None:
    """Print what is known of a run whose model's size is not: its batch and its steps."""
    from tuner.files import dump_json
    from tuner.fit.sequence_parallel import data_parallel_ranks
    from tuner.fit.split import possible

    ranks = data_parallel_ranks(loaded.config, machines.world_size)
    config = loaded.config.with_split(possible(loaded.config, ranks)[0])
    counted, warnings = _steps(loaded, config, machines.world_size)
    warnings = [f"the memory is not known: {why.what}. {why.fix or ''}".strip(), *warnings]
    if as_json:
        value: dict[str, Any] = {"recipe": loaded.name, "parameters": None, "presets": {}, "recommended": None}
        value |= {"batch": counted.to_json(), "notes": loaded.notes, "warnings": warnings}
        click.echo(dump_json(value), nl=False)
        return
    for line in (f"{loaded.name} on {said}", *loaded.notes, f"steps: {counted.describe()}"):
        say(wrapped(line))
    for warning in warnings:
        say(wrapped(f"WARNING: {warning}"), fg="yellow")


def _show_longest(loaded: Recipe, machines: Machines, said: str, *, as_json: bool) -> None:
    """Print the longest rows that fit: as the recipe is, and with tiled MLPs and offloaded activations."""
    from tuner.files import dump_json
    from tuner.fit import max_context, summary

    architecture = summary.known_architecture(loaded.config)
    flags = " ".join(f"--set {name}=True" for name in max_context.SETTINGS)
    whole = max_context.with_everything(loaded.config)
    found = {"as_it_is": max_context.longest(loaded.config, architecture, machines)}
    if whole != loaded.config:
        found["with_everything"] = max_context.longest(whole, architecture, machines)
    if as_json:
        values = {name: [vars(one) for one in rows] for name, rows in found.items()}
        click.echo(dump_json({"recipe": loaded.name, "max_context": values, "notes": loaded.notes}), nl=False)
        return
    say(wrapped(f"{loaded.name} on {said}: the longest row in units of 1,024 tokens, shared by so many ranks"))
    for name, rows in found.items():
        click.secho(flags if name == "with_everything" else "As the recipe is", italic=True)
        say_table(_longest_rows(rows), gap=2)
    say(wrapped(_LONGEST), dim=True)


def _longest_rows(rows: list[Longest]) -> Iterator[list[str]]:
    sizes = sorted({one.sequence_parallel_size for one in rows})
    yield ["sequence_parallel_size", *map(str, sizes)]
    for level in dict.fromkeys(one.level for one in rows):
        tokens = [one.tokens for one in rows if one.level == level]
        yield [level.removeprefix("deepspeed_"), *(f"{count // 1024:,}" if count else "-" for count in tokens)]


def _steps(loaded: Recipe, config: RecipeConfig, ranks: int) -> tuple[Steps, list[str]]:
    """Return the optimizer steps of the run on so many ranks, and what to say of the recipe and of too few steps."""
    from tuner.fit.sequence_parallel import data_parallel_ranks
    from tuner.launch import counting, steps
    from tuner.machine.topology import Batch

    batch = Batch(*config.split[:2], data_parallel_ranks(config, ranks))
    counted = steps.count_steps(config, batch, counting.sources(config))
    few = steps.too_few(config, batch, counted)
    return counted, [*loaded.warnings, *([few] if few else [])]


def _machines(
    gpus: int | None, gpu: str | None, gpu_memory: str | None, nodes: int, host_memory: str | None, dtype: str
) -> tuple[Machines, KnownGpu | None, str]:
    """Return the machines that the flags mean, where they are silent those that are here, and what to call them."""
    from tuner.fit import gpu_catalog, sizes
    from tuner.fit.levels import Machines
    from tuner.machine.hardware import Gpu, Hardware, detect
    from tuner.zero import precision

    if gpu and gpu_memory:
        raise UsageError("both name the GPU's memory", where="--gpu and --gpu-memory", fix="Give one of them.")
    host_bytes = sizes.parse_bytes(host_memory, "--host-memory") if host_memory else 0
    here, assumed = Hardware() if gpu or gpu_memory else detect(os.environ), ""
    if not (gpu or gpu_memory or here.gpus):
        gpus, gpu = gpus or 8, targets.ASSUMED_GPU
        assumed = " (assumed, since no GPU is here; say which with --gpus and --gpu)"
    if gpu_memory:
        # The capability tells bf16 from fp16, which take as much.
        kind: Gpu | None = Gpu(gpu_memory, sizes.parse_bytes(gpu_memory, "--gpu-memory"), (0, 0))
    else:
        kind = targets.known_gpu(gpu) if gpu else None
    node = targets.node(here, gpus, kind)
    count, first = len(node.gpus), node.gpus[0]
    weight_bytes = precision.decide(dtype, node).weight_bytes
    machines = Machines(count, node.smallest_gpu_bytes, nodes, host_bytes or node.host_memory_bytes, weight_bytes)
    product = gpu_catalog.find(gpu) if gpu else gpu_catalog.like(first.name, first.memory_bytes)
    return machines, product, f"{nodes} x {f'{count} x {kind.name}{assumed}' if kind else node.describe()}"


def _cluster(num_nodes: int, interconnect: str | None, product: KnownGpu | None, utilisation: float) -> Cluster | None:
    """Return what a step's seconds are worked out with, or None where no network is named."""
    from tuner.fit import sizes
    from tuner.fit.communication import Cluster

    if interconnect is None:
        return None
    rate = sizes.parse_rate(interconnect, "--interconnect")
    if product is None:
        raise UsageError("seconds need the GPU's speed", where="--interconnect", fix="Name it: --gpu a100-80g.")
    if not 0 < utilisation <= 1:
        raise UsageError(f"{utilisation} is no part of a peak", where="--utilisation", fix="Write 0.3 to 0.6.")
    return Cluster.of(product, num_nodes, rate, utilisation)


def _print(made: Report, said: str, notes: list[str]) -> None:
    for line in (_size(made, said), *notes):
        say(wrapped(line))
    click.secho("GiB on each GPU at the peak of a step, and on each host", italic=True)
    say_table(_memory_rows(made), bold=made.fits.index(made.recommended) + 1 if made.recommended else None)
    for line in _advice(made):
        say(wrapped(line))
    if made.steps:
        click.secho("Sent by each rank in one step", italic=True)
        say_table(_traffic_rows(made), gap=2)
    say(wrapped(_ESTIMATES), dim=True)


def _size(made: Report, said: str) -> str:
    from tuner.fit.parameters import num_parameters

    counts = made.parameters
    frozen = counts.frozen + counts.quantized
    return (
        f"{made.name} on {said}: {num_parameters(made.architecture):,} parameters, {counts.trainable:,} trained"
        + (f", {frozen:,} frozen" if frozen else "")
        + (f" ({counts.quantized:,} of them in {counts.quantized_bits} bits)" if counts.quantized else "")
    )


def _advice(made: Report) -> Iterator[str]:
    """Yield which level to take, or which changes make one fit."""
    from tuner.fit.sizes import gib

    best = made.recommended
    if best:
        yield f"Take {best.level}: the lowest level that fits, {gib(best.spare_gpu_bytes)} to spare on each GPU."
        if not made.machines.host_bytes:
            yield f"Each host then needs {gib(best.peak.host_bytes)}; --host-memory lets that be judged too."
        return
    yield "Nothing fits. " + ("Each of these does:" if made.changes else "No change tried here makes it fit.")
    for number, change in enumerate(made.changes, 1):
        yield f"  {number}. {change.what}: {f'{change.flags} --deepspeed {change.level}'.strip()}"


def _memory_rows(made: Report) -> Iterator[list[str]]:
    """Yield a column for each level: six levels and their longest line stand in 80 columns, eleven sizes do not."""
    yield ["", *(fit.level.removeprefix("deepspeed_") for fit in made.fits)]
    for title, keys in _PARTS.items():
        sizes = (sum(fit.peak.gpu.get(key, 0.0) for key in keys) for fit in made.fits)
        yield [title, *(f"{size / 2**30:.2f}" for size in sizes)]
    for title, totals in (
        ("total", [fit.peak.gpu_bytes for fit in made.fits]),
        ("spare", [fit.spare_gpu_bytes for fit in made.fits]),
        ("host", [fit.peak.host_bytes for fit in made.fits]),
    ):
        yield [title, *(f"{size / 2**30:.1f}" for size in totals)]
    yield ["fits", *map(_verdict, made.fits)]


def _verdict(fit: Fit) -> str:
    if fit.fits:
        return "yes"
    return "no" if fit.spare_gpu_bytes < 0 else "no: host"


def _traffic_rows(made: Report) -> Iterator[list[str]]:
    timed = ("compute s", "communication s", "not hidden s", "step s", "tokens/s")
    yield ["level", "GB", *(timed if any(step.time for step in made.steps) else ())]
    for step in made.steps:
        cells = [step.level.removeprefix("deepspeed_"), f"{step.traffic.total_bytes / 1e9:.1f}"]
        if time := step.time:
            cells += [f"{value:.2f}" for value in (time.compute_s, time.communication_s, time.visible_communication_s)]
            cells += [f"{time.total_s:.2f}", f"{made.tokens_per_step / time.total_s:,.0f}"]
        yield cells
