"""A trained model that reads images: the loss of its validation, answers to pictures, and exports that load."""

from __future__ import annotations

from pathlib import Path

import PIL.Image
import pytest
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.e2e.runs import Finished, ok, train
from tests.models import vision
from tests.tiny_model import tiny
from tuner.errors import DataError, UsageError
from tuner.machine.hardware import detect
from tuner.results.chat import begin
from tuner.results.evaluate import Wanted, evaluate
from tuner.results.export import Options, export
from tuner.results.saved import find
from tuner.worker.generation import Settings

pytestmark = pytest.mark.e2e

HERE = detect({"CUDA_VISIBLE_DEVICES": ""})
SHORT = ("--set", "max_steps=2", "--set", "log.num_samples=0", "--set", "train_cfg.val_interval=2")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("trained")
    return ok(train("tiny_vision_full_sample_images_e1", folder / "run", *SHORT, ranks=1))


@pytest.mark.parametrize("batch_size", [1, 3])
def test_the_loss_is_that_of_the_last_validation(run: Finished, batch_size: int) -> None:
    measured = evaluate(str(run.path), Wanted(batch_size=batch_size), HERE).metrics["loss"]

    assert measured == pytest.approx([line["eval_loss"] for line in run.metrics if "eval_loss" in line][-1], rel=1e-5)


def test_an_answer_depends_on_the_image_beside_the_question(run: Finished, tmp_path: Path) -> None:
    chat = begin(str(run.path), HERE, Settings(4, temperature=0))
    PIL.Image.new("RGB", (40, 20), (255, 0, 0)).save(tmp_path / "red.png")

    assert chat.show(str(tmp_path / "red.png")) == (40, 20)
    chat.ask("What is it?")
    chat.ask("And now?")  # the image stays in the conversation

    contents = [turn["content"] for turn in chat.turns if turn["role"] == "user"]
    assert [part["type"] for part in contents[0]] == ["image", "text"]
    assert contents[1] == "And now?"
    with pytest.raises(DataError, match="no image file"):
        chat.show(str(tmp_path / "none.png"))


def test_a_model_of_text_alone_is_shown_no_image(tmp_path: Path) -> None:
    chat = begin(str(tiny()), HERE, Settings(4))

    with pytest.raises(UsageError, match="reads text alone"):
        chat.show(str(tmp_path / "red.png"))


def test_an_export_has_the_processor_and_loads_in_plain_transformers(run: Finished, tmp_path: Path) -> None:
    export(find(run.path), tmp_path / "out", Options())

    _, report = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert AutoProcessor.from_pretrained(tmp_path / "out").image_token == "<image>"


@pytest.mark.long
def test_a_merged_adapter_keeps_the_processor(tmp_path: Path) -> None:
    model = vision.make("llava", tmp_path / "model")
    run = ok(train("tiny_vision_lora_sample_images_e1", tmp_path / "run", "--model", model, *SHORT, ranks=1))

    export(find(run.path), tmp_path / "out", Options(merge=True))

    AutoModelForImageTextToText.from_pretrained(tmp_path / "out")
    assert AutoProcessor.from_pretrained(tmp_path / "out").image_token == "<image>"
