"""What GRPO teaches a real model: the share of right answers to held-out sums of two-digit numbers, by step.

    python -m bench.grpo                        # SmolLM2-135M, the model of `make real`
    python -m bench.grpo --steps 10 --lr 2e-5

A prompt shows one sum and asks for another. The reward is 1 if the first word of the completion is the sum. The
measurement is that of the run's own validation: greedy completions of 200 sums that training never shows.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.real import model

SHOWN = "34 + 21 = 55\n"
REWARD = """
def first_word(completions, answer, **columns):
    return [float(text.split()[:1] == [right]) for text, right in zip(completions, answer)]
"""
HELD_OUT, TRAINED = 200, 2000


def write_sums(folder: Path) -> None:
    """Write train.jsonl, held.jsonl and the reward."""
    every = [(first, other) for first in range(10, 100) for other in range(10, 100)]
    random.Random(1).shuffle(every)
    rows = [{"prompt": f"{SHOWN}{first} + {other} =", "answer": str(first + other)} for first, other in every]
    for name, part in (("held", rows[:HELD_OUT]), ("train", rows[HELD_OUT : HELD_OUT + TRAINED])):
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in part))
    (folder / "sums.py").write_text(REWARD)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", default="2e-5")
    parser.add_argument("--completions", type=int, default=32, help="Completions a step, 8 of each prompt.")
    parser.add_argument("--every", type=int, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sums(folder)
        trained = str(model.prepare(model.folder()))
        argv = [sys.executable, "-m", "tuner", "train", "--model", trained, "--method", "grpo_full"]
        argv += ["--data", "train.jsonl", "--val", "held.jsonl", "--reward", "sums.py:first_word", "--work-dir", "run"]
        argv += ["--max-steps", str(arguments.steps), "--lr", arguments.lr, "--eval-every", str(arguments.every)]
        argv += ["--set", "max_completion_length=4", "--set", "num_generations=8"]
        argv += ["--batch-size", str(arguments.completions)]
        began = time.monotonic()
        done = subprocess.run(argv, cwd=folder, stdout=sys.stderr)
        if done.returncode:
            return done.returncode
        lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        print("| step | right, held out |\n| ---: | ---: |")
        for line in lines:
            if "eval_reward" in line:
                print(f"| {line['step']} | {line['eval_reward']:.1%} |")
        print(f"\n{time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
