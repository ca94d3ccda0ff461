"""The plan's time model beside what steps take here, as rows, length, size and ranks grow, one at a time.

    python -m bench scale [--rounds 1] [--steps 9]

All train a Llama with random weights in full, in bf16, with tuner. The model is that of `tuner plan`, FLOPs by
a rate and bytes by a rate, and what it leaves out because a GPU does it in milliseconds: the update of each weight. The
rates of FLOPs and updates are those of the first two lines, the rate of bytes that of an all-reduce between two
processes, with gloo. Ranks share the cores. Everything else of the column is predicted.
A figure is the median over the steps of all rounds, the first ones left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

from bench.jobs import ACCUMULATION, SMALL, TINY, Setting, llama, make_job, make_model, preset, resolved
from bench.steps import measured
from bench.table import Table, Unmeasured, arguments, in_turns, median, summary
from tuner.fit import operations, step_time
from tuner.fit.levels import Costs
from tuner.fit.parameters import num_parameters

BASE = Setting(1, "bf16", "full", micro_batch=2, row_tokens=256)
ALL_REDUCE_BYTES = 100_000_000


@dataclass(frozen=True)
class Case:
    """One line of the table: what is changed of the base, and the model's size."""

    changed: str
    setting: Setting = BASE
    size: dict[str, int] = field(default_factory=lambda: dict(SMALL))


CASES = (
    Case("the base: 1 rank, 2 x 2 rows of 256 tokens, 50M parameters"),
    Case("1 x 2 rows", replace(BASE, micro_batch=1)),
    Case("4 x 2 rows", replace(BASE, micro_batch=4)),
    Case("rows of 128 tokens", replace(BASE, row_tokens=128)),
    Case("rows of 512 tokens", replace(BASE, row_tokens=512)),
    Case("hidden size 384", size={**SMALL, "hidden_size": 384}),
    Case("hidden size 768", size={**SMALL, "hidden_size": 768}),
    Case("2 ranks", replace(BASE, ranks=2)),
    Case("2 ranks, ZeRO-1", replace(BASE, ranks=2, zero=1)),
)


def bytes_a_second() -> float:
    """Return the rate of an all-reduce between two processes of one core each, as the plan counts its bytes.

    Raises:
        Unmeasured: it failed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "bench.scale", "--rank"], capture_output=True, text=True, env=env)
    if done.returncode:
        raise Unmeasured(done.stderr[-1000:])
    return float(done.stdout.split()[-1])


def _rank() -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(minutes=2))
    values, took = torch.zeros(ALL_REDUCE_BYTES // 2, dtype=torch.bfloat16), []
    for _ in range(6):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(values)
        took.append(time.perf_counter() - began)
    volume = step_time.zero_traffic(Costs(0), ALL_REDUCE_BYTES, 0, dist.get_world_size(), 1).total_bytes
    if dist.get_rank() == 0:
        print(volume / sorted(took[1:])[2])
    dist.destroy_process_group()


@dataclass(frozen=True)
class Work:
    """What one rank does for a step."""

    flops: float
    updates: float
    sent_bytes: float

    @classmethod
    def of(cls, case: Case, recipe: Path, scratch: Path) -> Work:
        config = resolved(recipe, case.setting, scratch / "never").recipe.config
        assert config.architecture is not None
        weights, ranks = num_parameters(config.architecture), case.setting.ranks
        costs = Costs.of_preset(preset(case.setting), config.architecture.hidden_size)
        volume = step_time.zero_traffic(costs, 2 * weights, 0, ranks, ACCUMULATION)
        counted = operations.of_step(config, config.architecture, costs, ranks)
        return cls(counted.matmul_flops + counted.attention_flops, weights / ranks, volume.total_bytes)


@dataclass(frozen=True)
class Rates:
    """What the machine does in a second, all ranks together; bytes between two of them."""

    flops: float
    updates: float
    sent_bytes: float

    @classmethod
    def of(cls, whole: tuple[Work, float], half: tuple[Work, float], sent_bytes: float) -> Rates:
        """Return the rates of two settings of one rank that differ in their FLOPs alone, each with its seconds."""
        flops = (whole[0].flops - half[0].flops) / (whole[1] - half[1])
        return cls(flops, whole[0].updates / (whole[1] - whole[0].flops / flops), sent_bytes)

    def seconds(self, work: Work, ranks: int) -> float:
        return ranks * (work.flops / self.flops + work.updates / self.updates) + work.sent_bytes / self.sent_bytes


def main() -> None:
    parser = arguments(__doc__, rounds=1, has_tiny=True)
    parser.add_argument("--steps", type=int, default=9)
    given = parser.parse_args()
    cases = CASES[:2] + CASES[-1:] if given.tiny else CASES
    cases = tuple(replace(case, size=TINY) for case in cases) if given.tiny else cases
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        jobs, scratch = {}, Path(name)
        for number, case in enumerate(cases):
            folder = scratch / str(number)
            folder.mkdir()
            jobs[case.changed] = make_job(
                folder, case.setting, given.steps, make_model(folder / "model", llama(**case.size))
            )
        found = in_turns(jobs, given.rounds, lambda changed: measured("tuner", jobs[changed]))
        took = {name: rounds if isinstance(rounds, str) else median(rounds) for name, rounds in found.items()}
        works = {case.changed: Work.of(case, Path(jobs[case.changed].recipe), scratch) for case in cases}
        known = [(works[case.changed], took[case.changed].wall) for case in cases[:2]]
        rates = Rates.of(*known, bytes_a_second())
        table = Table("scale", summary(__doc__))
        for case in cases:
            seconds, here = rates.seconds(works[case.changed], case.setting.ranks), took[case.changed]
            row = {"changed": case.changed, "measured, s": here, "predicted, s": round(seconds, 3)}
            table.add(row | {"predicted / measured": f"{seconds / here.wall:.2f}"})
        told = (
            f"{rates.flops / 1e9:.0f} GFLOP/s, {rates.updates / 1e6:.0f}M updates/s, {rates.sent_bytes / 1e9:.2f} GB/s"
        )
        table.add({"changed": told})
    table.show(given.json)


if __name__ == "__main__":
    _rank() if sys.argv[1:] == ["--rank"] else main()
