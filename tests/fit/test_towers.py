"""The parameters of towers and projectors, the tokens of images, and which of the weights are trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from tests.models import vision
from tuner.fit import parameters
from tuner.models.vision import parts_of
from tuner.recipes.loading import load
from tuner.recipes.schema.architecture import Tower


def test_a_llava_is_counted_exactly_part_by_part(tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(vision.make("llava", tmp_path / "model"))
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    by_part = dict.fromkeys(("vision", "projector", "language"), 0)
    part_of = parts_of(model)
    for name, weight in model.named_parameters():
        by_part[part_of[name]] += weight.numel()
    architecture = load("tiny_vision_full_sample_images_e1").config.architecture
    assert architecture is not None

    assert parameters.of_tower(architecture) == {key: by_part[key] for key in ("vision", "projector")}
    assert parameters.num_parameters(architecture) == sum(by_part.values())


@pytest.mark.parametrize(
    ("frozen", "left"), [((), "all"), (("vision",), "less"), (("vision", "language"), "projector")]
)
def test_frozen_parts_are_not_counted_as_trained(frozen: tuple[str, ...], left: str) -> None:
    config = load("tiny_vision_full_sample_images_e1").config
    config = config.with_values({"model.freeze": frozen})
    assert config.architecture is not None

    counted = parameters.count(config, config.architecture)

    total, parts = parameters.num_parameters(config.architecture), parameters.of_tower(config.architecture)
    expected = {"all": total, "less": total - parts["vision"], "projector": parts["projector"]}[left]
    assert (counted.trainable, counted.trainable + counted.frozen) == (expected, total)


@pytest.mark.parametrize(
    ("tower", "size", "tokens"),
    [
        (Tower(model_type="llava", patch_size=14, image_size=336), (640, 480), 576),
        (Tower(model_type="gemma3", num_tokens=256), (640, 480), 256),
        (Tower(model_type="qwen2_5_vl", patch_size=14, merge_size=2), (560, 280), 200),
    ],
)
def test_the_tokens_of_an_image_follow_from_the_tower(tower: Tower, size: tuple[int, int], tokens: int) -> None:
    assert parameters.tokens_of_image(tower, size) == tokens
