"""What a healthy step costs beside a plain Trainer's at the same settings, counted by torch's profiler on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.jobs import ACCUMULATION, TINY, Setting, llama, make_job, make_model
from bench.steps import operations_of

pytestmark = pytest.mark.e2e


@pytest.mark.long  # two profiled trainings of two ranks
def test_a_step_has_one_collective_more_than_a_plain_trainers_and_nothing_for_each_parameter(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", llama(**TINY))
    job = make_job(tmp_path, Setting(2, "fp32", "full"), 5, model)
    for variant in ("tuner", "trainer"):
        (tmp_path / variant).mkdir()

    ours, plain = (operations_of(variant, job, tmp_path / variant) for variant in ("tuner", "trainer"))

    collectives, waits = (
        [sum(count for name, count in one.items() if name.startswith(prefix)) for one in (ours, plain)]
        for prefix in ("c10d::", "aten::_local_scalar_dense")
    )
    assert collectives[0] <= collectives[1] + 1, "the losses and stop requests"
    # All of them where a batch is made, on the CPU: its tokens, and the lengths of its samples.
    assert waits[0] <= waits[1] + 3 * ACCUMULATION
    for name in ("aten::linalg_vector_norm", "aten::isfinite"):
        assert ours.get(name, 0) <= plain.get(name, 0) + 1, name
