"""Real ranks on rows that are prepared while they train: the same losses on any number of them, and after a kill."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.data.conftest import conversation
from tests.e2e.runs import finish, fork, ok, processes_of, quick, train, wait_until, written_lines
from tests.faults.conftest import Faulty, faulty

pytestmark = pytest.mark.e2e
__all__ = ["faulty"]

SETS = (
    "max_steps=9",
    "checkpoint.interval=3",
    "packing=False",
    "format=messages",
    "dataset.streaming=12",
    "lora_dropout=0.0",
)
KEPT = 64 * 1024
"""Bytes of each end of a file by which a run knows it again."""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Sixty rows of 8 KB, less than 72 that nine steps of eight take: the last steps are of a second epoch."""
    words, path = ["blue", "sky", "light", "rain", "stone", "river"], tmp_path / "rows.jsonl"
    texts = [" ".join(words[(at * at + at * number) % 6] for at in range(1_400)) for number in range(60)]
    path.write_text("".join(json.dumps(conversation(f"{at}?", text)) + "\n" for at, text in enumerate(texts)))
    return path


def _asked(rows: Path, *more: str) -> list[object]:
    return ["--data", rows, "--deepspeed", "zero2", *(word for text in (*SETS, *more) for word in ("--set", text))]


def _blocks(run: Path) -> int:
    return sum(1 for folder in (run / "stream").glob("*/*-*") if not folder.name.startswith("making"))


@contextmanager
def _counted(run: Path) -> Iterator[list[int]]:
    """Look now and then how many blocks a run has."""
    counts, is_over = [0], threading.Event()

    def look() -> None:
        while not is_over.wait(0.01):
            counts.append(_blocks(run))

    thread = threading.Thread(target=look)
    thread.start()
    yield counts
    is_over.set()
    thread.join()


@pytest.mark.long
def test_a_stream_gives_the_same_losses_on_one_rank_on_two_and_after_a_kill_without_the_rows_that_were_seen(
    tmp_path: Path, rows: Path, faulty: Faulty
) -> None:
    recipe = quick(tmp_path, "lora")
    with _counted(tmp_path / "two") as counts:
        two = ok(train(recipe, tmp_path / "two", *_asked(rows)))
    assert 1 <= max(counts) <= 2
    assert not (two.path / "stream").exists() and not processes_of(two.path)
    listed = "\n".join(line for line in two.text.splitlines() if line.startswith("train"))
    assert "train: 12 rows" in listed and "train, from 48 on: 12 rows" in listed

    more = ("accumulative_counts=4", "train_dataloader.num_workers=1")
    one_rank = ok(train(recipe, tmp_path / "one", *_asked(rows, *more), ranks=1))
    assert one_rank.losses == pytest.approx(two.losses, rel=1e-5)

    killed = faulty("kill@1:8", recipe, tmp_path / "killed", *_asked(rows))
    assert killed.code == 137
    facts = json.loads((killed.path / "checkpoints/checkpoint-6/manifest.json").read_text())["facts"]["data"]
    begins = facts["stream"]["start"]
    assert begins["first"] == 48 == begins["row"]
    content = rows.read_bytes()
    spoilt = content[:KEPT] + b"\xff" * (begins["offset"] - KEPT) + content[begins["offset"] :]
    assert spoilt.count(b"\xff") > 200_000
    rows.write_bytes(spoilt)
    # Its last two blocks are enough for steps 7 and, in the second epoch, none.
    again = train(recipe, killed.path, *_asked(rows, "max_steps=7"), "--resume", "auto")

    assert again.losses[-1].hex() == two.losses[6].hex(), again.text
    rows.write_bytes(content)
    alone = tmp_path / "alone"
    shutil.copytree(two.path, alone)
    shutil.rmtree(alone / "checkpoints/checkpoint-9")
    resumed = ok(train(recipe, alone, *_asked(rows), "--resume", "auto", ranks=1))
    assert resumed.losses == pytest.approx(two.losses, rel=1e-5)


@pytest.mark.long
def test_a_stream_that_has_changed_is_refused_and_a_stop_leaves_nothing_behind(
    tmp_path: Path, rows: Path, faulty: Faulty
) -> None:
    recipe = quick(tmp_path, "lora")
    stopped = faulty("usr2@1:3", recipe, tmp_path / "run", *_asked(rows))
    assert stopped.code == 75, stopped.text
    assert not (stopped.path / "stream").exists()

    with rows.open("a") as stream:
        stream.write(json.dumps({"messages": []}) + "\n")
    refused = train(recipe, stopped.path, *_asked(rows), "--resume", "auto")

    assert refused.code == 2 and "Traceback" not in refused.text, refused.text
    assert "the data has changed: it now has 1 files of" in refused.text


@pytest.mark.long
def test_a_wrong_row_of_a_later_block_ends_the_run_with_its_line_and_may_be_left_out_after(
    tmp_path: Path, rows: Path
) -> None:
    lines = rows.read_text().splitlines(keepends=True)
    lines[40] = '{"messages": [{"role"\n'
    rows.write_text("".join(lines))
    recipe = quick(tmp_path, "lora")
    ended = train(recipe, tmp_path / "run", *_asked(rows, "checkpoint.interval=1"))

    assert ended.code == 2 and "Traceback" not in ended.text, ended.text
    assert f"{rows}:41" in ended.text

    again = train(recipe, ended.path, *_asked(rows, "bad_rows=1", "checkpoint.interval=1"), "--resume", "auto")
    assert ok(again).json("run.json")["resume_step"] >= 1 and len(again.losses) == 9


@pytest.mark.long  # tests/worker/test_guard.py
def test_a_signal_to_all_processes_of_a_run_stops_it_at_a_step_and_leaves_none_of_them(
    tmp_path: Path, rows: Path
) -> None:
    """As Slurm sends it, to what prepares the rows of the next step too."""
    path = tmp_path / "run"
    process = fork(quick(tmp_path, "lora"), "--work-dir", path, *_asked(rows, "max_steps=200"))
    wait_until(lambda: process.poll() is not None or written_lines(path / "metrics.jsonl") > 1)
    os.killpg(process.pid, signal.SIGTERM)

    run = finish(process, path)

    assert run.code == 75, run.text
    assert not (path / "stream").exists()


@pytest.mark.long
@pytest.mark.parametrize("objective", ["dpo", "kto"])  # orpo and reward read the pairs that dpo does
def test_judged_answers_are_streamed_too(tmp_path: Path, objective: str) -> None:
    recipe = f"tiny_{objective}_lora_sample_preferences_e1"
    values = ("max_steps=4", "checkpoint.interval=2", "log.interval=1", "val_dataloader=None", "dtype=fp32", "lr=1e-3")
    more = ("train_dataloader.batch_size=2", "dataset.streaming=6", "lora_dropout=0.0", "warmup_ratio=0.0")
    # TRL's own loss for kto looks at the other answers of all ranks' micro-batches.
    more = (*more, "loss_type=apo_zero_unpaired") if objective == "kto" else more
    asked = ["--deepspeed", "zero2", *(word for text in (*values, *more) for word in ("--set", text))]

    two = ok(train(recipe, tmp_path / "two", *asked, "--set", "accumulative_counts=2"))
    alone = ok(train(recipe, tmp_path / "one", *asked, "--set", "accumulative_counts=4", ranks=1))

    assert alone.losses == pytest.approx(two.losses, rel=1e-4)
    shutil.rmtree(two.path / "checkpoints/checkpoint-4")
    resumed = ok(train(recipe, two.path, *asked, "--set", "accumulative_counts=2", "--resume", "auto"))
    assert [loss.hex() for loss in resumed.losses] == [loss.hex() for loss in two.losses]


@pytest.mark.long
def test_ranks_that_share_samples_share_those_of_a_stream(tmp_path: Path, rows: Path) -> None:
    recipe, packed = quick(tmp_path, "lora"), ("packing=True", "max_steps=4", "dataset.streaming=2")
    apart = ok(train(recipe, tmp_path / "apart", *_asked(rows, *packed)))
    shared = ("accumulative_counts=4", "sequence_parallel_size=2")
    together = ok(train(recipe, tmp_path / "together", *_asked(rows, *packed, *shared)))

    assert together.losses == pytest.approx(apart.losses, abs=2e-5)
