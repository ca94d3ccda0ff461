"""The arguments RUN and SOURCE, a run or a model: how they are found, the options of SOURCE and quiet libraries."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _newest_of(text: str | Name) -> str:
    """Return the newest run in a recipe's folder (work_dirs/RECIPE), and print that; return any other text as it is."""
    name = identify(text)
    of_recipe = name.kind in (NameKind.FOLDER, NameKind.RECIPE)
    if not of_recipe or name.path is None or not (run := newest_run(name.path)):
        return name.text
    say(f"{name.text} holds runs: taking the newest, {run}.", err=True)
    return str(run)


def _source_of(text: str) -> str:
    """Return the run or model that SOURCE names: `_newest_of`, or the text as it is.

    Raises:
        RunDirectoryError: the path does not exist, the text is not OWNER/NAME, or it names something else; the hub is
            not asked.
    """
    name, fix = identify(text), "Give a run, a model's folder, or a hub id: OWNER/NAME."
    if (newest := _newest_of(name)) != text or (
        name.path and name.kind in (*MODELS, NameKind.FOLDER, NameKind.UNCLEAR)
    ):
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


class Place(click.ParamType):  # type: ignore[type-arg]  # click 8.1 to 8.3 have no arguments of it
    """What an argument about runs names: `RUN`, or `SOURCE`, a run or a model. A recipe's folder is its newest run."""

    name = "path"

    def __init__(self, find: Callable[[str], str]) -> None:
        self._find = find

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return self._find(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return complete.files(ctx, param, incomplete)


RUN, SOURCE = Place(_newest_of), Place(_source_of)
"""The types of these arguments. RUN is not looked for: a command may wait for a run, or ask `listing.require_run`."""
model_options = all_of(
    click.argument("source", type=SOURCE),
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
