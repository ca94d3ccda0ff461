"""What a text in a recipe's place names, found with one look."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.command import Tuner
from tuner.errors import TunerError
from tuner.launch import trainable
from tuner.recipes import catalog, loading
from tuner.recipes.names import NameKind, identify

FILES = {
    "mine.py": "lr = 1",
    "mine.yaml": "_base_: tiny_lora_sample_e1",
    "broken.yaml": "train_cfg: {max_epochs: [1",
    "xtuner.py": "from xtuner.dataset import process_hf_dataset",
    "theirs.yaml": "model_name_or_path: x\nfinetuning_type: lora",
    "arguments.json": '{"per_device_train_batch_size": 1, "num_train_epochs": 1}',
    "run.sh": "llamafactory-cli train theirs.yaml",
    "launch.yaml": "compute_environment: LOCAL_MACHINE\ndeepspeed_config: {zero_stage: 2}",
    "ds.json": '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 1}',
    "odd.yaml": "a: 1",
    "notes": "hello",
    "rows.jsonl": '{"text": "a"}',
    "rows.json": '[{"text": "a"}]',
    "lines.json": '{"train_cfg": "a"}\n{"train_cfg": "b"}',
    "model/config.json": "{}",
    "result/final/adapter_config.json": "{}",
    "run/recipe.py": "",
    "run/run.json": "{}",
    "zero2/run.json": "{}",
    "zero2/recipe.py": "",
    "data/rows.jsonl": "",
    "tiny_lora_sample_e1/rows.jsonl": "",
}
KINDS = {
    NameKind.RECIPE: "tiny_lora_sample_e3 tiny_lora_sample_e1 internlm2_chat_1_8b_dpo_full",
    NameKind.RECIPE_FILE: "mine.py ./mine.py run/recipe.py mine.yaml broken.yaml ~/mine.py",
    NameKind.MODEL: "model ./model result Qwen/Qwen3-0.6B",
    NameKind.RUN: "run ./run/ zero2",
    NameKind.FOLDER: "data ./data . run/..",
    NameKind.DEEPSPEED: "zero1 deepspeed_zero3 none deepspeed_zero9 ds.json launch.yaml",
    NameKind.OTHER_TOOL: "xtuner.py theirs.yaml arguments.json run.sh",
    NameKind.DATA: "rows.jsonl no.csv rows.json lines.json hf://datasets/x/y.parquet",
    NameKind.UNCLEAR: "odd.yaml notes ./notes pipe.yaml pipe.py",
    NameKind.MISSING: "no.py no.yaml no/such.yaml ./no no/such/file no.sh",
    NameKind.UNKNOWN: "nothing auto qwen3_8b lora tiny_lora_sampel_e3 ~nobody",
}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    os.mkfifo("pipe.yaml")
    os.mkfifo("pipe.py")


CASES = [(text, kind) for kind, texts in KINDS.items() for text in texts.split()]


@pytest.mark.parametrize(("text", "kind"), CASES, ids=[text for text, _ in CASES])
def test_a_text_names_one_kind_of_thing(text: str, kind: NameKind) -> None:
    assert identify(text).kind is kind


def test_any_text_is_identified_without_an_error() -> None:
    for text in ("", " ", "a\0b", "a\0/b", "\udcff", "x" * 5000, "/" * 5000, "_" * 5000):
        assert identify(text).text == text


def test_a_run_called_like_a_preset_is_a_run_and_still_the_preset_for_deepspeed(tuner: Tuner) -> None:
    result = tuner("train", "tiny_lora_sample_e1", "--deepspeed", "zero2", "--dry-run", "--json")

    assert result.code == 0, result.err
    assert json.loads(result.out)["level"]["name"] == "deepspeed_zero2"


def test_a_name_is_looked_up_once_from_the_command_to_the_plan(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    find = catalog.find
    monkeypatch.setattr(catalog, "find", lambda name, *hidden: [names.append(name), find(name, *hidden)][1])

    assert tuner("train", "tiny_lora_sample_e3", "--dry-run").code == 0
    assert names == ["tiny_lora_sample_e3"]


@pytest.mark.parametrize("kind", [NameKind.FOLDER, NameKind.DATA, NameKind.MISSING, NameKind.UNKNOWN])
def test_what_is_no_recipe_is_one_error_for_every_command(tuner: Tuner, kind: NameKind) -> None:
    for text in KINDS[kind].split():
        with pytest.raises(TunerError) as caught:
            loading.load(text)

        of_models = ("plan",) if trainable.named(text) else ()  # it shows what a GPU trains of a model
        for command in {"show", "plan", "copy", "check"}.difference(of_models):
            result = tuner(command, text)
            assert result.code == 2
            assert caught.value.what in result.out + result.err
