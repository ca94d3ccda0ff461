"""Faults by the hundred, tuner and the plain Trainer side by side: what is lost, as rows of a markdown table.

    python bench/faults.py saves [--kills 200]
    python bench/faults.py runs [--kills 50]
    python bench/faults.py times
    python bench/faults.py goodput [--seconds 360] [--every 60] [--interval 20]

Reach: none of tuner's saves that are killed costs more than itself; every killed run goes on, to the bit.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path


def saves(asked: argparse.Namespace, scratch: Path) -> list[str]:
    """SIGKILL in the middle of a save, at random moments; half as many for the Trainer."""
    from fault_saves import table  # it loads torch

    return table(scratch, asked.kills)


def runs(asked: argparse.Namespace, scratch: Path) -> list[str]:
    """SIGKILL of a random process at a random moment of a run, again and again; half as many for the Trainer."""
    from fault_runs import table

    return table(scratch, asked.kills)


def times(asked: argparse.Namespace, scratch: Path) -> list[str]:
    """Seconds that stopping, restarting and saving take."""
    from fault_runs import times_table

    return times_table(scratch)


def goodput(asked: argparse.Namespace, scratch: Path) -> list[str]:
    """The share of the wall time that goes into useful steps where a rank is killed again and again."""
    from fault_goodput import table

    return table(scratch, asked.seconds, asked.every, asked.interval)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for kind, kills in ((saves, 200), (runs, 50)):
        command = commands.add_parser(kind.__name__, help=kind.__doc__)
        command.add_argument("--kills", type=int, default=kills)
        command.set_defaults(run=kind)
    commands.add_parser("times", help=times.__doc__).set_defaults(run=times)
    command = commands.add_parser("goodput", help=goodput.__doc__)
    command.add_argument("--seconds", type=float, default=360)
    command.add_argument("--every", type=float, default=60, metavar="SECONDS", help="between two killed ranks")
    command.add_argument("--interval", type=int, default=20, help="steps between two checkpoints")
    command.set_defaults(run=goodput)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tuner-faults-") as scratch:
        print("\n".join(asked.run(asked, Path(scratch))))


if __name__ == "__main__":
    main()
