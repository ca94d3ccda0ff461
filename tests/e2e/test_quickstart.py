"""What `make quickstart` runs: a small model learns the sample from nothing, in minutes, on a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ok, train

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def test_the_quickstart_answers_most_validation_prompts_right(tmp_path: Path) -> None:
    run = ok(train("tiny_full_sample_e3", tmp_path / "run", "--set", "num_samples=40", ranks=0))

    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 40
    assert sum(sample["is_right"] for sample in samples) >= 34, [wrong for wrong in samples if not wrong["is_right"]]
    assert all(line["grad_norm"] > 0 for line in run.metrics if "loss" in line), (
        "DeepSpeed forgets it at stage 0 in fp32"
    )
    assert "Next: " in run.text and str(run.path / "final") in run.text
