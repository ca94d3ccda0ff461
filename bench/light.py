"""What commands that train nothing cost: each beside a bare click group with one command that prints, in turns.

    python -m bench light [--rounds 9] [--json FILE]

A figure is the median of all rounds. On a machine that others use too, the processor's seconds say more than the
wall's. Reach: `tuner --help` and `tuner list` at 1.5 of bare click, `show`, `plan` and a dry run at 3. Python must have
written its compiled files: PYTHONDONTWRITEBYTECODE is not set, and the first round does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

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
    "torchrun --help": [str(SCRIPTS / "torchrun"), "--help"],
    "accelerate --help": [str(SCRIPTS / "accelerate"), "--help"],
    "trl --help": [str(SCRIPTS / "trl"), "--help"],
}


def seconds(command: list[str]) -> tuple[float, float]:
    """Return the wall's and the processor's seconds of one call; one that fails ends it."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(given.rounds + 1):  # all of them in each round, so that a busy moment hits every one
        for name, command in COMMANDS.items():
            found[name].append(seconds(command))
    medians = {name: tuple(map(statistics.median, zip(*each[1:], strict=True))) for name, each in found.items()}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}, click {version('click')}, pydantic {version('pydantic')}, rounds: {given.rounds}\n")
    print("| command | s wall | s cpu | x bare click, wall | x bare click, cpu |\n|---|---|---|---|---|")
    bare_wall, bare_cpu = medians["bare click"]
    for name, (wall, cpu) in medians.items():
        print(f"| `{name}` | {wall:.3f} | {cpu:.3f} | {wall / bare_wall:.2f} | {cpu / bare_cpu:.2f} |")
    if given.json:
        lines = [{"command": name, "wall_s": wall, "cpu_s": cpu} for name, (wall, cpu) in medians.items()]
        given.json.write_text(json.dumps({"machine": machine, "rounds": given.rounds, "lines": lines}, indent=2))


if __name__ == "__main__":
    main()
