"""Ranks that stand still, on two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.runs import processes_of, quick
from tests.faults.conftest import Faulty

pytestmark = [pytest.mark.e2e, pytest.mark.long]  # without training: tests/worker/test_guard.py

# Longer than a step of the tiny model on a machine that is busy with other tests.
LIMIT = ("--set", "hang_timeout=8")


@pytest.mark.parametrize(
    ("fault", "told", "stack"),
    [
        ("freeze@1:2", "(rank 1 was suspended: state T, as after SIGSTOP)", "in train"),
        ("block@0:2", "(rank 0 did not end at SIGTERM)", "in _block"),
    ],
)
def test_a_rank_that_stands_still_ends_the_run_with_all_stacks_and_is_named(
    tmp_path: Path, faulty: Faulty, fault: str, told: str, stack: str
) -> None:
    run = faulty(fault, quick(tmp_path, "full"), tmp_path / "run", "--deepspeed", "zero2", *LIMIT)

    assert run.code == 124, run.text
    assert processes_of(run.path) == []
    late = int(fault[-3])
    *_, what, where, following = run.text.splitlines()
    assert what.startswith("error[hang]: no rank made progress for 8 s; this one was in step 2.") and what.endswith(
        told
    )
    assert where == f"On rank {late}, in step 2. More: tuner explain hang. Logs: {run.path / 'ranks'}"
    assert following == f"Next: tail -n 50 {run.path / 'ranks' / f'{late}.log'}"
    logs = [(run.path / "ranks" / f"{rank}.log").read_text() for rank in (late, 1 - late)]
    assert stack in logs[0]
    assert "distributed_c10d.py" in logs[1], "it waited for the other"
