"""`tuner check`: all that is wrong with a recipe, a DeepSpeed config or a run, told at once; nothing is started."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tuner.cli import complete, targets
from tuner.cli.options import override_options, overrides
from tuner.errors import TunerError, visible

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
        return visible(f"{place}{self.severity}: {self.what}{'. ' + self.fix if self.fix else ''}")


@click.command()
@click.argument("name", required=False, shell_complete=complete.recipes)
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
    debug: bool,
    **changes: Any,
) -> None:
    """Check NAME and start nothing: a recipe with its DeepSpeed config, a DeepSpeed config alone, or a run directory.

    Every error and warning is told, each with its line or key. Exit code 2 when there is an error. A recipe is checked
    for this machine, or for one with --gpus and --gpu.
    """
    kind = targets.kind_of(name)
    unused = {} if kind == "run" else {"gpus": gpus, "gpu": gpu, "nodes": nodes}
    targets.refuse_changes(name, kind, {**changes, **unused, "deepspeed": deepspeed})
    if kind == "config":
        found = _alone(str(name))
    else:
        recipe, machines = str(Path(str(name)) / "recipe.py") if kind == "run" else name, (gpus, gpu, nodes)
        found = _recipe(recipe, deepspeed, machines, allow_code, changes)
        if kind == "run":
            found += _run(Path(str(name)))
    _print(str(name or changes["model"] or changes["adapter"]), list(dict.fromkeys(found)), as_json=as_json)


def _alone(name: str) -> list[Finding]:
    """Check one DeepSpeed config without a recipe; what is lacking here is a warning: it may run elsewhere."""
    found = _config(lambda: _open(name, "NAME"))
    if any(one.severity == "error" for one in found):
        return found
    lacks = [finding for error in targets.lacks(_open(name, "NAME")) for finding in _told(error)]
    known = {one.where for one in found}  # what no run survives is told there already
    new = [one for one in lacks if one.where not in known]
    return found + [replace(one, severity="warning", what=f"no run starts with it here: {one.what}") for one in new]


def _recipe(
    name: str | None,
    deepspeed: str | None,
    machines: tuple[int | None, str | None, int],
    allow_code: bool,
    changes: dict[str, Any],
) -> list[Finding]:
    from tuner.recipes import catalog, paths, recipe

    loaded: list[Recipe] = []
    change = overrides(**changes)
    found = _errors(lambda: loaded.append(recipe.load(name, change, allow_code=allow_code)))
    if not loaded:
        named = deepspeed is not None and deepspeed != "auto"
        return found + (_config(lambda: _open(str(deepspeed), "--deepspeed")) if named else [])
    config = loaded[0].config
    found += _errors(lambda: recipe.refuse_functions(loaded[0], allow_code=allow_code))
    found += _errors(lambda: paths.check_model(config))
    found += _errors(lambda: paths.check_data(config))
    template = config.model.chat_template
    found += _errors(lambda: catalog.chat_template(template)) if template else []
    settled = _settled(loaded[0], deepspeed, machines)
    if any(one.severity == "error" for one in (*found, *settled)):
        return found + settled
    return found + settled + _machine(name, change, deepspeed, machines, allow_code=allow_code)


def _machine(
    name: str | None,
    change: Overrides,
    deepspeed: str | None,
    machines: tuple[int | None, str | None, int],
    *,
    allow_code: bool,
) -> list[Finding]:
    """Check what the recipe and its config need of this machine; of others, say what cannot be seen from here."""
    from tuner.launch import preflight
    from tuner.launch.resolve import Request

    lacks: list[TunerError | str] = []

    def look() -> None:
        request = Request(name, change, deepspeed, allow_code=allow_code, ignore_fit=True)
        made, environ = targets.planned(request, *machines)
        is_here = machines == (None, None, 1)
        lacks.extend(preflight.inspect(made, environ) if is_here else preflight.inspect_elsewhere(made))

    found = _errors(look)
    for one in lacks:
        found += [Finding("warning", one)] if isinstance(one, str) else _told(one)
    return found


def _settled(loaded: Recipe, deepspeed: str | None, machines: tuple[int | None, str | None, int]) -> list[Finding]:
    """Check the DeepSpeed config by itself, then what becomes of it and the recipe on the machines."""
    from tuner.launch import fitting
    from tuner.launch.resolve_recipe import resolve_recipe
    from tuner.zero import choice

    is_auto = choice.chosen(loaded, deepspeed)[0] == choice.AUTO
    found = [] if is_auto else _config(lambda: choice.open_chosen(loaded, deepspeed), to_run=True)
    if any(one.severity == "error" for one in found):
        return found + [Finding("warning", warning) for warning in loaded.warnings]
    warnings: list[str] = []

    def settle() -> None:
        hardware, topology = targets.machines(*machines)
        made = resolve_recipe(loaded, deepspeed, topology, hardware, ignore_fit=True)
        told = () if is_auto else made.final.config_warnings
        warnings.extend(warning for warning in made.warnings if warning not in told)
        fitting.refuse_hopeless(made.fit, loaded.config)

    errors = _errors(settle)
    return found + errors + [Finding("warning", warning) for warning in warnings]


def _run(path: Path) -> list[Finding]:
    from tuner.runs.directory import RunDirectory
    from tuner.zero import jsonfile

    def used() -> Document:
        document = jsonfile.read(RunDirectory(path).deepspeed)
        block = document.value.get("checkpoint")
        if isinstance(block, dict):
            block.pop("load_universal", None)  # the attempt's own: it resumed on another number of ranks
        return document

    return _config(used) + _errors(lambda: targets.run_section(path))


def _open(chosen: Any, where: str) -> Document:
    from tuner.zero import choice

    return choice.open_config(chosen, where)


def _config(opened: Callable[[], Document], *, to_run: bool = False) -> list[Finding]:
    """Check one DeepSpeed config by itself; `to_run`: a run is to start with it."""
    from tuner.zero.lint import inspect

    try:
        _, found = inspect(opened(), to_run=to_run)
    except TunerError as error:
        return _told(error)
    warnings = [Finding("warning", one.what, one.where, one.fix) for one in found.warnings]
    return [*map(_error, found.problems), *warnings]


def _errors(act: Callable[[], object]) -> list[Finding]:
    try:
        act()
    except TunerError as error:
        return _told(error)
    return []


def _told(error: TunerError) -> list[Finding]:
    return [*map(_error, error.each())]


def _error(error: TunerError) -> Finding:
    return Finding("error", error.what, error.where, error.fix, error.code)


def _print(name: str, found: list[Finding], *, as_json: bool) -> None:
    from tuner.files import dump_json

    counts = {severity: sum(one.severity == severity for one in found) for severity in ("error", "warning")}
    if as_json:
        value = {"name": name, "ok": not counts["error"], "findings": [asdict(one) for one in found]}
        click.echo(dump_json(value), nl=False)
    else:
        for one in found:
            click.echo(str(one))
        click.echo(visible(f"{name}: {_counted(counts)}"))
    if counts["error"]:
        click.get_current_context().exit(_WRONG)


def _counted(counts: dict[str, int]) -> str:
    told: Iterable[str] = (f"{count} {word}{'s' * (count > 1)}" for word, count in counts.items() if count)
    return ", ".join(told) or "nothing wrong"
