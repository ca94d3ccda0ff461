"""What rank 0 says and writes of the data before it trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import cache as cache
from tests.data.conftest import conversation, make_tokenizer
from tests.launch.plans import made
from tuner.data.prepare import prepare
from tuner.data.prepared import Prepared
from tuner.data.text_encoder import TextEncoder
from tuner.launch import render
from tuner.recipes.schema import RecipeConfig
from tuner.runs.directory import RunDirectory
from tuner.worker import rank_data


def prepared(
    tmp_path: Path, *rows: Any, sets: tuple[str, ...] = (), recipe: str = "tiny_full_custom_e1"
) -> tuple[RecipeConfig, Prepared, RunDirectory]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = (f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.max_length=64", *sets)
    plan = made(*values, recipe=recipe)
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    run.run_json.write_text(render.files(plan)["run.json"])
    config = plan.recipe.config
    dataset, encoder = config.train_dataloader.dataset, TextEncoder(make_tokenizer())
    return config, prepare(dataset, encoder, objective=config.objective.type), run


def test_a_run_leaves_word_of_its_rows_and_warns_of_those_it_does_not_train_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, found, run = prepared(tmp_path, conversation("one", "two"), conversation("one"))

    rank_data.show_data({"train": found}, run)

    (line,) = map(json.loads, (run.path / "data_report.jsonl").read_text().splitlines())
    assert (line["split"], line["what"], line["reason"]) == ("train", "dropped", "there is no answer")
    assert line["where"].endswith("rows.jsonl:2")
    assert run.read_json(run.data)["train"]["changes"] == [
        {"what": "dropped", "reason": "there is no answer", "samples": 1, "tokens": 0}
    ]
    assert "\nWARNING: some data is dropped or changed: train: 1 dropped: " in capsys.readouterr().out


def test_a_run_warns_of_keys_of_turns_and_weights_of_rows_that_it_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = conversation("one", "two")
    row["messages"][1]["mood"] = "calm"
    _, read, run = prepared(tmp_path, {**row, "source": "forum", "weight": 72.5}, row)

    rank_data.show_data({"train": read}, run)

    (warning,) = [json.loads(line)["warning"] for line in run.warnings.read_text().splitlines()]
    assert "'mood' of turns (2 rows" in warning
    assert "'weight'" in warning
    assert "source" not in warning
    assert "the column 'source' (1 row" in capsys.readouterr().out
    unread = run.read_json(run.data)["train"]["unread"]
    assert [(key["owner"], key["key"], key["rows"]) for key in unread] == [
        ("turn", "mood", 2),
        ("column", "source", 1),
        ("loss column", "weight", 1),
    ]


def _uncounted(run: RunDirectory) -> None:
    """Let the plan not know the number of samples, so that it has said nothing of few steps."""
    facts = run.read_json(run.run_json)
    run.run_json.write_text(json.dumps({**facts, "batch": {**facts["batch"], "samples": None}}))


def test_packed_rows_that_make_too_few_steps_are_told_with_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [conversation("one", "two")] * 40
    steps = ("train_dataloader.batch_size=1", "accumulative_counts=16", "train_dataloader.dataset.packing=True")
    config, found, run = prepared(tmp_path, *rows, sets=steps)

    rank_data.warn_of_few_steps(config, found, run)
    assert capsys.readouterr().out == "", "the plan has said it"
    _uncounted(run)
    rank_data.warn_of_few_steps(config, found, run)

    counts, told = found.counts, capsys.readouterr().out
    packed = f"40 samples packed into {counts.packed_rows} rows of 64 tokens, global batch 16, 1 epoch"
    assert told.startswith(f"WARNING: This run makes only 1 optimizer step ({packed})")
    assert "--set train_dataloader.dataset.packing=False (3 steps)" in told


@pytest.mark.parametrize(
    ("num_prompts", "sets", "counts"),
    [
        (4, ("train_cfg.max_epochs=6",), "24 optimizer steps (32 samples, global batch 8, 6 epochs)"),
        (3, ("train_cfg.max_epochs=1", "num_iterations=9"), "27 optimizer steps (24 samples"),  # as the plan counts
    ],
    ids=["each once", "each nine times"],
)
def test_steps_on_generated_completions_are_counted_by_completions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_prompts: int, sets: tuple[str, ...], counts: str
) -> None:
    one_step = ("train_dataloader.batch_size=8", "accumulative_counts=1", *sets)
    prompts = [{"prompt": f"{number} + 1 ="} for number in range(num_prompts)]
    config, found, run = prepared(tmp_path, *prompts, sets=one_step, recipe="tiny_grpo_full_custom_e6")
    _uncounted(run)

    rank_data.warn_of_few_steps(config, found, run)

    assert f"makes only {counts}" in capsys.readouterr().out


def test_a_warm_up_that_is_longer_than_the_run_is_told_once_its_steps_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [conversation("one", "two")] * 40
    sets = ("train_dataloader.batch_size=1", "accumulative_counts=1", "train_dataloader.dataset.packing=False")
    config, found, run = prepared(tmp_path, *rows, sets=(*sets, "warmup_steps=50"))

    rank_data.warn_of_few_steps(config, found, run)
    assert capsys.readouterr().out == "", "the plan has said it"
    _uncounted(run)
    rank_data.warn_of_few_steps(config, found, run)

    assert "warm-up takes 50 steps and the run 40" in capsys.readouterr().out
