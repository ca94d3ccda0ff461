"""A vision tower that is joined to an LLM: its facts, its paths, and the chat template of the LLM around it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.recipes.loaded import loaded
from tests.refused import refused
from tuner import assets
from tuner.errors import RecipeError
from tuner.recipes.loading import anchored, load

TOWER = "openai/clip-vit-large-patch14-336"
NAME = "tiny_full_sample_images_e1"
PACKING = "train_dataloader.dataset.packing=True"


def joins(tower: str, **more: object) -> str:
    return f"model.vision={ {'path': tower, **more} }"


def test_the_facts_of_a_joined_tower_are_those_of_its_config(tmp_path: Path) -> None:
    config = {"model_type": "clip", "vision_config": {"hidden_size": 48, "patch_size": 4, "image_size": 8}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")

    own = loaded(NAME, joins(str(tmp_path))).config
    published = loaded(NAME, joins(TOWER)).config

    assert own.architecture and own.architecture.vision_config and own.reads_images
    assert (own.architecture.vision_config.hidden_size, own.architecture.vision_config.image_size) == (48, 8)
    assert published.architecture and published.architecture.vision_config
    assert (published.architecture.vision_config.model_type, published.architecture.vision_config.image_size) == (
        "llava",
        336,
    )
    assert published.architecture.model_type == "llama"


def test_a_model_with_a_tower_gets_no_second_one() -> None:
    recipe = loaded(NAME, joins(TOWER), model="package:tiny_vision")

    assert recipe.config.model.vision is None
    assert any("has a vision tower already" in note for note in recipe.notes)


def test_samples_with_images_share_a_row_only_if_tower_and_llm_keep_them_apart(tmp_path: Path) -> None:
    config = json.loads((Path(assets.asset("package:tiny_vision")) / "config.json").read_text(encoding="utf-8"))

    def packs(llm: str) -> bool:
        config["text_config"]["model_type"] = llm
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return loaded(NAME, PACKING, model=str(tmp_path)).config.train_dataloader.dataset.packing

    assert packs("llama")
    with refused(RecipeError, f"--set {PACKING}"):
        packs("bloom")


def test_a_written_recipe_keeps_its_tower(tmp_path: Path) -> None:
    first = loaded(NAME, joins(TOWER, seed=3))
    (tmp_path / "mine.py").write_text(first.standalone(""), encoding="utf-8")

    again = load(str(tmp_path / "mine.py"))

    assert again.config.model.vision == first.config.model.vision
    assert again.config.architecture == first.config.architecture


def test_the_paths_of_a_tower_hold_in_any_folder(tmp_path: Path) -> None:
    (tmp_path / "clip").mkdir()
    (tmp_path / "projector.bin").write_bytes(b"")

    recipe = anchored(loaded(NAME, "model.vision=dict(path='./clip', projector='projector.bin')"), "none")

    vision = recipe.config.model.vision
    assert vision and (vision.path, vision.projector) == (str(tmp_path / "clip"), str(tmp_path / "projector.bin"))


LORA = "model.vision_lora=dict(r=4, lora_alpha=4)"


@pytest.mark.parametrize(
    ("sets", "keys"),
    [
        (("model.images=False",), ("model.vision", "images")),
        (("adapter=dict(r=4, lora_alpha=4, vision_r=2)",), ("vision_r",)),
        ((LORA, "model.freeze=('vision',)"), ("model.vision_lora", "model.freeze")),
        ((LORA, "adapter=dict(r=4, lora_alpha=4)"), ("model.vision_lora", "adapter.vision=True")),
        ((LORA, "train_cfg.trainable_layers=1"), ("train_cfg.trainable_layers", "model.vision_lora")),
    ],
)
def test_settings_that_contradict_a_tower_are_refused(sets: tuple[str, ...], keys: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        loaded(NAME, joins(TOWER), *sets)

    assert [key for key in keys if key not in str(caught.value)] == []


def test_the_template_of_an_llm_renders_images_and_is_found_again() -> None:
    own = assets.chat_template("chatml")
    both = assets.with_image_parts(own, "<image>")
    words = [{"type": "text", "text": "Why?"}]
    answer = {"role": "assistant", "content": "So."}

    def rendered(template: str, content: object) -> str:
        turns = [[{"role": "user", "content": content}, answer]]
        texts, _ = render_jinja_template(conversations=turns, chat_template=assets.without_generation_marks(template))
        return str(texts[0])

    assert assets.without_image_parts(both) == own == assets.without_image_parts(own)
    assert rendered(both, [{"type": "image"}, *words]) == rendered(own, "<image>\nWhy?")
    assert rendered(both, "Why?") == rendered(both, words) == rendered(own, "Why?")
