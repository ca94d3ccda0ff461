"""`tuner smoke` from end to end: every stage on two real ranks, nothing left behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import environment
from tests.e2e.warm import Ended, warm

pytestmark = pytest.mark.e2e

STAGES = ["model", "data", "train", "resume", "export"]


def smoke(*arguments: str, scratch: Path) -> Ended:
    # Variables for the run that will follow must not start other ranks here.
    env = environment(TMPDIR=str(scratch), NPROC_PER_NODE="8", MASTER_PORT="29999")
    return warm().run(["smoke", *arguments], env=env, cwd=scratch)


@pytest.mark.long
def test_every_stage_works_and_nothing_is_left(tmp_path: Path) -> None:
    arguments = ("--deepspeed", "zero3", "--set", "dtype=fp32", "--json")

    done = smoke("mixtral_8x7b_dpo_lora_sample_preferences_e1", *arguments, scratch=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    stages = {stage["name"]: stage["told"] for stage in told["stages"]}
    assert list(stages) == STAGES
    assert "2 ranks, deepspeed_zero3, fp32" in stages["train"]
    assert "the same loss" in stages["resume"]
    assert "the same outputs" in stages["export"]
    assert "NCCL" in told["not_tried"]
    assert [path for path in tmp_path.iterdir() if path.name.startswith("tuner-smoke")] == []


@pytest.mark.long
def test_a_stage_that_fails_on_the_ranks_gives_its_code_and_names_what_is_kept(tmp_path: Path) -> None:
    arguments = ("--set", "adapter.target_modules=.*no_such_module")  # PEFT alone reads regular expressions

    done = smoke("qwen3_0_6b_lora_sample_e1", *arguments, scratch=tmp_path)

    assert done.returncode == 2, done.stdout + done.stderr
    assert "no_such_module" in done.stderr
    (kept,) = (path for path in tmp_path.iterdir() if path.name.startswith("tuner-smoke"))
    assert f"failed at train. Its files are kept in {kept}" in done.stderr
    assert (kept / "run" / "ranks" / "0.log").is_file()
