"""What is measured on rows equals what follows from the definition, whatever the batches."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.machine.gpus import CPU
from tests.refused import refused
from tests.results.made import make_result
from tuner.data.prepare import prepare
from tuner.data.prepared import Prepared
from tuner.errors import DataError, ModelError, TunerError, UsageError
from tuner.models.load import load_model, pretrained_path
from tuner.recipes.loading import load as load_recipe
from tuner.recipes.schema import Dataset
from tuner.results.evaluate import Wanted, evaluate, generations, judged, likelihood, questions, rows_of
from tuner.results.export import Options, export
from tuner.results.loaded_model import LoadedModel, encoder_of, load, spec_of
from tuner.results.saved import find
from tuner.worker.generation import Answer, Settings

FEW = ("val_dataloader.dataset.max_rows=7",)


def result(folder: Path, recipe: str, *sets: str) -> LoadedModel:
    run, _ = make_result(folder / "run", recipe, *sets)
    return load(spec_of(str(run.path), None), CPU)


def prepared(found: LoadedModel, **asked: Any) -> Prepared:
    return prepare(rows_of(found.spec, **asked), found.encoder, objective=found.spec.objective)


def logits(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0].float()
    return found


def logp(model: Any, ids: list[int], labels: list[int]) -> float:
    """The log-probability of the trained tokens of one sequence."""
    each = F.log_softmax(logits(model, ids)[:-1], dim=-1)
    return sum(float(each[at, label]) for at, label in enumerate(labels[1:]) if label != -100)


def test_the_loss_is_the_mean_over_trained_tokens_whatever_the_batches(tmp_path: Path) -> None:
    found = result(tmp_path, "tiny_lora_sample_e1", "val_dataloader.dataset.packing=False", *FEW)
    rows = prepared(found)
    by_hand = -sum(logp(found.model, row["input_ids"], row["labels"]) for row in rows.dataset) / (
        rows.counts.trained_tokens
    )

    packed = rows_of(found.spec).model_copy(update={"packing": True})
    for batch_size, some in ((1, rows), (3, rows), (2, prepare(packed, found.encoder, objective="sft"))):
        measured = likelihood(found, some, batch_size)
        assert measured["loss"] == pytest.approx(by_hand, rel=1e-5)
        assert measured["perplexity"] == pytest.approx(math.exp(by_hand), rel=1e-4)
        assert measured["tokens"] == rows.counts.trained_tokens


def test_a_loss_that_is_no_number_is_an_error(tmp_path: Path) -> None:
    found = result(tmp_path, "tiny_full_sample_e1", *FEW)
    next(found.model.parameters()).data.fill_(math.nan)

    with pytest.raises(TunerError, match=r"the loss of .* is nan"):
        likelihood(found, prepared(found), 1)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_dpo_is_judged_against_the_model_that_training_began_with(method: str, tmp_path: Path) -> None:
    found = result(tmp_path, f"tiny_dpo_{method}_sample_preferences_e1", "beta=0.3", *FEW)
    recipe = found.spec.recipe
    assert recipe is not None
    if method == "full":  # the same weights as those it began with would have no rewards
        found.model.model.layers[0].mlp.down_proj.weight.data *= 3
    start = load_recipe("tiny_full_sample_preferences_e1").config
    base = load_model(start, pretrained_path(start.model), torch.float32, "cpu", shards=False).eval()
    rows = prepared(found)
    sides = [[(row[f"{side}_ids"], row[f"{side}_labels"]) for side in ("chosen", "rejected")] for row in rows.dataset]
    rewards = [[0.3 * (logp(found.model, *side) - logp(base, *side)) for side in both] for both in sides]
    margins = torch.tensor([chosen - rejected for chosen, rejected in rewards])

    for batch_size in (1, 4):  # 7 rows: a batch of 4 and one of 3
        measured = judged(found, recipe, rows, batch_size, CPU)
        assert measured["loss"] == pytest.approx(float(-F.logsigmoid(margins).mean()), rel=1e-4)
        assert measured["rewards/accuracies"] == pytest.approx(float((margins > 0).float().mean()))
        assert measured["rewards/margins"] == pytest.approx(float(margins.mean()), rel=1e-3, abs=1e-5)


def test_a_reward_model_is_judged_by_the_pairs_that_it_orders_right(tmp_path: Path) -> None:
    found = result(tmp_path, "tiny_reward_lora_sample_preferences_e1", *FEW)
    assert found.spec.recipe is not None
    rows = prepared(found)
    scores = [
        [float(logits(found.model, row[f"{side}_ids"])) for side in ("chosen", "rejected")] for row in rows.dataset
    ]

    for batch_size in (1, 4):
        measured = judged(found, found.spec.recipe, rows, batch_size, CPU)
        right = sum(chosen > rejected for chosen, rejected in scores) / len(scores)
        assert measured["accuracy"] == pytest.approx(right)


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_reward_model_without_its_run_has_the_metrics_that_it_has_with_it(method: str, tmp_path: Path) -> None:
    found = result(tmp_path / "run", f"tiny_reward_{method}_sample_preferences_e1", *FEW)
    assert found.spec.recipe is not None
    saved = found.spec.adapter or Path(found.spec.path)
    alone = str(shutil.copytree(saved, tmp_path / "alone"))
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "Two and two?", "chosen": "Four.", "rejected": "Five."}\n' * 2)

    measured = evaluate(alone, Wanted(data=str(pairs)), CPU)

    rows = prepare(rows_of(found.spec, str(pairs)), found.encoder, objective="reward")
    with_run = judged(found, found.spec.recipe, rows, 1, CPU)
    assert spec_of(alone, None).recipe is None
    assert {"accuracy", "margin", "loss"} <= measured.metrics.keys()
    assert measured.metrics == pytest.approx(with_run)


@pytest.mark.parametrize("objective", ["orpo", "kto"])
def test_every_other_objective_is_judged_by_its_trainer(objective: str, tmp_path: Path) -> None:
    found = result(tmp_path, f"tiny_{objective}_lora_sample_preferences_e1", *FEW)
    assert found.spec.recipe is not None

    measured = judged(found, found.spec.recipe, prepared(found), 4, CPU)

    assert {"loss", "rewards/chosen", "rewards/rejected", "rewards/margins"} <= measured.keys()
    assert all(math.isfinite(value) for value in measured.values())


@pytest.mark.parametrize("known_by", [{"packs_with": "sdpa"}, {"trust_remote_code": True}])
def test_samples_that_no_test_knows_to_stay_apart_share_no_row(tmp_path: Path, known_by: dict[str, Any]) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1")
    spec = spec_of(str(run.path), None)
    assert spec.recipe is not None
    changed = spec.recipe.model_copy(update={"model": spec.recipe.model.model_copy(update=known_by)})

    of_run, of_user = (rows_of(replace(spec, recipe=changed), data) for data in (None, "mine.jsonl"))

    assert rows_of(spec).packing and not of_run.packing and not of_user.packing


def test_the_users_rows_take_the_place_of_the_recipes_own(tmp_path: Path) -> None:
    found = result(tmp_path, "tiny_full_sample_e1")

    block = rows_of(found.spec, "mine.jsonl", "alpaca", "test", 5)

    expected = {"path": "mine.jsonl", "format": "alpaca", "split": "test", "max_rows": 5, "max_length": 256}
    assert block.model_dump(include=set(expected)) == expected
    assert rows_of(found.spec, max_rows=3).path.endswith("validation.jsonl")


def test_max_rows_counts_the_held_out_rows_of_a_run(tmp_path: Path) -> None:
    held = ("val_dataloader=None", "val_split=0.07")
    found = result(tmp_path, "tiny_full_sample_e1", *held)

    all_rows, few = prepared(found).counts.read, prepared(found, max_rows=3).counts.read

    assert (all_rows > 10, few) == (True, 3)


def test_rows_are_asked_for_where_there_are_none(tmp_path: Path) -> None:
    found = result(tmp_path, "tiny_full_sample_e1", "val_dataloader=None")

    with refused(UsageError, "--data"):
        rows_of(found.spec)


def test_generations_stand_beside_the_right_answers(tmp_path: Path) -> None:
    found = result(tmp_path, "tiny_full_sample_e1")

    asked = questions(found.spec, found.encoder, rows_of(found.spec), 3)
    lines = generations(found, asked, Settings(4, temperature=0))

    assert len(lines) == 3
    for line in lines:
        assert line["prompt"] and line["right"] and line["tokens"] <= 4
        assert line["answer"] != line["right"]


def test_a_question_is_asked_with_the_tools_of_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = result(tmp_path, "tiny_full_sample_e1")
    tokenizer = found.encoder.library_object
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + tokenizer.chat_template
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "Rain?"}, {"role": "assistant", "content": "No."}]
    rows.write_text(json.dumps({"messages": turns, "tools": [{"name": "weather", "parameters": {}}]}) + "\n")
    seen: list[str] = []

    def noted(loaded: Any, ids_BT: Any, *_: Any, **__: Any) -> Answer:
        seen.append(loaded.encoder.decode(ids_BT[0].tolist()))
        return Answer("", 0, True)

    monkeypatch.setattr("tuner.results.evaluate.answer", noted)

    generations(found, questions(found.spec, found.encoder, rows_of(found.spec, str(rows)), 1), Settings(4))

    assert len(seen) == 1 and "weather" in seen[0]


def test_what_cannot_be_asked_generates_nothing(tmp_path: Path) -> None:
    found = result(tmp_path, "tiny_full_sample_e1")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "Some text."}) + "\n")
    plain = Dataset(path=str(tmp_path / "text.jsonl"), format="text", max_length=64, packing=False)
    scores = result(tmp_path / "scores", "tiny_reward_full_sample_preferences_e1")

    long = tmp_path / "long.jsonl"
    long.write_text("".join(json.dumps({"instruction": "why " * n, "output": "So."}) + "\n" for n in (1, 2000)))

    with pytest.raises(DataError):
        questions(found.spec, found.encoder, plain, 1)
    with pytest.raises(ModelError, match="scores answers and writes none"):
        questions(scores.spec, scores.encoder, rows_of(scores.spec), 1)
    with pytest.raises(UsageError, match=r"a prompt has [\d,]+ tokens, and the model's context has 512"):
        questions(found.spec, found.encoder, rows_of(found.spec, str(long)), 2)


def test_questions_are_spread_evenly_over_the_rows_and_no_more_than_there_are(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"instruction": f"{n}?", "output": "So."}) + "\n" for n in range(7)))
    spec = spec_of("package:tiny", None)
    block, encoder = rows_of(spec, str(rows)), encoder_of(spec)

    asked = [
        [question.messages[0]["content"] for question in questions(spec, encoder, block, count)] for count in (4, 9)
    ]

    assert asked == [["0?", "1?", "3?", "5?"], [f"{n}?" for n in range(7)]]


@pytest.mark.parametrize(
    ("recipe", "has_note"), [("tiny_dpo_full_sample_preferences_e1", True), ("tiny_full_sample_e1", False)]
)
def test_an_exported_model_says_which_loss_of_its_run_is_not_measured(
    recipe: str, has_note: bool, tmp_path: Path
) -> None:
    run, _ = make_result(tmp_path / "run", recipe)
    export(find(run.path), tmp_path / "out", Options())
    pairs, told = Wanted(data="package:sample_preferences/validation.jsonl", max_rows=4), list[str]()
    wanted = pairs._replace(row_format="chosen")
    with pytest.raises(DataError, match=r"tuner eval RUN\. .* --format chosen"):
        evaluate(str(tmp_path / "out"), pairs, CPU)

    done = evaluate(str(tmp_path / "out"), wanted, CPU, tell=told.append)

    assert (done.rows["objective"], "note" in done.to_json()) == ("sft", has_note)
    assert len(told) == 1 + has_note
    if has_note:
        told.clear()
        assert "note" not in evaluate(str(run.path), pairs, CPU, tell=told.append).to_json() and len(told) == 1
