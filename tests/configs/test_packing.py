"""A model packs exactly where transformers keeps the samples of a packed row apart; measured on a small model.

What is measured is the separation by `position_ids`, which is all that a packed row says of its samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from tests.fit.built import config_of
from tests.fit.small import SMALL
from tuner.recipes import catalog
from tuner.recipes.part import read_part
from tuner.recipes.suit import LEAKS_WHEN_PACKED

LENGTHS = (7, 9, 5)
KINDS = {facts.model_type: facts for facts in SMALL}


def kinds_of_the_parts() -> set[str]:
    values = (read_part("models", name).values for name in catalog.names("models"))
    return {part["architecture"]["model_type"] for part in values if "architecture" in part}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: on busy cores, threads that wait for each other take 20 times as long (measured)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def separates(kind: str) -> bool:
    """Say whether the logits of packed samples are those of each of them alone."""
    facts = KINDS[kind]
    if facts.kv_lora_rank:
        facts = facts.model_copy(update={"kv_lora_rank": 16, "qk_nope_head_dim": 6})  # read in pairs, so even
    config = config_of(facts)
    config.n_group = config.topk_group = 1
    set_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    tokens = torch.randint(3, facts.vocab_size, (1, sum(LENGTHS)))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)  # large enough that a sample that sees another differs plainly
        together = model(tokens, position_ids=positions, use_cache=False).logits
        alone = torch.cat([model(sample, use_cache=False).logits for sample in tokens.split(LENGTHS, dim=1)], dim=1)
    return bool((together - alone).abs().max() < 1e-4 * alone.abs().max())


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of no shared experts
@pytest.mark.parametrize("kind", sorted(kinds_of_the_parts() & KINDS.keys()))
def test_a_model_packs_where_samples_do_not_see_each_other(kind: str) -> None:
    assert separates(kind) == (kind not in LEAKS_WHEN_PACKED)


def test_there_are_kinds_of_both_sorts() -> None:
    assert separates("llama")
    assert not separates("opt")
