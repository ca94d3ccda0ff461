"""The sums of bits by which a run sees that training changed a weight."""

from __future__ import annotations

import pytest
import torch

from tuner.worker.callbacks import _sum_of_bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_change_of_any_element_changes_the_sum(dtype: torch.dtype) -> None:
    base = torch.arange(1, 50, dtype=dtype)
    weights = [base[start : start + length] for start in range(4) for length in (1, 2, 3, 5, 8, 41)]
    weights += [base[:48].view(6, 8).t(), base[:48].view(6, 8)]

    for weight in weights:
        before = _sum_of_bits(weight)
        for at in (0, -1):
            last = weight[at] if weight.ndim == 1 else weight[at, at]
            last += 1
            assert _sum_of_bits(weight) != before
            last -= 1
        assert _sum_of_bits(weight) == before
