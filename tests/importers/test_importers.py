"""Other tools' configs become the recipe that one would write by hand, and every key of them is accounted for."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from transformers import Seq2SeqTrainingArguments, TrainingArguments

from tests.each import each
from tests.importers.keys import OF_TOOL
from tuner.errors import TunerError
from tuner.importers import aliases, direct, recipe_text, shell_commands, tools
from tuner.importers.document import ForeignConfig, Keys, walk
from tuner.importers.imported_recipe import Imported, recipe_from
from tuner.importers.key_tables import Changes
from tuner.importers.translation import _MAX_COMPARED, Entry, Outcome, Tool, Translation
from tuner.recipes import loading
from tuner.recipes.merging import leaves, lookup, nested
from tuner.recipes.schema import schema_keys

pytestmark = pytest.mark.usefixtures("here")

ROWS, OPTIMIZER = "train_dataloader.dataset", "optim_wrapper.optimizer"


def _imported(text: str, name: str | None = None, tool: str | None = None) -> Imported:
    """Import a text: by default as a shell script that calls a tool, as XTuner's Python, or as YAML."""
    is_call = re.match(r"(?:\w+=\S+ )?(?:swift|trl) ", text)
    name = name or ("train.sh" if is_call else "config.py" if text.startswith("from ") else "config.yaml")
    Path(name).write_text(text, encoding="utf-8")
    return tools.import_config([name], tool)


def _loaded(imported: Imported, name: str = "imported.py") -> dict[str, Any]:
    """Return the leaves of the recipe that the imported file means."""
    Path(name).write_text(recipe_text.text(imported), encoding="utf-8")
    return dict(leaves(loading.load(f"./{name}").values))


def _told(imported: Imported, key: str) -> Entry:
    """Return what is told of a key."""
    return next(entry for entry in imported.entries if entry.setting.key == key)


def _register(**data_sets: dict[str, Any]) -> None:
    """Register data sets as LLaMA-Factory does."""
    Path("data").mkdir()
    Path("data/dataset_info.json").write_text(json.dumps(data_sets), encoding="utf-8")


def _by_hand(text: str) -> dict[str, Any]:
    Path("by_hand.py").write_text(text, encoding="utf-8")
    return dict(leaves(loading.load("./by_hand.py").values))


@each([*OF_TOOL])
def test_each_key_of_a_tools_examples_is_mapped_or_reported(tool: str) -> None:
    imported = _imported(yaml.safe_dump(OF_TOOL[tool]), tool=tool)

    reported = {entry.setting.key for entry in imported.entries}
    keys = {".".join(keys) for keys, value in walk(OF_TOOL[tool], reported) if value is not None}
    assert keys - reported == set()
    assert all(entry.ours or entry.why for entry in imported.entries)
    _loaded(imported)


@each([*OF_TOOL])
def test_whose_a_file_is_is_told_from_its_keys(tool: str) -> None:
    assert _imported(yaml.safe_dump(OF_TOOL[tool])).tool == _imported(yaml.safe_dump(OF_TOOL[tool]), tool=tool).tool


def test_a_config_of_llamafactory_is_the_recipe_by_hand() -> None:
    _register(
        mine={"file_name": "mine.json", "formatting": "sharegpt", "columns": {"messages": "talk"}, "num_samples": 9}
    )
    imported = _imported(
        """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: lora
lora_rank: 16
dataset: mine
cutoff_len: 512
learning_rate: 1e-4
num_train_epochs: 2.0
warmup_ratio: 0.1
lr_scheduler_type: cosine
"""
    )

    by_hand = _by_hand(
        """
_base_ = "qwen3_8b_lora_custom_e2"
adapter = dict(r=16, lora_alpha=32, lora_dropout=0.0)
train_dataloader = dict(
    batch_size=8,
    dataset=dict(
        path="data/mine.json",
        format="sharegpt",
        columns=dict(conversations="talk"),
        max_rows=9,
        max_length=512,
        packing=False,
        pack_length=None,
    ),
)
optim_wrapper = dict(optimizer=dict(lr=1e-4), accumulative_counts=1)
param_scheduler = dict(type="cosine", warmup_ratio=0.1)
train_cfg = dict(gradient_checkpointing=True, global_batch_size=None)
log = dict(interval=500)
"""
    )
    assert _loaded(imported) == by_hand


_EXPERTS, _ZERO1 = {"expert_model_parallel_size": "2"}, {"zero_optimization": {"stage": 1}}


def _divided(**config: Any) -> dict[str, Any]:
    return {"deepspeed": {**config, "expert_parallel": {"enabled": True, "autoep_size": 2}}}


@pytest.mark.parametrize(
    ("tool", "written", "ours"),
    [
        ("axolotl", {"tensor_parallel_size": 2}, {"train_cfg.autotp_size": 2}),
        ("ms-swift", {"deepspeed_autotp_size": 2}, {"train_cfg.autotp_size": 2}),
        ("llamafactory", {"tensor_model_parallel_size": 2}, {"train_cfg.autotp_size": 2}),
        (
            "trl",
            {"parallelism_config": {"tp_size": 2, "sp_size": 4, "dp_shard_size": 1}},
            {"train_cfg.autotp_size": 2, "train_cfg.sequence_parallel_size": 4},
        ),
        (
            "trl",
            {"parallelism_config": {"tp_size": None, "sp_size": 1, "cp_size": 4}},
            {"train_cfg.autotp_size": 1, "train_cfg.sequence_parallel_size": 4},
        ),
        ("axolotl", {"expert_parallel_size": 2}, _divided(base="deepspeed_zero2")),
        ("axolotl", {"expert_parallel_size": 1}, {"deepspeed": "auto"}),
        ("llamafactory", {**_EXPERTS, "deepspeed": "zero1"}, _divided(base="deepspeed_zero1")),
        ("llamafactory", {**_EXPERTS, "deepspeed": _ZERO1}, _divided(**_ZERO1)),
        (
            "llamafactory",
            {**_EXPERTS, "deepspeed": {"expert_parallel": {"enabled": False, "preset_model": "mixtral"}}},
            {"deepspeed.expert_parallel": {"enabled": True, "preset_model": "mixtral", "autoep_size": 2}},
        ),
    ],
)
def test_ranks_that_split_layers_or_divide_experts_are_those_of_the_source(
    tool: str, written: dict[str, Any], ours: dict[str, Any]
) -> None:
    config = {key: value for key, value in OF_TOOL[tool].items() if key != "deepspeed"} | written

    imported = _imported(yaml.safe_dump(config), tool=tool)
    Path("imported.py").write_text(recipe_text.text(imported), encoding="utf-8")

    values = loading.load("./imported.py").values
    assert {key: lookup(values, tuple(key.split("."))) for key in ours} == ours


@pytest.mark.parametrize(
    ("tool", "written", "key", "other"),
    [
        (
            "ms-swift",
            {"deepspeed_autotp_size": 2, "deepspeed": {"tensor_parallel": {"autotp_size": 4}}},
            "deepspeed",
            "deepspeed_autotp_size = 2",
        ),
        ("llamafactory", {"tensor_model_parallel_size": 2, "deepspeed": "ds.json"}, "deepspeed", "parallel_size = 2"),
        (
            "axolotl",
            {"expert_parallel_size": 2, "deepspeed": {"expert_parallel": {"enabled": True, "autoep_size": 4}}},
            "deepspeed",
            "expert_parallel_size = 2",
        ),
        (
            "axolotl",
            {"sequence_parallel_degree": 2, "context_parallel_size": 4},
            "context_parallel_size",
            "sequence_parallel_degree = 2",
        ),
        ("trl", {"parallelism_config": {"sp_size": 2, "cp_size": 4}}, "parallelism_config.cp_size", "sp_size = 2"),
    ],
)
def test_two_sizes_for_the_same_ranks_are_named_with_the_one_that_counts(
    tool: str, written: dict[str, Any], key: str, other: str
) -> None:
    config = {name: value for name, value in OF_TOOL[tool].items() if name != "deepspeed"} | written

    def named(size: int) -> list[Entry]:
        Path("ds.json").write_text(json.dumps({"tensor_parallel": {"autotp_size": size}}))
        text = yaml.safe_dump(config, sort_keys=False).replace("size: 4", f"size: {size}")
        of_key = [entry for entry in _imported(text, tool=tool).entries if entry.setting.key == key]
        return [entry for entry in of_key if other in str(entry.why)]

    (entry,) = named(4)
    assert "4" in f"{entry.ours} {entry.why}"
    assert named(2) == []


def test_a_config_of_axolotl_is_the_recipe_by_hand() -> None:
    imported = _imported(
        """
base_model: Qwen/Qwen3-8B
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
datasets:
  - path: tatsu-lab/alpaca
    type: alpaca
val_set_size: 0.05
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 3
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 0.0002
warmup_ratio: 0.1
bf16: auto
gradient_checkpointing: true
logging_steps: 1
wandb_entity:
"""
    )

    by_hand = _by_hand(
        """
_base_ = "qwen3_8b_qlora_alpaca_e3"
adapter = dict(r=32, lora_alpha=16, lora_dropout=0.05)
train_dataloader = dict(batch_size=2, dataset=dict(val_split=0.05, pack_length=None))
optim_wrapper = dict(optimizer=dict(type="AdamW8bit"), accumulative_counts=4)
param_scheduler = dict(warmup_ratio=0.1)
train_cfg = dict(gradient_checkpointing=True, global_batch_size=None)
log = dict(interval=1)
"""
    )
    assert _loaded(imported) == by_hand


XTUNER = """
import torch
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from peft import LoraConfig
from datasets import load_dataset
from mmengine.optim import AmpOptimWrapper, CosineAnnealingLR, LinearLR
from xtuner.dataset import process_hf_dataset
from xtuner.dataset.map_fns import oasst1_map_fn
from xtuner.engine.runner import TrainLoop
from xtuner.model import SupervisedFinetune

path = 'internlm/internlm2-chat-7b'
sequence_parallel_size = 1
accumulative_counts = 16
accumulative_counts *= sequence_parallel_size
max_epochs = 3
warmup_ratio = 0.03
custom_hooks = []
if sequence_parallel_size > 1:
    custom_hooks += [dict(type=Nothing)]
model = dict(
    type=SupervisedFinetune,
    llm=dict(
        type=AutoModelForCausalLM.from_pretrained,
        pretrained_model_name_or_path=path,
        quantization_config=dict(type=BitsAndBytesConfig, load_in_4bit=True, bnb_4bit_quant_type='nf4')),
    lora=dict(type=LoraConfig, r=64, lora_alpha=16, lora_dropout=0.1))
train_dataset = dict(
    type=process_hf_dataset,
    dataset=dict(type=load_dataset, path='timdettmers/openassistant-guanaco'),
    max_length=2048,
    dataset_map_fn=oasst1_map_fn,
    pack_to_max_length=True)
train_dataloader = dict(batch_size=1, num_workers=0, dataset=train_dataset)
optim_wrapper = dict(
    type=AmpOptimWrapper,
    optimizer=dict(type=AdamW, lr=2e-4, betas=(0.9, 0.999), weight_decay=0),
    clip_grad=dict(max_norm=1),
    accumulative_counts=accumulative_counts)
param_scheduler = [
    dict(type=LinearLR, start_factor=1e-5, by_epoch=True, begin=0, end=warmup_ratio * max_epochs),
    dict(type=CosineAnnealingLR, eta_min=0.0, by_epoch=True, begin=warmup_ratio * max_epochs, end=max_epochs)]
train_cfg = dict(type=TrainLoop, max_epochs=max_epochs)
"""


def test_a_config_of_xtuner_is_the_catalogs_recipe_of_its_name() -> None:
    imported = _imported(XTUNER, "internlm2_chat_7b_qlora_oasst1_e3.py")

    assert imported.base == "internlm2_chat_7b_qlora_oasst1_e3"
    split = {"train_dataloader.batch_size": 1, "optim_wrapper.accumulative_counts": 16}  # which the name leaves open
    assert _loaded(imported) == {**dict(leaves(loading.load(imported.base).values)), **split}


def test_iterations_of_xtuner_are_micro_batches() -> None:
    more = "default_hooks = dict(checkpoint=dict(interval=500), logger=dict(interval=10))\n"
    found = _loaded(_imported(XTUNER.replace("max_epochs=max_epochs)", "max_iters=160)") + more, "config.py"))

    assert found["train_cfg.max_steps"] == 10
    assert (found["checkpoint.interval"], found["log.interval"]) == (32, 1)


def test_a_command_line_of_trl_means_what_its_config_would() -> None:
    words = "trl dpo --model_name_or_path Qwen/Qwen3-8B --dataset_name a/b --beta 0.2 --use_peft --lora_r=32 --no_bf16"
    imported = tools.import_config(words.split())
    found = _loaded(imported)

    assert imported.base == "qwen3_8b_dpo_lora_custom_e3"
    assert (found["objective.beta"], found["adapter.r"], found[f"{ROWS}.path"]) == (0.2, 32, "a/b")
    assert found[f"{OPTIMIZER}.lr"] == 1e-6


def test_the_training_call_of_a_shell_script_is_found_with_its_lines() -> None:
    script = """#!/bin/bash
nproc_per_node=2
# swift sft --model not/this
NPROC_PER_NODE=$nproc_per_node \\
swift sft \\
    --model Qwen/Qwen3-8B \\
    --dataset 'a/b:sub#500' \\
    --gradient_accumulation_steps $(expr 16 / $nproc_per_node) \\
    --deepspeed zero2
"""
    imported = _imported(script, "train.sh")
    found = _loaded(imported)

    assert found["optim_wrapper.accumulative_counts"] == 8
    assert (found[f"{ROWS}.path"], found[f"{ROWS}.name"], found[f"{ROWS}.max_rows"]) == ("a/b", "sub", 500)
    assert found["deepspeed"] == "deepspeed_zero2"


def test_rolls_role_is_taken_with_its_preset_and_its_pipeline_named() -> None:
    imported = _imported(yaml.safe_dump(OF_TOOL["roll"]))

    assert _loaded(imported)["deepspeed"] == "deepspeed_zero3"
    assert imported.obstacle and "no reward like" in imported.obstacle
    assert str(_told(imported, "actor_train.device_mapping").why).startswith("8 GPUs")


def test_a_value_stands_in_the_recipe_with_its_line() -> None:
    imported = _imported("base_model: Qwen/Qwen3-8B\nmicro_batch_size: 3\nsequence_len: 1024\n")

    assert "batch_size=3,  # line 2, micro_batch_size" in recipe_text.text(imported)


_LF = "model_name_or_path: Qwen/Qwen3-8B\nfinetuning_type: lora\nstage: sft\n"
_LF_DPO = _LF.replace("stage: sft", "stage: dpo")
_LF_IMAGES = "model_name_or_path: x/seeing\nstage: sft\ndataset: a.jsonl\n"
_AXOLOTL = "base_model: Qwen/Qwen3-8B\nsequence_len: 512\n"
_AXOLOTL_IMAGES = "base_model: x/seeing\nsequence_len: 512\ndatasets: [{path: a.jsonl}]\n"
_AXOLOTL_ROWS = f"{_AXOLOTL}datasets: [{{path: a.jsonl}}]\ntest_datasets: [{{path: b.jsonl}}]\n"
_SWIFT = "model: Qwen/Qwen3-8B\ntuner_type: lora\nlearning_rate: 1e-4\n"
_SWIFT_IMAGES = "swift sft --model x/seeing --dataset a.jsonl"
_SWIFT_FULL = f"{_SWIFT_IMAGES} --tuner_type full"
_RLHF = "swift rlhf --model x --dataset a.jsonl --rlhf_type"
_TRL = "model_name_or_path: Qwen/Qwen3-8B\nuse_peft: true\n"
_TRL_CPO = "model_name_or_path: x\nmodel_revision: main\ndataset_name: a.jsonl\ncpo_alpha: 0.5\n"
_GRPO = "model_name_or_path: Qwen/Qwen3-8B\nmodel_revision: main\ndataset_name: a/b\nnum_generations: 4\n"
_TUNE = "checkpointer: {checkpoint_dir: x}\ntokenizer: {path: x}\n"
_TUNE_GRPO = f"""\
{_TUNE}dataset: {{_component_: torchtune.dev.grpo.gsm8k.gsm8k_dataset}}
loss: {{_component_: torchtune.dev.grpo.loss.GRPOSimpleLoss, kl_coeff: 0.01, epsilon: 0.3}}
batch_size: 1
grpo_samples: 16
forward_batch_size: 2
max_generated_tokens: 99
ppo_epochs: 2
num_steps: 20
epochs: 3
"""
_XTUNER = """from xtuner.model import LLaVAModel
model = dict(type=LLaVAModel, llm=dict(pretrained_model_name_or_path='x/llm'),
    visual_encoder=dict(pretrained_model_name_or_path='x/tower'), """


def _warm_up(ratio: float, steps: int | None = None) -> dict[str, Any]:
    return {"param_scheduler.warmup_ratio": ratio, "param_scheduler.warmup_steps": steps}


def _schedule(kind: str, **options: float | str) -> dict[str, Any]:
    none = {"min_lr_ratio": 0.0, "decay_ratio": None, "decay_type": "cosine", "num_cycles": None}
    return {f"param_scheduler.{key}": value for key, value in {"type": kind, **none, **options}.items()}


def _by(kind: str, options: str = "") -> str:
    """Return the lines of a schedule and of its options."""
    return f"lr_scheduler_type: {kind}\n" + (f"lr_scheduler_kwargs: {options}\n" if options else "")


def _packs(training: bool, validation: bool) -> dict[str, Any]:
    return {f"{ROWS}.packing": training, "val_dataloader.dataset.packing": validation}


def _thinks(thinks: bool | None, thinking: str | None = None) -> dict[str, Any]:
    return {"model.chat_template_kwargs.enable_thinking": thinks, f"{ROWS}.thinking": thinking}


def _kernels(liger: bool, num_proc: int) -> dict[str, Any]:
    of_model = {"model.use_liger_kernel": liger, "model.attn_implementation": "flash_attention_2"}
    return {**of_model, f"{ROWS}.num_proc": num_proc}


def _learns(objective: str, **settings: Any) -> dict[str, Any]:
    return {f"objective.{key}": value for key, value in {"type": objective, **settings}.items()}


KEPT: list[tuple[str, dict[str, Any]]] = [
    # A warm-up keeps its steps or its share: steps became 3 % of all steps unless max_steps was set
    (f"{_AXOLOTL}warmup_steps: 10\n", _warm_up(0.0, 10)),
    (f"{_AXOLOTL}warmup_steps: 10\nmax_steps: 100\n", _warm_up(0.0, 10)),
    (f"{_AXOLOTL}warmup_steps: 10\nwarmup_ratio: 0.5\n", _warm_up(0.0, 10)),
    (f"{_AXOLOTL}warmup_ratio: 0.5\n", _warm_up(0.5)),
    (f"{_LF}warmup_steps: 0.1\n", _warm_up(0.1)),
    (f"{_TRL}warmup_steps: 7\n", _warm_up(0.0, 7)),
    (f"{_TUNE}lr_scheduler: {{num_warmup_steps: 100}}\n", _warm_up(0.0, 100)),
    # A schedule keeps its floor, its cycles and its decay
    (_LF + _by("cosine_with_min_lr", "{min_lr_rate: 0.1}"), _schedule("cosine", min_lr_ratio=0.1)),
    (_LF + _by("cosine_with_min_lr", "{min_lr: 5e-6}"), _schedule("cosine", min_lr_ratio=0.1)),
    (_LF + _by("cosine_with_restarts", "'{\"num_cycles\": 3}'"), _schedule("cosine_with_restarts", num_cycles=3)),
    (_LF + _by("cosine_with_restarts"), _schedule("cosine")),
    (_LF + _by("inverse_sqrt"), _schedule("inverse_sqrt")),
    (f"{_LF}warmup_ratio: 0.1\n" + _by("warmup_stable_decay"), _schedule("warmup_stable_decay", decay_ratio=0.6)),
    (
        f"{_LF}max_steps: 200\n" + _by("warmup_stable_decay", "{num_decay_steps: 30, decay_type: linear}"),
        _schedule("warmup_stable_decay", decay_ratio=0.15, decay_type="linear"),
    ),
    (f"{_AXOLOTL}lr_scheduler: cosine\ncosine_min_lr_ratio: 0.2\n", _schedule("cosine", min_lr_ratio=0.2)),
    (
        f"{_AXOLOTL}lr_scheduler: cosine_with_restarts\nlr_scheduler_kwargs: {{num_cycles: 2}}\n",
        _schedule("cosine_with_restarts", num_cycles=2),
    ),
    (_SWIFT + _by("cosine_with_min_lr", "'{\"min_lr\": 1e-5}'"), _schedule("cosine", min_lr_ratio=0.1)),
    # What happens several times an epoch is a share of all steps
    (f"{_AXOLOTL}evals_per_epoch: 4\nnum_epochs: 3\nval_set_size: 0.1\n", {"train_cfg.val_interval": 1 / 12}),
    (f"{_AXOLOTL}evals_per_epoch: 1\nnum_epochs: 3\nval_set_size: 0.1\n", {"train_cfg.val_interval": None}),
    (f"{_AXOLOTL}saves_per_epoch: 2\nnum_epochs: 1\n", {"checkpoint.interval": 0.5}),
    (f"{_AXOLOTL}saves_per_epoch: 1\nnum_epochs: 4\n", {"checkpoint.interval": 500}),
    (f"{_AXOLOTL}save_steps: 0.1\n", {"checkpoint.interval": 0.1}),
    (f"{_AXOLOTL}eval_steps: 0.25\nval_set_size: 0.1\n", {"train_cfg.val_interval": 0.25}),
    (f"{_AXOLOTL}eval_steps: 25\nval_set_size: 0.1\n", {"train_cfg.val_interval": 25}),
    # Validation is packed as the config says, or else as training is
    (f"{_AXOLOTL_ROWS}sample_packing: true\neval_sample_packing: false\n", _packs(True, False)),
    (f"{_AXOLOTL_ROWS}sample_packing: false\neval_sample_packing: true\n", _packs(False, True)),
    (f"{_AXOLOTL_ROWS}sample_packing: true\neval_sample_packing:\n", _packs(True, True)),
    (f"{_AXOLOTL_ROWS}sample_packing: false\n", _packs(False, False)),
    # The chat template and its values
    (f"{_LF}enable_thinking: false\n", _thinks(False, "strip")),
    (f"{_LF}enable_thinking: true\n", _thinks(None)),
    (f"{_SWIFT}enable_thinking: false\n", _thinks(False)),
    (f"{_AXOLOTL}chat_template_kwargs: {{enable_thinking: false}}\n", _thinks(False)),
    (f"{_AXOLOTL}rl: grpo\ntrl: {{chat_template_kwargs: {{enable_thinking: false}}}}\n", _thinks(False)),
    (f"{_TRL}chat_template_kwargs: '{{\"enable_thinking\": false}}'\n", _thinks(False)),
    (f"{_TRL}chat_template_kwargs: {{}}\n", _thinks(None)),
    ("base_model: x\nsequence_len: 8\nchat_template: chatml\n", {"model.chat_template": "chatml"}),
    (f"{_LF}template: alpaca\n", {"model.chat_template": "alpaca"}),
    # Noise on the embeddings, and the loss of sft
    (f"{_LF}neftune_noise_alpha: 5\n", _learns("sft", neftune_noise_alpha=5.0)),
    (f"{_AXOLOTL}noisy_embedding_alpha: 5\n", _learns("sft", neftune_noise_alpha=5.0)),
    (f"{_SWIFT}neftune_noise_alpha: '5'\n", _learns("sft", neftune_noise_alpha=5.0)),
    (f"{_TRL}neftune_noise_alpha: 0\n", _learns("sft", neftune_noise_alpha=None)),
    (f"{_LF}use_dft_loss: true\n", _learns("sft", loss_type="dft")),
    (f"{_LF}use_dft_loss: false\n", _learns("sft", loss_type="nll")),
    (f"{_SWIFT}enable_dft_loss: true\n", _learns("sft", loss_type="dft")),
    (f"{_TRL}loss_type: dft\n", _learns("sft", loss_type="dft")),
    (f"{_TRL}loss_type: chunked_nll\n", _learns("sft", loss_type="nll")),
    # Which turns are trained
    (f"{_AXOLOTL}train_on_inputs: true\n", {f"{ROWS}.trained_turns": "everything"}),
    (f"{_AXOLOTL}datasets: [{{path: a.jsonl, roles_to_train: []}}]\n", {f"{ROWS}.trained_turns": "marked"}),
    (f"{_LF}mask_history: true\n", {f"{ROWS}.trained_turns": "last"}),
    (f"{_LF}train_on_prompt: true\n", {f"{ROWS}.trained_turns": "everything"}),
    (f"{_SWIFT}loss_scale: last_round\n", {f"{ROWS}.trained_turns": "last"}),
    (f"{_SWIFT}loss_scale: all\n", {f"{ROWS}.trained_turns": "everything"}),
    (
        f"{_TUNE}dataset: {{_component_: a.chat_dataset, source: a/b, train_on_input: true}}\n",
        {f"{ROWS}.trained_turns": "everything"},
    ),
    # Kernels, processes, adapters
    (f"{_AXOLOTL}liger_rope: true\nflash_attention: true\ndataset_num_proc: 3\n", _kernels(True, 3)),
    (f"{_LF}enable_liger_kernel: false\nflash_attn: fa2\npreprocessing_num_workers: 3\n", _kernels(False, 3)),
    (f"{_SWIFT}modules_to_save: embed_tokens,lm_head\n", {"adapter.modules_to_save": ["embed_tokens", "lm_head"]}),
    (f"{_SWIFT}modules_to_save: embed_tokens, lm_head\n", {"adapter.modules_to_save": ["embed_tokens", "lm_head"]}),
    (f"{_SWIFT}modules_to_save: '[embed_tokens, lm_head]'\n", {"adapter.modules_to_save": ["embed_tokens", "lm_head"]}),
    (
        "swift sft --model Qwen/Qwen3-8B --dataset a.jsonl --split_dataset_ratio 0.1 --early_stop_interval 3\n",
        {"train_cfg.early_stopping_patience": 3},
    ),
    # What the tool means unasked, where the recipe's parts mean something else
    (_AXOLOTL, {"param_scheduler.warmup_ratio": 0.03, "train_dataloader.batch_size": 1}),
    (f"{_AXOLOTL}warmup_steps: 0\n", {"param_scheduler.warmup_ratio": 0.0}),
    (f"{_AXOLOTL}context_parallel_size: 2\n", {"train_cfg.sequence_parallel_size": 2}),
    (_TRL, {"adapter.target_modules": ["q_proj", "v_proj"], "train_cfg.gradient_checkpointing": True}),
    (f"{_LF}neat_packing: true\n", {f"{ROWS}.packing": True}),
    (
        "checkpointer: {checkpoint_dir: Qwen/Qwen3-8B}\nmetric_logger: {}\n"
        "model: {_component_: torchtune.models.qwen3.lora_qwen3_8b, lora_attn_modules: [q_proj]}\n",
        {"adapter.lora_dropout": 0.0},
    ),
    # TRL quantizes its constants only if asked, and uses an adapter only if asked
    (f"{_TRL}load_in_4bit: true\n", {"quantization.bits": 4, "quantization.double_quant": False}),
    (f"{_TRL}load_in_4bit: true\nuse_bnb_nested_quant: yes\n", {"quantization.double_quant": True}),
    (f"{_TRL.replace('true', 'no')}lora_r: 8\nlora_alpha: 16\n", {"adapter.r": None}),
    ("trl sft --model_name_or_path Qwen/Qwen3-8B --dataset_name a/b --lora_r 8", {"adapter.r": None}),
    # The interval of validation is that of the log if none is set; at the end of each epoch no steps count
    (f"{_LF}val_size: 0.1\neval_strategy: steps\nlogging_steps: 25\n", {"train_cfg.val_interval": 25}),
    (f"{_SWIFT}split_dataset_ratio: 0.1\neval_strategy: steps\nsave_steps: 30\n", {"train_cfg.val_interval": 30}),
    (f"{_TRL}eval_strategy: steps\ndataset_name: a/b\ndataset_test_split: test\n", {"train_cfg.val_interval": 10}),
    (f"{_LF}val_size: 0.1\neval_strategy: epoch\neval_steps: 50\n", {"train_cfg.val_interval": None}),
    # The alignment handbook's older keys, and the kernel's switch of older versions
    (f"{_TRL}use_flash_attention_2: true\npreprocessing_num_workers: 3\n", {f"{ROWS}.num_proc": 3}),
    (f"{_LF}flash_attn: yes\n", {"model.attn_implementation": "flash_attention_2"}),
    (f"{_LF}flash_attn: false\n", {"model.attn_implementation": None}),
    # Images
    (f"{_LF_IMAGES}finetuning_type: full\nfreeze_vision_tower: false\n", {"model.freeze": ("projector",)}),
    (
        f"{_LF_IMAGES}finetuning_type: full\nfreeze_language_model: true\n",
        {"model.freeze": ("vision", "projector", "language")},
    ),
    (f"{_LF_IMAGES}finetuning_type: lora\nfreeze_vision_tower: true\n", {"adapter.vision": False}),
    (f"{_LF_IMAGES}finetuning_type: lora\nfreeze_vision_tower: false\n", {"adapter.vision": True}),
    (f"{_LF_IMAGES}image_max_pixels: 1024\n", {f"{ROWS}.image_max_pixels": 1024}),
    (f"{_LF_IMAGES}image_min_pixels: 64\n", {f"{ROWS}.image_min_pixels": 64}),
    (f"{_LF_IMAGES}media_dir: photos\n", {f"{ROWS}.image_folder": "photos"}),
    (f"{_SWIFT_FULL} --freeze_vit false\n", {"model.freeze": ("projector",)}),
    (f"{_SWIFT_FULL} --freeze_llm true\n", {"model.freeze": ("vision", "projector", "language")}),
    (f"{_SWIFT_IMAGES} --freeze_vit false --freeze_aligner false\n", {"adapter.vision": True}),
    (f"{_SWIFT_IMAGES} --max_pixels 2048\n", {f"{ROWS}.image_max_pixels": 2048}),
    (f"MAX_PIXELS=4096 {_SWIFT_IMAGES}\n", {f"{ROWS}.image_max_pixels": 4096}),
    (f"MAX_PIXELS=4096 {_SWIFT_IMAGES} --max_pixels 2048\n", {f"{ROWS}.image_max_pixels": 2048}),
    (f"{_SWIFT_FULL} --aligner_lr 1e-3 --freeze_aligner false\n", {f"{OPTIMIZER}.projector_lr": 1e-3}),
    (f"{_AXOLOTL_IMAGES}processor_type: AutoProcessor\n", {"model.images": True}),
    (f"{_AXOLOTL_IMAGES}freeze_mm_modules: true\n", {"model.freeze": ("vision", "projector")}),
    (f"{_AXOLOTL_IMAGES}image_size: 512\n", {f"{ROWS}.image_max_pixels": 512 * 512}),
    (f"{_AXOLOTL_IMAGES}image_size: [640, 480]\n", {f"{ROWS}.image_max_pixels": 640 * 480}),
    (f"{_XTUNER}freeze_llm=True, freeze_visual_encoder=True)\n", {"model.freeze": ("vision", "language")}),
    (f"{_XTUNER}freeze_llm=False, freeze_visual_encoder=True)\n", {"model.freeze": ("vision",)}),
]


@each(KEPT)
def test_what_a_config_sets_keeps_its_meaning(text: str, values: dict[str, Any]) -> None:
    found = _loaded(_imported(text))

    assert {key: found.get(key) for key in values} == values


OBJECTIVE: list[tuple[str, dict[str, Any]]] = [
    # Configs of GRPO became SFT, or were refused.
    (f"{_GRPO}reward_funcs: [accuracy_reward]\n", _learns("grpo")),
    (f"{_GRPO}normalize_advantages: true\nreward_funcs: [accuracy_reward]\n", _learns("rloo")),
    ("trl grpo --model_name_or_path x --dataset_name a/b --reward_funcs accuracy_reward\n", _learns("grpo")),
    ("trl rloo --model_name_or_path x --dataset_name a/b --reward_funcs accuracy_reward\n", _learns("rloo")),
    (f"{_RLHF} grpo --reward_funcs accuracy format\n", _learns("grpo")),
    (f"{_RLHF} gkd --teacher_model y\n", _learns("distill")),
    (f"{_RLHF} kto\n", _learns("kto")),
    (f"{_RLHF} rm\n", _learns("reward")),
    (f"{_RLHF.removesuffix(' --rlhf_type')}\n", _learns("dpo")),
    (
        _TUNE_GRPO,
        {
            **_learns("grpo", num_generations=16, beta=0.01, epsilon=0.3, num_iterations=2, max_completion_length=99),
            **{"train_cfg.max_steps": 120, "train_dataloader.batch_size": 2, "optim_wrapper.accumulative_counts": 8},
        },
    ),
    (f"{_AXOLOTL}rl: grpo\ntrl: {{num_generations: 4, reward_funcs: [my.rewards.f]}}\n", _learns("grpo")),
    (f"{_AXOLOTL}reward_model: true\n", _learns("reward")),
    # A loss on the chosen answers is one of DPO's losses
    (
        "model_name_or_path: x\nmodel_revision: main\nbeta: 0.1\nrpo_alpha: 0.7\n",
        _learns("dpo", loss_type=("sigmoid", "sft"), loss_weights=(1.0, 0.7)),
    ),
    (f"{_LF_DPO}pref_ftx: 0.2\n", _learns("dpo", loss_type=("sigmoid", "sft"), loss_weights=(1.0, 0.2))),
    (f"{_LF_DPO}pref_loss: ipo\npref_ftx: 0.2\n", _learns("dpo", loss_type=("ipo", "sft"), loss_weights=(1.0, 0.2))),
    (f"{_AXOLOTL}rl: dpo\nrpo_alpha: 1\n", _learns("dpo", loss_type=("sigmoid", "sft"), loss_weights=(1.0, 1.0))),
    # CPO and SimPO have the defaults of their tool. TRL's CPO, which all but LLaMA-Factory call, adds the likelihood of
    # the chosen answers unless cpo_alpha is 0.
    (f"{_LF_DPO}pref_loss: simpo\n", _learns("simpo", beta=0.1, simpo_gamma=0.5)),
    (f"{_LF_DPO}pref_loss: simpo\npref_beta: 2\nsimpo_gamma: 1.4\n", _learns("simpo", beta=2.0, simpo_gamma=1.4)),
    (f"{_AXOLOTL}rl: simpo\ncpo_alpha: 0\n", _learns("simpo", beta=0.1, simpo_gamma=0.5, cpo_alpha=0.0)),
    (f"{_AXOLOTL}rl: simpo\nrl_beta: 2\nsimpo_gamma: 1\n", _learns("simpo", beta=2, simpo_gamma=1, cpo_alpha=1)),
    (f"{_RLHF} simpo --cpo_alpha 0", _learns("simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0)),
    (
        f"{_RLHF} simpo --beta 10 --simpo_gamma 3 --loss_type simpo",
        _learns("simpo", beta=10.0, simpo_gamma=3.0, cpo_alpha=1.0),
    ),
    (f"{_RLHF} cpo --loss_type simpo", _learns("simpo", beta=0.1, simpo_gamma=1.0, cpo_alpha=1.0)),
    (f"{_TRL_CPO}loss_type: simpo\n", _learns("simpo", beta=0.1, simpo_gamma=0.5, cpo_alpha=0.5)),
    (f"{_RLHF} cpo", _learns("cpo", loss_type="sigmoid", beta=0.1, cpo_alpha=1.0)),
    (f"{_RLHF} cpo --beta 0.3 --cpo_alpha 0.5", _learns("cpo", loss_type="sigmoid", beta=0.3, cpo_alpha=0.5)),
    (f"{_RLHF} simpo --loss_type hinge", _learns("cpo", loss_type="hinge", beta=2.0, cpo_alpha=1.0)),
    (f"{_TRL_CPO}loss_type: ipo\n", _learns("cpo", loss_type="ipo", beta=0.1, cpo_alpha=0.5)),
]


@each(OBJECTIVE)
def test_a_config_becomes_its_own_objective_with_its_settings(text: str, values: dict[str, Any]) -> None:
    imported = _imported(text)
    found = _loaded(imported)

    assert {key: found.get(key) for key in values} == values
    assert imported.obstacle is None
    losses = [entry for entry in imported.entries if entry.setting.key == "loss_type"]
    assert all(entry.outcome in (Outcome.TAKEN, Outcome.TRANSLATED) for entry in losses)


def test_held_out_rows_are_packed_as_training_is_and_another_wish_is_told() -> None:
    held_out = f"{_AXOLOTL}datasets: [{{path: a.jsonl}}]\nval_set_size: 0.1\n"

    imported = _imported(f"{held_out}sample_packing: true\neval_sample_packing: false\n")

    assert _told(imported, "eval_sample_packing").outcome is Outcome.LEFT_OUT
    assert _loaded(imported)["val_dataloader.dataset.packing"] is True


@each(["lr_scheduler_kwargs: {warmup_type: cosine}\n", "lr_scheduler_kwargs: {num_decay_steps: 30}\n"])
def test_an_option_of_a_schedule_that_means_something_else_here_is_told(text: str) -> None:
    imported = _imported(f"{_LF}lr_scheduler_type: warmup_stable_decay\n{text}")

    assert _told(imported, "lr_scheduler_kwargs").outcome is Outcome.CHANGED


@each(["lr_scheduler_kwargs: 3\n", "lr_scheduler_kwargs: '{min'\n", "lr_scheduler_kwargs: {num_cycles: many}\n"])
def test_options_of_a_schedule_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(TunerError, match="lr_scheduler_kwargs"):
        _imported(f"{_LF}lr_scheduler_type: cosine_with_restarts\n{text}")


@each([name for name in tools.NAMES if name != "xtuner"])
def test_each_listed_key_of_a_tool_has_a_rule(name: str) -> None:
    tool = tools.tool_named(name)
    for key in sorted(tool.others or ()):
        plain = key.replace(".*", ".x")
        assert plain in tool.table or any(fnmatchcase(plain, pattern) for pattern in tool.table), plain


def test_a_misprint_is_named_with_the_key_that_it_looks_like_and_the_rest_is_imported() -> None:
    cases = [
        ("actor_train: {model_args: {lora_rnk: 8}}\npretrain: x\n", "config.yaml", "roll", "lora_rank"),
        (XTUNER.replace("max_norm=1)", "max_nrm=1)"), "config.py", None, "max_norm"),
        (XTUNER.replace("max_length=2048", "max_lengt=2048"), "config.py", None, "max_length"),
        (XTUNER.replace("train_cfg = dict", "train_cgf = dict"), "config.py", None, "train_cfg"),
        (
            "checkpointer: {checkpoint_dir: x}\ndataset: {_component_: a.alpaca_dataset, splt: x}\n",
            "c.yaml",
            "torchtune",
            "split",
        ),
        ("model_name_or_path: x\ndataset_mixture: {datasets: [{id: a/b, splt: x}]}\n", "c.yaml", "trl", "split"),
        ("base_model: x\nliger_rms_nrm: true\n", "c.yaml", "axolotl", "liger_rms_norm"),
        ("base_model: x\ncontext_parapllel_size: 2\n", "c.yaml", "axolotl", "context_parallel_size"),
        ("base_model: x\ndatasets: [{path: a/b, typ: alpaca}]\n", "c.yaml", "axolotl", "type"),
        (f"{_LF}lora_rnk: 8\n", "c.yaml", None, "lora_rank"),
        ("swift sft --model x --dataset y --lora_rnk 8\n", "c.sh", None, "lora_rank"),
        ("trl sft --model_name_or_path x --learning_rte 8\n", "c.sh", None, "learning_rate"),
        ("model: x\ntrain_dataset: y\npeft_config:\n  name: lora\n  rnk: 8\n", "c.yaml", None, "no such key"),
    ]
    for text, name, tool, near in cases:
        unknown = [entry for entry in _imported(text, name, tool).entries if entry.outcome is Outcome.UNKNOWN]
        assert unknown and near in str(unknown[0].why), text


def test_llamafactorys_keys_of_an_answer_during_validation_are_left_out_with_what_answers_in_tuner() -> None:
    """Those that its arguments inherit of transformers: a new one is told of too."""
    of_both = {field.name for field in dataclasses.fields(TrainingArguments)}
    added = [field.name for field in dataclasses.fields(Seq2SeqTrainingArguments) if field.name not in of_both]
    imported = _imported(_LF + "".join(f"{key}: 1\n" for key in added))

    reasons = {key: _told(imported, key).why for key in added}
    assert {_told(imported, key).outcome for key in added} == {Outcome.LEFT_OUT}
    assert len(added) >= 5
    of_sorting = reasons.pop("sortish_sampler")
    assert len({*reasons.values()}) == 1 and of_sorting not in reasons.values()


def test_of_very_many_unknown_keys_the_first_are_compared_with_known_ones_and_it_is_said() -> None:
    text = "base_model: x\n" + "".join(f"learning_rate_{number}: 1\n" for number in range(5000))
    started = time.process_time()

    unknown = [entry for entry in _imported(text, tool="axolotl").entries if entry.outcome is Outcome.UNKNOWN]

    assert len(unknown) == 5000
    assert sum("learning_rate" in str(entry.why) for entry in unknown) == _MAX_COMPARED
    assert len({entry.why for entry in unknown[_MAX_COMPARED:]}) == 2, "the first of them says it"
    assert time.process_time() - started < 10, "0.8 s; 14 s with each compared"


def test_a_mixtures_columns_and_a_data_sets_other_keys_are_told() -> None:
    mixture = "model_name_or_path: x\ndataset_mixture: {datasets: [{id: a/b, columns: [messages], data_dir: x}]}\n"
    of_trl = {entry.setting.key for entry in _imported(mixture).entries}
    of_xtuner = {
        entry.setting.key
        for entry in _imported(XTUNER.replace("pack_to_max_length=", "split='x', pack_to_max_length="), "c.py").entries
    }

    assert {"dataset_mixture.datasets.0.columns", "dataset_mixture.datasets.0.data_dir"} <= of_trl
    assert "train_dataloader.dataset.split" in of_xtuner


@each(
    [
        (f"{_LF}adapter_name_or_path: a,b\n", "adapter_name_or_path", "b"),
        (f"{_LF}adapter_name_or_path: a\ncreate_new_adapter: true\n", "create_new_adapter", "a"),
        ("swift sft --model x --dataset y --adapters a b\n", "adapters", "b"),
    ]
)
def test_several_adapters_and_a_new_one_on_an_old_one_are_not_trained_as_they_are(
    text: str, key: str, path: str
) -> None:
    imported = _imported(text)

    assert key in {entry.setting.key for entry in imported.differences}
    assert _loaded(imported)["adapter.path"] == path


def test_a_total_batch_of_axolotl_is_told_as_a_change() -> None:
    imported = _imported(f"{_AXOLOTL}batch_size: 128\nmicro_batch_size: 4\n")

    assert "batch_size" in {entry.setting.key for entry in imported.differences}


_ACCELERATE = "accelerate launch --config_file"


@each(
    [
        (f"{_ACCELERATE} recipes/zero3.yaml --num_processes 4 scripts/sft.py", "deepspeed_zero3", Outcome.CHANGED),
        (f"{_ACCELERATE}=config.yaml scripts/sft.py", "config.yaml", Outcome.TAKEN),
        (f"{_ACCELERATE} fsdp.yaml scripts/sft.py", "auto", Outcome.LEFT_OUT),
        ("accelerate launch --deepspeed_config_file z2.json scripts/sft.py", "deepspeed_zero2", Outcome.CHANGED),
        ("trl sft --accelerate_config zero3", "deepspeed_zero3", Outcome.TRANSLATED),
        ("trl sft --accelerate_config fsdp2", "auto", Outcome.LEFT_OUT),
    ]
)
def test_accelerates_config_before_a_script_is_the_deepspeed_config(
    launcher: str, config: str, outcome: Outcome
) -> None:
    Path("config.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 3}\n")
    Path("fsdp.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")

    imported = _imported(f"{launcher} --model_name_or_path Qwen/Qwen3-8B --dataset_name a/b\n", "train.sh")

    assert _loaded(imported)["deepspeed"] == config
    assert _told(imported, "accelerate_config").outcome is outcome


def test_further_calls_of_a_script_are_told() -> None:
    call = "trl sft --model_name_or_path x --dataset_name a/b\n"
    entries = [entry for entry in _imported(call * 2, "train.sh").entries if entry.setting.key == "a further call"]

    assert [entry.setting.where for entry in entries] == ["train.sh:2"]


@each(
    [
        ("tasks: [truthfulqa]\n", "evaluates"),
        ("prompt: {user: Hi}\nmax_new_tokens: 3\n", "answer"),
        ("ppo_epochs: 2\n", "PPO"),
        ("policy_model: {_component_: x}\n", "PPO"),
        ("quantizer: {groupsize: 2}\n", "quantizes"),
    ]
)
def test_what_torchtune_does_beside_training_is_refused_by_name(more: str, what: str) -> None:
    with pytest.raises(TunerError, match=what) as caught:
        _imported(_TUNE + more, tool="torchtune")

    assert caught.value.exit_code == 2


def test_torchtunes_methods_and_references_are_taken() -> None:
    text = """
model_dir: /tmp/Qwen3-8B
model: {{_component_: torchtune.models.qwen3.{component}, {lora}}}
checkpointer: {{checkpoint_dir: "${{model_dir}}", output_dir: "${{output_dir}}"}}
tokenizer: {{path: "${{nowhere}}/tokenizer.model"}}
dataset: {{_component_: torchtune.datasets.alpaca_dataset}}
loss: {{_component_: torchtune.{loss}}}
optimizer: {{lr: 1e-4}}
output_dir: out
"""
    lora = "lora_rank: 8, lora_alpha: 16, lora_attn_modules: [q_proj]"
    for component, method in (("qwen3_8b", "full"), ("lora_qwen3_8b", "lora"), ("qlora_qwen3_8b", "qlora")):
        keys = "" if method == "full" else lora
        found = _imported(text.format(component=component, lora=keys, loss="modules.loss.Linear"), tool="torchtune")
        assert found.base == f"qwen3_8b_{method}_alpaca_e1"
    dpo = _imported(text.format(component="lora_qwen3_8b", lora=lora, loss="rlhf.loss.DPOLoss"), tool="torchtune")
    assert dpo.base and "dpo_lora" in dpo.base


def test_a_model_is_known_by_its_older_name() -> None:
    imported = _imported(_LF.replace("Qwen/Qwen3-8B", "models/Meta-Llama-3.1-8B"))

    assert (imported.base or "").startswith("llama3_1_8b_")


def test_a_config_with_data_of_videos_is_not_trained_as_it_is() -> None:
    _register(seen={"file_name": "seen.json", "columns": {"videos": "videos"}}, read={"file_name": "read.json"})

    assert "'seen'" in (_imported(f"{_LF}dataset: seen,read\n").obstacle or "")


def test_data_of_images_come_with_llamafactorys_defaults_for_images() -> None:
    columns = {"messages": "messages", "images": "pictures"}
    _register(seen={"file_name": "seen.json", "formatting": "sharegpt", "columns": columns})
    text = "model_name_or_path: x/seeing\nstage: sft\nfinetuning_type: full\ndataset: seen\n"

    values = _loaded(_imported(text))

    assert (values["model.images"], values["model.freeze"]) == (True, ("vision", "projector"))
    assert (values[f"{ROWS}.image_max_pixels"], values[f"{ROWS}.image_min_pixels"]) == (768 * 768, 32 * 32)
    assert values[f"{ROWS}.columns.images"] == "pictures"


def test_a_model_of_text_has_no_settings_of_images() -> None:
    imported = _imported(_LF.replace("lora", "full") + "freeze_vision_tower: true\n")

    assert _loaded(imported)["model.freeze"] == ()
    assert "text alone" in str(_told(imported, "freeze_vision_tower").why)


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdef", "bcdefg", strict=True)
)
BAD = [
    ("no mapping", "config.yaml", "- a\n", "config.yaml:1"),
    ("an empty file", "config.yaml", "", "config.yaml"),
    ("an object", "config.yaml", f"{_LF}x: !!python/object/apply:os.system ['touch ran']\n", "config.yaml:4"),
    ("an alias bomb", "config.yaml", _LF + _BOMB, "config.yaml:"),
    ("an alias of itself", "config.yaml", f"{_LF}x: &x [*x]\n", "config.yaml:"),
    ("a merge of a number", "config.yaml", f"{_LF}<<: 3\n", "config.yaml:"),
    ("a text for a number", "config.yaml", f"{_LF}learning_rate: fast\n", "config.yaml:4"),
    ("a number out of range", "config.yaml", f"{_LF}learning_rate: -1\n", "config.yaml:4"),
    ("a number without end", "config.yaml", f"{_LF}lora_rank: 0x{'f' * 6000}\n", "config.yaml:4"),
    ("another one", "config.py", f"import xtuner\nx = 0x{'f' * 6000}\n", "config.py:2"),
    ("a key twice", "config.yaml", f"{_LF}stage: sft\n", "config.yaml:4"),
    ("a circle", "config.yaml", "checkpointer: 1\nmetric_logger: 1\na: ${b}\nb: ${a}\n", "config.yaml:3"),
    (
        "a text for a block",
        "config.yaml",
        f"{_AXOLOTL}datasets:\n- path: a/b\n  type: chat_template\n  message_property_mappings: from\n",
        "config.yaml:6",
    ),
    ("code for GPUs", "config.yaml", "pretrain: x\nactor_train:\n  device_mapping: exit()\n", "config.yaml:3"),
    ("a call", "config.py", "import xtuner\nimport os\nx = os.system('touch ran')\n", "config.py:3"),
    ("a function", "config.py", "import xtuner\ndef f():\n    return 1\n", "config.py:2"),
    ("a huge power", "config.py", "import xtuner\nx = 9 ** 9 ** 9 ** 9\n", "config.py:2"),
    ("a script of nothing", "train.sh", "echo hello\n", "train.sh"),
]


@each(BAD)
def test_what_cannot_be_imported_is_one_message_with_its_line(why: str, name: str, text: str, where: str) -> None:
    with pytest.raises(TunerError) as caught:
        _imported(text, name)

    assert caught.value.exit_code == 2
    assert str(caught.value.where).startswith(where) or where in caught.value.what
    assert not Path("ran").exists()


@each(
    [("columns", "question"), ("columns", ["question"]), ("tags", "role"), ("num_samples", "5k"), ("num_samples", [5])]
)
def test_a_wrong_value_of_a_registered_data_set_is_one_message_with_its_place(key: str, value: Any) -> None:
    Path("data").mkdir(exist_ok=True)
    Path("data/dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.json", key: value}}))

    with pytest.raises(TunerError, match=key) as caught:
        _imported(f"{_LF}dataset: mine\n")

    assert str(caught.value.where).startswith("data/dataset_info.json:")


_REWRITE = """\
model: Qwen/Qwen3-0.6B
model_class: llm
peft_config:
  name: lora
  r: 16
  lora_alpha: 32
  target_modules: all
kernel_config:
  name: auto
dist_config:
  name: fsdp2
quant_config:
  name: bnb
  quantization_bit: 4
train_dataset: sets.yaml
micro_batch_size: 2
global_batch_size: 8
cutoff_len: 1024
learning_rate: 2.0e-4
max_steps: 10
sample_backend: hf
"""


def test_what_belongs_to_4_bits_is_left_out_of_an_import_with_8() -> None:
    text = "model_name_or_path: Qwen/Qwen3-0.6B\nfinetuning_type: lora\nstage: sft\ndataset: alpaca_en_demo\n"
    imported = _imported(f"{text}quantization_bit: 8\nquantization_type: fp4\ndouble_quantization: false\n")

    assert _loaded(imported)["quantization.bits"] == 8
    left_out = [entry.setting.key for entry in imported.entries if entry.outcome is Outcome.LEFT_OUT]
    assert {"quantization_type", "double_quantization"} <= set(left_out)


@each(
    [
        (f"{_LF}quantization_type: nf4\ndouble_quantization: true\n", "quantization_type"),
        (f"{_TRL}load_in_4bit: false\nbnb_4bit_quant_type: nf4\n", "bnb_4bit_quant_type"),
        (f"{_SWIFT}bnb_4bit_use_double_quant: true\n", "bnb_4bit_use_double_quant"),
    ]
)
def test_how_4_bits_are_stored_quantizes_nothing_by_itself(text: str, key: str) -> None:
    imported = _imported(text)

    assert not [our_key for our_key in _loaded(imported) if our_key.startswith("quantization.")]
    assert _told(imported, key).outcome is Outcome.LEFT_OUT


def test_a_config_of_llamafactorys_rewrite_is_read_with_its_own_defaults_and_lines() -> None:
    Path("sets.yaml").write_text("one:\n  path: one.jsonl\n  source: local\n  converter: alpaca\n  num_samples: 5\n")

    imported = _imported(_REWRITE)
    found = _loaded(imported)

    data = "train_dataloader.dataset"
    assert (found[f"{data}.path"], found[f"{data}.format"], found[f"{data}.max_rows"]) == ("one.jsonl", "alpaca", 5)
    assert (found["quantization.bits"], found["adapter.r"], found["adapter.lora_alpha"]) == (4, 16, 32)
    assert (found["train_dataloader.batch_size"], found["train_cfg.global_batch_size"]) == (2, 8)
    assert found["optim_wrapper.accumulative_counts"] == "auto"
    assert (found["param_scheduler.type"], found["optim_wrapper.optimizer.weight_decay"]) == ("constant", 0.01)
    assert "lr=0.0002,  # line 19, learning_rate" in recipe_text.text(imported)


@pytest.mark.parametrize(
    ("kernels", "uses", "noted"),
    [
        ("liger_kernel", True, set()),
        ("cuda_fused_moe, liger_kernel", True, {"kernel_config"}),
        ("auto", "auto", {"kernel_config"}),
    ],
)
def test_the_kernels_of_the_rewrite_are_ligers_where_it_names_them(
    kernels: str, uses: bool | str, noted: set[str]
) -> None:
    imported = _imported(_REWRITE.replace("  name: auto\n", f"  name: {kernels}\n").replace("sets.yaml", "rows.jsonl"))

    assert _loaded(imported)["model.use_liger_kernel"] == uses
    left_out = {entry.setting.name for entry in imported.entries if entry.outcome is Outcome.LEFT_OUT}
    assert {name.partition(".")[0] for name in left_out if "kernel" in name} == noted
    told = {entry.to_json()["key"] for entry in imported.entries if not entry.setting.is_default}
    assert {"model", "peft_config.r", "quant_config.name"} <= told and not told & {"lora_rank", "enable_liger_kernel"}
    assert uses == "auto" or "use_liger_kernel=True,  # line 9, kernel_config.name" in recipe_text.text(imported)


@pytest.mark.parametrize(
    ("model_class", "converter", "objective"),
    [("llm", "alpaca", "sft"), ("llm", "pair", "dpo"), ("cls", "pair", "reward")],
)
def test_the_rewrite_names_its_stage_by_the_model_and_its_rows(
    model_class: str, converter: str, objective: str
) -> None:
    Path("sets.yaml").write_text(f"one:\n  path: owner/name\n  converter: {converter}\n")

    found = _loaded(_imported(f"model: Qwen/Qwen3-0.6B\nmodel_class: {model_class}\ntrain_dataset: sets.yaml\n"))

    assert found["objective.type"] == objective
    assert "adapter.r" not in found


WRONG: tuple[Any, ...] = ("fast", "1e400", [], ["fast", {}], {"fast": 1}, True, float("nan"), -1, 10**400, None)
"""What no key, or few, may hold."""


def _wrong(tool: Tool, name: str) -> Iterator[tuple[Keys, Any]]:
    """Yield every key of a tool's examples and table with one of the wrong values, and each value with many keys."""
    of_examples = {keys[: end + 1] for keys, _ in walk(OF_TOOL.get(name, {}), {}) for end in range(len(keys))}
    # A reason alone looks at no value; ROLL's roles share their rules.
    looked_at = {key for key, rule in tool.table.items() if not isinstance(rule, str) and "*" not in key}
    of_table = {tuple(key.split(".")) for key in looked_at if not key.startswith(("student.", "sft_train."))}
    for at, keys in enumerate(sorted(of_examples | of_table)):
        yield keys, WRONG[at % len(WRONG)]


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", tools.NAMES)
def test_a_wrong_value_of_any_key_is_a_recipe_or_one_message(name: str, step: int) -> None:
    tool = tools.tool_named(name)
    for keys, value in islice(_wrong(tool, name), 0, None, step):
        try:
            translation = Translation(tool.begin(ForeignConfig(nested(keys, value), "config.yaml")), tool)
            translation.run()
            recipe_from(translation)
        except TunerError as error:
            assert error.where or error.fix, (keys, value)
        except Exception as error:
            error.add_note(f"{'.'.join(keys)} = {value!r:.40}")
            raise


def test_a_folder_and_a_config_that_is_not_utf_8_are_refused() -> None:
    Path("folder.yaml").mkdir()
    Path("config.yaml").write_bytes(b"stage: \xff\xfe\n")

    for name, why in (("config.yaml", "UTF-8"), ("folder.yaml", "directory")):
        with pytest.raises(TunerError, match=why):
            tools.import_config([name])


def test_a_registered_file_outside_of_the_data_folder_is_refused() -> None:
    _register(mine={"file_name": "../../etc/passwd"})

    with pytest.raises(TunerError, match="outside") as caught:
        _imported(f"{_LF}dataset: mine\n")

    assert str(caught.value.where).endswith("dataset_info.json:1")


def test_no_environment_variable_is_read_into_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    text = "checkpointer: {checkpoint_dir: '${oc.env:SECRET}'}\nmetric_logger: {log_dir: x}\n"

    assert os.environ["SECRET"] not in recipe_text.text(_imported(text))


PROMPTS = [
    ("base_model: x\nsequence_len: 8\ndatasets: [{path: a/b, type: alpaca}]\n", "datasets[0].type", "### Instruction"),
    (f"{_AXOLOTL}rl: dpo\ndatasets: [{{path: a/b, type: chatml.ultra}}]\n", "datasets[0].type", "ChatML"),
    (f"{_LF}template: cohere\n", "template", "own chat template"),
    ("model: Qwen/Qwen3-8B\ntuner_type: lora\ntrain_type: lora\ntemplate: default\n", "template", "own chat template"),
    (f"{_TUNE}dataset: {{_component_: torchtune.datasets.alpaca_dataset}}\n", "dataset._component_", "### Instruction"),
]


@each(PROMPTS)
def test_a_prompt_that_the_tool_writes_otherwise_is_told(text: str, key: str, how: str) -> None:
    told = _told(_imported(text), key)

    assert told.outcome is Outcome.CHANGED and how in str(told.why)


def test_a_template_of_the_models_family_is_its_own() -> None:
    assert _told(_imported(f"{_LF}template: qwen3_nothink\n"), "template").outcome is Outcome.LEFT_OUT


def test_a_mark_inside_a_word_of_a_script_is_no_comment() -> None:
    """All that followed `a.jsonl#5` in its line was lost."""
    for script in (
        "swift sft --dataset a#5 b#60 --model x # last\n",
        "D='a#5 b#60'\nswift sft --dataset $D --model x\n",
    ):
        Path("train.sh").write_text(script, encoding="utf-8")
        values = shell_commands.read_script(Path("train.sh")).values
        words = values["dataset"] if isinstance(values["dataset"], list) else [values["dataset"]]
        assert (" ".join(words), values["model"]) == ("a#5 b#60", "x")


def test_a_limit_of_rows_belongs_to_its_data_set() -> None:
    """ms-swift's 5 and 60 rows were one limit of 65 over all rows."""
    command = "swift sft --model Qwen/Qwen3-8B --dataset a.jsonl#5 b.jsonl#60\n"

    values = _loaded(_imported(command, "train.sh"))

    limits = [(data_set["path"], data_set["max_rows"]) for data_set in values[f"{ROWS}.mixture"]]
    assert (limits, values[f"{ROWS}.max_rows"]) == ([("a.jsonl", 5), ("b.jsonl", 60)], None)


def test_limits_of_llamafactory_are_those_of_each_data_set() -> None:
    _register(a={"file_name": "a.json", "num_samples": 7}, b={"file_name": "b.json"})

    limited, registered = (_loaded(_imported(f"{_LF}dataset: a,b\n{more}")) for more in ("max_samples: 5\n", ""))

    assert [data_set.get("max_rows") for data_set in limited[f"{ROWS}.mixture"]] == [5, 5]
    assert [data_set.get("max_rows") for data_set in registered[f"{ROWS}.mixture"]] == [7, None]


def test_parts_of_axolotls_and_trls_data_sets_are_kept() -> None:
    axolotl = "base_model: x\nsequence_len: 8\ndatasets:\n- {path: a.jsonl, split: 'train[:10%]'}\n"
    axolotl += "- {path: b.jsonl, shards: 4}\n"
    mixer = "model_name_or_path: x\nuse_peft: true\ndataset_mixer: {a/b: 0.5, c/d: 1.0}\n"
    mixer += "dataset_splits: [train_sft, test_sft]\n"
    held_out = "model_name_or_path: x\nuse_peft: true\n"
    held_out += "dataset_mixture: {datasets: [{path: a/b}], test_split_size: 0.1}\n"

    rows = _loaded(_imported(axolotl))[f"{ROWS}.mixture"]
    assert [(row["split"], row.get("weight")) for row in rows] == [("train[:10%]", None), ("train", 0.25)]
    rows = [(row["path"], row["split"], row.get("weight")) for row in _loaded(_imported(mixer))[f"{ROWS}.mixture"]]
    assert rows == [("a/b", "train_sft", 0.5), ("c/d", "train_sft", None)]
    assert _loaded(_imported(held_out))[f"{ROWS}.val_split"] == 0.1


def test_the_settings_of_grpo_are_those_of_the_config() -> None:
    text = f"{_GRPO}beta: 0.04\nepsilon_high: 0.3\nscale_rewards: false\nloss_type: dr_grpo\ntop_k: -1\n"
    text += "max_completion_length: 77\nuse_vllm: true\nvllm_mode: server\nvllm_server_port: 9000\n"
    text += "vllm_group_port: 9001\n"
    text += "reward_funcs: [accuracy_reward, my_rewards.length]\nreward_weights: [1.0, 0.5]\n"
    values = _loaded(_imported(text))

    of_objective = {key.partition(".")[2]: value for key, value in values.items() if key.startswith("objective.")}
    assert of_objective | {
        **{"num_generations": 4, "beta": 0.04, "epsilon_high": 0.3, "scale_rewards": "none", "top_k": 0},
        **{"loss_type": "dr_grpo", "max_completion_length": 77},
        **{"generation.engine": "vllm", "generation.server": "http://127.0.0.1:9000"},
        "generation.group_port": 9001,
        "rewards": ({"type": "math", "column": "solution"}, {"type": "my_rewards:length", "weight": 0.5}),
    } == of_objective | {"rewards": tuple(of_objective["rewards"])}


def test_a_reward_that_tuner_does_not_have_stands_in_the_way_of_a_run() -> None:
    imported = _imported(f"{_GRPO}reward_funcs: [code]\n")

    assert imported.obstacle is not None and "code" in imported.obstacle
    assert _loaded(imported)["objective.type"] == "grpo"


def test_golds_loss_is_a_distillation_of_another_vocabulary() -> None:
    text = (
        "model_name_or_path: x\nmodel_revision: main\nteacher_model_name_or_path: y\nlmbda: 1.0\nuse_uld_loss: true\n"
    )
    merge = "uld_token_merge_strategy: bayesian\n"
    sorted_, hybrid, other = (
        _imported(f"{text}{more}")
        for more in (merge, f"{merge}uld_use_hybrid_loss: true\nbeta: 0.5\n", "uld_token_merge_strategy: observed\n")
    )

    ways = [_loaded(imported)["objective.vocabulary_matching"] for imported in (sorted_, hybrid)]
    assert ways == ["sorted", "hybrid"]
    assert _loaded(hybrid)["objective.beta"] == 0.5
    assert _told(other, "uld_token_merge_strategy").is_learned


def test_smoothed_labels_of_simpo_are_told_as_another_loss() -> None:
    assert _told(_imported(f"{_RLHF} simpo --cpo_alpha 0 --label_smoothing 0.1"), "label_smoothing").is_learned


@pytest.mark.parametrize("key", ["base_model: x\nsequence_len: 8\nchat_template: jinja\nchat_template_jinja", "trl"])
def test_the_text_of_a_chat_template_is_kept(key: str) -> None:
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    if key == "trl":
        key = "model_name_or_path: x\ndataset_name: trl-lib/Capybara\nuse_peft: true\nchat_template"
    imported = _imported(f"{key}: {json.dumps(text)}\n")

    assert _loaded(imported)["model.chat_template"] == text
    assert not [
        entry for entry in imported.entries if text in str(entry.setting.value) and entry.outcome is Outcome.CHANGED
    ]


_UNSUPPORTED = re.compile(r"not support|no such|no counterpart|does not have")
_OTHER_MODELS = re.compile(
    r"(?:ebft|qat|quantization|hatchery|vllm|diffusion|fsdp_config|teacher|reward|reward_model|critic|reference|"
    r"agent_config_common|dataset_filter|actor_infer|student_infer|student_train|validation|\w+\.\w+_filter_config|"
    r"\w*env_manager|model\.visual_encoder\w*)\b.*"
)
"""Blocks of another program or model, whose keys share names with those of a recipe."""


@each([*tools.NAMES])
def test_no_row_of_a_table_calls_unsupported_what_the_schema_has(name: str) -> None:
    tool, leaves_of_schema = tools.tool_named(name), {keys[-1] for keys in schema_keys()}
    words = {word for word, alias in aliases.table().items() if alias.key or alias.flag}
    false = []
    for key in sorted({key for key in (*tool.table, *(tool.others or ())) if "*" not in key}):
        rule = tool.table.get(key) or next(
            (rule for pattern, rule in tool.table.items() if "*" in pattern and fnmatchcase(key, pattern)), ""
        )
        why = rule.why if isinstance(rule, Changes) else rule if isinstance(rule, str) else ""
        last = key.rpartition(".")[2]
        if _UNSUPPORTED.search(why) and last in leaves_of_schema | words and not _OTHER_MODELS.fullmatch(key):
            false.append((key, why))

    assert false == []


_AXO, _TRL_PLAIN = "base_model: x\nsequence_len: 8\n", "model_name_or_path: x\nmodel_revision: main\n"
DIRECT = [
    (_AXO, "train_on_inputs: true", False),
    (_AXO, "train_on_inputs: false", False),
    (_AXO, "datasets: [{path: a.jsonl, roles_to_train: [user]}]", True),
    (_AXO, "datasets: [{path: a.jsonl, roles_to_train: [assistant]}]", False),
    (_AXO, "datasets: [{path: a.jsonl, roles_to_train: []}]", False),
    (_AXO, "datasets: [{path: a.jsonl, roles_to_train: []}, {path: b.jsonl}]", True),
    *(
        (f"{_AXO}datasets: [{{path: a.jsonl, roles_to_train: {roles}}}]\n", inputs, differs)
        for roles in ("[]", "[assistant]")
        for inputs, differs in (("train_on_inputs: true", True), ("train_on_inputs: false", False))
    ),
    (_AXO, "datasets: [{path: a.jsonl, message_field_training: train}]", False),
    (_AXO, "datasets: [{path: a.jsonl, message_field_training: learn}]", True),
    (_AXO, "datasets: [{path: a.jsonl, message_field_training_detail: train_detail}]", False),
    (_AXO, "datasets: [{path: a.jsonl, message_field_training_detail: detail}]", True),
    (_AXO, "datasets: [{path: a.jsonl, train_on_eot: none}]", True),
    (_AXO, "datasets: [{path: a.jsonl, train_on_eos: all}]", True),
    (_AXO, "datasets: [{path: a.jsonl, train_on_eos: last}]", True),
    (_AXO, "datasets: [{path: a.jsonl, train_on_eos: turn}]", False),
    (_AXO, "special_tokens: {eos_token: <e>}", True),
    (_AXO, "special_tokens: {pad_token: <p>}", False),
    (_AXO, "tokens: [<a>]", True),
    (_AXO, "unfrozen_parameters: [lm_head]", True),
    (_AXO, "datasets: [{path: a.jsonl, type: alpaca}]", True),
    (_AXO, "neftune_noise_alpha: 5", False),
    (_AXO, "noisy_embedding_alpha: 0", False),
    (f"{_AXO}rl: dpo\n", "neftune_noise_alpha: 5", True),
    (_AXO, "context_parapllel_size: 2", True),
    (_LF, "mask_history: true", False),
    (_LF, "mask_history: false", False),
    (_LF, "train_on_prompt: true", False),
    (_LF, "new_special_tokens: <a>,<b>", True),
    (_LF, "use_galore: true", True),
    (_LF, "rope_scaling: linear", True),
    (_LF, "simpo_gamma: 0", False),
    (_LF, "template: cohere", True),
    (_LF, "template: qwen3", False),
    (_LF, "label_smoothing_factor: 0.1", True),
    (_TRL_PLAIN, "assistant_only_loss: false", True),
    (_TRL_PLAIN, "assistant_only_loss: true", False),
    (_TRL_PLAIN, "completion_only_loss: false", True),
    (_SWIFT, "loss_scale: react", True),
    (_SWIFT, "loss_scale: last_round+ignore_empty_think", True),
    (_SWIFT, "loss_scale: last_round", False),
    (_SWIFT, "loss_scale: all", False),
    (_SWIFT, "loss_scale: default", False),
    (_SWIFT, "new_special_tokens: [<a>]", True),
    (_SWIFT, "freeze_parameters: [lm_head]", True),
    (_TUNE, "max_steps_per_epoch: 10", True),
    (_TUNE, "max_steps_per_epoch: null", False),
    (_TUNE, "dataset: {_component_: a.chat_dataset, source: a/b, train_on_input: true}", False),
]


@each(DIRECT)
def test_a_config_is_trained_directly_only_if_the_recipe_learns_the_same(base: str, line: str, differs: bool) -> None:
    """Such keys were dropped in the line that says how many keys were changed, and the run started."""
    Path("config.yaml").write_text(f"{base}{line}\n", encoding="utf-8")
    cache = {"TUNER_CACHE": str(Path("cache").absolute())}

    if differs:
        with pytest.raises(TunerError, match=r"tuner import config\.yaml") as caught:
            direct.recipe_of("config.yaml", cache)
        assert caught.value.exit_code == 2
        assert line.partition(":")[0] in caught.value.what
    else:
        assert direct.recipe_of("config.yaml", cache) is not None


def test_what_other_tools_refuse_together_is_refused_and_what_has_no_turns_chooses_none() -> None:
    with pytest.raises(TunerError, match="train_on_prompt"):
        _imported(f"{_LF}mask_history: true\ntrain_on_prompt: true\n")
    of_texts = _imported(
        "base_model: x\nsequence_len: 8\ntrain_on_inputs: true\ndatasets: [{path: a.jsonl, type: completion}]\n"
    )

    assert "trained_turns" not in of_texts.values["train_dataloader"]["dataset"]
    assert _told(of_texts, "train_on_inputs").outcome is Outcome.LEFT_OUT


def test_differences_that_are_in_no_config_stand_in_the_table() -> None:
    _register(a={"file_name": "a.json"})
    of_factory = _imported(f"{_LF}dataset: a\ncutoff_len: 64\n")
    of_pretraining = _imported(f"{_LF.replace('stage: sft', 'stage: pt')}")
    of_trl = _imported("model_name_or_path: x\nmodel_revision: main\ndataset_name: a/b\n")
    of_tune = _imported(_TUNE.replace("path: x", "path: x, max_seq_len: null"))

    changed = [
        {entry.setting.key for entry in imported.entries if entry.outcome is Outcome.CHANGED}
        for imported in (of_factory, of_pretraining, of_trl, of_tune)
    ]
    assert {"a.columns", "cutoff_len", "the end of an answer"} <= changed[0]
    assert {"blocks of text"} <= changed[1]
    assert {"assistant_only_loss", "plain prompts"} <= changed[2]
    assert {"tokenizer.max_seq_len"} <= changed[3]


@each([("qwen", "created by Alibaba Cloud"), ("qwen3", None), ("zephyr", "You are Zephyr")])
def test_a_template_of_llamafactory_brings_its_own_system_prompt(template: str, system: str | None) -> None:
    imported, written = (
        _loaded(_imported(f"{_LF}dataset: a.jsonl\ntemplate: {template}\n{more}"))[f"{ROWS}.system"]
        for more in ("", "default_system: Mine.\n")
    )

    assert (system in str(imported)) if system else imported is None
    assert written == "Mine."
