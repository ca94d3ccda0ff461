"""The argument SOURCE, a run or a model: how it is found, its options and quiet libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import click

from tuner import paths
from tuner.cli import complete
from tuner.cli.options import all_of, debug_option, remote_code_option
from tuner.cli.say import say
from tuner.errors import RunDirectoryError
from tuner.recipes import mistaken
from tuner.recipes.names import MODELS, Name, NameKind, identify
from tuner.runs.directory import newest_run
from tuner.runs.listing import below, no_run

model_options = all_of(
    click.argument("source", shell_complete=complete.files),
    click.option(
        "--adapter", metavar="PATH", shell_complete=complete.files, help="Load this LoRA adapter on top of SOURCE."
    ),
    remote_code_option,
    click.option(
        "--bits",
        type=click.Choice(("4", "8", "16")),
        callback=lambda _, __, bits: bits and int(bits),
        help="Load the weights in 4, 8 or 16 bits. [default: as in training, or 16]",
    ),
    debug_option,
)


@contextmanager
def stdout_is_the_answers() -> Iterator[None]:
    """Silence the libraries, and send to stderr what they still print."""
    from tuner.worker.quiet import quiet_libraries

    quiet_libraries()
    with redirect_stdout(sys.stderr):
        yield


max_new_tokens_option = click.option(
    "--max-new-tokens",
    type=click.IntRange(1),
    default=512,
    help="Longest answer, in tokens.",
)


def newest_of(text: str | Name) -> str:
    """Return the newest run in a recipe's folder (work_dirs/RECIPE), and print that; return any other text as it is."""
    name = identify(text)
    of_recipe = name.kind in (NameKind.FOLDER, NameKind.RECIPE)
    if not of_recipe or name.path is None or not (run := newest_run(name.path)):
        return name.text
    say(f"{name.text} holds runs: taking the newest, {run}.", err=True)
    return str(run)


def source_of(text: str) -> str:
    """Return the run or model that SOURCE names: `newest_of`, or the text as it is.

    Raises:
        RunDirectoryError: the path does not exist, the text is not OWNER/NAME, or it names something else; the hub is
            not asked.
    """
    name, fix = identify(text), "Give a run, a model's folder, or a hub id: OWNER/NAME."
    if (newest := newest_of(name)) != text or (name.path and name.kind in (*MODELS, NameKind.FOLDER, NameKind.UNCLEAR)):
        return newest
    if name.kind is NameKind.MODEL:
        folder = Path(text).parent
        if not (paths.is_folder(folder) and below(folder)):
            return text
    elif name.kind is NameKind.UNKNOWN:
        from huggingface_hub import try_to_load_from_cache  # 0.01 s, and only a word needs it

        if paths.is_hub_id(text) and isinstance(try_to_load_from_cache(text, "config.json"), str):
            return text
    elif name.kind in (NameKind.RECIPE, NameKind.RECIPE_FILE, NameKind.OTHER_TOOL, NameKind.DEEPSPEED):
        raise RunDirectoryError(f"{text!r} is {name.kind.value}, not a run or a model", where="SOURCE", fix=fix)
    meant = mistaken.hub_id(text)
    raise no_run(text, "SOURCE", f"Did you mean {meant}?" if meant else fix)
