"""`tuner check`: all that is wrong with a recipe, a DeepSpeed config or a run, told at once; nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from tuner.cli import complete, targets
from tuner.cli.options import override_options, overrides
from tuner.errors import TunerError, visible

Value = TypeVar("Value")
if TYPE_CHECKING:
    from tuner.recipes.recipe import Overrides, Recipe
    from tuner.zero.jsonfile import Document

_WRONG = 2


@dataclass(frozen=True)
class Finding:
    """One thing to tell; code is an error's, where is a file:line:column, a flag or a key."""

    severity: Literal["error", "warning"]
    what: str
    where: str | None = None
    fix: str | None = None
    code: str | None = None

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        code = f"[{self.code}]" if self.code else ""
        return visible(f"{place}{self.severity}{code}: {self.what}{'. ' + self.fix if self.fix else ''}")


@dataclass
class Report:
    """All that is to be told, in the order in which it was looked at."""

    findings: list[Finding] = field(default_factory=list)

    @property
    def has_errors(self) -> bool:
        return any(one.severity == "error" for one in self.findings)

    def error(self, error: TunerError) -> None:
        """Add an error, and each other one that it tells of."""
        self.findings += [Finding("error", one.what, one.where, one.fix, one.code) for one in error.each()]

    def warn(self, warnings: Iterable[str]) -> None:
        """Add warnings that are sentences."""
        self.findings += [Finding("warning", warning) for warning in warnings]

    def attempt(self, act: Callable[[], Value]) -> Value | None:
        """Return what `act` returns, or None where it raises a user's mistake, which is added."""
        try:
            return act()
        except TunerError as error:
            self.error(error)
            return None


@click.command()
@click.argument("name", required=False, shell_complete=complete.recipes, callback=targets.imported)
@targets.deepspeed_option
@targets.machine_options
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@override_options
def command(
    name: str | None,
    deepspeed: str | None,
    gpus: int | None,
    gpu: str | None,
    nodes: int,
    as_json: bool,
    allow_code: bool,
    **changes: Any,
) -> None:
    """Check NAME and start nothing: a recipe with its DeepSpeed config, a DeepSpeed config alone, or a run directory.

    Every error and warning is told, each with its line or key. Exit code 2 when there is an error. A recipe is checked
    for this machine, or for one with --gpus and --gpu.
    """
    kind = targets.kind_of(name)
    unused = {} if kind == "run" else {"gpus": gpus, "gpu": gpu, "nodes": nodes}
    targets.refuse_changes(name, kind, {**changes, **unused, "deepspeed": deepspeed})
    report, machines = Report(), (gpus, gpu, nodes)
    if kind == "config":
        _alone(report, str(name))
    elif kind == "run":
        _recipe(report, str(Path(str(name)) / "recipe.py"), None, machines, allow_code, changes)
        _run(report, Path(str(name)))
    else:
        _recipe(report, name, deepspeed, machines, allow_code, changes)
    _print(str(name or changes["model"] or changes["adapter"]), list(dict.fromkeys(report.findings)), as_json=as_json)


def _alone(report: Report, name: str) -> None:
    """Check one DeepSpeed config without a recipe; what is lacking here is a warning: it may run elsewhere."""
    from tuner.zero import choice

    if not _config(report, lambda: choice.open_config(name, "NAME")):
        return
    here = Report()
    for error in targets.lacks(choice.open_config(name, "NAME")):
        here.error(error)
    told = {one.where for one in report.findings}  # what no run survives is told there already
    report.findings += [
        replace(one, severity="warning", what=f"no run starts with it here: {one.what}")
        for one in here.findings
        if one.where not in told
    ]


def _recipe(
    report: Report,
    name: str | None,
    deepspeed: str | None,
    machines: targets.Machines,
    allow_code: bool,
    changes: dict[str, Any],
) -> None:
    from tuner.recipes import catalog, loading, path_checks
    from tuner.zero import choice
    from tuner.zero.rules import AUTO

    change = overrides(**changes)
    loaded = report.attempt(lambda: loading.load(name, change, allow_code=allow_code))
    if loaded is None:
        if deepspeed not in (None, AUTO):
            _config(report, lambda: choice.open_config(deepspeed, "--deepspeed"))
        return
    report.attempt(lambda: loading.refuse_functions(loaded, allow_code=allow_code))
    report.attempt(lambda: path_checks.check_model(loaded.config))
    report.attempt(lambda: path_checks.check_data(loaded.config))
    if template := loaded.config.model.chat_template:
        report.attempt(lambda: catalog.chat_template(template))
    _settled(report, loaded, deepspeed, machines)
    if not report.has_errors:
        _machine(report, name, change, deepspeed, machines, allow_code=allow_code)


def _machine(
    report: Report,
    name: str | None,
    change: Overrides,
    deepspeed: str | None,
    machines: targets.Machines,
    *,
    allow_code: bool,
) -> None:
    """Check what the recipe and its config need of this machine; of others, say what cannot be seen from here."""
    from tuner.launch import preflight
    from tuner.launch.run import Request

    request = Request(name, change, deepspeed, allow_code=allow_code, ignore_fit=True)
    planned = report.attempt(lambda: targets.planned(request, *machines))
    if planned is None:
        return
    is_here = machines == (None, None, 1)
    lacks = report.attempt(lambda: preflight.inspect(planned) if is_here else preflight.inspect_elsewhere(planned))
    for one in lacks or ():
        report.warn([one]) if isinstance(one, str) else report.error(one)


def _settled(report: Report, loaded: Recipe, deepspeed: str | None, machines: targets.Machines) -> None:
    """Check the DeepSpeed config by itself, then what becomes of it and the recipe on the machines."""
    from tuner.launch import fitting
    from tuner.launch.resolve_recipe import resolve_recipe
    from tuner.launch.run import ResolvedRecipe
    from tuner.zero import choice

    is_auto = choice.is_auto(loaded, deepspeed)
    if not is_auto and not _config(report, lambda: choice.open_chosen(loaded, deepspeed), to_run=True):
        report.warn(loaded.warnings)
        return

    def resolve() -> ResolvedRecipe:
        hardware, topology = targets.machines(*machines, choice.launch_of(loaded, deepspeed))
        return resolve_recipe(loaded, deepspeed, topology, hardware, ignore_fit=True)

    made = report.attempt(resolve)
    if made is None:
        return
    report.attempt(lambda: fitting.refuse_hopeless(made.fit, made.recipe.config))
    told = () if is_auto else made.final.config_warnings
    report.warn(warning for warning in made.warnings if warning not in told)


def _run(report: Report, path: Path) -> None:
    from tuner.runs.directory import RunDirectory
    from tuner.zero import jsonfile

    def used() -> Document:
        document = jsonfile.read(RunDirectory(path).deepspeed)
        block = document.value.get("checkpoint")
        if isinstance(block, dict):
            block.pop("load_universal", None)  # the attempt's own: it resumed on another number of ranks
        return document

    _config(report, used)
    report.attempt(lambda: targets.run_section(path))


def _config(report: Report, opened: Callable[[], Document], *, to_run: bool = False) -> bool:
    """Check one DeepSpeed config by itself, and say whether it holds; `to_run`: a run is to start with it."""
    from tuner.zero.lint import inspect

    inspected = report.attempt(lambda: inspect(opened(), to_run=to_run)[1])
    if inspected is None:
        return False
    for problem in inspected.problems:
        report.error(problem)
    report.findings += [Finding("warning", one.what, one.where, one.fix) for one in inspected.warnings]
    return not inspected.problems


def _print(name: str, findings: list[Finding], *, as_json: bool) -> None:
    from tuner.files import dump_json

    counts = {severity: sum(one.severity == severity for one in findings) for severity in ("error", "warning")}
    if as_json:
        value = {"name": name, "ok": not counts["error"], "findings": [asdict(one) for one in findings]}
        click.echo(dump_json(value), nl=False)
    else:
        for one in findings:
            click.echo(str(one))
        click.echo(visible(f"{name}: {_counted(counts)}"))
    if counts["error"]:
        click.get_current_context().exit(_WRONG)


def _counted(counts: dict[str, int]) -> str:
    told: Iterable[str] = (f"{count} {word}{'s' * (count > 1)}" for word, count in counts.items() if count)
    return ", ".join(told) or "nothing wrong"
