"""SDPA on GPUs whose kernels take no grouped heads: the same result, without scores of all pairs of tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.integrations import sdpa_attention

from tuner.models.compat import repeat_heads_on_old_gpus

EIGHT_HEADS = SimpleNamespace(num_key_value_groups=4, is_causal=True)


def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, list[bool]]:
    """Return transformers' attention, and whether torch was asked to group the heads."""
    groups: list[bool] = []
    compute = torch.nn.functional.scaled_dot_product_attention

    def spy(*tensors: Tensor, enable_gqa: bool = False, **options: object) -> Tensor:
        groups.append(enable_gqa)
        return compute(*tensors, enable_gqa=enable_gqa, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
        result, _ = sdpa_attention.sdpa_attention_forward(EIGHT_HEADS, query, key, value, None)
    return result, groups


@pytest.mark.parametrize(("capability", "grouped"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_keys_and_values_are_copied_before_sdpa_on_gpus_below_8_0_alone(
    capability: tuple[int, int], grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", sdpa_attention.use_gqa_in_sdpa)  # put back at the end
    query, key, value = (torch.randn(1, heads, 32, 16) for heads in (8, 2, 2))
    expected, _ = attend(query, key, value)

    repeat_heads_on_old_gpus(capability)
    result, groups = attend(query, key, value)

    assert groups == [grouped]
    torch.testing.assert_close(result, expected)
