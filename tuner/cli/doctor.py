"""`tuner doctor`: whether this machine can train, and what to do where it cannot."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from tuner.cli.help import Command
from tuner.errors import MachineError
from tuner.files import dump_json

if TYPE_CHECKING:
    from tuner.lab.doctor import Report

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[bold red]failed[/]", "absent": "[dim]-[/]"}


@click.command(cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, for a bug report.")
def command(as_json: bool) -> None:
    """Check the installation: libraries, GPUs, communication between processes, limits, disks.

    Takes a few seconds. Exit code 3 if something fails. Values of environment variables are never printed.
    """
    from tuner.lab import doctor

    report = doctor.examine(dict(os.environ))
    if as_json:
        click.echo(dump_json(report.to_json()), nl=False)
    else:
        _print(report)
    if report.failed:
        sys.exit(MachineError.exit_code)


def _print(report: Report) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in report.rows:
        fix = f"\n-> {row.fix}" if row.fix else ""
        table.add_row(row.name, _MARKS[row.status], escape(f"{row.text}{fix}"))
    console.print(table)
    console.print(f"\n{escape(report.verdict)}", style="bold")
