"""Models that read images learn to: handwritten digits, and the pictures that ship with the package."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
from sklearn.datasets import load_digits

from tests.e2e.runs import ok, train
from tests.models import vision

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM_HELD_OUT = 200
SIDE = 32
RECIPE = """
model = dict(path="{model}", images=True)
train_dataloader = dict(batch_size=16, dataset=dict(path="{folder}/train.jsonl", max_length=128, packing=False))
val_dataloader = dict(batch_size=16, dataset=dict(path="{folder}/held_out.jsonl", max_length=128, packing=False))
optim_wrapper = dict(optimizer=dict(lr=2e-3), accumulative_counts=1)
train_cfg = dict(max_epochs=3, global_batch_size=None, val_interval=10_000)
checkpoint = dict(interval=10_000)
log = dict(num_samples=0, generate=200, max_new_tokens=3)
"""


def write_digits(folder: Path) -> None:
    """Write scikit-learn's digits as images, with rows that ask for them; the last ones are held out."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    for name, part in (("train", order[NUM_HELD_OUT:]), ("held_out", order[:NUM_HELD_OUT])):
        rows = []
        for number in part:
            gray = (digits.images[number] * 255 / 16).astype(np.uint8)
            image = PIL.Image.fromarray(gray).resize((SIDE, SIDE), PIL.Image.Resampling.NEAREST)
            image.save(folder / f"{number}.png")
            question = {"role": "user", "content": "<image>Which digit?"}
            answer = {"role": "assistant", "content": str(digits.target[number])}
            rows.append(json.dumps({"messages": [question, answer], "images": [f"{number}.png"]}))
        (folder / f"{name}.jsonl").write_text("\n".join(rows), encoding="utf-8")


def test_a_model_from_random_weights_reads_nine_of_ten_digits_that_it_has_not_seen(tmp_path: Path) -> None:
    write_digits(tmp_path)
    model = vision.make("qwen2_5_vl", tmp_path / "model")
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE.format(model=model, folder=tmp_path), encoding="utf-8")

    run = ok(train(recipe, tmp_path / "run", "--deepspeed", "none", ranks=1))

    assert [line["eval_exact_match"] for line in run.metrics if "eval_exact_match" in line][-1] >= 0.9


def test_the_small_model_of_the_package_answers_questions_about_its_pictures(tmp_path: Path) -> None:
    run = ok(train("tiny_vision_full_sample_images_e3", tmp_path / "run", ranks=1))

    samples = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 8
    assert sum(sample["is_right"] for sample in samples) >= 6
    assert all(sample["prompt"].startswith("<image>") for sample in samples)
