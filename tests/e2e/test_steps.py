"""Two real ranks take the steps that a dry run has said, and what it says of going on is exact."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import COMMAND, environment, ok, train
from tuner import assets

# Without other ranks, and for each thing that changes the steps: tests/worker/test_steps.py.
pytestmark = [pytest.mark.e2e, pytest.mark.long]

# 9 rows of pairs are 18 answers: 5 micro-batches on one rank and on the other, the last of them filled up; 3 steps.
RECIPE = """
_base_ = "tiny_kto_full_custom_e2"
train_dataloader = dict(
    batch_size=2,
    dataset=dict(
        mixture=[dict(path={pairs!r}, weight=0.01), dict(path="pairs.jsonl", weight=1.5)],
        max_rows=9,
        max_length=128,
    ),
)
optim_wrapper = dict(accumulative_counts=2, dtype="fp32")
log = dict(interval=1, num_samples=0)
"""


def dry_run(recipe: Path, *arguments: object) -> dict[str, Any]:
    words = [*COMMAND, "train", str(recipe), "--dry-run", "--json", *map(str, arguments)]
    told = subprocess.run(
        words, env=environment(NPROC_PER_NODE="2"), cwd=recipe.parent, capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(told.stdout)["batch"]
    return found


def test_two_ranks_on_a_mixture_of_pairs_take_the_steps_of_the_dry_run(tmp_path: Path) -> None:
    pairs = Path(assets.asset("package:sample_preferences/train.jsonl"))
    more = tmp_path / "pairs.jsonl"
    more.write_text("".join(pairs.read_text(encoding="utf-8").splitlines(keepends=True)[:20]), encoding="utf-8")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(pairs=str(pairs)).replace("pairs.jsonl", str(more)))
    told = dry_run(recipe)

    run = ok(train(recipe, tmp_path / "run"))

    assert (told["rows"], told["samples"], told["steps_per_epoch"]) == (9, 18, 3)
    assert told["steps_are"].startswith("exact unless samples are dropped")
    assert told["steps"] == run.json("status.json")["max_steps"] == run.json("status.json")["step"] == 6
    again = dry_run(recipe, "--resume", run.path, "--set", "max_epochs=3")
    assert (again["samples"], again["steps"], again["steps_done"], again["steps_left"]) == (18, 9, 6, 3)
    assert again["steps_are"] == "exact"
