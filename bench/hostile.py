"""Bad inputs by the thousand, of every kind that comes from outside; each must end in one message.

    python bench/hostile.py [--inputs 14000] [--commands 300] [--folders 800] [--seed 0]

Reach: at least 10,000 inputs refused, none with a traceback, none that wrote a file, opened a connection or started
a process. Inputs that were taken were right by chance and do not count. The kinds and their functions stand in
tests/hostile/doors.py. `--commands` are tried through the whole command line, each in a child of its own; so are
`--folders`: damaged models, adapters and runs, which may be written into, and odd environments (hostile_folders.py).
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import hostile_folders
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from tests.hostile import strategies
from tests.hostile.doors import DOORS, TINY, Door


def generated(strategy: st.SearchStrategy[Any], count: int, seed: int) -> list[Any]:
    """Return `count` inputs that a strategy makes, the same for the same seed."""
    found: list[Any] = []

    @seeded(seed)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck]
    )
    @given(strategy)
    def collect(made: Any) -> None:
        found.append(made)

    collect()
    return found


def tried(door: Door, count: int, seed: int, folder: Path) -> Counter[str]:
    """Take `count` generated inputs through one door and count what became of them."""
    counts: Counter[str] = Counter()
    for made in generated(door.strategy, count, seed):
        try:
            counts["refused" if door.refuses(folder, made) else "taken"] += 1
        except Exception:
            counts["bugs"] += 1
            print(f"{door.kind}: {repr(made)[:300]}\n{traceback.format_exc(limit=-4)[-1_800:]}", file=sys.stderr)
    return counts


COMMANDS = (
    *("train {name} --dry-run", "show {name}", "check {name}", "copy {name} copies", "list {name}", "{name}"),
    *("show {TINY} --diff={name}", "plan {TINY} --gpu={name} --gpus=1", "train {TINY} --dry-run --set={override}"),
    *("train {TINY} --dry-run --deepspeed={name}", "train {TINY} --dry-run --resume={name}"),
    *("train {TINY} --dry-run --work-dir={name}", "train {TINY} --dry-run --model={name}"),
    "train {TINY} --dry-run --data={name}",
)


def command(chance: random.Random, strategy_of: dict[str, list[str]]) -> list[str]:
    """Return a command line with something bad in it."""
    name, override = chance.choice(strategy_of["names"]), chance.choice(strategy_of["overrides"])
    names = {"name": name, "override": override, "TINY": TINY}
    return [word.format(**names) for word in chance.choice(COMMANDS).split()]


def commanded(count: int, seed: int, folder: Path) -> Counter[str]:
    """Try `count` command lines and count how they ended."""
    counts: Counter[str] = Counter()
    # What a process can be given: no NUL, and text.
    made = {
        kind: [text.replace("\0", "").encode("utf-8", "replace").decode() for text in generated(strategy, 500, seed)]
        for kind, strategy in (("names", strategies.names), ("overrides", strategies.overrides))
    }
    chance = random.Random(seed)
    for _ in range(count):
        arguments = command(chance, made)
        hostile_folders.count_one(counts, repr(arguments), *hostile_folders.run(arguments, folder, writes=False))
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=14_000, help="generated inputs, shared among the kinds")
    parser.add_argument("--commands", type=int, default=300, help="command lines")
    parser.add_argument("--folders", type=int, default=800, help="damaged folders and odd environments, by commands")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", help="one kind alone")
    asked = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    doors = [door for door in DOORS if asked.inputs and asked.kind in (None, door.kind)]
    print("| kind | tried | refused in one message | taken | tracebacks or effects | seconds |")
    print("|---|---|---|---|---|---|")
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch:
        shares = [round(asked.inputs * (1 if asked.kind else door.share)) for door in doors]
        kinds = [
            (door.kind, partial(tried, door, share, asked.seed, Path(scratch)))
            for door, share in zip(doors, shares, strict=True)
        ]
        if asked.folders:  # first: environments are tried before anything heavy is imported here
            kinds[:0] = hostile_folders.rows(asked.folders, asked.seed, Path(scratch), asked.kind)
        if asked.commands and not asked.kind:
            kinds.append(("command line", partial(commanded, asked.commands, asked.seed, Path(scratch))))
        for kind, act in kinds:
            started = time.monotonic()
            counts = act()
            total += counts
            row(kind, counts, time.monotonic() - started)
    row("all", total, None)
    sys.exit(1 if total["bugs"] else 0)


def row(kind: str, counts: Counter[str], seconds: float | None) -> None:
    took = "" if seconds is None else f"{seconds:.0f}"
    print(
        f"| {kind} | {counts.total():,} | {counts['refused']:,} | {counts['taken']:,} | {counts['bugs']} | {took} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
