"""`tuner smoke`: a recipe tried in under a minute on a CPU, before it waits for a cluster."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

import click

from tuner.cli.help import Command
from tuner.cli.options import OptionValue, overrides, recipe_options
from tuner.cli.say import say, say_json
from tuner.recipes.names import Name

if TYPE_CHECKING:
    from tuner.lab.smoke import Stage

_ALONE = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
"""For this process and its ranks: no GPU, no hub, and nothing reported to anyone."""


@click.command(
    cls=Command,
    examples=("tuner smoke qwen3_8b_qlora_alpaca_e1",),
    json_keys={
        "tuner smoke RECIPE --json": "`recipe`, `exit_code`, `stages`, `kept`, `not_tried`",
    },
    uses={
        "try the recipe without a GPU, in a minute": "`tuner smoke RECIPE`",
    },
)
@recipe_options("recipe")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    recipe: Name | None, deepspeed: str | None, as_json: bool, allow_code: bool, **changes: OptionValue
) -> None:
    """Test a recipe in about a minute: with a small random model of its architecture, in two CPU processes.

    Trains two steps on the first rows, saves a checkpoint, resumes from it and loads the result. Exit code 0, or that
    of the stage that failed.
    """
    started = time.monotonic()
    os.environ |= _ALONE
    from tuner.worker.quiet import quiet_libraries

    quiet_libraries()
    from tuner.lab.smoke import UNKNOWN, smoke
    from tuner.launch.resolved_run import Request

    request = Request(recipe, overrides(**changes), deepspeed, allow_code=allow_code, command=("tuner", *sys.argv[1:]))
    result = smoke(request, dict(os.environ), lambda stage: None if as_json else _print(stage))
    if as_json:
        value = {
            "recipe": result.name,
            "exit_code": result.exit_code,
            "stages": [vars(stage) for stage in result.stages],
            "kept": str(result.kept) if result.kept else None,
            "not_tried": UNKNOWN,
        }
        say_json(value)
        sys.exit(result.exit_code)
    if result.kept:
        say(f"{result.name} failed at {result.stages[-1].name}. Its files are kept in {result.kept}", err=True)
    else:
        say(f"{result.name} works, {time.monotonic() - started:.0f} s. {UNKNOWN}")
    sys.exit(result.exit_code)


def _print(stage: Stage) -> None:
    mark = f"FAILED ({stage.exit_code})" if stage.exit_code else "ok"
    say(f"{stage.name:7} {mark:3} {stage.seconds:5.1f} s  {stage.told}", err=bool(stage.exit_code))
