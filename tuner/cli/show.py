"""`tuner show`: a recipe, merged, and the DeepSpeed config it ends in, with the origin of every value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import click

from tuner.cli import complete
from tuner.cli.help import Command
from tuner.cli.options import Changes, OptionValue, identified, overrides, recipe_options, refuse_changes, taken_out
from tuner.cli.say import columns, say, say_json
from tuner.cli.text import differing, with_origins
from tuner.errors import UsageError
from tuner.files import JsonObject
from tuner.recipes import loading
from tuner.recipes.merging import Kind, Origin, Place, Section, differences, leaves
from tuner.recipes.names import CONFIGS, Name, NameKind
from tuner.recipes.overrides import KEY_FLAGS
from tuner.runs.directory import RunDirectory
from tuner.zero import choice, jsonfile
from tuner.zero.config import Document

if TYPE_CHECKING:
    from tuner.launch.machines import MachineFlags

_RUN_FACTS = {"versions", "hardware", "precision", "world_size", "num_nodes", "batch", "platform"}


@dataclass(frozen=True)
class Shown:
    """What a name means, as sections: 'recipe', 'deepspeed', 'run'; the lines above them, and the warnings."""

    name: str
    sections: dict[str, Section]
    head: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    json_values: JsonObject = field(default_factory=dict)
    """Values of --json beside the sections."""


@click.command(
    cls=Command,
    examples=(
        "tuner show qwen3_8b_qlora_alpaca_e1",
        "tuner show qwen3_8b_qlora_alpaca_e1 --lr 1e-4 --deepspeed zero2",
    ),
    json_keys={
        "tuner show RECIPE --json": "`recipe`, `origins`",
    },
    uses={
        "each value of a recipe, and who set it": "`tuner show RECIPE`",
        "change any value": "`--set KEY=VALUE`, with the keys of `tuner show`; for DeepSpeed `--ds KEY=VALUE`",
    },
)
@recipe_options("name", machines=True)
@click.option(
    "--diff",
    "other",
    metavar="OTHER",
    callback=identified,
    shell_complete=complete.recipes,
    help="Show only the values that differ from OTHER: a recipe, or a DeepSpeed preset or JSON.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the values and their origins as JSON.")
def command(
    name: Name | None,
    deepspeed: str | None,
    other: Name | None,
    as_json: bool,
    allow_code: bool,
    **changes: OptionValue,
) -> None:
    """Show every value of a recipe, where it comes from and what it overrides.

    NAME is a recipe, a DeepSpeed preset or JSON, or a run directory. With --deepspeed, or with --gpus and --gpu, the
    final DeepSpeed config is shown too.

    With --diff, --set applies to NAME only and --deepspeed to both. OTHER may also be a DeepSpeed preset or JSON.
    """
    from tuner.launch.machines import HERE, MachineFlags

    refuse_changes(name, {**changes, "deepspeed": deepspeed})
    flags = MachineFlags(**taken_out(MachineFlags._fields, changes))
    is_final = deepspeed is not None or bool(changes["ds"] or changes["nvme"]) or flags != HERE
    look = partial(_look, flags if is_final else None, allow_code)
    left = look(name, deepspeed, changes)
    if other is None:
        _print(left, as_json=as_json)
    elif "level" in left.json_values and other.kind in CONFIGS:
        right = look(name, other.text, changes)
        left_name = f"--deepspeed {left.json_values['level']['name']}"
        _print_diff(left, right, left_name, f"--deepspeed {other.text}", as_json=as_json)
    else:
        right = look(other, deepspeed, {})
        _print_diff(left, right, left.name, right.name, as_json=as_json)


def _look(
    flags: MachineFlags | None, allow_code: bool, name: Name | None, deepspeed: str | None, changes: Changes
) -> Shown:
    if name and name.kind in CONFIGS:
        document = choice.open_config(name, "NAME")
        return Shown(document.name, {"deepspeed": _config_section(document)})
    if name and name.path and name.kind is NameKind.RUN:
        return _run(RunDirectory(name.path))
    from tuner.launch.validation_rows import hold_out

    recipe = hold_out(loading.load(name, overrides(**changes) if changes else None, allow_code=allow_code))
    sections = {"recipe": Section(recipe.values, recipe.origins)}
    if flags is None:
        return Shown(recipe.name, sections, recipe.notes, warnings=recipe.warnings)
    from tuner.launch import memory
    from tuner.launch.machines import look_up
    from tuner.launch.resolve import decide

    machines = look_up(flags, os.environ, choice.launch_flags(recipe, deepspeed))
    resolved = decide(recipe, deepspeed, machines)
    described = f"{machines.hardware.describe()}; {machines.topology.describe()}"
    sections["recipe"] = Section(resolved.recipe.values, resolved.recipe.origins)
    sections["deepspeed"] = Section(resolved.final.config, resolved.final.origins)
    reason = memory.why(resolved.level_and_split)
    why = f" ({reason})" if reason else ""
    head = (
        *recipe.notes,
        f"{recipe.name} on {described}",
        f"DeepSpeed: {resolved.level}{why}",
    )
    json_values = {
        "machine": described,
        "level": {"name": resolved.level, "reason": reason},
        "warnings": list(resolved.warnings),
    }
    return Shown(recipe.name, sections, head, resolved.warnings, json_values)


def _run(run_dir: RunDirectory) -> Shown:
    recipe = loading.load(str(run_dir.recipe))
    sections = {
        "recipe": Section(recipe.values, recipe.origins),
        "deepspeed": _config_section(jsonfile.read_json_config(run_dir.deepspeed)),
        "run": _run_section(run_dir),
    }
    return Shown(str(run_dir.path), sections, warnings=recipe.warnings)


def _config_section(document: Document) -> Section:
    """Return a DeepSpeed config as it is written, each value with its line and column."""
    origins = {key: Origin(document.place(tuple(key.split(".")))) for key, _ in leaves(document.value)}
    return Section(document.value, origins)


def _run_section(run_dir: RunDirectory) -> Section:
    """Return the versions, the hardware and the geometry of a run."""
    values = run_dir.read_run().model_dump(mode="json", include=_RUN_FACTS, exclude_unset=True)
    return Section(values, {key: Origin(Place(Kind.DERIVED, str(run_dir.run_json))) for key, _ in leaves(values)})


_FLAGS = {"train_cfg.max_epochs": "--epochs", "randomness.seed": "--seed"}
"""Options of a recipe's keys that `command_line.KEY_FLAGS` does not have."""


def _print(shown: Shown, *, as_json: bool) -> None:
    if as_json:
        answer: JsonObject = {name: section.values for name, section in shown.sections.items()}
        for name, section in shown.sections.items():
            origins = {key: origin.to_json() for key, origin in section.origins.items()}
            answer["origins" if name == "recipe" else f"{name}_origins"] = origins
        say_json({**answer, **shown.json_values})
        return
    lines, alone = [*shown.head], len(shown.sections) == 1
    for title, section in shown.sections.items():
        options = {key: flag for flag, key in KEY_FLAGS.items()} | _FLAGS if title == "recipe" else {}
        width = 44 if alone else 64
        values_shown = with_origins(section.values, section.origins, width=width, columns=columns(), options=options)
        lines += values_shown if alone else [f"{_TITLES[title]}:", *(f"  {line}" for line in values_shown)]
    say("\n".join(lines))
    for warning in shown.warnings:
        say(f"WARNING: {warning}", err=True)


_TITLES: Mapping[str, str] = {"recipe": "recipe", "deepspeed": "deepspeed.json", "run": "run.json"}


def _print_diff(left: Shown, right: Shown, left_name: str, right_name: str, *, as_json: bool) -> None:
    common = [name for name in left.sections if name in right.sections]
    if not common:
        fix = "Compare two recipes, two DeepSpeed configs, or two run directories"
        problem = f"{left_name} has {_contents(left)} and {right_name} {_contents(right)}: they cannot be compared"
        raise UsageError(problem, where="--diff", fix=f"{fix}; --deepspeed gives a recipe its config.")
    by_section = {name: list(differences(left.sections[name], right.sections[name])) for name in common}
    if as_json:
        by_key = {
            name: {difference.key: difference.to_json() for difference in several}
            for name, several in by_section.items()
        }
        say_json({"left": left_name, "right": right_name, "differences": by_key})
        return
    say(f"--- {left_name}", fg="red")
    say(f"+++ {right_name}", fg="green")
    for name, several in by_section.items():
        click.echo(f"{_TITLES[name]}:" if several else f"{_TITLES[name]}: no difference")
        for line, colour in differing(several):
            say(f"  {line}", fg=colour)


def _contents(shown: Shown) -> str:
    return " and ".join(f"a {_TITLES[name]}" for name in shown.sections)
