"""Seconds of an optimizer step: a minimal `deepspeed.initialize` loop, the plain Trainer and tuner, in turns.

    python -m bench steps [--ranks 1 2] [--dtypes fp32 bf16] [--methods full lora] [--rounds 3] [--steps 12]

All train a Llama of about 50M parameters with random weights on the CPU, at the same settings: the same rows, micro-
batch, accumulation, learning rate, clipping and DeepSpeed config (ZeRO-2), fused AdamW, no recomputation. They take
turns, A B C A B C; a figure is the median over the steps of all rounds. On a machine that others use too, the
processor's seconds say more than the wall's. Reach: tuner at 1.00 of the loop.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tuner.machine.topology import without_variables

VARIANTS = ("loop", "trainer", "tuner")
ROW_TOKENS, MICRO_BATCH, ACCUMULATION, WARM_STEPS = 256, 2, 2, 3
ROOT = Path(__file__).parents[1]
RECIPE = """
_base_ = "tiny_pretrain_{method}_custom_e1"
model = dict(path="{model}")
train_dataloader = dict(batch_size={micro_batch}, dataset=dict(path="{rows}", max_length={tokens}, packing=False))
val_dataloader = None
optim_wrapper = dict(optimizer=dict(lr=1e-4), accumulative_counts={accumulation}, dtype="{dtype}")
param_scheduler = dict(type="constant", warmup_ratio=0.0)
train_cfg = dict(max_steps={steps}, gradient_checkpointing=False)
checkpoint = dict(interval=100000)
log = dict(interval=10, num_samples=0)
"""


@dataclass(frozen=True)
class Setting:
    """One line of the table."""

    ranks: int
    dtype: str
    method: str

    def __str__(self) -> str:
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, ZeRO-2, {self.dtype}, {self.method}"


def steps_of(variant: str, recipe: Path, folder: Path, ranks: int) -> list[tuple[float, float]]:
    """Train, and return the wall's and the processor's seconds of each step after the first ones, of rank 0."""
    times = folder / "times.json"
    train(variant, recipe, folder, ranks, BENCH_TIMES=str(times))
    found = json.loads(times.read_text())[WARM_STEPS:]
    return [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(found)]


def operations_of(variant: str, recipe: Path, folder: Path, ranks: int) -> dict[str, int]:
    """Train, and return how often each operation runs in one step of rank 0, by torch's profiler."""
    file = folder / "operations.json"
    train(variant, recipe, folder, ranks, BENCH_TIMES=os.devnull, BENCH_OPERATIONS=str(file))
    found: dict[str, int] = json.loads(file.read_text())
    return found


def train(variant: str, recipe: Path, folder: Path, ranks: int, **more: str) -> None:
    """Train one variant to its end, on CPUs."""
    run, threads = folder / "run", str(max(1, (os.cpu_count() or 1) // ranks))
    # The ranks of tuner do not look for modules in the working directory.
    env = without_variables(os.environ) | {"OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT)} | more
    arguments = ["train", recipe, "--work-dir", run, "--deepspeed", "zero2", "--nproc-per-node", ranks]
    tuner = [sys.executable, "-m", "bench.steps_rank", *map(str, arguments)]
    if variant == "tuner":
        command = tuner
    else:
        rank = ["-m", "bench.steps_rank", variant, str(recipe), str(run)]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--standalone"]
        command = [sys.executable, *launcher, *rank]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{variant}: {done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def write_recipe(folder: Path, setting: Setting, steps: int, **size: int) -> Path:
    """Write a recipe with a model and rows of its own; `size` is what `make_inputs` takes."""
    from bench.steps_rank import make_inputs

    model, rows = make_inputs(folder, **size)
    recipe = folder / "recipe.py"
    values = {"method": setting.method, "dtype": setting.dtype, "model": model, "rows": rows, "steps": steps}
    sizes = {"tokens": ROW_TOKENS, "micro_batch": MICRO_BATCH, "accumulation": ACCUMULATION}
    recipe.write_text(RECIPE.format(**values, **sizes), encoding="utf-8")
    return recipe


def measured(setting: Setting, rounds: int, steps: int, folder: Path) -> dict[str, tuple[float, float]]:
    """Return each variant's median seconds of the wall and of the processor."""
    recipe = write_recipe(folder, setting, steps)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name in VARIANTS:
            with tempfile.TemporaryDirectory(dir=folder) as each:
                found[name] += steps_of(name, recipe, Path(each), setting.ranks)
    medians = {}
    for name, times in found.items():
        walls, cpus = zip(*times, strict=True)
        medians[name] = (statistics.median(walls), statistics.median(cpus))
    return medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--methods", nargs="+", default=["full", "lora"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, rounds: {given.rounds}\n")
    print("| setting | loop, s wall (cpu) | Trainer / loop, wall (cpu) | tuner / loop, wall (cpu) |\n|---|---|---|---|")
    lines = []
    for place in itertools.product(given.ranks, given.dtypes, given.methods):
        setting = Setting(*place)
        with tempfile.TemporaryDirectory(prefix="steps-") as folder:
            found = measured(setting, given.rounds, given.steps, Path(folder))
        wall, cpu = found["loop"]
        ratios = [f"{found[name][0] / wall:.2f} ({found[name][1] / cpu:.2f})" for name in ("trainer", "tuner")]
        print(f"| {setting} | {wall:.3f} ({cpu:.3f}) | {ratios[0]} | {ratios[1]} |", flush=True)
        lines.append({"setting": str(setting), "seconds": found})
    if given.json:
        given.json.write_text(json.dumps(lines, indent=2))


if __name__ == "__main__":
    main()
