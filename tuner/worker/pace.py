"""How fast each rank is by itself: its time between collectives is measured and compared, and slow ranks are named.

A step takes all ranks equally long, because each waits for the slowest one. What differs is the time that a rank works
before it waits: it reads rows, and computes forward passes. There no gradient is reduced; what ZeRO-3 waits for there,
weights of other ranks, is subtracted. The clock of a GPU's work is its events, and they are read in steps that have
waited for later ones anyway, so nothing waits for a GPU more often. Not run on several GPUs.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import median_low
from typing import Any, Literal

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import TrainerCallback, TrainerState, TrainingArguments

from tuner.errors import DiskError
from tuner.files import write_json
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RankPace, RanksPace, SlowRank
from tuner.worker import compat_update
from tuner.worker.consensus import LateNumbers, sent
from tuner.worker.process import warn
from tuner.worker.trainer_types import BuiltTrainer

WINDOW = 100
"""The steps between two comparisons, of a run that has enough."""
_SHORTEST, _SAMPLES = 10, 10
_SLOW = 1.3
"""A rank that takes this many times the median in two comparisons one after another is named."""
_MICRO = 1_000_000
Part = Literal["data", "forward", "gathers", "waiting"]
Slow = dict[int, tuple[float, Literal["data", "computing"]]]
_PARTS: tuple[Part, ...] = ("data", "forward", "gathers", "waiting")


class Pace(TrainerCallback):  # type: ignore[misc]
    """Measures ten steps of each window on every rank; at its end rank 0 gets the times of all, and names slow ranks.

    The first step of a start is not measured: it prepares kernels and buffers.
    """

    def __init__(self, trainer: BuiltTrainer, run_dir: RunDirectory) -> None:
        self.trainer, self.run_dir = trainer, run_dir
        self.is_measuring = False
        self._in_forward = False
        self._spans: list[tuple[Part, Any, Any]] = []
        self._sums = dict.fromkeys(_PARTS, 0.0)
        self._num_measured = 0
        self._window, self._every = WINDOW, 1
        self._since = self._first = 0
        self._hosts = [""] * dist.get_world_size()
        self._late: tuple[LateNumbers, int, int] | None = None
        self._suspected: dict[int, int] = {}
        self._slow: list[SlowRank] = []
        self._has_events = get_accelerator().device_name() not in ("cpu", "mps")
        trainer.pace = self
        compat_update.around_gathers(self._gathering)

    @contextmanager
    def measured(self, part: Literal["data", "forward", "waiting"]) -> Iterator[None]:
        """Count the time in the block as a part of the step, if the step is measured."""
        if not self.is_measuring:
            yield
            return
        mark: Callable[[], Any] = time.perf_counter if part == "data" else self._mark
        began, self._in_forward = mark(), part == "forward"
        try:
            yield
        finally:
            self._in_forward = False
            self._spans.append((part, began, mark()))

    def _gathering(self, gather: Callable[[], None]) -> None:
        if not self._in_forward:
            gather()
            return
        began, self._in_forward = self._mark(), False  # one gather may call another
        try:
            gather()
        finally:
            self._in_forward = True
            self._spans.append(("gathers", began, self._mark()))

    def _mark(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = get_accelerator().Event(enable_timing=True)
        event.record()
        return event

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self._window = min(WINDOW, max(_SHORTEST, state.max_steps // 10))
        self._every = self._window // _SAMPLES
        self._since = self._first = state.global_step
        dist.all_gather_object(self._hosts, socket.gethostname())

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self._measure_next(state)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        self._compare()
        if self.is_measuring:
            self._collect()
        if state.global_step % self._window == 0 and self._num_measured:
            self._gather(args.device, state.global_step)
        self._measure_next(state)

    def on_train_end(self, *_: object, **__: object) -> None:
        self._compare()
        self.is_measuring = False

    def _measure_next(self, state: TrainerState) -> None:
        following = state.global_step + 1
        self.is_measuring = following > self._first + 1 and following % self._every == 0

    def _collect(self) -> None:
        for part, began, ended in self._spans:
            self._sums[part] += ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1000
        self._spans.clear()
        self._num_measured += 1

    def _gather(self, device: torch.device, step: int) -> None:
        own_4 = sent([round(self._sums[part] / self._num_measured * _MICRO) for part in _PARTS], device)
        of_ranks = [torch.empty_like(own_4) for _ in self._hosts]
        dist.all_gather(of_ranks, own_4)
        if dist.get_rank() == 0:
            self._late = LateNumbers(torch.cat(of_ranks)), self._since, step
        self._since, self._num_measured, self._sums = step, 0, dict.fromkeys(_PARTS, 0.0)

    def _compare(self) -> None:
        """Name what is slow, on rank 0. It has the times by now: a step has passed since they were gathered."""
        if self._late is None:
            return
        (late, since, step), self._late = self._late, None
        micros, size = late.read(), len(_PARTS)
        paces = [self._pace(rank, *micros[rank * size : (rank + 1) * size]) for rank in range(len(micros) // size)]
        now = slow_ranks(paces)
        named_ranks = {slow.rank for slow in self._slow if slow.until_step is None}
        kept = [self._went_on(slow, now, since) for slow in self._slow]
        new = [
            SlowRank(rank=rank, host=paces[rank].host, since_step=self._suspected[rank], ratio=ratio, part=part)
            for rank, (ratio, part) in now.items()
            if rank in self._suspected and rank not in named_ranks
        ]
        for slow_rank in new:
            warn(self.run_dir, f"Every step waits for {slow_rank.line}.")
        self._suspected = {rank: self._suspected.get(rank, since) for rank in now}
        self._slow = [*kept, *new]
        with suppress(DiskError):  # of a full disk the next save tells
            write_json(self.run_dir.pace, RanksPace(step=step, ranks=paces, slow=self._slow).to_json())

    def _went_on(self, slow_rank: SlowRank, now: Slow, since: int) -> SlowRank:
        if slow_rank.until_step is not None:
            return slow_rank
        if slow_rank.rank in now:
            return slow_rank.model_copy(update={"ratio": now[slow_rank.rank][0], "part": now[slow_rank.rank][1]})
        print(
            f"Rank {slow_rank.rank} on {slow_rank.host} is as fast as the others again since step {since:,}.",
            flush=True,
        )
        return slow_rank.model_copy(update={"until_step": since})

    def _pace(self, rank: int, data: int, forward: int, gathers: int, waiting: int) -> RankPace:
        return RankPace(
            rank=rank,
            host=self._hosts[rank],
            data_s=data / _MICRO,
            computing_s=max(0, forward - gathers) / _MICRO,
            waiting_s=(waiting + gathers) / _MICRO,
        )


def slow_ranks(paces: Sequence[RankPace]) -> Slow:
    """Return the slow ranks: how many times the median their own time is, and what makes the difference."""
    usual_s = median_low([pace.own_s for pace in paces])  # of two ranks the faster one is the usual
    usual_data_s = median_low([pace.data_s for pace in paces])
    slow: Slow = {}
    for pace in paces:
        if usual_s and pace.own_s >= _SLOW * usual_s:
            is_data = pace.data_s - usual_data_s > (pace.own_s - usual_s) / 2
            slow[pace.rank] = round(pace.own_s / usual_s, 2), "data" if is_data else "computing"
    return slow
