"""`tuner plan`: what a recipe needs on any machines: its memory at every level, the level to take, its steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tuner.errors import ModelError, Option, Text, marked, options
from tuner.files import JSON_VERSION, JsonObject
from tuner.fit import advice, sizes, summary
from tuner.fit.candidates import Candidate
from tuner.launch import steps
from tuner.launch.machines import MachineFlags, RunMachines, planned_machines
from tuner.launch.resolve import decide, steps_of
from tuner.launch.steps import Steps
from tuner.machine import libraries
from tuner.machine.hardware import Gpu, Hardware
from tuner.machine.topology import Batch
from tuner.notebook import Mark, brief, lines_of, paragraphs, table
from tuner.recipes import catalog
from tuner.recipes.merging import Kind
from tuner.recipes.recipe import Recipe
from tuner.zero.choice import disk_of, is_auto

_HEAD = ("level", "GPU GiB", "spare", "host GiB", "fits")
_MAX_CHANGES, _MAX_WARNINGS = 4, 3
"""How many lines of each a plan prints in Python."""


class Plan(NamedTuple):
    """What a recipe needs on machines, and which levels fit.

    Args:
        report: Memory, levels and traffic; None if the model's size is not known, and `unknown` says why.
        steps: The optimizer steps of the run.
        warnings: About the recipe, too few steps and the DeepSpeed config.
        chosen: The DeepSpeed config that the user chose, with the split of a run; None without one, or if its memory
            is not known.
        gpus: Those of one node.
    """

    recipe: Recipe
    on: str
    report: summary.PlanReport | None
    unknown: ModelError | None
    steps: Steps
    batch: Batch
    warnings: tuple[str, ...]
    chosen: Candidate | None = None
    gpus: tuple[Gpu, ...] = ()

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
        levels = (
            [(level.fit, level.level in self.report.refused) for level in self.report.levels] if self.report else []
        )
        fits = [*levels, *([(self.chosen.fit, False)] if self.chosen else [])]
        return [
            (
                catalog.short_name(fit.level),
                *(f"{size / sizes.GIB:.1f}" for size in (fit.peak.gpu_bytes, fit.spare_gpu_bytes, fit.peak.host_bytes)),
                Mark("refused" if refused else "fits" if fit.fits else "does not fit", fit.fits and not refused),
            )
            for fit, refused in fits
        ]

    def _lines(self) -> list[str]:
        """Return which level to take, or what makes one fit; the steps; the first warnings."""
        changes = self.report.changes if self.report else []
        ways = [f"{change.description}: {change.options.in_python}" for change in changes]
        best = self.report.recommended if self.report else None
        lines = []
        if best:
            best_options = options(Option("deepspeed", best.level), advice.folder(best.level, best.machines))
            lines = [
                *([advice.WITHOUT_OFFLOADING, *ways[:_MAX_CHANGES]] if ways else ()),
                f"recommended: {best_options.in_python}",
            ]
        elif self.report:
            lines = ["Nothing fits." + (" Each of these changes does:" if ways else ""), *ways[:_MAX_CHANGES]]
        warnings = [f"warning: {brief(Text(text).in_python)}" for text in self.warnings[:_MAX_WARNINGS]]
        return [*lines, f"steps: {self.steps.describe()}", *warnings]

    def to_json(self) -> JsonObject:
        """Return the plan as plain values; sizes are whole bytes."""
        empty: JsonObject = {"recipe": self.recipe.name, "parameters": None, "presets": {}, "recommended": None}
        value = {"version": JSON_VERSION, **(summary.to_json(self.report) if self.report else empty), "chosen": None}
        if chosen := self.chosen:
            value |= {"chosen": {"name": chosen.level, "split": chosen.split._asdict(), **chosen.fit.to_json()}}
        return value | {"batch": self.steps.to_json(), "notes": self.recipe.notes, "warnings": list(self.warnings)}


def make(
    recipe: Recipe,
    flags: MachineFlags,
    environ: Mapping[str, str],
    deepspeed: str | None = None,
    machines: RunMachines | None = None,
) -> Plan:
    """Work out what a recipe needs.

    Args:
        machines: In place of those that flags name; without GPUs, the plan has no memory and no seconds.
        deepspeed: The value of `--deepspeed`; None if the recipe decides.

    Raises:
        TunerError: flags contradict each other, or there is no formula for the model's architecture.
    """
    machines = machines or planned_machines(flags, environ)
    decided = decide(recipe, deepspeed, machines, compares=True)
    config = decided.recipe.config
    is_undecided = is_auto(recipe, deepspeed)
    is_changed = not is_undecided or bool(recipe.ds)
    counted = steps_of(decided)
    of_config = decided.warnings if is_changed else (*decided.recipe.warnings, *decided.data_warnings)
    warnings = [*of_config, *steps.warnings(config, decided.batch, counted)]
    report, compared = None, decided.level_and_split.compared
    chosen = compared.taken if is_changed and compared else None
    if unknown := summary.unknown_size(config):
        typed = decided.recipe.origins.get("architecture.model_type")
        if typed and typed.place.kind is Kind.FLAG:
            raise unknown
        warnings = [Text(f"the memory is not known: {unknown.what}. {marked(unknown.fix or '')}".strip()), *warnings]
    elif machines.hardware.gpus:
        summary.known_architecture(config)
        assert decided.level_and_split.of_presets
        report = summary.make(
            recipe.name,
            config,
            machines.to_fit(decided.precision, disk_of(decided.recipe)),
            decided.level_and_split.of_presets,
            cluster=machines.cluster if flags.interconnect is not None else None,
            assumed=machines.cluster,
            named=chosen,
        )
        warnings = [*_no_kernels(machines.hardware), *warnings]
    every = tuple(dict.fromkeys(warnings))
    return Plan(
        recipe=decided.recipe,
        on=machines.name,
        report=report,
        unknown=unknown,
        steps=counted,
        batch=decided.batch,
        warnings=every,
        chosen=chosen,
        gpus=machines.hardware.gpus,
    )


def _no_kernels(node: Hardware) -> Iterator[str]:
    """Warn if torch has no kernels for the planned GPUs, as `tuner train` does on such GPUs."""
    for gpu in {gpu.name: gpu for gpu in node.gpus}.values():
        is_known = gpu.compute_capability > (0, 0)
        if is_known and (problem := libraries.cuda_problem(gpu.compute_capability, elsewhere=True)):
            yield f"torch has no kernels for {gpu.name}: {problem}. Install a torch for CUDA 12.6 there."
