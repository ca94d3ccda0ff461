"""`tuner doctor`: whether this machine can train, and what to do where it cannot."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tuner.cli.help import Command
from tuner.cli.say import say_json
from tuner.errors import MachineError, UsageError
from tuner.machine import hardware, launchers
from tuner.machine import hostfile as hostfiles
from tuner.machine.hostfile import NODE
from tuner.machine.topology import LAUNCHERS, Launcher, LaunchFlags

if TYPE_CHECKING:
    from tuner.lab.doctor import DoctorReport

_MARKS = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "failed": "[bold red]failed[/]", "absent": "[dim]-[/]"}


@click.command(
    cls=Command,
    examples=("tuner doctor", "tuner doctor --nodes --hostfile hosts", "srun tuner doctor --nodes --launcher slurm"),
    json_keys={
        "tuner doctor --json": "`verdict`, `versions`, `checks`",
    },
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON, for a bug report.")
@click.option("--nodes", is_flag=True, help="Check nodes, not the installation: whether each is well, and how fast.")
@click.option(
    "--launcher",
    type=click.Choice(LAUNCHERS),
    metavar="NAME",
    default="local",
    help="With --nodes: how the processes are started, as for tuner train.",
)
@click.option("--hostfile", type=click.Path(path_type=Path), help="With --nodes: check these hosts over ssh.")
@click.option("--ssh", metavar="COMMAND", default="ssh", help="With --hostfile: the ssh to use.")
def command(as_json: bool, nodes: bool, launcher: Launcher, hostfile: Path | None, ssh: str) -> None:
    """Check the installation: libraries, GPUs, communication between processes, limits, disks.

    Takes a few seconds. Exit code 3 if something fails. Values of environment variables are never printed.

    With --nodes it checks nodes instead: GPUs by their driver and the kernel's log, this folder, the clock, and how
    fast each rank multiplies matrices and all reduce, compared with the others. Start it on each node with the
    variables of a run (NNODES, NODE_RANK, ADDR), by srun, or with --hostfile.
    """
    if not nodes and (hostfile or launcher != "local"):
        name = "--hostfile" if hostfile else "--launcher"
        raise UsageError(f"{name} without --nodes", where=name, fix="Add --nodes.")
    if hostfile and NODE not in os.environ:
        _start_on_hosts(hostfile, ssh)
    from tuner.lab import doctor

    report = _of_nodes(launcher) if nodes else doctor.examine(dict(os.environ))
    if as_json:
        say_json(report.to_json())
    else:
        _print(report)
    if report.failed:
        sys.exit(MachineError.exit_code)


def _of_nodes(launcher: Launcher) -> DoctorReport:
    from tuner.lab import nodes
    from tuner.lab.doctor import DoctorReport

    this_machine = hardware.detect(os.environ)
    topology = launchers.resolve(LaunchFlags(launcher=launcher), os.environ, len(this_machine.gpus))
    return DoctorReport(tuple(nodes.examine(this_machine, topology, Path.cwd(), dict(os.environ))))


def _start_on_hosts(hostfile: Path, ssh: str) -> NoReturn:
    from tuner.lab import hosts

    launch = hosts.plan(hostfiles.read_hostfile(hostfile, None, None), ssh, sys.argv[1:], Path.cwd(), os.environ, {})
    sys.exit(hosts.run(*hosts.look(launch)))


def _print(report: DoctorReport) -> None:
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    table = Table(box=None, show_header=False, pad_edge=False)
    for row in report.rows:
        fix = f"\n-> {row.fix}" if row.fix else ""
        table.add_row(row.name, _MARKS[row.status], escape(f"{row.text}{fix}"))
    console.print(table)
    console.print(f"\n{escape(report.conclusion)}", style="bold")
