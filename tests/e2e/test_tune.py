"""`tuner tune` from end to end: real ranks, a table, a recipe that trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import environment
from tests.e2e.warm import warm
from tuner.recipes import loading

pytestmark = pytest.mark.e2e


@pytest.mark.long  # tests/lab/test_tune.py
def test_the_fastest_of_what_was_measured_is_written_as_a_recipe(tmp_path: Path) -> None:
    asked = ("--set", "global_batch_size=2", "--steps", "2", "--minutes", "0.001", "--json", "-o", "fast.py")
    command = ["tune", "tiny_lora_sample_e1", *asked]
    env = environment(TMPDIR=str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()

    done = warm().run(command, env=env, cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    (only,) = told["candidates"]  # there was time for no other
    assert (only["micro_batch"] * only["accumulation"], told["is_whole"]) == (2, False)
    assert only["tokens_per_second"] > 0 and only["peak_bytes"] > 0
    assert loading.load(str(tmp_path / "fast.py")).config.split.samples == 2
    assert list((tmp_path / "scratch").iterdir()) == []
    again = warm().run(command, env=env, cwd=tmp_path)
    assert again.returncode == 2 and "exists" in again.stdout + again.stderr
