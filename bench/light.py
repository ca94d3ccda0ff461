"""What commands that train nothing cost: each beside a bare click group with one command that prints, in turns.

    python -m bench light [--rounds 9] [--json FILE]

A figure is the median of all rounds. On a machine that others use too, the processor's seconds say more than the
wall's. The goals: `tuner --help` at most 1.3 times bare click; `list`, with a pattern too, `show`, `plan` and a dry run
at most 0.4 s of the processor. Python must have written its compiled files: PYTHONDONTWRITEBYTECODE is not set, and a
round before the first does not count.
"""

from __future__ import annotations

import sys
from pathlib import Path

from bench.table import Table, arguments, in_turns, median, spent

RECIPE = "internlm2_chat_7b_qlora_oasst1_e3"
BARE_CLICK = """
import click
@click.group()
def main(): pass
@main.command("list")
def listing(): click.echo("one line")
main(["list"])
"""
TUNER = [sys.executable, "-c", "from tuner.cli import main; main()"]
SCRIPTS = Path(sys.executable).parent
COMMANDS = {
    "bare click": [sys.executable, "-c", BARE_CLICK],
    "tuner --help": [*TUNER, "--help"],
    "tuner list": [*TUNER, "list"],
    "tuner list '*qlora*'": [*TUNER, "list", "*qlora*"],
    "tuner show": [*TUNER, "show", RECIPE],
    "tuner plan": [*TUNER, "plan", RECIPE, "--gpus", "8", "--gpu", "a100-80g"],
    "tuner train --dry-run": [*TUNER, "train", RECIPE, "--deepspeed", "deepspeed_zero2", "--dry-run"],
    "tuner train --dry-run, a sample of rows rendered": [*TUNER, "train", "tiny_full_sample", "--dry-run"],
    "torchrun --help": [str(SCRIPTS / "torchrun"), "--help"],
    "accelerate --help": [str(SCRIPTS / "accelerate"), "--help"],
    "trl --help": [str(SCRIPTS / "trl"), "--help"],
}


def main() -> None:
    given = arguments(__doc__, rounds=9).parse_args()
    in_turns(COMMANDS, 1, lambda name: [spent(COMMANDS[name])])
    found = in_turns(COMMANDS, given.rounds, lambda name: [spent(COMMANDS[name])])
    medians = {name: median(each) for name, each in found.items() if not isinstance(each, str)}
    what = f"Commands that train nothing, in turns. Medians of {given.rounds}. Seconds of the wall (cpu)."
    table = Table("light", what)
    for name, took in medians.items():
        table.add({"command": f"`{name}`", "seconds": took, "x bare click": took.over(medians["bare click"])})
    table.show(given.json)


if __name__ == "__main__":
    main()
