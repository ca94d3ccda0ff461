"""A model that cannot read the images of its rows is told before a rank starts, with what is wrong and where."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import PIL.Image
import pytest

from tests.launch.plans import TINY, made
from tests.models import vision
from tests.models.test_llava import write_clip
from tests.models.test_whole import llama4
from tuner.errors import TunerError
from tuner.launch import preflight


def refusal(*sets: str, **request: str) -> str:
    with pytest.raises(TunerError) as caught:
        preflight.check(made(*sets, **request))
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.make("llava", tmp_path_factory.mktemp("model") / "whole")


def test_rows_with_images_need_a_model_that_reads_them() -> None:
    text = refusal(recipe="tiny_full_sample_images_e1")

    assert "train.jsonl:1" in text
    assert "the row holds an image, and the model reads text alone" in text


def test_an_objective_of_text_names_the_one_that_trains_on_images(model: Path, tmp_path: Path) -> None:
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    row = {"prompt": "<image>What?", "chosen": "A square.", "rejected": "A circle.", "images": ["a.png"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")

    path = f"train_dataloader.dataset.path={tmp_path / 'rows.jsonl'}"
    text = refusal("objective.type=dpo", path, recipe="tiny_lora_custom_e1", model=str(model))

    assert "no class for the LLM alone of model_type 'llava', and objective 'dpo' trains on text alone" in text
    assert "Train it with objective sft" in text
    assert "rows.jsonl:1: the row holds an image" in text and "with objective sft" in text


def test_a_model_without_a_tower_is_not_asked_to_read_images() -> None:
    assert "'package:tiny' has no vision tower" in refusal("model.images=True", recipe=TINY)


def test_a_llama_4_is_trained_on_text_alone(tmp_path: Path) -> None:
    llama4(tmp_path)
    of_text = made(recipe="tiny_full_sample_e1", model=str(tmp_path)).recipe

    assert of_text.config.model.images is False
    assert "does not train Llama 4 on images" in str(of_text.origins["model.images"].place)
    told = refusal("model.images=True", recipe="tiny_full_sample_e1", model=str(tmp_path))
    assert "does not train Llama 4 on images" in told and "--set model.images=False" in told


def test_a_folder_without_a_processor_is_refused(model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "model", ignore=shutil.ignore_patterns("processor_config.json"))

    text = refusal(recipe="tiny_vision_full_sample_images_e1", model=str(tmp_path / "model"))

    assert "has none of processor_config.json and preprocessor_config.json" in text


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "cannot"), (b"GIF89a broken", "cannot"), (None, "no image file")],
    ids=["empty", "broken", "missing"],
)
def test_an_image_that_cannot_be_read_is_named_with_its_row(
    model: Path, content: bytes | None, problem: str, tmp_path: Path
) -> None:
    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "good.png")
    if content is not None:
        (tmp_path / "bad.png").write_bytes(content)
    turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A square."}]
    rows = [json.dumps({"messages": turns, "images": [f"{name}.png"]}) for name in ("good", "bad")]
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, rows[0]]), encoding="utf-8")

    text = refusal(
        f"train_dataloader.dataset.path={tmp_path / 'rows.jsonl'}",
        recipe="tiny_vision_full_sample_images_e1",
        model=str(model),
    )

    assert "rows.jsonl:2" in text
    assert "bad.png" in text and problem in text


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clip(tmp_path_factory.mktemp("tower") / "clip")


def joins(tower: Path, **more: object) -> str:
    return f"model.vision={ {'path': str(tower), **more} }"


def test_a_tower_that_is_joined_is_checked_before_the_start(clip: Path, tmp_path: Path) -> None:
    recipe = "tiny_full_sample_images_e1"
    for name in ("model.safetensors", "preprocessor_config.json"):
        shutil.copytree(clip, tmp_path / name, ignore=shutil.ignore_patterns(name))
    shutil.copytree(clip, tmp_path / "cut")
    (tmp_path / "cut/model.safetensors").write_bytes((clip / "model.safetensors").read_bytes()[:-1])

    assert "holds no weights" in refusal(joins(tmp_path / "model.safetensors"), recipe=recipe)
    assert "no preprocessor_config.json" in refusal(joins(tmp_path / "preprocessor_config.json"), recipe=recipe)
    assert "is truncated" in refusal(joins(tmp_path / "cut"), recipe=recipe)
    assert "does not exist" in refusal(joins(tmp_path / "absent"), recipe=recipe)
    assert "does not exist" in refusal(joins(clip, projector=str(tmp_path / "absent")), recipe=recipe)
    assert "does not exist" in refusal(joins(clip, projector="absent"), recipe=recipe), "no projector is on the hub"


def test_what_is_no_clip_is_no_tower(model: Path) -> None:
    text = refusal(joins(model), recipe="tiny_full_sample_images_e1")

    assert "is of model_type 'llava', and a LLaVA reads images with a CLIP" in text


def test_a_new_projector_is_warned_about_beside_an_llm_that_learns_and_where_it_is_frozen(
    clip: Path, model: Path
) -> None:
    def warning(method: str, *sets: str) -> str | None:
        lines = preflight.check(made(*sets, recipe=f"tiny_{method}_sample_images_e1"))
        return next((line for line in lines if line.startswith("the projector is new")), None)

    learns, frozen = "the LLM learns with it", "its weights stay random"
    saved = "adapter.modules_to_save=['multi_modal_projector']"
    assert learns in str(warning("full", joins(clip)))
    assert learns in str(warning("lora", joins(clip), saved))
    assert frozen in str(warning("full", joins(clip), "model.freeze=('projector',)"))
    assert frozen in str(warning("lora", joins(clip))) and saved in str(warning("lora", joins(clip)))
    assert warning("full", joins(clip), "model.freeze=('vision', 'language')") is None
    assert warning("lora", joins(clip, projector=str(model))) is None


def test_a_learning_rate_of_a_frozen_projector_is_warned_about(model: Path) -> None:
    def warned(recipe: str, *sets: str) -> bool:
        rate = "optim_wrapper.optimizer.projector_lr=1e-4"
        run = made(rate, *sets, recipe=f"tiny_vision_{recipe}_sample_images_e1", model=str(model))
        return any("projector_lr has no effect" in line for line in preflight.check(run))

    assert warned("lora")
    assert warned("full", "model.freeze=('projector',)")
    assert not warned("lora", "adapter.vision=True")
    assert not warned("lora", "adapter.modules_to_save=['multi_modal_projector']")
    assert not warned("full")
