"""Ranks that divide the experts of a model: together they compute what one computes alone."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.e2e.runs import environment
from tests.e2e.warm import of_module, warm
from tests.refused import refused
from tests.worker.splitting import of_experts
from tests.worker.test_tensor_parallel import TOLERANCE
from tuner.errors import ModelError
from tuner.fit.parameters import num_parameters
from tuner.recipes.schema.expert_parallel import DIVIDED_BY, DIVIDED_TYPES, of_rank
from tuner.recipes.schema.long_context import SHARED_BY
from tuner.recipes.schema.tensor_parallel import SPLIT_BY
from tuner.worker.trainer_setup import refuse_untested


class OwnCode(torch.nn.Linear):
    """Of a module that came with a model."""

    __module__ = "transformers_modules.its_own"


@pytest.mark.long
def test_every_kind_whose_experts_are_said_to_be_divided_computes_the_same_with_frozen_ones_too() -> None:
    kinds = (
        *sorted(f"{kind}/experts" for kind in DIVIDED_TYPES),
        *sorted(f"{kind}/attention" for kind in DIVIDED_TYPES),
    )

    done = warm().run(kinds, code=of_module("tests.worker.splitting"), env=environment(LOCAL_RANK="-1"))
    assert not done.returncode, done.stderr[-4000:]
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith('["'))

    assert found.keys() == set(kinds)
    assert {kind: far for kind, far in found.items() if isinstance(far, str) or max(far[:2]) > TOLERANCE} == {}
    planned = {kind: num_parameters(of_rank(of_experts(kind), 2)) for kind in DIVIDED_TYPES}
    assert {kind: found[f"{kind}/experts"][2] for kind in DIVIDED_TYPES} == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("key", [SHARED_BY, SPLIT_BY, DIVIDED_BY])
@pytest.mark.parametrize(("kind", "module"), [("dots1", torch.nn.Linear), ("qwen3_moe", OwnCode), ("llama", OwnCode)])
def test_a_kind_that_the_plan_did_not_know_is_neither_shared_nor_split_nor_divided(
    key: str, kind: str, module: type[torch.nn.Module]
) -> None:
    model = module(1, 1)
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type=kind))
    zero = {"expert_parallel": {"enabled": key == DIVIDED_BY, "autoep_size": 2}}
    sizes = {"autotp_size": 1 + (key == SPLIT_BY), "sequence_parallel_size": 1 + (key == SHARED_BY)}
    config = SimpleNamespace(train_cfg=SimpleNamespace(**sizes))

    with refused(ModelError, key, kind):
        refuse_untested(cast(Any, config), zero, cast(Any, model))
