"""How long commands take to answer, side by side in one run: best of N wall-clock seconds each.

    python bench/startup.py [--rounds 5]

Reach: `tuner --help` and `tuner list` within 1.5x of bare click; `show` and `--dry-run` under 0.3 s; no torch in any.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(sys.executable).parent
RECIPE = "internlm2_chat_7b_qlora_oasst1_e3"
BARE_CLICK = "import click\n@click.command()\ndef main(): pass\nmain(['--help'])"
COMMANDS = {
    "bare click --help": [sys.executable, "-c", BARE_CLICK],
    "tuner --help": [SCRIPTS / "tuner", "--help"],
    "tuner list": [SCRIPTS / "tuner", "list"],
    "tuner show": [SCRIPTS / "tuner", "show", RECIPE],
    "tuner train --dry-run": [SCRIPTS / "tuner", "train", RECIPE, "--deepspeed", "deepspeed_zero2", "--dry-run"],
    "trl --help": [SCRIPTS / "trl", "--help"],
    "torchrun --help": [SCRIPTS / "torchrun", "--help"],
    "accelerate --help": [SCRIPTS / "accelerate", "--help"],
}


def seconds(command: list[str | Path]) -> float:
    """Return the wall-clock seconds of one call; a call that fails is a mistake here, not a fast answer."""
    start = time.perf_counter()
    subprocess.run([str(part) for part in command], check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    best = dict.fromkeys(COMMANDS, float("inf"))
    for _ in range(rounds):  # all commands in each round, so that a busy moment hits every one of them
        for name, command in COMMANDS.items():
            best[name] = min(best[name], seconds(command))
    bare = best["bare click --help"]
    print(f"best of {rounds}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}\n")
    print("| command | seconds | x bare click |\n|---|---|---|")
    for name, value in best.items():
        print(f"| `{name}` | {value:.3f} | {value / bare:.1f} |")


if __name__ == "__main__":
    main()
