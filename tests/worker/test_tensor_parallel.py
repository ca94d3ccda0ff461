"""Ranks that split the layers of a model: together they compute what one computes alone, and what each of them has."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import environment
from tests.e2e.warm import of_module, warm
from tests.fit.small import small
from tuner.fit.parameters import num_parameters
from tuner.recipes.schema.tensor_parallel import SPLIT_TYPES, of_rank

TOLERANCE = 1e-5
"""Sums of fp32 in another order; a head too many or too few is off by a tenth and more."""
ODD = ("llama/1", "qwen3/1", "llama/3", "qwen3/3", "llama/tied", "gpt_neox/tied", "llama/tied-lora", "llama/embed-lora")
"""One key-value head, or three; tied embeddings; LoRA on all linear layers, or on the embeddings too."""


@pytest.mark.long
def test_every_kind_that_is_said_to_be_split_computes_the_same_with_an_adapter_and_with_few_key_value_heads_too() -> (
    None
):
    kinds = (*sorted(SPLIT_TYPES), *sorted(f"{kind}/lora" for kind in SPLIT_TYPES), *ODD)

    done = warm().run(kinds, code=of_module("tests.worker.splitting"), env=environment(LOCAL_RANK="-1"))
    assert not done.returncode, done.stderr[-4000:]
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))

    assert found.keys() == set(kinds)
    assert {kind: far for kind, far in found.items() if isinstance(far, str) or max(far[:2]) > TOLERANCE} == {}
    planned = {kind: num_parameters(of_rank(small(kind), 2)) for kind in SPLIT_TYPES}
    assert {kind: found[kind][2] for kind in SPLIT_TYPES} == planned
    assert found["llama/1"][2] == num_parameters(
        of_rank(small("llama").model_copy(update={"num_key_value_heads": 1}), 2)
    )
