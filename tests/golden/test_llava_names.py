"""Every LLaVA recipe name of XTuner means that recipe here, number for number."""

from __future__ import annotations

import csv
from ast import literal_eval
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tuner.errors import RecipeError
from tuner.importers import words, xtuner_names
from tuner.importers.xtuner_names import spellings_in
from tuner.recipes import catalog, loading
from tuner.recipes.recipe import Recipe

Row = dict[str, str]

with (Path(__file__).parent / "xtuner_llava.csv").open(encoding="utf-8", newline="") as stream:
    ROWS: dict[str, Row] = {row["name"]: row for row in csv.DictReader(stream)}
"""The values of the 33 files in XTuner's repository at b934f46."""
with (Path(__file__).parent / "xtuner_recipes.csv").open(encoding="utf-8", newline="") as stream:
    INTERNVL = [row["name"] for row in csv.DictReader(stream) if row["name"].startswith("internvl_")]

RESOLVED = sorted(ROWS)
_70B = "llava_llama3_70b_instruct_quant_clip_vit_large_p14_336_e1_gpu8_pretrain"
OTHERWISE = {_70B: {"llm": "meta-llama/Meta-Llama-3-70B-Instruct"}}
"""XTuner trains the model of 8B under this name."""
IN_4_BITS = "4 bits; tuner keeps it in 16 bits"
"""A frozen LLM without an adapter stays in 16 bits here, which a warning says."""


@cache
def load(name: str) -> Recipe:
    return loading.load(name)


def ours(name: str) -> Row:
    """Return the recipe under XTuner's words."""
    config = load(name).config
    model, loader, optim, adapter = config.model, config.train_dataloader, config.optim_wrapper, config.adapter
    assert model.vision and model.path and optim.clip_grad
    dataset = loader.dataset
    lora = model.vision_lora
    of_tower = (lora.r, lora.lora_alpha, lora.lora_dropout) if lora else ()
    if adapter and adapter.vision:
        of_tower = (adapter.vision_r, adapter.vision_lora_alpha, adapter.lora_dropout)
    values: dict[str, Any] = {
        "llm": model.path,
        "vit": model.vision.path,
        "freeze_llm": "language" in model.freeze or adapter is not None,
        "freeze_visual_encoder": "vision" in model.freeze or adapter is not None or lora is not None,
        "load_in_4bit": config.quantization is not None,
        "llm_lora": f"{adapter.r}/{adapter.lora_alpha}/{adapter.lora_dropout}" if adapter else "",
        "visual_encoder_lora": "/".join(map(str, of_tower)),
        "pad_image_to_square": model.vision.pad_to_square,
        "select_layer": "" if model.vision.feature_layer == -2 else model.vision.feature_layer,
        "max_length": dataset.max_length,
        "batch_size": loader.batch_size,
        "accumulative_counts": optim.accumulative_counts,
        "max_epochs": config.train_cfg.max_epochs,
        "lr": optim.optimizer.lr,
        "betas": optim.optimizer.betas,
        "weight_decay": optim.optimizer.weight_decay,
        "max_norm": optim.clip_grad.max_norm,
        "warmup_ratio": config.param_scheduler.warmup_ratio,
        "data": "/".join(dataset.path.split("/")[3 if "llava_data" in dataset.path else -1 :]) if dataset.path else "",
    }
    return {"name": name, **{key: str(value) for key, value in values.items()}}


def alike(key: str, theirs: str, own: str) -> bool:
    if key in ("lr", "weight_decay", "max_norm", "betas"):
        return bool(literal_eval(theirs) == literal_eval(own))
    return theirs == own


@each(RESOLVED)
def test_a_name_gives_xtuner_s_numbers(name: str) -> None:
    row, own = ROWS[name] | OTHERWISE.get(name, {}), ours(name)
    if any(IN_4_BITS in line for line in load(name).warnings):
        assert row["load_in_4bit"] == "True"
        row = row | {"load_in_4bit": "False"}

    assert {key: (row[key], own[key]) for key in row if not alike(key, row[key], own[key])} == {}


@each(RESOLVED)
def test_the_projector_learns_in_every_recipe(name: str) -> None:
    config = load(name).config

    assert "projector" not in config.model.freeze
    assert config.adapter is None or config.adapter.modules_to_save == ["multi_modal_projector"]
    assert config.reads_images and config.architecture and config.architecture.vision_config
    assert not config.train_dataloader.dataset.packing


@each(INTERNVL)
def test_an_internvl_recipe_says_that_its_model_needs_other_code(name: str) -> None:
    with pytest.raises(RecipeError, match="published only with code of its own"):
        loading.load(name)


def test_the_same_rules_hold_for_other_models_of_the_catalog() -> None:
    config = load("llava_qwen3_4b_qlora_clip_vit_large_p14_336_lora_e2_gpu4_finetune").config

    assert (config.model.path, config.train_cfg.max_epochs) == ("Qwen/Qwen3-4B", 2)
    assert config.optim_wrapper.accumulative_counts == 2  # XTuner's step has 128 samples
    with pytest.raises(RecipeError, match="an LLM of its catalog"):
        loading.load("llava_unknown_7b_clip_vit_large_p14_336_e1_gpu8_pretrain")


def test_the_table_is_whole() -> None:
    assert (len(ROWS), len(INTERNVL)) == (33, 21)
    assert {name for name in ROWS if words.has_recipe(name)} == {*RESOLVED}


def spellings() -> set[str]:
    """Return the spellings that the names of this table use."""
    spelt = {name: len(reading.words) for name in RESOLVED if (reading := catalog.find(name))}
    return {found.written for name, many in spelt.items() for found, _, _ in islice(spellings_in(name), many)}


def test_every_spelling_of_a_llava_is_in_some_name() -> None:
    assert spellings() == {spelling.written for spelling in xtuner_names.SPELLINGS if "llava_" in spelling.written}
