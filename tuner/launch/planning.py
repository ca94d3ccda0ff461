"""`tuner plan`: what a recipe needs on any machines: its memory at every level, the level to take, its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from tuner.errors import ModelError, UsageError
from tuner.files import JsonObject
from tuner.fit import sizes, step_time, summary
from tuner.fit.advice import WITHOUT_OFFLOADING
from tuner.fit.levels import Fit
from tuner.fit.step_time import Cluster, KnownGpu
from tuner.launch import data_rows, machine_facts, steps
from tuner.launch.machine_facts import RunPlace
from tuner.launch.resolve import decide
from tuner.launch.steps import Steps
from tuner.machine import hardware, libraries
from tuner.machine.hardware import Gpu, Hardware
from tuner.machine.topology import Batch, planned
from tuner.notebook import Mark, brief, lines_of, paragraphs, table
from tuner.recipes import catalog
from tuner.recipes.python_calls import in_python
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import Split
from tuner.zero.config import AUTO

_HEAD = ("level", "GPU GiB", "spare", "host GiB", "fits")
_MAX_CHANGES, _MAX_WARNINGS = 4, 3
"""How many lines of each a plan prints in Python."""


class Wanted(NamedTuple):
    """The machines to plan for; sizes and rates are texts such as "80GB" and "8x400Gb/s".

    Args:
        gpus: GPUs of each node. None: the number of this machine.
        gpu: Their product, such as "a100-80g".
        gpu_memory: Their memory, in place of the product.
        nodes: Nodes of that kind.
        host_memory: Memory of each node.
        nvme: A folder on each node's own disk, for swapping if nothing else fits.
        interconnect: Network of each node: adds the seconds of a step on several GPUs.
        utilisation: Part of the GPU's peak that is reached.
    """

    gpus: int | None = None
    gpu: str | None = None
    gpu_memory: str | None = None
    nodes: int = 1
    host_memory: str | None = None
    nvme: str | None = None
    interconnect: str | None = None
    utilisation: float = 0.4


class Chosen(NamedTuple):
    """What the DeepSpeed config needs that the user chose.

    `split` is the split that `tuner train` takes with that config; the levels' split may be another.
    """

    fit: Fit
    split: Split

    def to_json(self) -> JsonObject:
        return {"name": self.fit.level, "split": self.split._asdict(), **self.fit.to_json()}


class Plan(NamedTuple):
    """What a recipe needs on machines, and which levels fit.

    Args:
        on: The machines in words.
        report: Memory, levels and traffic; None if the model's size is not known, and `unknown` says why.
        steps: The optimizer steps of the run.
        batch: The batch of all ranks.
        warnings: About the recipe, too few steps and the DeepSpeed config.
        chosen: The DeepSpeed config that the user chose; None without one, or if its memory is not known.
    """

    recipe: Recipe
    on: str
    report: summary.Report | None
    unknown: ModelError | None
    steps: Steps
    batch: Batch
    warnings: tuple[str, ...]
    chosen: Chosen | None = None

    @property
    def recommended(self) -> str | None:
        """The level to take, such as "deepspeed_zero2"; None: nothing fits, or the size is not known."""
        best = self.report.recommended if self.report else None
        return best.level if best else None

    def __repr__(self) -> str:
        levels = lines_of([_HEAD, *self._levels()]) if self.report else []
        lines = (f"Plan of {self.recipe.name!r} on {self.on}", *levels, *(f"  {line}" for line in self._lines()))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        title = f"{self.recipe.name} on {self.on}"
        head = table(self._levels(), title=title, head=_HEAD) if self.report else paragraphs([title])
        return head + paragraphs(self._lines())

    def _levels(self) -> list[tuple[object, ...]]:
        """Return a row for each level, as `_HEAD` names its cells."""
        levels = [one.fit for one in self.report.levels] if self.report else []
        fits = [*levels, *([self.chosen.fit] if self.chosen else [])]
        return [
            (
                catalog.short_name(fit.level),
                *(f"{size / sizes.GIB:.1f}" for size in (fit.peak.gpu_bytes, fit.spare_gpu_bytes, fit.peak.host_bytes)),
                Mark("fits" if fit.fits else "does not fit", fit.fits),
            )
            for fit in fits
        ]

    def _lines(self) -> list[str]:
        """Return which level to take, or what makes one fit; the steps; the first warnings."""
        changes = self.report.changes if self.report else []
        ways = [f"{one.description}: {in_python(f'{one.flags} --deepspeed {one.level}'.strip())}" for one in changes]
        advice = [f"recommended: deepspeed={self.recommended!r}"] if self.recommended else []
        if advice and ways:
            advice = [WITHOUT_OFFLOADING, *ways[:_MAX_CHANGES], *advice]
        if self.report and not self.recommended:
            advice = ["Nothing fits." + (" Each of these changes does:" if ways else ""), *ways[:_MAX_CHANGES]]
        warnings = [f"warning: {brief(in_python(text))}" for text in self.warnings[:_MAX_WARNINGS]]
        return [*advice, f"steps: {self.steps.describe()}", *warnings]

    def to_json(self) -> JsonObject:
        """Return the plan as plain values; sizes are whole bytes."""
        empty: JsonObject = {"recipe": self.recipe.name, "parameters": None, "presets": {}, "recommended": None}
        value = summary.to_json(self.report) if self.report else empty
        value |= {"chosen": self.chosen.to_json() if self.chosen else None}
        return value | {"batch": self.steps.to_json(), "notes": self.recipe.notes, "warnings": list(self.warnings)}


class PlannedMachines(NamedTuple):
    """Machines that flags name: as a place to run, in words, and what a step's seconds are shown with, if at all."""

    place: RunPlace
    name: str
    network: Cluster | None


def make(recipe: Recipe, wanted: Wanted, environ: Mapping[str, str], deepspeed: str | None = None) -> Plan:
    """Work out what a recipe needs.

    Args:
        deepspeed: The value of `--deepspeed`; None if the recipe decides.

    Raises:
        TunerError: flags contradict each other, or there is no formula for the model's architecture.
    """
    machines = machines_of(wanted, environ)
    decided = decide(replace(recipe, ds=()), AUTO, machines.place)
    config = decided.recipe.config
    counted = steps.count_steps(config, decided.batch, data_rows.sources(config))
    warnings = [*decided.recipe.warnings, *decided.of_data, *steps.warnings(config, decided.batch, counted)]
    report = None
    if unknown := summary.unknown_size(config):
        warnings = [f"the memory is not known: {unknown.what}. {unknown.fix or ''}".strip(), *warnings]
    else:
        report = summary.make(
            recipe.name,
            config,
            machines.place.machines(decided.precision),
            decided.chosen.candidates,
            decided.chosen.choice,
            cluster=machines.network,
            assumed=machines.place.cluster,
        )
        warnings = [*_no_kernels(machines.place.hardware), *warnings]
    chosen, more = _chosen(recipe, deepspeed, machines.place)
    every = tuple(dict.fromkeys((*warnings, *more)))
    return Plan(decided.recipe, machines.name, report, unknown, counted, decided.batch, every, chosen)


def _no_kernels(node: Hardware) -> Iterator[str]:
    """Warn if torch has no kernels for the planned GPUs, as `tuner train` does on such GPUs."""
    for gpu in {gpu.name: gpu for gpu in node.gpus}.values():
        known = gpu.compute_capability > (0, 0)
        if known and (problem := libraries.cuda_problem(gpu.compute_capability, elsewhere=True)):
            yield f"torch has no kernels for {gpu.name}: {problem}. Install a torch for CUDA 12.6 there."


def _chosen(recipe: Recipe, deepspeed: str | None, place: RunPlace) -> tuple[Chosen | None, tuple[str, ...]]:
    """Return what the chosen DeepSpeed config needs, and its warnings."""
    if deepspeed is None and recipe.config.deepspeed == AUTO and not recipe.ds:
        return None, ()
    decided = decide(recipe, deepspeed, place)
    chosen = Chosen(decided.fit, decided.recipe.config.split) if decided.fit else None
    return chosen, decided.warnings


def machines_of(wanted: Wanted, environ: Mapping[str, str]) -> PlannedMachines:
    """Return the machines that flags name, or this machine.

    Raises:
        UsageError: two flags set the same thing, or a size or a name is not known.
    """
    gpus, gpu, gpu_memory = wanted.gpus, wanted.gpu, wanted.gpu_memory
    if gpu and gpu_memory:
        raise UsageError("both set the GPU's memory", where="--gpu and --gpu-memory", fix="Use one of them.")
    host_bytes = sizes.parse_bytes(wanted.host_memory, "--host-memory") if wanted.host_memory else 0
    here, assumed = Hardware() if gpu or gpu_memory else hardware.detect(environ), ""
    if not (gpu or gpu_memory or here.gpus):
        gpus, gpu = gpus or 8, machine_facts.ASSUMED_GPU
        assumed = " (assumed, because this machine has no GPU; set --gpus and --gpu)"
    if gpu_memory:
        # The capability tells bf16 from fp16, which take as much.
        kind: Gpu | None = Gpu(gpu_memory, sizes.parse_bytes(gpu_memory, "--gpu-memory"), (0, 0))
    else:
        kind = machine_facts.known_gpu(gpu) if gpu else None
    node = machine_facts.node(here, gpus, kind)
    node = node._replace(host_memory_bytes=host_bytes or node.host_memory_bytes)
    count, first = len(node.gpus), node.gpus[0]
    product = step_time.find(gpu) if gpu else step_time.like(first.name, first.memory_bytes)
    nodes = f"{wanted.nodes} node{'s' * (wanted.nodes > 1)}"
    name = f"{nodes} with {f'{count} x {kind.name}{assumed}' if kind else node.describe()}"
    network = _cluster(wanted, product)
    usual = Cluster.of(product, wanted.nodes, utilisation=_utilisation(wanted)) if product else None
    place = RunPlace(node, planned(wanted.nodes, count), network or usual, wanted.nvme or "")
    return PlannedMachines(place, name, network)


def _cluster(wanted: Wanted, product: KnownGpu | None) -> Cluster | None:
    """Return what the seconds of a step are computed with, or None without a network."""
    if wanted.interconnect is None:
        return None
    rate = sizes.parse_rate(wanted.interconnect, "--interconnect")
    if product is None:
        raise UsageError(
            "estimating seconds needs the GPU's speed", where="--interconnect", fix="Set it: --gpu a100-80g."
        )
    return Cluster.of(product, wanted.nodes, rate, _utilisation(wanted))


def _utilisation(wanted: Wanted) -> float:
    if not 0 < wanted.utilisation <= 1:
        message = f"{wanted.utilisation} is no part of a peak"
        raise UsageError(message, where="--utilisation", fix="Use 0.3 to 0.6.")
    return wanted.utilisation
