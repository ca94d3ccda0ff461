"""Turns and spans with weights learn the same on one rank, on two, in other batches, shared, streamed and resumed."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import Finished, ok, quick, train
from tests.faults.conftest import Faulty

pytestmark = pytest.mark.e2e

_WORDS = ["river", "stone", "cloud", "apple", "green", "quick", "seven", "lamp", "paper", "wind"]
_MARKS: list[dict[str, Any]] = [{}, {"weight": 0.25}, {"loss": 0}, {"spans": [[0, 5, 0.5], [6, 9, 0]]}, {"train": 1}]


def rows(folder: Path) -> Path:
    """Write conversations of two answers, most of them with weights."""
    made = random.Random(0)  # noqa: S311
    path = folder / "rows.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number in range(40):
            turns: list[dict[str, Any]] = []
            for at in range(2):
                question, answer = (" ".join(made.choices(_WORDS, k=made.randint(3, 9))) for _ in range(2))
                turns.append({"role": "user", "content": question})
                turns.append({"role": "assistant", "content": answer, **_MARKS[(number + at) % len(_MARKS)]})
            file.write(f"{json.dumps({'messages': turns})}\n")
    return path


def run(folder: Path, name: str, *sets: str, ranks: int = 1, level: str = "zero2") -> Finished:
    recipe, words = asked(folder, *sets)
    return ok(train(recipe, folder / name, *words, "--deepspeed", level, ranks=ranks))


def asked(folder: Path, *sets: str) -> tuple[Path, list[str]]:
    recipe = quick(folder, "full")
    recipe.write_text(
        recipe.read_text()
        .replace("accumulative_counts=2", "accumulative_counts='auto'")
        .replace("max_steps=4", "max_steps=4, global_batch_size=8")
    )
    values = [f"train_dataloader.dataset.path={rows(folder)}", "train_dataloader.dataset.format=messages", *sets]
    return recipe, [word for value in values for word in ("--set", value)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """Return the run of two ranks."""
    return run(tmp_path_factory.mktemp("two"), "two", ranks=2)


@pytest.mark.long
def test_weighed_turns_are_learned_alike_on_any_ranks_in_any_batches_and_shared(tmp_path: Path, two: Finished) -> None:
    first = run(tmp_path, "one")
    others = [
        two,
        run(tmp_path, "zero3", ranks=2, level="zero3"),
        run(tmp_path, "accumulated", "train_dataloader.batch_size=1"),
        run(tmp_path, "shared", "sequence_parallel_size=2", ranks=2),
        run(tmp_path, "whole", "train_cfg.loss=whole"),
    ]

    assert len(first.losses) == 4
    for other in others:
        assert other.losses == pytest.approx(first.losses, abs=2e-5), other.path.name


@pytest.mark.long
def test_weighed_turns_of_a_stream_are_learned_alike_on_two_ranks(tmp_path: Path) -> None:
    stream = ("train_dataloader.dataset.streaming=16", "max_steps=4")

    alone, two = (run(tmp_path, f"{ranks}", *stream, ranks=ranks) for ranks in (1, 2))

    assert two.losses == pytest.approx(alone.losses, abs=2e-5)


@pytest.mark.long
def test_a_killed_run_of_weighed_turns_goes_on_bit_for_bit(tmp_path: Path, two: Finished) -> None:
    recipe, words = asked(tmp_path)
    killed = Faulty()("kill@1:4", recipe, tmp_path / "killed", *words, "--deepspeed", "zero2")
    assert killed.code == 137

    resumed = ok(train(recipe, killed.path, *words, "--deepspeed", "zero2", "--resume", "auto"))

    assert resumed.json("run.json")["resume_step"] == 2
    assert [loss.hex() for loss in resumed.losses] == [loss.hex() for loss in two.losses]
    results = [finished.path / "final" / "model.safetensors" for finished in (resumed, two)]
    assert results[0].read_bytes() == results[1].read_bytes()
