"""A pretrained model learns from real text: what it is asked before and after, and its loss on rows held out."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.runs import COMMAND, environment, finish, ok, start
from tests.real import files

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_it_answers_a_question(real: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "chat", str(real / "smollm2"), "--temperature", "0", "--max-new-tokens", "20"],
        input="What is the capital of France?", capture_output=True, text=True, env=environment(), check=True,
    )  # fmt: skip

    assert "Paris" in done.stdout


def test_it_learns_from_the_documentation_of_python(real: Path, tmp_path: Path) -> None:
    rows, held_out = files.paths(real, "docs-135")

    sources = ("--work-dir", tmp_path / "run", "--data", rows, "--val", held_out)
    shorter = ("--set", "max_steps=60", "--set", "val_dataloader.dataset.max_rows=25")
    started = start("--model", real / "smollm2", *sources, *shorter, ranks=0, OMP_NUM_THREADS="2")
    run = ok(finish(started, tmp_path / "run"))

    losses = [line["eval_loss"] for line in run.metrics if "eval_loss" in line]
    assert losses[0] > 3.5, "it knew the rows before"
    assert losses[-1] < losses[0] - 0.3
