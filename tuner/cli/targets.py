"""Options that several commands share: machines and the DeepSpeed config; and the argument RECIPE."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from tuner.cli import complete
from tuner.cli.options import Changes, all_of
from tuner.cli.say import say
from tuner.errors import UsageError
from tuner.hooks import recipe_of_other_tool

if TYPE_CHECKING:
    from tuner.launch.targets import Kind

machine_options = all_of(
    click.option("--gpus", type=click.IntRange(1), help="GPUs per node. [default: those of this machine]"),
    click.option("--gpu", metavar="NAME", help="GPU model to plan for, such as a100-80g or h100."),
    click.option("--nodes", type=click.IntRange(1), default=1, show_default=True, help="Number of nodes."),
)
"""Machines to plan for; they need not be this one."""
deepspeed_option = all_of(
    click.option(
        "--deepspeed",
        metavar="PRESET|FILE",
        shell_complete=complete.deepspeed,
        help="DeepSpeed config: zero1, zero2, zero2_offload, zero3, zero3_offload, a JSON file, an accelerate config, "
        "none, or auto: the lowest ZeRO level that fits. [default: the recipe's, auto]",
    ),
    click.option(
        "--ds",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=complete.deepspeed_keys,
        help="Override a DeepSpeed config value, such as --ds overlap_comm=false. The last part of KEY is enough if it "
        "is unambiguous.",
    ),
)


def imported(ctx: click.Context, param: click.Parameter, name: str | None) -> str | None:
    """Return the recipe of another tool's config, and print a line about it; return any other name as it is.

    Raises:
        TunerError: the config is wrong, or its recipe would train something else.
    """
    converted = recipe_of_other_tool(name, os.environ) if name else None
    if converted is None:
        return name
    say(converted.summary, err=True)
    return str(converted.path)


def refuse_changes(name: str | None, kind: Kind, changes: Changes) -> None:
    """Refuse options of a recipe if the name is not a recipe.

    Args:
        changes: The options' values by their names in Python.

    Raises:
        UsageError: one of them is not at its default.
    """
    if kind == "recipe":
        return
    description = {"config": "a DeepSpeed config", "run": "a run directory"}[kind]
    fix = f"Use it with a recipe: RECIPE --deepspeed {name}." if kind == "config" else f"Name {name}/recipe.py instead."
    for key, value in changes.items():
        if value not in (None, (), 1):
            flag = {"sets": "--set", "more": "--cfg-options"}.get(key, f"--{key.replace('_', '-')}")
            raise UsageError(f"{flag} needs a recipe, and {name!r} is {description}", where=flag, fix=fix)
