"""Every row is trained on once an epoch, and weighs the same, on one, two and three ranks.

On two ranks, against a plain loop: tests/reference/test_training.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import Finished, distance, ok, train
from tests.tiny_model import tiny

pytestmark = [pytest.mark.e2e, pytest.mark.long]

RECIPE = """
_base_ = "tiny_{name}_custom_e2"
train_dataloader = dict(batch_size=2, dataset=dict(path={data!r}, max_length=64, packing={packing}))
optim_wrapper = dict(optimizer=dict(lr=1e-3), accumulative_counts=6, dtype="fp32")
param_scheduler = dict(type="constant", warmup_ratio=0.0)
checkpoint = dict(interval={interval}, max_keep_ckpts=9)
log = dict(interval=1, num_samples=0)
"""
NUM_ROWS = 29
"""Twelve a step: the last step of an epoch has five, which are two batches and a half."""
_MARK = re.compile(r"row (\d+) ")


def recipe(folder: Path, name: str = "full", packing: bool = False, interval: int = 100) -> Path:
    """Write marked rows of unequal lengths, and a recipe of two epochs over them."""
    rows = [{"prompt": f"This is row {at} of all.", "chosen": "yes " * (at % 7 + 1)} for at in range(NUM_ROWS)]
    for row in rows:
        if name == "full":
            row["completion"] = row.pop("chosen")
        else:
            row["rejected"] = "no"
    data, path = folder / "rows.jsonl", folder / "recipe.py"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    path.write_text(RECIPE.format(name=name, data=str(data), packing=packing, interval=interval))
    return path


def run(path: Path, work_dir: Path, ranks: int, *arguments: object) -> Finished:
    asked = ("--deepspeed", "zero2", "--set", f"accumulative_counts={6 // ranks}", *arguments)
    return ok(train(path, work_dir, *asked, ranks=ranks, worker="tests.e2e.recorder"))


def seen(finished: Finished) -> Counter[str]:
    """Count the marks of all rows that the ranks of a run trained on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny())
    lines = [json.loads(line) for file in finished.path.glob("seen-*.jsonl") for line in file.read_text().splitlines()]
    return Counter(mark for _, ids in lines for mark in _MARK.findall(tokenizer.decode(ids)))


def weights(finished: Finished) -> dict[str, object]:
    return load_file(finished.path / "final" / "model.safetensors")


@pytest.mark.parametrize("name", ["full", "dpo_full"])
def test_one_two_and_three_ranks_train_on_every_row_once_an_epoch_and_learn_the_same(tmp_path: Path, name: str) -> None:
    path = recipe(tmp_path, name)
    alone, *others = (run(path, tmp_path / f"ranks-{ranks}", ranks) for ranks in (1, 2, 3))

    times = 2 if name == "full" else 4  # a pair shows its prompt twice
    assert seen(alone) == {str(row): times for row in range(NUM_ROWS)}
    for other in others:
        assert seen(other) == seen(alone)
        assert other.losses == pytest.approx(alone.losses, rel=1e-5)
        assert [line["num_tokens"] for line in other.metrics] == [line["num_tokens"] for line in alone.metrics]
        assert distance(weights(other), weights(alone)) < 1e-5


def test_packed_rows_are_trained_on_once_and_a_run_goes_on_with_them_on_another_number_of_ranks(tmp_path: Path) -> None:
    path = recipe(tmp_path, packing=True, interval=1)
    three, alone = (run(path, tmp_path / f"ranks-{ranks}", ranks) for ranks in (3, 1))
    assert seen(three) == seen(alone) == {str(row): 2 for row in range(NUM_ROWS)}

    (tmp_path / "two").mkdir()
    checkpoint = three.path / "checkpoints" / "checkpoint-1"
    two = run(path, tmp_path / "resumed", 2, "--resume", checkpoint)

    assert two.losses == pytest.approx(three.losses[1:], rel=1e-5)
    assert [line["num_tokens"] for line in two.metrics] == [line["num_tokens"] for line in three.metrics[1:]]
