"""What of memory and time divided experts cost, and what a rank has."""

from __future__ import annotations

from typing import cast

import pytest

from tests.fit.recipes import lightest
from tuner.fit.candidates import traffic
from tuner.fit.estimate import peak
from tuner.fit.levels import Costs, Machines
from tuner.fit.parameters import built, num_parameters
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.expert_parallel import of_rank

MIXTRAL = lightest("mixtral_8x7b_full_alpaca_e3")
FACTS = cast("Architecture", MIXTRAL.architecture)
RANKS, SIZE = 8, 4


def level(name: str, size: int = SIZE) -> Costs:
    preset = Costs.of_preset(name if name == "none" else f"deepspeed_{name}", FACTS.hidden_size)
    return preset._replace(expert_ranks=size)


def states(name: str, size: int = SIZE) -> float:
    return peak(MIXTRAL, FACTS, level(name, size), RANKS, RANKS).model_states


def test_a_rank_has_its_part_of_the_experts_and_all_of_the_rest() -> None:
    whole, part = built(FACTS).layers[0], built(of_rank(FACTS, SIZE)).layers[0]

    assert whole.experts is not None and part.experts is not None
    assert part.experts.parameters == whole.experts.parameters / SIZE
    assert part.linears == whole.linears


def test_weights_are_divided_and_the_optimizer_is_sharded_over_all_ranks_as_ever() -> None:
    whole, part = (num_parameters(facts) for facts in (FACTS, of_rank(FACTS, SIZE)))

    assert states("none") == pytest.approx(16 * part)
    assert states("zero1") == pytest.approx(4 * part + 12 * whole / RANKS)
    assert states("zero2") == pytest.approx(2 * part + 14 * whole / RANKS)
    assert states("zero2", 1) == pytest.approx(2 * whole + 14 * whole / RANKS)


def test_tokens_travel_to_the_experts_and_back_in_both_passes() -> None:
    config = MIXTRAL.with_split(MIXTRAL.split._replace(recompute=False))
    machines = Machines(RANKS, 80 * 2**30)
    tokens = config.split.samples * config.train_dataloader.dataset.max_length

    sent = traffic(config, FACTS, machines, level("zero1", 2))

    states_of_layer = 2 * tokens * 2 * FACTS.hidden_size / 2  # two experts of each token, half of them elsewhere
    assert sent.layer_bytes == pytest.approx(4 * FACTS.num_hidden_layers * states_of_layer)
    whole = traffic(config, FACTS, machines, level("zero1", 1))
    assert whole.layer_bytes == 0
    alone = traffic(config, FACTS, machines, level("zero1", RANKS))  # no other rank has the same experts
    rest = num_parameters(FACTS) - sum(layer.experts.parameters for layer in built(FACTS).layers if layer.experts)
    assert alone.reduce_bytes == pytest.approx(whole.reduce_bytes * rest / num_parameters(FACTS), rel=1e-3)
