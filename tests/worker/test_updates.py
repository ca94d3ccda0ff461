"""The update at stage 0 in 16 bits is DeepSpeed's, with one wait for a GPU in the place of one a tensor."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import environment
from tests.e2e.warm import of_module, warm


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "ranks"), [("bf16", 1), ("bf16", 2), ("fp16", 2)])
def test_weights_norms_and_skipped_steps_are_deepspeeds_and_one_value_is_read(dtype: str, ranks: int) -> None:
    done = warm().run([dtype], code=of_module("tests.worker.updates", ranks=ranks), env=environment())
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    deepspeeds, ours = found[0]

    assert len(found) == ranks
    assert all(other["weights"] == ours["weights"] and other["taken"] == ours["taken"] for _, other in found)
    assert ours["taken"] == deepspeeds["taken"] == [True, True, True, False, True, True]
    assert ours["num_updates"] == deepspeeds["num_updates"]
    assert ours["scale"] == deepspeeds["scale"]
    assert ours["norms"] == pytest.approx(deepspeeds["norms"], rel=1e-5)
    assert max(norm for norm in ours["norms"] if norm < float("inf")) > 0.5, "some gradients are clipped"
    assert ours["weights"] == pytest.approx(deepspeeds["weights"], abs=2e-7)
    assert ours["in_16_bits"] == pytest.approx(deepspeeds["in_16_bits"], abs=1e-2)
    assert sum(deepspeeds["waits"].values()) > deepspeeds["tensors"]
    assert sum(ours["waits"].values()) == 1, ours["waits"]
