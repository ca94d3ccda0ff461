"""MLPs in tiles: the same numbers, with an adapter's dropout too, and never more than a tile inside."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fit.recipes import lightest
from tests.fit.small import small
from tests.refused import refused
from tuner.errors import ModelError
from tuner.lab.shrink import config_of
from tuner.models.load import decoder_layers
from tuner.recipes.schema.long_context import TILED_TYPES
from tuner.worker.long_rows import tile_mlps

ROW = ("train_dataloader.dataset.max_length=200", "train_dataloader.batch_size=1")


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(small(kind))).train()


def gradients(model: Any) -> torch.Tensor:
    """Return those of all weights in a row, after one backward pass whose dropout is seeded."""
    torch.manual_seed(2)
    ids_BT = torch.arange(2 * 17).view(2, 17)
    model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("kind", sorted(TILED_TYPES))
def test_a_tiled_mlp_computes_the_same(kind: str) -> None:
    expected, model = gradients(model_of(kind)), model_of(kind)
    tile_mlps(model, lightest("tiny_full_sample_e1", "tiled_mlp=True", *ROW))

    assert torch.allclose(gradients(model), expected, atol=1e-6)


def test_no_more_tokens_than_a_tile_are_in_an_mlp_and_dropout_is_the_same_in_the_backward_pass() -> None:
    model, seen = model_of("llama"), []
    for layer in decoder_layers(model):
        layer.mlp.down_proj = torch.nn.Sequential(layer.mlp.down_proj, torch.nn.Dropout(0.5))
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0].clone()))
    tile_mlps(model, lightest("tiny_full_sample_e1", "tiled_mlp=True", *ROW))
    num_forward = len(decoder_layers(model)) * 5  # of 200 tokens, 48 at a time

    gradients(model)

    assert len(seen) == 2 * num_forward
    assert {hidden.shape[1] for hidden in seen} == {3, 4}


def test_a_model_that_shows_only_when_loaded_that_it_has_experts_is_refused() -> None:
    text = SimpleNamespace(get_text_config=lambda: SimpleNamespace(model_type="mixtral"))

    with refused(ModelError, "train_cfg.tiled_mlp"):
        tile_mlps(SimpleNamespace(config=text), lightest("tiny_full_sample_e1", "tiled_mlp=True"))
