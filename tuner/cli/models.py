"""The argument SOURCE, a run or a model: its options, how it is found, and how its libraries are silenced."""

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
from tuner.recipes import mistaken
from tuner.recipes.starting_weights import holds_model
from tuner.runs.directory import is_run, newest_run
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
    show_default=True,
    help="Longest answer, in tokens.",
)


def newest_of(name: str) -> str:
    """Return the newest run in a recipe's folder (work_dirs/RECIPE), and print that; return any other name as it is."""
    folder = paths.expanded(name)
    if not paths.is_folder(folder) or is_run(folder) or holds_model(folder) or not (run := newest_run(folder)):
        return name
    say(f"{name} holds runs: taking the newest, {run}.", err=True)
    return str(run)


def source_of(name: str) -> str:
    """Return the run or model that SOURCE names: `newest_of`, or the name as it is.

    Raises:
        RunDirectoryError: the path does not exist, and the name is not OWNER/NAME; the hub is not asked.
    """
    local, fix = paths.local(name), "Give a run, a model's folder, or a hub id: OWNER/NAME."
    if local:
        if not paths.exists(local):
            raise no_run(name, "SOURCE", fix)
        return newest_of(name)
    from huggingface_hub import try_to_load_from_cache  # 0.01 s, and only names that are not a path need it

    folder = Path(name).parent
    is_cached = "/" not in name and isinstance(try_to_load_from_cache(name, "config.json"), str)
    if is_cached or ("/" in name and not (paths.is_folder(folder) and below(folder))):
        return name
    meant = mistaken.hub_id(name)
    raise no_run(name, "SOURCE", f"Did you mean {meant}?" if meant else fix)
