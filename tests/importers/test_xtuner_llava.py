"""A LLaVA's config in XTuner's keys is the same recipe as XTuner's name; other values are listed or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tests.golden.test_llava_names import OTHERWISE, ROWS, load
from tuner.errors import RecipeError
from tuner.importers import recipe_text, tools
from tuner.importers.imported_recipe import Imported
from tuner.importers.translation import Outcome
from tuner.recipes import loading
from tuner.recipes.merging import leaves

pytestmark = pytest.mark.usefixtures("here")

CONFIG = """
from peft import LoraConfig
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, CLIPImageProcessor, CLIPVisionModel
from transformers import SiglipVisionModel
from xtuner.dataset import ConcatDataset, LLaVADataset
from xtuner.dataset.refcoco_json import InvRefCOCOJsonDataset, RefCOCOJsonDataset
from xtuner.dataset.map_fns import llava_map_fn
from xtuner.model import LLaVAModel

tower = "{vit}"
image_processor = dict(type=CLIPImageProcessor.from_pretrained, pretrained_model_name_or_path=tower)
model = dict(
    type=LLaVAModel,
    freeze_llm={freeze_llm},
    freeze_visual_encoder={freeze_visual_encoder},
    pretrained_pth="iter_2181.pth",
    llm=dict(
        type=AutoModelForCausalLM.from_pretrained,
        pretrained_model_name_or_path="{llm}",
        quantization_config={quantization},
    ),
    visual_encoder=dict(type=CLIPVisionModel.from_pretrained, pretrained_model_name_or_path=tower),
    llm_lora={llm_lora},
    visual_encoder_lora={visual_encoder_lora},
)
train_dataloader = dict(batch_size={batch_size}, dataset=dict(type=ConcatDataset, datasets=[{data_sets}]))
optim_wrapper = dict(
    optimizer=dict(type=AdamW, lr={lr}, betas={betas}, weight_decay={weight_decay}),
    clip_grad=dict(max_norm={max_norm}),
    accumulative_counts={accumulative_counts},
)
param_scheduler = [
    dict(type=LinearLR, by_epoch=True, begin=0, end={warmup_ratio} * {max_epochs}),
    dict(type=CosineAnnealingLR, eta_min=0.0, by_epoch=True, begin={warmup_ratio} * {max_epochs}, end={max_epochs}),
]
train_cfg = dict(max_epochs={max_epochs})
""".replace("from peft", "from mmengine.optim import CosineAnnealingLR, LinearLR\nfrom peft")
DATA_SET = """dict(type={type}, max_dataset_length={limit}, data_path="{path}", image_folder="{image_folder}",
    image_processor=image_processor, dataset_map_fn=llava_map_fn,
    max_length=int({max_length} - (336 / 14) ** 2), pad_image_to_square={pads}), """
TYPES = {"llava": "LLaVADataset", "refcoco": "RefCOCOJsonDataset", "inv_refcoco": "InvRefCOCOJsonDataset"}


def lora(numbers: str) -> str:
    """Return XTuner's block for a row's `r/alpha/dropout`."""
    names = zip(("r", "lora_alpha", "lora_dropout"), numbers.split("/"), strict=False)
    return f"dict(type=LoraConfig, {', '.join(f'{key}={value}' for key, value in names)})" if numbers else "None"


def config(name: str) -> str:
    """Return a config in XTuner's keys with the values of this row."""
    row = ROWS[name] | OTHERWISE.get(name, {})
    dataset = load(name).config.train_dataloader.dataset
    each_set = [
        {"path": data_set.path, "image_folder": data_set.image_folder, "type": TYPES[data_set.format or ""]}
        for data_set in dataset.mixture or [dataset]
    ]
    for data_set in each_set:
        data_set["limit"] = "None" if data_set["type"] == "LLaVADataset" else "70000"
    shared = {"max_length": row["max_length"], "pads": row["pad_image_to_square"]}
    own: dict[str, Any] = {
        "llm_lora": lora(row["llm_lora"]),
        "visual_encoder_lora": lora(row["visual_encoder_lora"]),
        "quantization": "dict(load_in_4bit=True)" if row["load_in_4bit"] == "True" else "None",
        "data_sets": "".join(DATA_SET.format(**data_set, **shared) for data_set in each_set),
    }
    return CONFIG.format(**row | own)


def imported(text: str) -> Imported:
    Path("config.py").write_text(text, encoding="utf-8")
    return tools.import_config(["config.py"], None)


def values_of(text: str) -> dict[str, Any]:
    """Return the leaves of the recipe that the import of a config gives."""
    Path("imported.py").write_text(recipe_text.text(imported(text)), encoding="utf-8")
    return dict(leaves(loading.load("./imported.py").config.model_dump(mode="json")))


ONE = config("llava_v15_7b_finetune_lora")
WHOLE = config("llava_v15_7b_finetune")


@each(sorted(ROWS))
def test_a_config_is_the_recipe_of_its_name(name: str) -> None:
    of_name, of_file = dict(leaves(load(name).config.model_dump(mode="json"))), values_of(config(name))

    assert {key: (of_name[key], of_file.get(key)) for key in of_name if of_name[key] != of_file.get(key)} == {}


def reasons(text: str, key: str) -> list[str]:
    changed = [entry for entry in imported(text).entries if entry.outcome is Outcome.CHANGED]
    return [entry.why or "" for entry in changed if entry.setting.key.endswith(key)]


SEVERAL = (
    DATA_SET.format(type="LLaVADataset", limit=None, path="a.json", image_folder="b", max_length=2048, pads=False) + "]"
)
CHANGED = [
    (config(max(ROWS, key=lambda name: name.endswith("refcoco"))), "datasets.0.max_dataset_length", "weight = 0.22"),
    (ONE, "pretrained_pth", "model.vision.projector"),
    (config("llava_llama3_8b_instruct_quant_clip_vit_large_p14_336_e1_gpu1_pretrain"), "load_in_4bit", "16 bits"),
    (ONE.replace("path=tower)\nmodel", "path='other')\nmodel"), "image_processor", "image processor of openai/clip"),
    (ONE.replace("), ]", "), " + SEVERAL), "pad_image_to_square", "pad alike"),
    (ONE.replace('data_path="', 'offline_processed_text_folder="x", data_path="'), "text_folder", "tokenizes it"),
    (ONE.replace('tower = "openai/', 'tower = "x/'), "max_length", "does not know how many"),
    (ONE.replace("freeze_visual_encoder=True", "freeze_visual_encoder=False"), "freeze_visual_encoder", "whole tower"),
]


@each(CHANGED)
def test_what_differs_is_listed(text: str, key: str, why: str) -> None:
    assert [why in reason for reason in reasons(text, key)] == [True]


def test_a_whole_tower_beside_an_adapter_is_not_trained() -> None:
    text = ONE.replace("freeze_visual_encoder=True", "freeze_visual_encoder=False")

    assert "whole tower" in (imported(text).obstacle or "") and imported(ONE).obstacle is None


def test_the_projector_is_trained_beside_the_modules_that_are_named() -> None:
    text = ONE.replace("type=LoraConfig, r=128", "type=LoraConfig, modules_to_save=['lm_head'], r=128")

    assert values_of(text)["adapter.modules_to_save"] == ["lm_head", "multi_modal_projector"]


def test_keys_that_are_missing_have_the_defaults_of_xtuner() -> None:
    text = ONE.replace("r=128, lora_alpha=256, lora_dropout=0.05", "bias='none'")
    text = text.replace("max_length=int(2048 - (336 / 14) ** 2), pad_image_to_square=True", "")
    text = text.replace("max_dataset_length=None", "max_dataset_length=70")
    values = values_of(text)

    assert [values[f"adapter.{key}"] for key in ("r", "lora_alpha", "lora_dropout")] == [8, 8, 0.0]
    of_rows = [values[f"train_dataloader.dataset.{key}"] for key in ("max_length", "max_rows")]
    assert (of_rows, values["model.vision.pad_to_square"]) == ([2048 + 576, 70], False)
    assert values["train_cfg.gradient_checkpointing"] == "auto"


def test_other_layers_of_the_tower_are_read() -> None:
    text = WHOLE.replace("type=LLaVAModel,", "type=LLaVAModel, visual_select_layer=-1, projector_depth=2,")

    assert values_of(text)["model.vision.feature_layer"] == -1


BAD = [
    (ONE.replace("type=CLIPVisionModel", "type=SiglipVisionModel"), "a CLIP to an LLM"),
    (ONE.replace("type=LLaVAModel,", "type=LLaVAModel, projector_depth=3,"), "two linear layers"),
    (ONE.replace("visual_encoder=dict(", "visual_encodr=dict("), "has no visual_encoder"),
    (ONE.replace("data_path=", "offline_processed_text_folder="), "XTuner has tokenized"),
]


@each(BAD)
def test_what_cannot_work_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        imported(text)

    assert str(error.value.where).startswith("config.py:")
