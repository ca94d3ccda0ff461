"""A rank that runs out of memory, on two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import Finished, ok, quick
from tests.faults.conftest import Faulty
from tuner.runs import checkpoints

pytestmark = pytest.mark.e2e


@pytest.mark.long  # what it tries, and in which order: tests/launch/test_retry.py
def test_retry_goes_on_from_the_checkpoint_with_the_losses_of_an_undisturbed_run(
    tmp_path: Path, undisturbed: Finished, faulty: Faulty
) -> None:
    run = ok(
        faulty("oom>1@1:3", quick(tmp_path, "full"), tmp_path / "run", "--deepspeed", "zero2", "--on-oom", "retry")
    )

    first = run.json("attempts/1/status.json")["diagnosis"]
    assert (first["cause"], first["rank"], first["step"]) == ("gpu-out-of-memory", 1, 3)
    facts = run.json("run.json")
    assert facts["resume"] == str(run.path / "checkpoints" / "checkpoint-2")
    assert facts["batch"]["global_batch"] == undisturbed.json("run.json")["batch"]["global_batch"] == 8
    assert (facts["batch"]["micro_batch"], facts["batch"]["accumulation"]) == (1, 4)
    assert [line["step"] for line in run.metrics] == [1, 2, 3, 4]
    assert run.losses == pytest.approx(undisturbed.losses[:4], rel=1e-3)
    assert run.json("status.json")["state"] == "done"
    assert checkpoints.inspect(run.path / "checkpoints" / "checkpoint-4") is None
    assert "On rank 1, in step 3. More: tuner explain gpu-out-of-memory. Logs: " in run.text
    assert "attempt 2 with micro-batch 1 x accumulation 4 (global batch 8) at deepspeed_zero2, from ch" in run.text


@pytest.mark.long  # tests/runs/test_causes.py
def test_without_retry_the_next_command_is_told_and_every_rank_has_its_log(tmp_path: Path, faulty: Faulty) -> None:
    run = faulty("host-oom@0:2", quick(tmp_path, "full"), tmp_path / "run", "--deepspeed", "zero2")

    assert run.code == 1, run.text
    *_, what, where, following = run.text.splitlines()
    assert what == "error[host-out-of-memory]: the machine ran out of memory: MemoryError"
    assert where == f"On rank 0, in step 2. More: tuner explain host-out-of-memory. Logs: {run.path / 'ranks'}"
    assert following.startswith("Next: tuner train ") and following.endswith("accumulative_counts=4")
    assert "step 1/4" in run.text and "Traceback" not in run.text
    assert "MemoryError" in (run.path / "ranks" / "0.log").read_text()
    # Rank 1 was left alone in a collective: it noticed, or it was told to end and left its stack, or both.
    assert "most recent call" in (run.path / "ranks" / "1.log").read_text()
