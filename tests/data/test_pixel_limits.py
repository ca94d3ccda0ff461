"""Limits of pixels: a model gets as many features of an image as its row has tokens."""

from __future__ import annotations

import json
from pathlib import Path

import PIL.Image
import pytest
from transformers import AutoModelForImageTextToText

from tests.models import vision
from tuner.data.image_batches import BatchImages, PixelLoader
from tuner.data.image_encoder import ImageEncoder
from tuner.data.layouts import IMAGES
from tuner.data.prepare import prepare
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides


@pytest.mark.parametrize(
    ("limit", "tokens"),
    [
        ({}, 6),  # 48 x 32 pixels, and a token is 16 x 16
        ({"image_max_pixels": 16 * 32}, 2),
        ({"image_min_pixels": 64 * 48}, 12),
    ],
)
def test_an_images_limit_decides_the_tokens_of_its_row_and_the_features_of_the_model(
    limit: dict[str, int], tokens: int, tmp_path: Path
) -> None:
    folder = vision.make("qwen2_5_vl", tmp_path / "model")
    PIL.Image.new("RGB", (48, 32), "red").save(tmp_path / "red.png")
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Red."}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"messages": turns, "images": ["red.png"]}) + "\n")
    dataset = load(None, Overrides(model=str(folder), data=str(rows))).config.train_dataloader.dataset
    dataset = dataset.model_copy(update={**limit, "val_split": None})
    encoder = ImageEncoder.of(vision.processor(folder), dataset)

    row = prepare(dataset, encoder, objective="sft").dataset[0]
    pixels = PixelLoader(encoder, 0).pixels(BatchImages(row[IMAGES]))

    assert pixels is not None
    features = AutoModelForImageTextToText.from_pretrained(folder).base_model.get_image_features(
        **pixels, return_dict=True
    )
    assert sum(one == encoder.image_id for one in row["input_ids"]) == tokens
    assert sum(len(one) for one in features.pooler_output) == tokens
