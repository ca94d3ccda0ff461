"""Options that several commands share, the argument RECIPE, and how both become a recipe and its overrides."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tuner.cli import complete
from tuner.cli.say import say
from tuner.errors import UsageError
from tuner.hooks import recipe_of_other_tool
from tuner.recipes import catalog, trust
from tuner.recipes.names import CONFIGS, MODELS, Name, NameKind, identify
from tuner.recipes.recipe import Overrides

OptionValue = Any
"""The value of an option, as click converts it."""
Changes = dict[str, OptionValue]
"""The values of the options that `override_options` adds, by their names in Python."""
Function = Callable[..., OptionValue]
Decorator = Callable[[Function], Function]


catalog_option = click.option(
    "--catalog",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    is_eager=True,
    expose_value=False,
    callback=lambda ctx, _, folders: ctx.with_resource(catalog.using(*folders)),
    help="Folder with your own models, data sets and recipes, searched before ./tuner_configs. May be given several "
    "times. [env: TUNER_CATALOG]",
)
"""It holds until the command ends; `catalog.given_folders` returns the folders."""
json_option = click.option("--json", "as_json", is_flag=True, help="Print the answer as one JSON object.")
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the Python traceback of an error.")
"""`cli.main` looks for it."""


remote_code_option = click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run the code that comes with the model: of one commit on the hub, or of a folder. Read it first.",
)


def runs_folder(metavar: str) -> Decorator:
    """Return the argument of a command about the runs below a folder. One that is named and missing is refused."""
    default = Path("work_dirs")

    def existing(_: click.Context, __: click.Parameter, folder: Path) -> Path:
        if not folder.is_dir() and folder != default:
            fix = "Give the folder that runs are written to."
            raise UsageError(f"no folder {str(folder)!r}", where=metavar, fix=fix)
        return folder

    path = click.Path(path_type=Path)
    return click.argument("folder", metavar=f"[{metavar}]", type=path, default=default, callback=existing)


def all_of(*options: Decorator) -> Decorator:
    """Return a decorator that adds several options to a command, in the order of its --help."""
    return lambda command: reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


class Finite(click.FloatRange):
    """A finite number in a range; click's own range accepts NaN, and infinity if the range has no end."""

    def convert(self, value: OptionValue, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number: float = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        if self.min is not None and (number < self.min or (self.min_open and number == self.min)):
            self.fail(f"{value} is not {'above' if self.min_open else 'at least'} {self.min:g}.", param, ctx)
        if self.max is not None and (number > self.max or (self.max_open and number == self.max)):
            self.fail(f"{value} is not {'below' if self.max_open else 'at most'} {self.max:g}.", param, ctx)
        return number


def _path(flag: str, help_text: str) -> Decorator:
    return click.option(flag, metavar="PATH", shell_complete=complete.files, help=help_text)


def _pairs(flag: str, name: str, metavar: str, help_text: str) -> Decorator:
    return click.option(flag, name, multiple=True, metavar=metavar, shell_complete=complete.keys, help=help_text)


def _of_key(flag: str, metavar: str, help_text: str) -> Decorator:
    return click.option(flag, metavar=metavar, help=help_text)


machine_options = all_of(
    click.option("--gpus", type=click.IntRange(1), help="GPUs per node. [default: those of this machine]"),
    click.option("--gpu", metavar="NAME", help="GPU model to plan for, such as a100-80g or h100."),
    click.option("--nodes", type=click.IntRange(1), default=1, help="Number of nodes."),
)
"""Machines to plan for; they need not be this one."""
deepspeed_option = all_of(
    click.option(
        "--deepspeed",
        metavar="PRESET|FILE",
        shell_complete=complete.deepspeed,
        help=f"DeepSpeed config: {', '.join(map(catalog.short_name, catalog.of_package(catalog.PRESETS)))}, a JSON "
        "file, an accelerate config, none, or auto: the fastest ZeRO level that fits. [default: the recipe's, auto]",
    ),
    click.option(
        "--ds",
        multiple=True,
        metavar="KEY=VALUE",
        shell_complete=complete.deepspeed_keys,
        help="Override a DeepSpeed config value, such as --ds overlap_comm=false. The last part of KEY is enough if it "
        "is unambiguous.",
    ),
    _path(
        "--nvme",
        "Folder on each node's own NVMe disk: for a config without nvme_path, and zero3_nvme if nothing else fits.",
    ),
)
override_options = all_of(
    _path(
        "--model",
        "Model to train: a folder, a run's result, or an id on the Hugging Face hub, such as Qwen/Qwen3-0.6B.",
    ),
    click.option(
        "--method",
        metavar="NAME",
        help="Training method if no RECIPE is given: lora, qlora, full, dora and others. [default: lora]",
    ),
    _path("--adapter", "LoRA adapter to continue training: a run's result, or a folder saved by PEFT."),
    click.option(
        "--data",
        multiple=True,
        metavar="PATH",
        shell_complete=complete.files,
        help="Training data: a file (JSON lines, JSON, CSV, Parquet, text), a folder, or an id on the hub. Give it "
        "several times to train on all of them; a.jsonl,b.jsonl:0.5 takes all rows of a and half of those of b.",
    ),
    _path("--val", "Validation data, as for --data."),
    click.option(
        "--val-split",
        type=Finite(min=0, max=1, max_open=True),
        metavar="PART",
        help="Share of the training rows to hold out and validate on, such as 0.05; 0 holds out none. "
        "[default: the recipe's; without a recipe 5 %, at least 8 and at most 500 rows]",
    ),
    click.option(
        "--epochs",
        type=Finite(min=0, min_open=True),
        metavar="NUMBER",
        help="Number of passes over the training data; 0.5 is half a pass. [default: 3, or the recipe's]",
    ),
    click.option(
        "--reward",
        "rewards",
        multiple=True,
        metavar="NAME|FILE:FUNCTION",
        shell_complete=complete.rewards,
        help="What scores completions (GRPO and others): math, exact, contains, json, length, or a function of yours, "
        "my_rewards.py:length. Several are added up.",
    ),
    _of_key("--lr", "RATE", "Peak learning rate, such as 2e-4. [default: the recipe's]"),
    _of_key(
        "--batch-size",
        "SAMPLES",
        "Samples per optimizer step on all GPUs together; tuner chooses the micro-batch and the accumulation.",
    ),
    _of_key("--max-steps", "STEPS", "Stop after this number of optimizer steps, instead of --epochs."),
    _of_key(
        "--max-length",
        "TOKENS",
        "Longest sample, in tokens; longer ones are cut, or split if they are packed. [default: 2048, or the recipe's]",
    ),
    _of_key("--lora-rank", "R", "Rank of the LoRA adapter. [default: 16, or the recipe's]"),
    _of_key(
        "--save-every", "STEPS", "Save a checkpoint every so many optimizer steps. [default: 500, or the recipe's]"
    ),
    _of_key("--eval-every", "STEPS", "Validate every so many optimizer steps. [default: every epoch]"),
    _of_key("--report-to", "TRACKER", "Also log to tensorboard, wandb, mlflow, trackio, comet_ml, swanlab or clearml."),
    _of_key("--push", "OWNER/NAME", "Upload the result to the Hugging Face hub when the run ends. Uses your token."),
    _pairs(
        "--set",
        "sets",
        "KEY=VALUE",
        "Override any recipe value, such as --set warmup_ratio=0.1 (`tuner show RECIPE` lists them).",
    ),
    _pairs(
        "--cfg-options", "cfg_options", "KEY=VALUE ...", "Same as --set, with XTuner's name and several pairs at once."
    ),
    click.option(
        "--seed",
        type=click.IntRange(0, 2**32 - 1),
        help="Random seed of new weights, data order and dropout. [default: 42]",
    ),
    click.option(
        "--allow-code",
        is_flag=True,
        help="Allow a recipe file to run Python code. Use it only with files that you trust.",
    ),
    remote_code_option,
    catalog_option,
    debug_option,
    click.argument("more", nargs=-1, metavar=""),
)
"""The options that change a recipe (--model, --data, --lr, --set ...), --allow-code, --catalog and --debug."""
OF_KEYS = ("lr", "batch_size", "max_steps", "max_length", "lora_rank", "save_every", "eval_every", "report_to", "push")
"""The options that `override_options` adds for one key of a recipe each; `command_line.KEY_FLAGS` has the keys."""
ONE_VALUE = ("model", "seed", "method", "adapter", "val", "val_split", "epochs", *OF_KEYS)
"""The options of one value that `override_options` adds."""


def plain_name(flag: str) -> str:
    """Return the flag of an option by its name in Python."""
    return f"--{flag.replace('_', '-')}"


def taken_out(names: Iterable[str], options: Changes) -> Changes:
    """Take the options with these names out, and return them: a record's fields are named like its options."""
    return {name: options.pop(name) for name in names if name in options}


def _place_of(stray: str) -> str:
    """Return where an argument belongs that stands beside the recipe: data, or a model, has an option."""
    context = click.get_current_context()
    first: Name | None = context.params.get("recipe") or context.params.get("name")
    model, data = first, identify(stray)
    if first and first.kind is NameKind.DATA and data.kind is not NameKind.DATA:
        model, data = data, first
    if data.kind is not NameKind.DATA:
        return "Pass values with --set KEY=VALUE."
    is_recipe = model is not None and model is first and model.kind not in MODELS
    named = shlex.quote(model.text if model else "MODEL")
    return f"Write: {context.command_path} {named if is_recipe else f'--model {named}'} --data {shlex.quote(data.text)}"


def overrides(
    sets: Sequence[str], cfg_options: Sequence[str], more: Sequence[str], **changes: OptionValue
) -> Overrides:
    """Return the recipe overrides.

    Args:
        more: Arguments that belong to no option.
        changes: The other options that `override_options` adds, by their names in Python.

    Raises:
        UsageError: an argument belongs to no option, or `Overrides` raises it.
    """
    if more:
        raise UsageError(f"unexpected argument {more[0]!r}", fix=_place_of(more[0]))
    pairs = [(plain_name(name), changes.pop(name)) for name in OF_KEYS]
    pairs = [(flag, text) for flag, text in pairs if text is not None]
    pairs += [trust.FLAG_PAIR] if changes.pop("trust_remote_code") else []
    pairs += [("--set", text) for text in sets]
    pairs += [("--cfg-options", text) for text in cfg_options]
    changes["data"] = changes["data"] or None
    return Overrides(pairs=tuple(pairs), **changes)


def identified(ctx: click.Context, param: click.Parameter, text: str | None) -> Name | None:
    """Return what the text names; for another tool's config the recipe made of it, after a line about it.

    Raises:
        TunerError: the config is wrong, or its recipe would train something else.
    """
    if text is None:
        return None
    name = identify(text)
    if name.kind is not NameKind.OTHER_TOOL:
        return name
    converted = recipe_of_other_tool(text, os.environ)
    say(converted.summary, err=True)
    return Name(str(converted.path), NameKind.RECIPE_FILE, converted.path)


def recipe_argument(name: str) -> Decorator:
    """Return the argument RECIPE, under its name in Python; it may also be the config file of another tool."""
    return click.argument(name, required=False, shell_complete=complete.recipes, callback=identified)


def recipe_options(argument: str, *, deepspeed: bool = True, machines: bool = False) -> Decorator:
    """Return the argument RECIPE and the options of every command that takes one; `machines` adds `machine_options`."""
    more_options = [*([deepspeed_option] if deepspeed else []), *([machine_options] if machines else [])]
    return all_of(recipe_argument(argument), *more_options, override_options)


def refuse_changes(name: Name | None, changes: Changes, kinds: Sequence[NameKind] = (*CONFIGS, NameKind.RUN)) -> None:
    """Refuse options of a recipe if the name is of a kind that takes none, as a DeepSpeed config and a run.

    Args:
        changes: The options' values by their names in Python.

    Raises:
        UsageError: one of them was given.
    """
    if name is None or name.kind not in kinds:
        return
    fix = f"Use it with a recipe: RECIPE --deepspeed {name.text}."
    if name.kind is NameKind.RUN:
        fix = f"Name {name.text}/recipe.py instead."
    if name.kind is NameKind.CHECKPOINT:
        fix = f"To train from it, use --model {name.text}."
    if changes["more"]:
        raise UsageError(f"unexpected argument {changes['more'][0]!r}", fix=_place_of(changes["more"][0]))
    context, typed = click.get_current_context(), (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    for parameter in context.command.params:
        # Not by its value: `--seed 0`, `--epochs 1` and a flag equal defaults of other options.
        if parameter.name in changes and context.get_parameter_source(parameter.name) in typed:
            flag = parameter.opts[0]
            raise UsageError(f"{flag} needs a recipe, and {name.text!r} is {name.kind.value}", where=flag, fix=fix)
