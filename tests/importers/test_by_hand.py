"""Another tool's config is the recipe that one would write by hand for it.

`tests/e2e/test_roll_pipeline_trains.py` trains one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tuner.hooks import recipe_of_other_tool
from tuner.recipes.loading import load

LLAMA_FACTORY = """
model_name_or_path: package:tiny
stage: sft
finetuning_type: lora
lora_rank: 4
lora_target: all
dataset: {rows}
cutoff_len: 128
per_device_train_batch_size: 2
gradient_accumulation_steps: 2
learning_rate: 3e-3
max_steps: 3
lr_scheduler_type: constant
warmup_ratio: 0.0
weight_decay: 0.0
logging_steps: 1
disable_gradient_checkpointing: true
"""
LORA = """
_base_ = "tiny_lora_custom_e3"
adapter = dict(r=4, lora_alpha=8, lora_dropout=0.0, target_modules="all-linear")
train_dataloader = dict(batch_size=2, dataset=dict(path="{rows}", max_length=128, packing=False, pack_length=None))
optim_wrapper = dict(optimizer=dict(lr=3e-3, weight_decay=0.0), accumulative_counts=2)
param_scheduler = dict(type="constant", warmup_ratio=0.0)
train_cfg = dict(max_steps=3, gradient_checkpointing=False, global_batch_size=None)
checkpoint = dict(interval=500)
log = dict(interval=1)
"""
TRL = """
model_name_or_path: package:tiny
dataset_name: {rows}
max_length: 128
per_device_train_batch_size: 2
gradient_accumulation_steps: 1
learning_rate: 1.0e-3
num_train_epochs: 1
max_steps: 3
lr_scheduler_type: linear
logging_steps: 1
gradient_checkpointing: false
seed: 7
"""
FULL = """
_base_ = "tiny_full_custom_e1"
train_dataloader = dict(batch_size=2, dataset=dict(path="{rows}", max_length=128, packing=False, pack_length=None))
optim_wrapper = dict(optimizer=dict(lr=1e-3, weight_decay=0.0), accumulative_counts=1)
param_scheduler = dict(type="linear", warmup_ratio=0.0)
train_cfg = dict(max_steps=3, gradient_checkpointing=False, global_batch_size=None)
checkpoint = dict(interval=500)
log = dict(interval=1)
randomness = dict(seed=7)
"""


@pytest.mark.parametrize(("config", "recipe"), [(LLAMA_FACTORY, LORA), (TRL, FULL)], ids=["llamafactory", "trl"])
def test_another_tools_config_is_the_recipe_by_hand(config: str, recipe: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"instruction": "Add 1 and 1.", "output": "2"}) + "\n")
    theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.py"
    theirs.write_text(config.format(rows=rows))
    ours.write_text(recipe.format(rows=rows))

    imported = recipe_of_other_tool(str(theirs), {"TUNER_CACHE": str(tmp_path / "cache")})

    found, by_hand = (load(str(path)).config for path in (imported.path, ours))
    # The model's facts are of its folder, and of the catalog.
    assert found.model_dump(exclude={"architecture"}) == by_hand.model_dump(exclude={"architecture"})
