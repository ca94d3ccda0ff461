"""What a healthy step costs beside a plain Trainer's at the same settings, counted on two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.jobs import TINY, Setting, llama, make_job, make_model
from bench.steps import counts_of
from tests.worker.test_waits import MOST_WAITS

pytestmark = pytest.mark.e2e


@pytest.mark.long  # two profiled trainings of two ranks
def test_a_step_has_one_collective_more_than_a_plain_trainers_and_fewer_operations(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", llama(**TINY))
    job = make_job(tmp_path, Setting(2, "fp32", "full"), 7, model)
    for variant in ("tuner", "trainer"):
        (tmp_path / variant).mkdir()

    ours, plain = (counts_of(variant, job, tmp_path / variant) for variant in ("tuner", "trainer"))

    collectives = [
        sum(count for name, count in counted["operations"].items() if name.startswith("c10d::"))
        for counted in (ours, plain)
    ]
    assert 0 < collectives[0] <= collectives[1] + 1, "the losses and stop requests"
    assert sum(ours["waits"].values()) <= MOST_WAITS < sum(plain["waits"].values())
    assert sum(ours["operations"].values()) < sum(plain["operations"].values())
    for name in ("aten::linalg_vector_norm", "aten::isfinite"):
        assert ours["operations"].get(name, 0) <= plain["operations"].get(name, 0) + 1, name
