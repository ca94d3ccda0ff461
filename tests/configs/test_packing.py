"""A model packs exactly where transformers keeps the samples of a packed row apart; measured on a small model.

What is measured is the separation by `position_ids`, which is all that a packed row says of its samples, in a model as
it is loaded. Where there is none rows are padded, and a padded row has the logits that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, set_seed
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from tests.each import each
from tests.fit.small import SMALL
from tests.models.brought import BROUGHT, brought
from tuner.data.batches import side_by_side
from tuner.lab.shrink import config_of
from tuner.models.mixers import keep_samples_apart
from tuner.recipes import catalog
from tuner.recipes.recipe_file import read_part
from tuner.recipes.schema.architecture import KEEPS_APART, NOT_BEHIND_PADDING, Architecture

LENGTHS = (7, 9, 5)
CHOOSE_TOKENS = {"deepseek_v32", "glm_moe_dsa"}
"""An indexer chooses the tokens that they attend to. Packed rows, of which it would choose too, were not tried, so they
are padded."""
KINDS = {facts.model_type: facts for facts in SMALL}


def kinds_of_the_parts() -> set[str]:
    values = (read_part("models", name).values for name in catalog.names("models"))
    return {part["architecture"]["model_type"] for part in values if "architecture" in part}


@cache
def model_of(kind: str) -> PreTrainedModel:
    """Return a small model with weights that are large enough that a sample that sees another differs plainly."""
    set_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(small_config(kind), experts_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    keep_samples_apart(model)
    return model


def small_config(kind: str) -> PreTrainedConfig:
    if kind in BROUGHT:
        return brought(kind)
    facts = KINDS[kind]
    if facts.kv_lora_rank:
        facts = Architecture(**{**facts.model_dump(), "kv_lora_rank": 16, "qk_nope_head_dim": 6})  # even: read in pairs
    config = config_of(facts)
    config.n_group = config.topk_group = 1
    if kind in CHOOSE_TOKENS:  # with few heads many scores are exactly 0, and whom a tie chooses depends on the padding
        config.index_n_heads, config.index_topk = 64, 4
    return config


def samples(model: PreTrainedModel) -> tuple[torch.Tensor, ...]:
    set_seed(0)
    return torch.randint(3, model.config.vocab_size, (1, sum(LENGTHS))).split(LENGTHS, dim=1)


def is_as_alone(kind: str, logits: Callable[[PreTrainedModel, tuple[torch.Tensor, ...]], torch.Tensor]) -> bool:
    """Say whether the logits of samples, one after the other, are those of each of them alone."""
    model = model_of(kind)
    with torch.no_grad():
        alone = torch.cat([model(sample, use_cache=False).logits for sample in samples(model)], dim=1)
        together = logits(model, samples(model))
    return bool((together - alone).abs().max() < 1e-4 * alone.abs().max())


def packed(model: PreTrainedModel, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    found: torch.Tensor = model(torch.cat(parts, dim=1), position_ids=positions, use_cache=False).logits
    return found


def in_two_rows(model: PreTrainedModel, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the logits of two samples in one row, and of the third in a row that is padded, of one batch."""
    first, second, third = (part[0].tolist() for part in parts)
    rows = [
        {"input_ids": first + second, "labels": first + second, "seq_lengths": [len(first), len(second)]},
        {"input_ids": third, "labels": third, "seq_lengths": [len(third)]},
    ]
    batch = side_by_side(rows, pad_id=0)
    del batch["labels"]
    found = model(**batch, use_cache=False).logits
    return torch.cat([found[:1], found[1:, : len(third)]], dim=1)


def padded(model: PreTrainedModel, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    batch = DataCollatorForLanguageModeling(pad_token_id=0)([{"input_ids": part[0].tolist()} for part in parts])
    del batch["labels"]
    found = model(**batch, use_cache=False).logits
    return torch.cat([row[None, :length] for row, length in zip(found, LENGTHS, strict=True)], dim=1)


def behind_padding(model: PreTrainedModel, parts: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the logits of samples in rows that are padded on the left, as TRL batches prompts: with a mask alone."""
    longest = max(LENGTHS)
    rows = torch.cat([F.pad(part, (longest - part.shape[1], 0)) for part in parts])
    mask = torch.cat([F.pad(torch.ones_like(part), (longest - part.shape[1], 0)) for part in parts])
    found = model(rows, attention_mask=mask, use_cache=False).logits
    return torch.cat([row[None, longest - length :] for row, length in zip(found, LENGTHS, strict=True)], dim=1)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of no shared experts
@each(sorted((KINDS.keys() | BROUGHT.keys()) - CHOOSE_TOKENS), every=2)
def test_a_model_packs_where_samples_do_not_see_each_other(kind: str) -> None:
    assert is_as_alone(kind, packed) == (kind in KEEPS_APART)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@each(sorted(KEEPS_APART))
def test_packed_samples_give_the_loss_and_the_gradients_that_they_give_alone(kind: str) -> None:
    model = deepcopy(model_of(kind)).double()  # in fp32 the rounding of Gemma 4's long sums is 4e-5 alone
    parts = samples(model)

    loss, found = learned([packed(model, parts)], model)
    expected_loss, expected = learned(alone(model, parts), model)

    assert abs(loss / expected_loss - 1) < 1e-5
    assert found.keys() == expected.keys()
    least = 1e-3 * max(float(gradient.norm()) for gradient in expected.values())  # that of a bias of keys is 0
    far = {
        name: float((found[name] - gradient).norm() / gradient.norm().clamp(min=least))
        for name, gradient in expected.items()
    }
    assert {name: distance for name, distance in far.items() if distance > 1e-5} == {}


def alone(model: PreTrainedModel, parts: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return [model(part, use_cache=False).logits for part in parts]


def learned(logits: list[torch.Tensor], model: PreTrainedModel) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of all samples' tokens as classes that they are given, and the gradients of all weights."""
    found = torch.cat([row.flatten(0, 1) for row in logits])
    loss = F.cross_entropy(found, torch.arange(len(found)) % 7)
    model.zero_grad()
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    return loss.item(), gradients


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@each(sorted(KEEPS_APART))
def test_samples_of_rows_side_by_side_do_not_see_each_other(kind: str) -> None:
    assert is_as_alone(kind, in_two_rows)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@each(sorted((KINDS.keys() | BROUGHT.keys()) - KEEPS_APART))
def test_a_padded_sample_is_as_it_is_alone_where_samples_would_see_each_other(kind: str) -> None:
    assert is_as_alone(kind, padded)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@each(sorted(KINDS.keys() | BROUGHT.keys()))
def test_a_sample_behind_padding_is_as_it_is_alone_or_its_kind_generates_nothing(kind: str) -> None:
    assert is_as_alone(kind, behind_padding) == (kind not in NOT_BEHIND_PADDING)


def test_every_kind_that_packs_is_measured_and_every_part_is() -> None:
    assert KINDS.keys() | BROUGHT.keys() >= KEEPS_APART | kinds_of_the_parts()


def test_there_are_kinds_of_both_sorts() -> None:
    assert is_as_alone("llama", packed)
    assert not is_as_alone("opt", packed)
