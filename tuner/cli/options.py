"""Options that several commands share, and how they become overrides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from tuner.cli import complete
from tuner.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])
Decorator = Callable[[Command], Command]


def _use_catalogs(ctx: click.Context, _: click.Parameter, given: tuple[Path, ...]) -> None:
    from tuner.recipes import catalog_folders

    ctx.with_resource(catalog_folders.using(*given))


catalog_option = click.option(
    "--catalog",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    is_eager=True,
    expose_value=False,
    callback=_use_catalogs,
    help="Look for parts in this folder first, then in TUNER_CATALOG and ./tuner_configs (docs/catalog.md).",
)
"""It holds until the command ends; `catalog_folders.given_folders` returns what it names."""
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback for every error.")
"""`cli.main` looks for it."""


def all_of(*options: Decorator[Any]) -> Decorator[Any]:
    """Return what adds several options to a command, as they stand in its --help."""
    return lambda command: reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


class Finite(click.FloatRange):
    """A number of a range: click's own lets NaN into every one, and infinity into one without an end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def _after_options(ctx: click.Context, _: click.Parameter, more: tuple[str, ...]) -> tuple[str, ...]:
    """Return what follows --cfg-options: without a recipe, click takes the second KEY=VALUE for one."""
    for name in ("recipe", "name"):
        given = ctx.params.get(name)
        if isinstance(given, str) and "=" in given and ctx.params.get("cfg_options") and not given.endswith(".py"):
            ctx.params[name] = None
            return (given, *more)
    return more


def _path(flag: str, told: str) -> Decorator[Any]:
    return click.option(flag, metavar="PATH", shell_complete=complete.files, help=told)


def _pairs(flag: str, name: str, metavar: str, told: str) -> Decorator[Any]:
    return click.option(flag, name, multiple=True, metavar=metavar, shell_complete=complete.keys, help=told)


def _of_key(flag: str, metavar: str, help_text: str) -> Decorator[Any]:
    return click.option(flag, metavar=metavar, help=help_text)


override_options = all_of(
    _path("--model", "Train this model: a folder, a run's result, or an id on the hub. No recipe is needed."),
    click.option("--method", metavar="NAME", help="Training method for --model without a recipe. Default: lora."),
    _path("--adapter", "Continue training this adapter: a run's result, or a folder saved by PEFT."),
    click.option(
        "--data",
        multiple=True,
        metavar="PATH",
        shell_complete=complete.files,
        help="Train on this data: a file, a folder, or an id on the hub. Several make a mixture, as does "
        "a.jsonl,b.jsonl:0.5 (all rows of a, half of those of b).",
    ),
    _path("--val", "Validate on this data."),
    click.option(
        "--val-split",
        type=Finite(min=0, max=1, max_open=True),
        metavar="PART",
        help="Hold out this share of the training rows, such as 0.05, and validate on it; 0 holds out none. Default "
        "without a recipe: 5 %, at least 8 and at most 500 rows.",
    ),
    click.option(
        "--epochs",
        type=Finite(min=0, min_open=True),
        metavar="NUMBER",
        help="Epochs: passes over the training rows; 0.5 is half of one.",
    ),
    _of_key("--lr", "RATE", "Peak learning rate, such as 2e-4."),
    _of_key("--batch-size", "SAMPLES", "Samples of one optimizer step on all GPUs; the micro-batch follows."),
    _of_key("--max-steps", "STEPS", "End after so many optimizer steps, in place of --epochs."),
    _of_key("--max-length", "TOKENS", "Cut samples to so many tokens."),
    _of_key("--lora-rank", "R", "Rank of the LoRA adapter."),
    _of_key("--save-every", "STEPS", "Optimizer steps from one checkpoint to the next."),
    _of_key("--eval-every", "STEPS", "Optimizer steps from one validation to the next. Default: every epoch."),
    _of_key("--report-to", "TRACKER", "Log to tensorboard, wandb, mlflow, trackio, comet_ml, swanlab or clearml."),
    _of_key("--push", "OWNER/NAME", "Push the result to the Hugging Face hub at the end. Uses your token."),
    _pairs("--set", "sets", "KEY=VALUE", "Change any value; KEY may be shortened to its unique end."),
    _pairs("--cfg-options", "cfg_options", "KEY=VALUE ...", "Same as --set, under XTuner's name."),
    click.option("--seed", type=click.IntRange(0, 2**32 - 1), help="Seed of weights, data order and dropout."),
    click.option(
        "--allow-code",
        is_flag=True,
        help="Allow a recipe file to run Python code, its own or that of installed packages. Off by default.",
    ),
    catalog_option,
    debug_option,
    click.argument("more", nargs=-1, metavar="", callback=_after_options),
)
"""What changes a recipe: --model, --data, --lr, --set and the others, --allow-code, --catalog and --debug."""
OF_KEYS = ("lr", "batch_size", "max_steps", "max_length", "lora_rank", "save_every", "eval_every", "report_to", "push")
"""The options that `override_options` adds for one key of a recipe each; `command_line.KEY_FLAGS` has the keys."""
ONE_VALUE = ("model", "seed", "method", "adapter", "val", "val_split", "epochs", *OF_KEYS)
"""The options of one value that `override_options` adds."""


def plain_name(flag: str) -> str:
    """Return the flag of an option by its name in Python."""
    return f"--{flag.replace('_', '-')}"


def overrides(sets: Sequence[str], cfg_options: Sequence[str], more: Sequence[str], **given: Any) -> Any:
    """Return the recipe overrides; `more` holds what follows the first value of --cfg-options, as XTuner allows.

    Args:
        given: The other options that `override_options` adds, by their names in Python.

    Raises:
        UsageError: an argument that belongs to nothing, or as `Overrides`.
    """
    from tuner.recipes.recipe import Overrides  # pydantic's core, which --help does not need

    stray = [text for text in more if "=" not in text or not cfg_options]
    if stray:
        raise UsageError(f"unexpected argument {stray[0]!r}", fix="Pass values with --set KEY=VALUE.")
    pairs = [(plain_name(name), given.pop(name)) for name in OF_KEYS]
    pairs = [(flag, text) for flag, text in pairs if text is not None]
    pairs += [("--set", text) for text in sets]
    pairs += [("--cfg-options", text) for text in (*cfg_options, *more)]
    given["data"] = given["data"] or None
    return Overrides(pairs=tuple(pairs), **given)
