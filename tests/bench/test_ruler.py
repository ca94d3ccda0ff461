"""The ruler's losses are those of transformers itself, and its weights of a step are the ones that the step left."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, TrainerControl, TrainerState

from bench import ruler
from bench.clock import bench_clock
from bench.jobs import make_model, of_catalog

ROWS = [("How many?", "Two."), ("Which colour is it?", "It is as green as grass."), ("Where?", "Here.")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), of_catalog("tiny"))


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    turns = [({"role": "user", "content": asks}, {"role": "assistant", "content": says}) for asks, says in ROWS]
    (tmp_path / "val.jsonl").write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in turns))
    return tmp_path / "val.jsonl"


def test_the_loss_is_transformers_own_over_the_answers_tokens(model: Path, held_out: Path) -> None:
    measuring = ruler.Ruler(model, held_out)
    figures, _ = measuring.measure(model, {})

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    total = 0.0
    for turn in measuring.turns:
        ids = torch.tensor([[*turn.prompt, *turn.answer]])
        labels = torch.tensor([[*[-100] * len(turn.prompt), *turn.answer]])
        with torch.no_grad():
            total += float(network(input_ids=ids, labels=labels).loss) * len(turn.answer)
    tokens = sum(len(turn.answer) for turn in measuring.turns)
    assert figures["loss"] == pytest.approx(total / tokens, rel=1e-4)


def test_an_answer_ends_with_the_token_that_ends_a_turn(model: Path, held_out: Path) -> None:
    measuring = ruler.Ruler(model, held_out)

    for turn, (_, says) in zip(measuring.turns, ROWS, strict=True):
        assert turn.answer[-1] == measuring.tokenizer.eos_token_id
        assert measuring.tokenizer.decode(turn.answer[:-1]).strip() == says


def test_a_model_prefers_no_answer_more_than_it_did_before(model: Path, tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text(json.dumps({"prompt": "How?", "chosen": "So.", "rejected": "No."}) + "\n")

    figures, _ = ruler.Ruler(model, tmp_path / "pairs.jsonl").measure(model, {})

    assert figures["dpo_loss"] == pytest.approx(math.log(2)) and figures["preferred"] == 0


def test_rows_of_about_one_length_go_together_and_none_is_left_out() -> None:
    lengths = [700, 3, 2000, 500, 4, 500]

    batches = list(ruler._batches(lengths))

    assert batches == [[1, 4], [3, 5], [0], [2]]
    assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= 1024 for batch in batches)


def test_an_answer_is_read_up_to_its_end() -> None:
    def decode(tokens: list[int]) -> str:
        return " ".join(map(str, tokens))

    assert ruler.answered(decode, [5, 6, 0, 7], end=0) == "5 6"
    assert ruler.answered(decode, [5, 6], end=0) == "5 6"


def test_the_weights_of_a_step_are_written_and_measured(
    model: Path, held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BENCH_CLOCK", str(tmp_path / "clock.jsonl"))
    monkeypatch.setenv("BENCH_SNAPSHOTS", str(tmp_path / "snapshots"))
    monkeypatch.setattr(bench_clock, "_steps", 0)
    monkeypatch.setattr(bench_clock, "_began", 0.0)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    state, control = TrainerState(max_steps=8), TrainerControl()

    for _ in range(8):
        with torch.no_grad():
            network.get_input_embeddings().weight.mul_(0.5)
        bench_clock.tick(network, state, control)

    folders = {int(folder.name): folder for folder in (tmp_path / "snapshots").iterdir()}
    assert sorted(folders) == [1, 2, 4, 6] and not control.should_training_stop
    measuring = ruler.Ruler(model, held_out)
    _, curve = measuring.measure(model, folders)
    whole, _ = measuring.measure(model, {})
    assert len({round(figures["loss"], 5) for figures in (*curve.values(), whole)}) == 5


def test_training_stops_after_the_seconds_that_it_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_CLOCK", str(tmp_path / "clock.jsonl"))
    monkeypatch.setenv("BENCH_STOP_S", "0")
    monkeypatch.setattr(bench_clock, "_steps", 0)
    monkeypatch.setattr(bench_clock, "_began", 0.0)
    control = TrainerControl()

    bench_clock.tick(torch.nn.Linear(1, 1), TrainerState(max_steps=8), control)

    assert control.should_training_stop
