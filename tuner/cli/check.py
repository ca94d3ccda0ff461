"""`tuner check`: all that is wrong with a recipe, a DeepSpeed config, a run or a checkpoint; nothing is started."""

from __future__ import annotations

import os

import click

from tuner.cli.help import Command
from tuner.cli.options import OptionValue, overrides, recipe_options, refuse_changes, taken_out
from tuner.cli.say import say_json
from tuner.errors import visible
from tuner.recipes.names import CONFIGS, Name, NameKind

_WRONG = 2


@click.command(
    cls=Command,
    examples=(
        "tuner check my_recipe.py",
        "tuner check tiny_lora_custom_e3 --data my.jsonl",
    ),
    json_keys={
        "tuner check RECIPE --json": "`name`, `ok`, `findings`, `on_hub`",
    },
)
@recipe_options("name", machines=True)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(
    name: Name | None,
    deepspeed: str | None,
    as_json: bool,
    allow_code: bool,
    **changes: OptionValue,
) -> None:
    """Check a recipe, a DeepSpeed config, a run directory or a checkpoint, and list all errors and warnings.

    NAME is a recipe (checked with its DeepSpeed config), a DeepSpeed preset or JSON, a run directory, or one of its
    checkpoints (each file of a checkpoint is read and compared with its hash). Nothing starts. The check is for this
    machine, or for the GPUs that --gpus and --gpu name. Exit code 2 if there is an error.
    """
    from tuner.launch import checking
    from tuner.launch.machines import MachineFlags
    from tuner.launch.resolved_run import Request

    flags = taken_out(MachineFlags._fields, changes)
    saved = (NameKind.RUN, NameKind.CHECKPOINT)
    unused = {} if name is not None and name.kind in saved else flags
    refuse_changes(name, {**changes, **unused, "deepspeed": deepspeed}, (*CONFIGS, *saved))
    request = Request(name, overrides(**changes), deepspeed, allow_code=allow_code)
    report = checking.check(request, MachineFlags(**flags), dict(os.environ))
    if as_json:
        say_json(report.to_json())
    else:
        for finding in report.findings:
            click.echo(str(finding))
        click.echo(visible(f"{report.name}: {report.conclusion}"))
    if not report.ok:
        click.get_current_context().exit(_WRONG)
