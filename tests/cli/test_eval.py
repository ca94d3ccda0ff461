"""`tuner eval`: figures for people and for programs, new files only, and refusals before a model is loaded."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from tests.cli.command import Tuner
from tests.results.made import make_result

ROWS = ({"instruction": "Why?", "output": "Because."}, {"instruction": "One?", "output": "Two, or three."})


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return tmp_path / "rows.jsonl"


def test_a_model_is_judged_on_the_users_rows(tuner: Tuner, rows: Path) -> None:
    told = tuner("eval", "package:tiny", "--data", rows)
    value = json.loads(tuner("eval", "package:tiny", "--data", rows, "--json", "--batch-size", 2).out)

    assert (value["source"], value["objective"], value["bits"]) == ("the model package:tiny", "sft", 16)
    assert value["counts"]["read"] == 2 and value["sets"][0]["format"] == "alpaca"
    metrics = value["metrics"]
    assert metrics["perplexity"] == pytest.approx(math.exp(metrics["loss"]))
    assert f"{metrics['loss']:.4g}" in told.out and "perplexity" in told.out


def test_a_run_is_judged_by_its_objective_on_its_validation_rows(tuner: Tuner, tmp_path: Path) -> None:
    make_result(tmp_path / "run", "tiny_dpo_lora_sample_preferences_e1", "val_dataloader.dataset.max_rows=5")

    value = json.loads(tuner("eval", tmp_path / "run", "--json", "--max-rows", 3).out)

    assert value["objective"] == "dpo" and value["counts"]["kept"] == 3
    assert {"loss", "rewards/accuracies", "rewards/margins"} <= value["metrics"].keys()


def test_answers_go_to_a_new_file(tuner: Tuner, rows: Path, tmp_path: Path) -> None:
    given = ("eval", "package:tiny", "--data", rows, "--generate", 2, "--out", tmp_path / "answers.jsonl")
    result = tuner(*given, "--max-new-tokens", 3)

    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(line["prompt"], line["right"]) for line in lines] == [("Why?", "Because."), ("One?", "Two, or three.")]
    assert result.code == 0 and "answers.jsonl" in result.out
    again = tuner(*given)
    assert again.code == 2 and "already exists" in again.err
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("package:tiny",), 2, "has no validation data"),
        (("package:tiny", "--data", "gone.jsonl"), 2, "gone.jsonl"),
        (("package:tiny", "--generate", "2"), 2, "--generate and --out need each other"),
        (("package:tiny", "--generate", "2", "--out", "gone/a.jsonl"), 2, "the folder of"),
        (("package:tiny", "--tasks", ","), 2, "no task is given"),
        (("package:tiny", "--tasks", "arc_easy"), 3, "pip install 'tuner-deepspeed[eval]'"),
    ],
)
def test_what_cannot_be_judged_is_one_line(
    arguments: tuple[str, ...], code: int, words: str, tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("tuner.results.loaded_model.load_weights", None)  # refused before

    result = tuner("eval", *arguments)

    assert (result.code, result.out) == (code, "")
    assert len(result.messages) == 1 and words in result.messages[0]
