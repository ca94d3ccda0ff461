"""Limits of pixels: a model gets as many features of an image as its row has tokens."""

from __future__ import annotations

import json
import re
from pathlib import Path

import PIL.Image
import pytest
from transformers import AutoModelForImageTextToText

from tests.models import vision
from tuner.data.image_batches import BatchImages, PixelLoader
from tuner.data.image_encoder import ImageEncoder
from tuner.data.layouts import IMAGES
from tuner.data.prepare import describe, prepare
from tuner.errors import DataError
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Dataset


def of_rows(folder: Path, *rows: dict[str, object]) -> tuple[Dataset, ImageEncoder]:
    """Write a Qwen2.5-VL and rows; return the data set and the encoder."""
    model = vision.make("qwen2_5_vl", folder / "model")
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = load(None, Overrides(model=str(model), data=str(file))).config.train_dataloader.dataset
    dataset = dataset.model_copy(update={"val_split": None})
    return dataset, ImageEncoder.of(vision.processor(model), dataset)


def asked(answer: str) -> dict[str, object]:
    """Return a row with an image and this answer."""
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": answer}]
    return {"messages": turns, "images": ["red.png"]}


@pytest.mark.parametrize(
    ("size", "answer", "problem"),
    [
        ((600, 2), "Red.", "the model's processor refuses the image"),
        ((48, 32), "The tag <|image_pad|>.", "the text of an answer holds '<|image_pad|>'"),
    ],
)
def test_what_the_processor_cannot_take_is_refused_with_its_row(
    size: tuple[int, int], answer: str, problem: str, tmp_path: Path
) -> None:
    PIL.Image.new("RGB", size, "red").save(tmp_path / "red.png")
    dataset, encoder = of_rows(tmp_path, asked(answer))

    with pytest.raises(DataError, match=re.escape(problem)) as caught:
        prepare(dataset, encoder, objective="sft")

    assert str(caught.value.where).endswith("rows.jsonl:1")


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
    PIL.Image.new("RGB", (48, 32), "red").save(tmp_path / "red.png")
    dataset, encoder = of_rows(tmp_path, asked("Red."))
    encoder = ImageEncoder.of(encoder.processor, dataset := dataset.model_copy(update=limit))

    made = prepare(dataset, encoder, objective="sft")
    row = made.dataset[0]
    pixels = PixelLoader(encoder, 0).pixels(BatchImages(row[IMAGES]))

    assert pixels is not None
    features = AutoModelForImageTextToText.from_pretrained(tmp_path / "model").base_model.get_image_features(
        **pixels, return_dict=True
    )
    assert sum(token == encoder.image_id for token in row["input_ids"]) == tokens
    assert sum(len(vectors) for vectors in features.pooler_output) == tokens
    shape = f"1 sample of at most {dataset.max_length} tokens, 1 image, "
    assert describe(made).startswith(f"train: 1 row of format 'messages' (detected) -> {shape}")
