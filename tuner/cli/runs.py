"""`tuner runs`: what is in a work directory, and how each run stands."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner.cli.say import say
from tuner.errors import UsageError, visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.segment import SegmentLines
    from rich.table import Table

    from tuner.runs.listing import Listed

_DEFAULT = Path("work_dirs")
_EVERY_S = 2.0
_STYLES = {"running": "cyan", "done": "green", "failed": "bold red", "died": "bold red", "damaged": "bold red"}


@click.command()
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=_DEFAULT)
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
@click.option("--watch", is_flag=True, help="Show it again every two seconds, until Ctrl-C.")
def command(folder: Path, as_json: bool, watch: bool) -> None:
    """List the runs below DIR (work_dirs): state, step, loss, speed, and what to do about those that ended badly."""
    from tuner.files import dump_json
    from tuner.runs import listing

    if watch and (as_json or not sys.stdout.isatty()):
        what = "--watch with --json" if as_json else "--watch needs a terminal"
        raise UsageError(what, where="--watch", fix="Leave --watch out.")
    if not folder.is_dir() and folder != _DEFAULT:
        raise UsageError(f"no folder {str(folder)!r}", where="DIR", fix="Name the folder that runs are written to.")
    if watch:
        _watch(folder)
    elif as_json:
        click.echo(dump_json([run.to_json() for run in listing.below(folder)]), nl=False)
    else:
        _print(folder, listing.below(folder))


def _print(folder: Path, runs: Sequence[Listed]) -> None:
    if not runs:
        say(f"No run below {folder}.")
        return
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 160, highlight=False)
    console.print(_table(runs))


def _watch(folder: Path) -> None:
    from rich.console import Console
    from rich.live import Live

    from tuner.runs import listing

    console = Console(highlight=False)
    try:
        with Live(_end_of_table(listing.below(folder), console), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(_EVERY_S)
                live.update(_end_of_table(listing.below(folder), console), refresh=True)
    except KeyboardInterrupt:
        return


def _end_of_table(runs: Sequence[Listed], console: Console) -> SegmentLines:
    """Return as many lines of the table's end as the terminal shows: there stand the runs that are at work."""
    from rich.segment import SegmentLines

    height = console.height - 1
    header, *lines = console.render_lines(_table(runs[-height:]), pad=False)
    return SegmentLines([header, *lines[-(height - 1) :]], new_lines=True)


def _table(runs: Sequence[Listed]) -> Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for title in ("step", "loss", "tokens/s", "seen"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("why")
    for run in runs:
        table.add_row(
            escape(visible(run.name)),
            f"[{_STYLES.get(run.state, 'yellow')}]{run.state}[/]",
            "" if run.step is None else f"{run.step:,}",
            "" if run.loss is None else f"{run.loss:.4f}",
            "" if run.tokens_per_second is None else f"{run.tokens_per_second:,.0f}",
            _age(time.time() - run.seen),
            escape(visible(". ".join(filter(None, (run.why.rstrip("."), _going_on(run)))))),
        )
    return table


def _going_on(run: Listed) -> str:
    if run.state in ("running", "done"):
        return ""
    if run.resumable_step is None:
        return "No checkpoint to go on from"
    return f"Goes on from step {run.resumable_step:,}"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"
