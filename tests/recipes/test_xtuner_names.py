"""XTuner's words in a name: each becomes a name of ours, sets what it says, and tells what is lost."""

from __future__ import annotations

from typing import Any

import pytest

from tests.launch.plans import made
from tests.recipes.loaded import loaded
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.importers import xtuner_names
from tuner.recipes import catalog, loading

OF_XTUNER = {"global_batch_size": None, "pack_length": None}
OF_XTUNERS_ADAPTERS = {"r": 64, "lora_alpha": 16, "lora_dropout": 0.1}
"""What its own names keep; a name that it has not leaves these to the plan."""
DPO = "llama3_8b_instruct_dpo_qlora_orpo_dpo_mix_40k_e3"
OWN = "qwen3_8b_full_finetune_custom_dataset_e1"


@pytest.mark.parametrize(
    ("name", "ours", "changed"),
    [
        ("qwen3_8b_qlora_alpaca_e3_copy", "qwen3_8b_qlora_alpaca_e3", {}),
        ("qwen3_8b_qlora_alpaca_e3_hf", "qwen3_8b_qlora_alpaca_e3", {}),
        ("qwen3_8b_qlora_alpaca_e3_hf_copy", "qwen3_8b_qlora_alpaca_e3", {}),
        ("qwen3_8b_qlora_alpaca_e3_openmind", "qwen3_8b_lora_alpaca_e3", {}),
        ("qwen3_8b_qlora_alpaca_e2_gpu8", "qwen3_8b_qlora_alpaca_e2", {"batch_size": 8, "accumulative_counts": 1}),
        ("qwen3_8b_full_alpaca_e3_varlen", "qwen3_8b_full_alpaca_e3", {}),
        ("qwen3_8b_full_alpaca_e3_32k_varlen", "qwen3_8b_full_alpaca_e3", {"max_length": 32768}),
        ("qwen3_8b_full_alpaca_e3_16k_2gpus", "qwen3_8b_full_alpaca_e3", {"max_length": 16384}),
        ("qwen3_8b_full_alpaca_8k_sp1", "qwen3_8b_full_alpaca_e3", {"max_length": 8192, "accumulative_counts": 1}),
        ("qwen3_8b_full_alpaca_32k_sp4", "qwen3_8b_full_alpaca_e3", {"max_length": 32768, "accumulative_counts": 4}),
        ("qwen3_8b_full_alpaca_1M_sp8", "qwen3_8b_full_alpaca_e3", {"max_length": 1048576, "accumulative_counts": 8}),
        ("qwen3_8b_full_alpaca_e3_sp4", "qwen3_8b_full_alpaca_e3", {}),
        ("qwen3_8b_full_alpaca_e3_sequence_parallel_4", "qwen3_8b_full_alpaca_e3", {}),
        ("llama3_8b_instruct_dpo_qlora", DPO, {}),
        (
            "llama3_8b_instruct_dpo_qlora_varlenattn",
            DPO,
            OF_XTUNER | OF_XTUNERS_ADAPTERS | {"lr": 5e-7, "batch_size": 1},
        ),
        ("qwen3_8b_orpo_full_varlenattn_jsonl_dataset", "qwen3_8b_orpo_full_jsonl_dataset_e3", {"batch_size": 1}),
        ("qwen3_8b_reward_lora_ultrafeedback", "qwen3_8b_reward_lora_ultrafeedback_e1", {}),
        ("internlm2_chat_1_8b_dpo_full", "internlm2_chat_1_8b_sft_dpo_full_orpo_dpo_mix_40k_e3", OF_XTUNER),
        ("qwen3_8b_w_untokenized_dataset", OWN, {}),
        ("qwen3_8b_w_internevo_dataset", OWN, {}),
        ("qwen3_8b_full_intern_repo_dataset_template", OWN, {"accumulative_counts": 4, "max_length": 8192}),
    ],
)
def test_a_word_of_xtuner_s_is_a_name_of_ours_with_its_own_values(
    name: str, ours: str, changed: dict[str, Any]
) -> None:
    found, plain = loading.load(name).values, loading.load(ours).values

    assert {key.split(".")[-1]: value for key, value in differing(plain, found)} == changed


def differing(old: Any, new: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(new, dict) or not isinstance(old, dict):
        return [] if old == new else [(prefix, new)]
    return [pair for key in new for pair in differing(old.get(key), new[key], f"{prefix}.{key}")]


def test_a_value_says_which_word_set_it() -> None:
    found = loading.load("qwen3_8b_full_alpaca_e3_32k_varlen").origins["train_dataloader.dataset.max_length"]

    assert found.text == "_32k in name qwen3_8b_full_alpaca_e3_32k_varlen"
    assert found.overridden[0][0] == 2048


def test_an_override_beats_a_word() -> None:
    config = loaded("qwen3_8b_full_alpaca_e3_32k_varlen", "max_length=512").config

    assert config.train_dataloader.dataset.max_length == 512


def test_a_word_lies_over_the_recipe_that_the_rest_of_the_name_is() -> None:
    config = loading.load("tiny_full_sample_e2_gpu8").config

    assert config.train_dataloader.batch_size == 8
    assert config.optim_wrapper.optimizer.lr == loading.load("tiny_full_sample").config.optim_wrapper.optimizer.lr
    assert config.train_cfg.max_epochs == 2


def test_of_two_words_that_set_one_value_the_outer_one_counts() -> None:
    inner, outer = (loading.load(f"qwen3_8b_dpo_full_varlenattn_ultrafeedback_e1{end}").config for end in ("", "_gpu8"))

    assert inner.train_dataloader.batch_size == 1
    assert outer.train_dataloader.batch_size == 8


def test_a_recipe_file_may_build_on_a_name_with_such_words(tmp_path: Any) -> None:
    file = tmp_path / "my.py"
    file.write_text("_base_ = 'tiny_full_sample_e2_sp4'\nrandomness = dict(seed=1)\n")

    found = loading.load(str(file))

    assert found.config.train_cfg.max_epochs == 2
    assert "sequence parallelism" in found.warnings[0]


def test_what_is_not_done_as_in_xtuner_is_a_warning_of_the_plan(tmp_path: Any) -> None:
    warnings = made(recipe="tiny_full_sample_8k_sp4", work_dir=tmp_path / "run").warnings

    assert [warning for warning in warnings if "sequence parallelism" in warning] == [warnings[0]]
    assert "4 times as many samples" in warnings[0]
    assert made(recipe="tiny_full_sample_8k_sp1", work_dir=tmp_path / "run").warnings == warnings[1:]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_8b_full_alpaca",  # of our own names, none goes without its epochs
        "qwen3_8b_full_alpaca_8k",
        "qwen3_8b_full_alpaca_sp4",
        "qwen3_8b_full_alpaca_e3_0k",
        "qwen3_8b_full_alpaca_e3_８k",
        "qwen3_8b_kto_full",
        "qwen3_8b_dpo_full_nothing",
        "qwen3_8b_full_alpaca_e3_gpu8_e3",
        "_copy",
        "_sp4",
    ],
)
def test_a_word_makes_no_recipe_of_what_is_none(name: str) -> None:
    with refused(RecipeError, None, name):
        loading.load(name)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("qwen3_8b_qlra_alpaca_e3_32k_varlen", "qwen3_8b_qlora_alpaca_e3_32k_varlen"),
        ("llama2_7b_full_alpca_enzh_32k_sp1", "llama2_7b_full_alpaca_enzh_32k_sp1"),
        ("qwen1_5_110b_chat_qlora_alpca_e3_16k_2gpus", "qwen1_5_110b_chat_qlora_alpaca_e3_16k_2gpus"),
        ("internlm2_chat_1_8b_dpo_ful", "internlm2_chat_1_8b_dpo_full"),
        ("internlm2_chat_1_8b_dpo_full_varlenatn", "internlm2_chat_1_8b_dpo_full"),
    ],
)
def test_a_typing_error_beside_such_a_word_keeps_it(name: str, meant: str) -> None:
    with refused(RecipeError, None, repr(meant)):
        loading.load(name)
    loading.load(meant)


def test_a_name_of_ours_is_never_read_as_one_of_xtuner_s() -> None:
    # ultrachat_200k ends like a context length, and orpo_dpo_mix_40k holds two objectives.
    for name in ("tiny_full_ultrachat_200k_e3", "tiny_dpo_full_orpo_dpo_mix_40k_e3"):
        reading = catalog.find(name)
        assert reading and reading.words == ()


def test_every_spelling_says_in_one_line_what_it_means() -> None:
    for spelling in xtuner_names.SPELLINGS:
        assert spelling.written
        assert spelling.says.endswith(".")
        assert "\n" not in spelling.says
