"""The parts of each family of vision-language models: which weights are trained, adapted and quantized."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.models import vision
from tuner.models.load import load_model
from tuner.models.vision import parts_of
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides


@pytest.mark.parametrize("kind", [*vision.KINDS, *vision.FAMILIES])
def test_a_4_bit_adapter_is_on_the_llm_alone_and_the_other_parts_keep_their_bits(kind: str, tmp_path: Path) -> None:
    folder = vision.make(kind, tmp_path / "model")
    config = load(None, Overrides(model=str(folder), data="my.jsonl", method="qlora")).config

    adapted = load_model(config, str(folder), torch.float32, "cpu", shards=False)

    part_of = parts_of(adapted.get_base_model())
    assert {"vision", "projector", "language"} <= set(part_of.values())
    trained = {part_of[name] for name, weight in adapted.get_base_model().named_parameters() if weight.requires_grad}
    small = {
        part_of[name] for name, weight in adapted.get_base_model().named_parameters() if weight.dtype == torch.uint8
    }
    assert trained == small == {"language"}


def test_what_reads_sound_in_a_gemma_4_is_not_trained(tmp_path: Path) -> None:
    folder = vision.make("gemma4", tmp_path / "model")
    config = load(None, Overrides(model=str(folder), data="my.jsonl", method="full")).config

    model = load_model(config, str(folder), torch.float32, "cpu", shards=False)

    part_of = parts_of(model)
    assert "sound" in part_of.values()
    for name, weight in model.named_parameters():
        assert weight.requires_grad == (part_of[name] != "sound"), name
