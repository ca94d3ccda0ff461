"""`tuner import` writes a recipe and never over another file; `tuner train` takes another tool's config as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Tuner

CONFIG = """
model_name_or_path: Qwen/Qwen3-8B
stage: sft
finetuning_type: lora
dataset: mine.jsonl
deepspeed: ds.json
"""
DEEPSPEED = '{"zero_optimization": {"stage": 2}}\n'


@pytest.fixture(autouse=True)
def made_things_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))


def test_a_recipe_is_written_with_the_deepspeed_config_beside_it(tuner: Tuner) -> None:
    Path("sft.yaml").write_text(CONFIG, encoding="utf-8")
    Path("ds.json").write_text(DEEPSPEED, encoding="utf-8")

    done = tuner("import", "sft.yaml", "-o", "mine.py")

    assert done.code == 0, done.err
    assert "Wrote mine.py and mine.deepspeed.json" in done.out
    assert Path("mine.deepspeed.json").read_text(encoding="utf-8") == DEEPSPEED
    assert tuner("show", "./mine.py").code == 0
    assert tuner("plan", "./mine.py", "--gpus", "8", "--gpu", "h100").code == 0


def test_nothing_is_overwritten(tuner: Tuner) -> None:
    Path("sft.yaml").write_text(CONFIG, encoding="utf-8")
    Path("mine.py").write_text("x = 1\n", encoding="utf-8")

    done = tuner("import", "sft.yaml", "-o", "mine.py")

    assert done.code == 2 and "mine.py exists" in done.err
    assert Path("mine.py").read_text(encoding="utf-8") == "x = 1\n"


def test_what_became_of_each_key_is_there_as_json(tuner: Tuner) -> None:
    Path("sft.yaml").write_text(CONFIG, encoding="utf-8")

    told = json.loads(tuner("import", "sft.yaml", "--json").out)

    outcomes = {entry["key"]: entry["outcome"] for entry in told["entries"]}
    assert outcomes["model_name_or_path"] == "taken"
    assert outcomes["deepspeed"] == "no counterpart"


def test_an_unknown_option_is_what_is_wrong_and_not_the_file(tuner: Tuner) -> None:
    Path("sft.yaml").write_text(CONFIG, encoding="utf-8")

    done = tuner("import", "sft.yaml", "--force")

    assert done.code == 2 and "no such option: --force" in done.err


def test_a_command_line_is_imported_too(tuner: Tuner) -> None:
    done = tuner("import", "trl", "sft", "--model_name_or_path", "Qwen/Qwen3-8B", "--dataset_name", "a/b")

    assert done.code == 0, done.err
    assert Path("trl_sft.py").is_file()


def test_train_takes_a_config_of_another_tool_and_says_so(tuner: Tuner, nothing_starts: None) -> None:
    Path("sft.yaml").write_text(CONFIG, encoding="utf-8")
    Path("mine.jsonl").write_text('{"instruction": "a", "output": "b"}\n', encoding="utf-8")

    done = tuner("train", "sft.yaml", "--dry-run", "--ignore-fit")

    assert done.code == 0, done.err
    assert "sft.yaml of LLaMA-Factory is imported" in done.err
    assert "tuner import sft.yaml" in done.err
