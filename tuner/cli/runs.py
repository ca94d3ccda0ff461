"""`tuner runs`: what is in a work directory, and how each run stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text

from tuner.cli.help import Command
from tuner.cli.options import runs_folder
from tuner.cli.say import say, say_json
from tuner.errors import UsageError, visible
from tuner.machine import slurm
from tuner.runs import listing, promises
from tuner.runs.ledger import Ledger
from tuner.runs.listing import Listed

_EVERY_S = 2.0
_PIPE_COLUMNS = 10_000
_STYLES = {
    "pending": "blue",
    "running": "cyan",
    "done": "green",
    "failed": "bold red",
    "died": "bold red",
    "damaged": "bold red",
}


class _Column(NamedTuple):
    """A figure of a run: the head of its column, its text, and how that stands on a line of its own."""

    title: str
    text: Callable[[Listed], str]
    alone: str = "{}"


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


_COLUMNS = (
    _Column("step", lambda run: _figure(run.step, ","), "step {}"),
    _Column("loss", lambda run: _figure(run.loss, ".4f"), "loss {}"),
    _Column("tokens/s", lambda run: _figure(run.tokens_per_second, ",.0f"), "{} tokens/s"),
    _Column("useful tokens/s", lambda run: _figure(run.ledger.useful_tokens_per_second, ",.0f"), "{} useful tokens/s"),
    _Column("interruptions", lambda run: _figure(len(run.ledger.interruptions) or None, ","), "interruptions {}"),
    _Column("seen", lambda run: _age(time.time() - run.seen)),
)
"""Where no run has a figure, the table leaves its column out."""


@click.command(
    cls=Command,
    examples=(
        "tuner runs",
        "tuner runs work_dirs --watch",
        "tuner runs work_dirs/RECIPE/TIME",
    ),
    json_keys={
        "tuner runs --json": (
            "a list; each: `path`, `name`, `state`, `why`, `step`, `loss`, `tokens_per_second`, `resumable_step`, "
            "`verdict`, `ledger`"
        ),
    },
)
@runs_folder("DIR")
@click.option("--json", "as_json", is_flag=True, help="Print the runs as JSON.")
@click.option("--watch", is_flag=True, help="Refresh the list every two seconds; press Ctrl-C to stop.")
def command(folder: Path, as_json: bool, watch: bool) -> None:
    """List runs with their state, step, loss and speed, and what to do about those that failed.

    A job of tuner submit that waits in the queue is listed too.

    DIR is the folder to look in. [default: work_dirs] If it is a run, its ledger follows: what the time of all its
    attempts went into, and each interruption.
    """
    if watch and (as_json or not sys.stdout.isatty()):
        problem = "--watch with --json" if as_json else "--watch needs a terminal"
        raise UsageError(problem, where="--watch", fix="Remove --watch.")
    if watch:
        _watch(folder)
    elif as_json:
        say_json([run.to_json() for run in _below(folder)])
    else:
        _print(folder, _below(folder))


def _below(folder: Path) -> list[Listed]:
    return listing.below(folder, slurm.queued, slurm.has_ended)


def _print(folder: Path, runs: Sequence[Listed]) -> None:
    if not runs:
        say(f"No runs below {folder}.")
        return
    # What reads a pipe has no width: a line a run, however long.
    console = Console(width=None if Console().is_terminal else _PIPE_COLUMNS, highlight=False)
    console.print(_shown(runs, console))
    if listing.looks_like_a_run(folder):
        _print_ledger(runs[0].ledger, console)


def _print_ledger(of_run: Ledger, console: Console) -> None:
    times = Table(box=None, pad_edge=False, show_header=False)
    total_s = sum(of_run.seconds.values())
    for part, words in promises.PARTS.items() if total_s else ():
        if spent_s := of_run.seconds[part]:
            times.add_row(words, f"{spent_s:,.1f} s", f"{spent_s / total_s:.1%}")
    for column in times.columns[1:]:
        column.justify = "right"
    console.print()
    console.print(times if total_s else "What the time went into is not known.")
    for line in _recoveries(of_run):
        console.print(line, markup=False)
    if line := promises.line(of_run.promises):
        console.print(line, markup=False)


def _recoveries(of_run: Ledger) -> Iterator[str]:
    if of_run.goodput is not None:
        mean_s = of_run.mean_recovery_s
        yield f"Goodput {of_run.goodput:.1%}" + (
            f", mean time to recover {mean_s:,.1f} s" if mean_s is not None else ""
        )
    for attempt in of_run.interruptions:
        where = (
            f", rank {attempt.rank}" + (f" on {attempt.host}" if attempt.host else "")
            if attempt.rank is not None
            else ""
        )
        repeated = f", {attempt.lost_steps:,} steps repeated" if attempt.lost_steps else ""
        recovered = f", recovered in {attempt.recovered_s:,.1f} s" if attempt.recovered_s is not None else ""
        ended = f"attempt {attempt.number} {attempt.state} after step {attempt.step:,}{where}{repeated}{recovered}"
        yield visible(f"{ended}: {attempt.why}" if attempt.why else ended)


def _shown(runs: Sequence[Listed], console: Console) -> Table | Group:
    """Return the table, or where the terminal is too narrow for it, three lines for each run."""
    table = _table(runs)
    if not console.is_terminal:  # a pipe is never too narrow, and measuring costs as much as printing
        return table
    needed = console.measure(table, options=console.options.update(max_width=_PIPE_COLUMNS)).maximum
    return table if needed <= console.width else _stacked(runs)


def _stacked(runs: Sequence[Listed]) -> Group:
    lines: list[Text | Padding] = []
    for run in runs:
        figures = [column.alone.format(text) for column in _COLUMNS if (text := column.text(run))]
        state = Text(run.state, style=_STYLES.get(run.state, "yellow"))
        lines += [Text(visible(run.name), style="bold", overflow="fold")]
        lines += [Padding(Text("  ").join([state, *map(Text, figures)]), (0, 0, 0, 2))]
        lines += [Padding(Text(why), (0, 0, 0, 2))] if (why := _why(run)) else []
    return Group(*lines)


def _watch(folder: Path) -> None:
    console = Console(highlight=False)
    try:
        with Live(_end_of_table(_below(folder), console), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY_S)
                live.update(_end_of_table(_below(folder), console), refresh=True)
    except KeyboardInterrupt:
        return


def _end_of_table(runs: Sequence[Listed], console: Console) -> SegmentLines:
    """Return as many lines of the table's end as the terminal shows: there stand the runs that are at work."""
    height = console.height - 1
    shown = _shown(runs[-height:], console)
    header, *lines = console.render_lines(shown, pad=False)
    if not isinstance(shown, Table):
        return SegmentLines([header, *lines][-height:], new_lines=True)
    return SegmentLines([header, *lines[-(height - 1) :]], new_lines=True)


def _table(runs: Sequence[Listed]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    columns = [column for column in _COLUMNS if any(map(column.text, runs))]
    for column in columns:
        table.add_column(column.title, justify="right", no_wrap=True)
    table.add_column("outcome")
    for run in runs:
        table.add_row(
            escape(visible(run.name)),
            f"[{_STYLES.get(run.state, 'yellow')}]{run.state}[/]",
            *(escape(column.text(run)) for column in columns),
            escape(_why(run)),
        )
    return table


def _why(run: Listed) -> str:
    slow = (f"Slow: {rank.line}" for rank in run.slow_ranks)
    sentences = (run.verdict or run.why.rstrip("."), _going_on(run), _attempts(run.ledger), *slow)
    return visible(". ".join(filter(None, sentences)))


def _attempts(of_run: Ledger) -> str:
    """Return how much of its time a run that was interrupted has used, if that is known."""
    if len(of_run.attempts) == 1 or of_run.goodput is None:
        return ""
    return f"{len(of_run.attempts)} attempts, goodput {of_run.goodput:.0%}"


def _going_on(run: Listed) -> str:
    if run.state in ("running", "done"):
        return ""
    if run.resumable_step is None:
        if run.state == "pending":
            return ""
        return "No checkpoint to resume from"
    return f"Resumes from step {run.resumable_step:,}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
