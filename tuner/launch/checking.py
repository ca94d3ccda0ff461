"""All that is wrong with a recipe, a DeepSpeed config, a run or a checkpoint; nothing is started or printed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeVar

from tuner import paths
from tuner.errors import Option, RunDirectoryError, TunerError, visible
from tuner.files import JsonObject
from tuner.launch import admit, memory, preflight
from tuner.launch.checks import deepspeed_config
from tuner.launch.machines import HERE, MachineFlags, look_up
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine import hardware
from tuner.notebook import Mark, brief, table
from tuner.recipes import loading
from tuner.recipes.names import CONFIGS, Name, NameKind, identify
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig
from tuner.runs import checkpoints
from tuner.runs.directory import RunDirectory
from tuner.zero import choice, jsonfile, presets
from tuner.zero.choice import is_auto
from tuner.zero.config import AUTO, Document
from tuner.zero.lint import check_device, inspect

Value = TypeVar("Value")
_MAX_SHOWN = 15
"""Findings that a report shows of itself in Python."""


@dataclass(frozen=True)
class Finding:
    """One error or warning. `code` is the error's; `where` is a file:line:column, a flag or a key."""

    severity: Literal["error", "warning"]
    what: str
    where: str | None = None
    fix: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        prefix = f"{self.where}: " if self.where else ""
        code = f"[{self.code}]" if self.code else ""
        return visible(f"{prefix}{self.severity}{code}: {self.what}{'. ' + self.fix if self.fix else ''}")


@dataclass(repr=False)
class CheckReport:
    """All findings about `name`, in the order of the checks."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    on_hub: list[str] = field(default_factory=list)
    """The models and data that a check does not look up: they are on the hub."""

    @property
    def ok(self) -> bool:
        """Whether there is no error; there may be warnings."""
        return not any(finding.severity == "error" for finding in self.findings)

    def __repr__(self) -> str:
        more = len(self.findings) - _MAX_SHOWN
        lines = [f"  {brief(finding)}" for finding in self.findings[:_MAX_SHOWN]]
        return "\n".join(
            (f"Check of {self.name!r}: {self.conclusion}", *lines, *([f"  and {more} more"] if more > 0 else []))
        )

    def _repr_html_(self) -> str:
        heading = Mark(self.conclusion, self.ok)
        rows = [(finding.severity, finding.what, finding.where or "", finding.fix or "") for finding in self.findings]
        return table([("result", heading, "", ""), *rows], title=f"Check of {self.name}")

    @property
    def conclusion(self) -> str:
        """How many errors and warnings there are, and which models and data of the hub were not looked up."""
        errors = sum(finding.severity == "error" for finding in self.findings)
        warnings = len(self.findings) - errors
        parts = [
            f"{count} {name}{'s' if count > 1 else ''}"
            for count, name in ((errors, "error"), (warnings, "warning"))
            if count
        ]
        counts = ", ".join(parts) or "no problems"
        return f"{counts}; not looked up on the hub: {', '.join(self.on_hub)}" if self.on_hub else counts

    def to_json(self) -> JsonObject:
        """Return the report as plain values."""
        findings = [asdict(finding) for finding in self.findings]
        return {"name": self.name, "ok": self.ok, "findings": findings, "on_hub": self.on_hub}

    def error(self, error: TunerError) -> None:
        """Add an error, and each error that it holds."""
        self.findings += [
            Finding("error", finding.what, finding.where, finding.fix, finding.code) for finding in error.each()
        ]

    def warn(self, warnings: Iterable[str]) -> None:
        """Add warnings that are sentences."""
        self.findings += [Finding("warning", warning) for warning in warnings]

    def attempt(self, act: Callable[[], Value]) -> Value | None:
        """Return the result of `act`; if it raises a user's mistake, add the mistake and return None."""
        try:
            return act()
        except TunerError as error:
            self.error(error)
            return None


def check(request: Request, flags: MachineFlags, environ: Mapping[str, str]) -> CheckReport:
    """Check what a request's `recipe` names: a recipe with its DeepSpeed config, such a config, a run or a checkpoint.

    Raises:
        UsageError: it names a folder that is no run.
    """
    name = request.recipe
    report = CheckReport(str(name.text if name else request.overrides.model or request.overrides.adapter))
    if name and name.kind in CONFIGS:
        _alone(report, name, environ)
    elif name and name.path and name.kind is NameKind.RUN:
        run_dir = RunDirectory(name.path)
        _recipe(report, request._replace(recipe=identify(str(run_dir.recipe))), flags, environ)
        _run(report, run_dir)
    elif name and name.path and name.kind is NameKind.CHECKPOINT:
        _checkpoint(report, name.path)
    else:
        _recipe(report, request, flags, environ)
    report.findings = list(dict.fromkeys(report.findings))
    return report


def _alone(report: CheckReport, name: Name, environ: Mapping[str, str]) -> None:
    """Check one DeepSpeed config without a recipe. What this machine lacks is a warning: another may have it."""
    needs_disk = name.preset is not None and presets.find(name.preset).needs_disk

    def opened() -> Document:
        document = choice.open_config(name, "NAME")
        return choice.with_disk(document, "PATH", Option("nvme")) if needs_disk else document

    if needs_disk:
        report.warn([f"a run with {name.text} names the folder on a disk to swap to: {Option('nvme', 'PATH')}"])
    if not _config(report, opened):
        return
    machine_report = CheckReport(name.text)
    for error in _lacks(opened(), environ):
        machine_report.error(error)
    places = {finding.where for finding in report.findings}  # an error that holds on every machine is reported already
    report.findings += [
        replace(finding, severity="warning", what=f"this machine cannot run it: {finding.what}")
        for finding in machine_report.findings
        if finding.where not in places
    ]


def _lacks(document: Document, environ: Mapping[str, str]) -> list[TunerError]:
    """Return what this machine lacks for a DeepSpeed config by itself."""
    this_machine, value = hardware.detect(environ), inspect(document)[0].value
    errors: list[TunerError] = []
    try:
        check_device(value, this_machine.device, document.where)
    except TunerError as error:
        errors.append(error)
    return [*errors, *deepspeed_config.lacks(value, this_machine, environ, document.where)]


def _recipe(report: CheckReport, request: Request, flags: MachineFlags, environ: Mapping[str, str]) -> None:
    recipe = report.attempt(lambda: loading.load(request.recipe, request.overrides, allow_code=request.allow_code))
    if recipe is None:
        if request.deepspeed is not None and request.deepspeed != AUTO:
            deepspeed = request.deepspeed
            _config(report, lambda: choice.open_config(deepspeed, Option("deepspeed")))
        return
    report.on_hub = _on_hub(recipe.config)
    for problem in admit.problems(recipe, allow_code=request.allow_code, of_run=True):
        report.error(problem)
    plan_decides = is_auto(recipe, request.deepspeed)
    if not plan_decides and not _config(report, lambda: choice.open_chosen(recipe, request.deepspeed), to_run=True):
        report.warn(recipe.warnings)
        return
    plan = report.attempt(lambda: _planned(request, recipe, flags, environ))
    if plan is None:
        return
    if hopeless := memory.hopeless(plan.level_and_split):
        report.error(hopeless)
    reported = () if plan_decides else plan.final.config_warnings
    report.warn(warning for warning in plan.warnings if warning not in reported)
    if report.ok:
        for finding in report.attempt(lambda: preflight.inspect(plan, elsewhere=flags != HERE)) or ():
            report.warn([finding]) if isinstance(finding, str) else report.error(finding)


def _on_hub(config: RecipeConfig) -> list[str]:
    """Return the paths of the model, the tower, the teacher and the data that are on the hub."""
    models = [config.model, config.model.vision, config.objective.taught_by]
    all_paths = [model.path for model in models if model] + [
        rows.path for loader in config.loaders.values() for rows in loader.dataset.data_sets
    ]
    return [path for path in dict.fromkeys(all_paths) if path and paths.local(path) is None]


def _planned(request: Request, recipe: Recipe, flags: MachineFlags, environ: Mapping[str, str]) -> ResolvedRun:
    """Plan the run. Its recipe was admitted before, or its problems were reported."""
    now = datetime.now().astimezone()
    if flags == HERE:
        return resolve_run(request, environ, hardware.detect(environ), now, recipe=recipe)
    elsewhere = look_up(flags, environ)
    return resolve_run(request, environ, elsewhere.hardware, now, elsewhere.topology, recipe)


def _run(report: CheckReport, run_dir: RunDirectory) -> None:
    def used() -> Document:
        document = jsonfile.read_json_config(run_dir.deepspeed)
        block = document.value.get("checkpoint")
        if isinstance(block, dict):
            block.pop("load_universal", None)  # only for the attempt that resumed on another number of ranks
        return document

    _config(report, used)
    report.attempt(run_dir.read_run)
    for _, folder in checkpoints.newest_first(run_dir.checkpoints):
        _checkpoint(report, folder)


def _checkpoint(report: CheckReport, folder: Path) -> None:
    """Read every file of a checkpoint and compare it with its hash."""
    problem = checkpoints.inspect(folder)
    if problem and folder.is_dir():  # a run that goes on may have removed it meanwhile
        fix = "Remove it, or restore the file: no run resumes from it."
        report.error(RunDirectoryError(f"{folder.name}: {problem}", where=folder, fix=fix))


def _config(report: CheckReport, opened: Callable[[], Document], *, to_run: bool = False) -> bool:
    """Check one DeepSpeed config by itself and return whether it has no error; `to_run`: a run will start with it."""
    inspected = report.attempt(lambda: inspect(opened(), to_run=to_run)[1])
    if inspected is None:
        return False
    for problem in inspected.problems:
        report.error(problem)
    report.findings += [Finding("warning", warning.what, warning.where, warning.fix) for warning in inspected.warnings]
    return not inspected.problems
