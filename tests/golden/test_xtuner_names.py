"""Every recipe name of XTuner v0.1 means that recipe here, number for number; where it does not, this file says why."""

from __future__ import annotations

import csv
import itertools
import math
from ast import literal_eval
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tuner.errors import RecipeError
from tuner.importers import xtuner_names
from tuner.recipes import catalog, loading
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig

Row = dict[str, str]

with (Path(__file__).parent / "xtuner_recipes.csv").open(encoding="utf-8", newline="") as stream:
    ROWS: dict[str, Row] = {row["name"]: row for row in csv.DictReader(stream)}
"""XTuner's own values as its files hold them: v0.1.23, and what was added to it later. Empty: not in that file."""

# test_llava_names.py has these.
VISION = {name for name in ROWS if name.startswith(("llava_", "internvl_"))}
REFUSED = {"POLAR_1_8B_full_varlenattn_custom_dataset", "POLAR_7B_full_varlenattn_custom_dataset"}
TEXT = sorted(ROWS.keys() - VISION - REFUSED)

SETTINGS = {
    "pretrained_model_name_or_path": "model.path",
    "quant": "quantization.bits",
    "lora_r": "adapter.r",
    "lora_alpha": "adapter.lora_alpha",
    "lora_dropout": "adapter.lora_dropout",
    "max_length": "train_dataloader.dataset.max_length",
    "pack_to_max_length": "train_dataloader.dataset.packing",
    "batch_size": "train_dataloader.batch_size",
    "accumulative_counts": "optim_wrapper.accumulative_counts",
    "max_epochs": "train_cfg.max_epochs",
    "optim_type": "optim_wrapper.optimizer.type",
    "lr": "optim_wrapper.optimizer.lr",
    "betas": "optim_wrapper.optimizer.betas",
    "weight_decay": "optim_wrapper.optimizer.weight_decay",
    "max_norm": "optim_wrapper.clip_grad.max_norm",
    "warmup_ratio": "param_scheduler.warmup_ratio",
    "loss_beta": "objective.beta",
}
"""XTuner's word: ours."""

DELIBERATE = {
    "use_varlen_attn": "packed samples never see each other here; 444 of XTuner's recipes let them",
    "sequence_parallel_size": "a key that the number of GPUs decides: samples stay whole, and the run says so",
    "prompt_template": "the tokenizer's own chat template, not XTuner's",
    "loss_type": "a reward model learns by Bradley-Terry, not by XTuner's focal loss with a penalty",
    "reward_token_id": "a score head reads the last token; no token of the vocabulary is spent on it",
    "dataset_map_fn": "a row format has that place",
}
"""Columns that are not compared, with why. Besides: a step is an optimizer step here, a micro-batch there."""

WHERE_THE_DATA_IS = {
    "name", "family", "data_path", "data_files", "data_num", "alpaca_en_path", "alpaca_zh_path", "oasst1_path",
    "dataset_name",
}  # fmt: skip

DATA = ("data_path", "alpaca_en_path", "alpaca_zh_path", "oasst1_path")
MOVED = {
    "AI_Connect/alpaca": "tatsu-lab/alpaca",
    "ArmelR/stack-exchange-instruction": "hf://datasets/ArmelR/stack-exchange-instruction/data/finetune/*.parquet",
    "damo/MSAgent-Bench": "./data/msagent_bench.jsonl",
    "emozilla/pg_books-tokenized-bos-eos-chunked-65536": "emozilla/pg19",
    "shibing624/medical": "hf://datasets/shibing624/medical/finetune/train_*.json",
    "path/to/your/json_data": None,
}
"""XTuner's data sets that stand elsewhere here: another hub's, chosen files of one, text in place of tokens."""

TOLD = {
    "sequence parallelism": {name for name in TEXT if (ROWS[name]["sequence_parallel_size"] or "1") != "1"},
    "100 steps": {name for name in TEXT if name.endswith("_hf")},
    "InternEvo": {name for name in TEXT if name.endswith(("_w_tokenized_dataset", "_w_internevo_dataset"))},
    "fused experts": {name for name in TEXT if name.startswith("mixtral") and "_qlora_" in name},
}
"""What a run says because XTuner would do otherwise, and at which names."""


def from_another_place(row: Row) -> Row:
    """Fill in what a file of XTuner's says under another name than its siblings."""
    name = row["name"]
    if name.endswith("_hf"):  # their TrainingArguments; betas and max_norm are transformers' defaults
        rest = {"weight_decay": "0", "batch_size": "1", "accumulative_counts": "16", "optim_type": "AdamW"}
        lr, epochs = ("0.0002", "3") if name.startswith("internlm_7b") else ("0.0003", "1")
        return {**row, **rest, "lr": lr, "max_epochs": epochs, "betas": "(0.9, 0.999)", "max_norm": "1"}
    if row["betas"] == "(0.9, 0.95)":  # warm_up_ratio, with one more underscore
        return {**row, "warmup_ratio": "0.025"}
    if "_moss_sft_" in name:  # its own class of data set, which packs nothing
        return {**row, "pack_to_max_length": "False"}
    return row


OTHERWISE: dict[tuple[str, str], tuple[Any, str]] = {
    **{
        (f"llama2_7b_full_alpaca_enzh_{size}", "model.path"): (
            "meta-llama/Llama-2-7b-hf",
            "the same in Meta's own format",
        )
        for size in ("8k_sp1", "32k_sp1", "128k_sp8", "256k_sp8", "1M_sp16")
    },
    ("internlm2_chat_7b_orpo_qlora_varlenattn_ultrafeedback_e5", "model.path"): (
        "internlm/internlm2-chat-7b-sft",
        "XTuner trains the 1.8B model under this name",
    ),
    ("internlm_7b_full_intern_repo_dataset_template", "model.path"): ("internlm/internlm-7b", "a path to fill in"),
    ("mistral_7b_w_untokenized_dataset", "model.path"): ("mistralai/Mistral-7B-v0.1", "the same on a disk of XTuner's"),
    ("qwen1_5_4b_qlora_alpaca_e3_openmind", "model.path"): ("Qwen/Qwen1.5-4B", "a copy on another hub"),
    **{
        (f"llama2_70b_int8_lora_open_platypus_e1{end}", "quantization.bits"): (8, "load_in_8bit, outside the table")
        for end in ("", "_hf")
    },
}
"""Single values that differ, as they are here, with what XTuner has there."""


COUNTED_IN_MICRO_BATCHES = {
    "minicpm3_4b_chat_qlora_custom_sft_e1",
    "minicpm3_4b_dpo_qlora",
    "minicpm3_4b_full_alpaca_zh_e3",
    "minicpm3_4b_full_custom_pretrain_e1",
}
"""XTuner runs 10,000 micro-batches of these (of one: 3), whatever their names say; here they run the name's epochs."""


def theirs(row: Row) -> dict[str, Any]:
    """Return a row's settings under our keys; empty cells are left out, but no adapter is one."""
    full = from_another_place(row)
    found = {ours: _value(column, full[column]) for column, ours in SETTINGS.items() if full[column]}
    return {"adapter.r": None, "quantization.bits": None, **found}


def _value(column: str, text: str) -> Any:
    if column in ("pretrained_model_name_or_path", "optim_type"):
        return text
    if column == "quant":
        return int(text.removesuffix("bit"))
    if column == "max_length":
        return math.prod(int(factor) for factor in text.split("*"))
    return literal_eval(text)


def ours(config: RecipeConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = None if found is None else getattr(found, name)
    # The same 16 rows of a rank, in micro-batches that the plan chooses.
    return (
        {"train_dataloader.batch_size": 1, "optim_wrapper.accumulative_counts": 16}[key] if found == "auto" else found
    )


@cache
def load(name: str) -> Recipe:
    return loading.load(name)


def differences(name: str) -> dict[str, tuple[Any, Any]]:
    """Return what a recipe of ours has otherwise than XTuner's of the same name: key to (XTuner's, ours)."""
    found = {key: (value, ours(load(name).config, key)) for key, value in theirs(ROWS[name]).items()}
    return {key: pair for key, pair in found.items() if pair[0] != pair[1]}


def test_the_table_is_whole() -> None:
    assert len(TEXT) == 529
    assert {name for name in TEXT if "train_cfg.max_epochs" not in theirs(ROWS[name])} == COUNTED_IN_MICRO_BATCHES
    assert {*SETTINGS, *DELIBERATE, *WHERE_THE_DATA_IS} == {*ROWS[TEXT[0]]}


@each(TEXT)
def test_a_name_of_xtuner_s_gives_its_numbers(name: str) -> None:
    known = {key: value for (other, key), (value, _) in OTHERWISE.items() if other == name}

    assert {key: pair[1] for key, pair in differences(name).items()} == known


def test_what_is_learned_is_what_xtuner_trains() -> None:
    found = {name: load(name).config.objective.type for name in TEXT}

    assert {name: objective for name, objective in found.items() if objective != objective_of(name)} == {}


def objective_of(name: str) -> str:
    if ROWS[name]["dataset_map_fn"] == "pretrain_map_fn" or "_pgbooks_" in name:
        return "pretrain"
    return next((objective for objective in ("dpo", "orpo", "reward") if f"_{objective}_" in f"{name}_"), "sft")


def test_the_data_is_what_xtuner_reads() -> None:
    # Its name says alpaca alone; XTuner's file reads the Chinese one too.
    otherwise = {"qwen1_5_moe_a2_7_b_chat_full_alpaca_e3"}
    read = {name: {row[column] for column in DATA if row[column]} for name, row in ROWS.items() if name in TEXT}
    moved = {name: {MOVED.get(path, path) for path in paths} for name, paths in read.items() if paths}

    assert {name for name, paths in moved.items() if paths != data_of(name)} == otherwise


def data_of(name: str) -> set[str | None]:
    dataset = load(name).config.train_dataloader.dataset
    return {share.path for share in dataset.mixture or (dataset,)}


@pytest.mark.parametrize("words", TOLD)
def test_what_runs_otherwise_is_told_once_and_nothing_else_is(words: str) -> None:
    lines = {name: (*load(name).warnings, *load(name).notes) for name in TEXT}
    told = {name for name in TEXT if any(words in line for line in lines[name])}

    assert told == TOLD[words]
    assert {name for name in TEXT if lines[name]} == set().union(*TOLD.values())
    assert all(len(lines[name]) == len(set(lines[name])) for name in TEXT)


def test_every_spelling_is_in_some_name_of_xtuner_s() -> None:
    # `_copy` is in none: the command that copies a recipe adds it.
    used = {id(spelling) for name in TEXT for spelling in spellings_of(name)}
    unused = {
        spelling.written
        for spelling in xtuner_names.SPELLINGS
        if id(spelling) not in used and "llava_" not in spelling.written
    }

    assert unused == {"_copy"}


def spellings_of(name: str) -> list[xtuner_names.Spelling]:
    reading = catalog.find(name)
    replaced = itertools.islice(xtuner_names.spellings_in(name), len(reading.words) if reading else 0)
    return [spelling for spelling, _, _ in replaced]


@each(sorted(REFUSED))
def test_a_reward_model_against_reference_answers_is_refused_as_one(name: str) -> None:
    with pytest.raises(RecipeError, match="reference answers"):
        loading.load(name)
