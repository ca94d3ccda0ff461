"""`tuner tune`: the fastest way to compute a recipe's steps here, measured and written as a recipe."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from tuner.cli.help import Command
from tuner.cli.options import Finite, OptionValue, overrides, recipe_options
from tuner.cli.say import say, say_json
from tuner.files import JsonObject, write_new_text
from tuner.machine.topology import LaunchFlags
from tuner.recipes import catalog
from tuner.recipes.names import Name

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.lab.tune import Candidate, Measured, Tuned


@click.command(
    cls=Command,
    examples=("tuner tune my_recipe.py",),
    json_keys={
        "tuner tune RECIPE --json": "`recipe`, `ranks`, `candidates`, `fastest`, `written`, `exit_code`",
    },
    uses={
        "measure splits of a step on this machine": "`tuner tune RECIPE`",
    },
)
@recipe_options("recipe")
@click.option("--steps", type=click.IntRange(2), default=6, help="Optimizer steps per candidate.")
@click.option(
    "--minutes",
    type=Finite(min=0, min_open=True),
    default=15,
    help="Start no new candidate after this time.",
)
@click.option("--nproc-per-node", type=int, help="Worker processes. [default: one per GPU] [env: NPROC_PER_NODE]")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Recipe file to write. [default: RECIPE_tuned.py]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the measurements as JSON.")
def command(
    recipe: Name | None,
    deepspeed: str | None,
    steps: int,
    minutes: float,
    nproc_per_node: int | None,
    output: Path | None,
    as_json: bool,
    allow_code: bool,
    **changes: OptionValue,
) -> None:
    """Measure the fastest settings for a recipe on this machine, and write them as a recipe.

    Tries micro-batches, gradient checkpointing, losses and ZeRO levels for some steps each. The global batch stays
    the same, so every candidate learns the same. Running out of memory is a row of the table. Ctrl-C shows what was
    measured so far.
    """
    from tuner.lab.tune import tune
    from tuner.launch.resolved_run import Request

    flags, typed = LaunchFlags(nproc_per_node=nproc_per_node), ("tuner", *sys.argv[1:])
    request = Request(recipe, overrides(**changes), deepspeed, flags, allow_code=allow_code, command=typed)
    show: Callable[[Measured], None] = (lambda _: None) if as_json else (lambda measured: say(_line(measured)))
    tuned = tune(request, dict(os.environ), show, steps=steps, minutes=minutes, output=output)
    written = None
    if tuned.fastest:
        note = f" The fastest way that tuner tune measured on {tuned.ranks} rank{'s' * (tuned.ranks > 1)}."
        try:
            write_new_text(tuned.path, tuned.recipe().standalone(note))
            written = tuned.path
        except FileExistsError:  # it was not there when the measuring began
            say(f"{tuned.path} already exists and was not changed.", err=True)
    if as_json:
        say_json(_json(tuned, written))
    else:
        _print(tuned, written)
    sys.exit(tuned.exit_code)


_RECOMPUTED = {"all": "recomputed", "none": "kept"}


def _line(measured: Measured) -> str:
    split = measured.candidate.split
    way = f"{split.micro_batch} x {split.accumulation}, {_RECOMPUTED.get(split.recomputes, split.recomputes)}"
    outcome = f"{measured.tokens_per_second:,.0f} tokens/s" if measured.tokens_per_second else measured.failure
    level = catalog.short_name(measured.candidate.level)
    return f"{way}, {measured.candidate.loss} loss{_kernels(measured.candidate)}, {level}: {outcome}"


def _kernels(candidate: Candidate) -> str:
    """Return the kernels that a candidate computes with and that are not the plan's choice."""
    return "".join(f", {key}={value}" for key, value in candidate.kernels.items())


def _print(tuned: Tuned, written: Path | None) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("micro x steps", "activations", "loss", "level", "tokens/s", "GiB a rank", ""):
        table.add_column(title, justify="right" if title in ("tokens/s", "GiB a rank") else "left", no_wrap=True)
    for measured in sorted(tuned.measured, key=lambda measured: -(measured.tokens_per_second or 0.0)):
        split, first = measured.candidate.split, tuned.measured[0].tokens_per_second
        compared = (
            f"{measured.tokens_per_second / first:.2f}x" if measured.tokens_per_second and first else measured.failure
        )
        table.add_row(
            f"{split.micro_batch} x {split.accumulation}",
            _RECOMPUTED.get(split.recomputes, split.recomputes),
            f"{measured.candidate.loss}{_kernels(measured.candidate)}",
            catalog.short_name(measured.candidate.level),
            f"{measured.tokens_per_second:,.0f}" if measured.tokens_per_second else "",
            f"{measured.peak_bytes / 2**30:.2f}" if measured.peak_bytes else "",
            compared,
        )
    click.echo()
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)
    if not tuned.is_whole:
        click.echo(
            "Not every candidate was measured." + ("" if tuned.was_interrupted else " Raise --minutes to measure more.")
        )
    if written:
        say(f"Wrote {written}. Next: tuner train {written if written.is_absolute() else f'./{written}'}")


def _json(tuned: Tuned, written: Path | None) -> JsonObject:
    def row(measured: Measured) -> JsonObject:
        return {
            **measured.candidate.split._asdict(),
            "loss": measured.candidate.loss,
            "kernels": dict(measured.candidate.kernels),
            "deepspeed": measured.candidate.level,
            "tokens_per_second": measured.tokens_per_second,
            "peak_bytes": measured.peak_bytes,
            "failure": measured.failure or None,
        }

    return {
        "recipe": tuned.original.name,
        "ranks": tuned.ranks,
        "is_whole": tuned.is_whole,
        "candidates": [row(measured) for measured in tuned.measured],
        "fastest": row(tuned.fastest) if tuned.fastest else None,
        "written": str(written) if written else None,
        "exit_code": tuned.exit_code,
    }
