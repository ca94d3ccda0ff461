"""One rank that takes the small jobs for real on the CPU: `python -m tests.bench.real_rank FILE JOB...`.

It writes the peak of each job's second step, all live storages counted, into FILE.RANK.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F

from bench.gpu_loss import as_on_a_gpu
from bench.live import Live
from bench.simulation import Job, build, optimizer_of, step
from tests.bench.small_jobs import JOBS
from tuner.worker import compat


def peak(job: Job) -> int:
    torch.manual_seed(0)
    with mock.patch.object(F, "linear", F.linear), as_on_a_gpu(), Live() as live:
        before = live.now
        model = build(job)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=dict(job.deepspeed))
        gc.collect()
        step(engine, job, "cpu")
        gc.collect()
        live.reset()
        step(engine, job, "cpu")
        found = live.peak - before
        engine.destroy()
    del engine, model
    gc.collect()
    return found


def main() -> None:
    compat.build_no_collective()
    deepspeed.init_distributed(dist_backend="gloo")
    peaks = {name: peak(JOBS[name]) for name in sys.argv[2:]}
    Path(f"{sys.argv[1]}.{os.environ['RANK']}").write_text(json.dumps(peaks), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # torch 2.13's gloo may abort in its destructors


if __name__ == "__main__":
    main()
