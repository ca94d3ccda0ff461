"""Slow ranks are named, from the time that each works by itself."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.e2e.runs import finish, fork, ok, quick, wait_until
from tests.launch.plans import written_run
from tuner.runs import beats, listing
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RankPace
from tuner.worker.consensus import LateNumbers
from tuner.worker.pace import Pace, slow_ranks


def pace(rank: int, data_s: float, computing_s: float) -> RankPace:
    return RankPace(rank=rank, host=f"node-{rank}", data_s=data_s, computing_s=computing_s, waiting_s=0.0)


def test_a_rank_is_slow_by_the_median_and_told_what_makes_it_so() -> None:
    paces = [pace(0, 0.01, 1.0), pace(1, 0.01, 1.0), pace(2, 0.01, 1.9), pace(3, 1.0, 1.0), pace(4, 0.01, 1.0)]

    assert slow_ranks(paces) == {2: (1.89, "computing"), 3: (1.98, "data")}


def test_of_two_ranks_the_faster_one_is_the_usual() -> None:
    assert slow_ranks([pace(0, 0.0, 10.0), pace(1, 0.0, 1.0)]) == {0: (10.0, "computing")}
    assert slow_ranks([pace(0, 0.0, 1.2), pace(1, 0.0, 1.0)]) == {}


@pytest.fixture
def compared(tmp_path: Path) -> Iterator[Any]:
    """Takes the computing times of three ranks at the end of a window, and lets rank 0 compare them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = written_run(tmp_path / "run")
    run.ranks.mkdir()
    callback = Pace(SimpleNamespace(), run)  # type: ignore[arg-type]
    callback._hosts = ["node-0", "node-1", "node-2"]

    def at_step(step: int, *computing_s: float) -> RunDirectory:
        micros = [micro for seconds in computing_s for micro in (0, round(seconds * 1e6), 0, 0)]
        callback._late = LateNumbers(torch.tensor(micros)), step - 100, step
        callback._compare()
        return run

    yield at_step
    dist.destroy_process_group()


def test_a_rank_that_is_slow_in_two_comparisons_is_named_in_log_and_list_until_it_no_longer_is(
    compared: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run = compared(4200, 1.0, 1.0, 1.9)
    assert run.pace_or_none.slow == [] and not run.warnings.exists()

    compared(4300, 1.0, 1.0, 1.9)
    compared(4400, 1.0, 1.0, 2.5)
    (slow,) = listing.look(run.path, "run").slow_ranks
    assert (slow.rank, slow.host, slow.since_step, slow.ratio, slow.part) == (2, "node-2", 4100, 2.5, "computing")
    assert len(run.warnings.read_text().splitlines()) == 1

    compared(4500, 1.0, 1.0, 1.0)
    (slow,) = run.pace_or_none.slow
    assert slow.until_step == 4400
    assert listing.look(run.path, "run").slow_ranks == ()
    assert "Rank 2 on node-2" in capfd.readouterr().out


def test_only_some_steps_are_measured_and_never_the_first_of_a_start(compared: Any) -> None:
    trainer = SimpleNamespace()
    callback = Pace(trainer, RunDirectory(Path("nowhere")))  # type: ignore[arg-type]
    args, state = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(global_step=0, max_steps=2000)
    callback.on_train_begin(args, state, SimpleNamespace())
    callback.on_epoch_begin(args, state, SimpleNamespace())
    measured = []
    for step in range(1, 41):
        measured += [step] if callback.is_measuring else []
        with trainer.pace.measured("forward"):
            pass
        state.global_step = step
        callback.on_step_end(args, state, SimpleNamespace())

    assert measured == [10, 20, 30, 40]
    assert callback._num_measured == 4


@pytest.mark.e2e
@pytest.mark.long  # what is compared, and what is told of it: above
@pytest.mark.parametrize("level", ["zero2", "zero3"])
def test_a_rank_that_is_really_slowed_is_named(level: str, tmp_path: Path) -> None:
    recipe, work_dir = quick(tmp_path, "full"), tmp_path / "run"
    run, ended = RunDirectory(work_dir), threading.Event()
    process = fork(
        recipe, "--work-dir", work_dir, "--deepspeed", level, "--set", "max_steps=40", "--set", "checkpoint.interval=40"
    )

    def slow_down() -> None:
        wait_until(lambda: ended.is_set() or any(beat.step for beat in beats.read_beats(run).values()))
        if ended.is_set():
            return
        rank = psutil.Process(beats.read_beats(run)[1].pid)
        while not ended.wait(0.02):  # long spans: on a busy machine each takes some milliseconds more
            try:
                rank.send_signal(signal.SIGSTOP)
                time.sleep(0.09)
                rank.send_signal(signal.SIGCONT)
            except psutil.NoSuchProcess:
                return

    slowing = threading.Thread(target=slow_down)
    slowing.start()
    try:
        done = ok(finish(process, work_dir))
    finally:
        ended.set()
        slowing.join()

    told = run.pace_or_none
    assert told and {slow.rank for slow in told.slow} == {1}, told  # another process may hold it up less for a while
    assert told.slow[0].ratio > 1.5 and told.slow[0].part == "computing"
    assert "rank 1 on" in done.text
