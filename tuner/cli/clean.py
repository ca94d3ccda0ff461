"""`tuner clean`: what failed and killed runs left on disks, and its removal."""

from __future__ import annotations

import os
from pathlib import Path

import click

from tuner.cli.help import Command
from tuner.cli.options import json_option, runs_folder
from tuner.cli.say import say, say_json
from tuner.files import sized
from tuner.machine import slurm
from tuner.runs import cleaning, listing

_WHAT = {"checkpoint": "of a save that was never finished", "swapped": "files that a run swapped to this disk"}


@click.command(
    cls=Command,
    examples=("tuner clean", "tuner clean work_dirs/RECIPE/TIME", "tuner clean work_dirs --yes"),
    json_keys={
        "tuner clean --json": "`leftovers` (run, path, kind and bytes of each), `bytes`, `is_removed`, `passed_over`",
    },
)
@runs_folder("FOLDER")
@click.option("--yes", is_flag=True, help="Remove what is listed.")
@json_option
def command(folder: Path, yes: bool, as_json: bool) -> None:
    """List what failed and killed runs left on disks and nobody can use, with sizes; with --yes, remove it.

    That is what saves that were never finished wrote (nothing resumes from it), and files that DeepSpeed swapped to
    disks of this machine. Runs that may be at work, or that a job of Slurm may start again, and runs of other users are
    passed over, each with a line that says why.

    FOLDER is the folder to look in, or a run. [default: work_dirs]
    """
    passed_over: list[str] = []
    runs = [Path(run.path) for run in listing.below(folder)]
    leftovers = cleaning.found(runs, os.environ, slurm.has_ended, passed_over.append)
    if yes:
        leftovers = [*cleaning.removed(leftovers, os.environ, slurm.has_ended, passed_over.append)]
    num_bytes = sum(leftover.num_bytes for leftover in leftovers)
    if as_json:
        leftover_values = [leftover.to_json() for leftover in leftovers]
        say_json({"leftovers": leftover_values, "bytes": num_bytes, "is_removed": yes, "passed_over": passed_over})
        return
    for leftover in leftovers:
        say(f"{sized(leftover.num_bytes):>10}  {leftover.path}  {_WHAT[leftover.kind]}")
    for line in passed_over:
        say(f"Passed over: {line}.")
    if not leftovers:
        say(f"Nothing to remove below {folder}.")
    elif yes:
        say(f"Removed {sized(num_bytes)}.")
    else:
        say(f"{sized(num_bytes)} in all. Nothing is removed yet: add --yes.")
