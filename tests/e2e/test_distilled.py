"""Distillation from the command line: any number of ranks trains the same, and the student comes closer to its teacher.

The runs that are compared have a teacher with another vocabulary; tests/faults/test_signals.py resumes one with the
same. Their reports are read too: the completions, and a verdict by the loss.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import tuner
from tests.e2e.test_generated import RANKS, lines, resumed, train
from tests.worker.test_distill import teachers
from tuner.models.load import pretrained_path
from tuner.recipes.loading import load

RUN = (
    *("tiny_distill_full_sample_e1", "--set", "teacher=teacher", "--lr", "1e-3", "--val-split", "0.02"),
    *("--set", "max_completion_length=12", "--set", "global_batch_size=16", "--set", "val_dataloader.batch_size=8"),
    *("--save-every", "2", "--max-steps", "4"),
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the run `teacher`, and students of a teacher with another vocabulary.

    `one` has one rank and accumulates; `two` has two ranks at ZeRO-3; `again` is `two`, resumed from step 2.
    """
    folder = tmp_path_factory.mktemp("runs")
    train(
        folder, "tiny_full_sample_e1", "--lr", "3e-3", "--max-steps", "30", "--val-split", "0", "--work-dir", "teacher"
    )
    torch.manual_seed(3)
    teachers(folder / "other")
    other = (*RUN, "--set", "teacher=other", "--set", "vocabulary_matching=hybrid", "--set", "teacher_bits=4")
    split = ("--set", "train_dataloader.batch_size=4", "--set", "accumulative_counts=4")
    train(folder, *other, "--work-dir", "one", *split)
    train(folder, *other, "--work-dir", "two", *RANKS)
    resumed(folder, "two", last_step=4)
    return folder


@pytest.mark.long
def test_one_rank_that_accumulates_and_two_at_zero_3_train_the_same_on_a_teacher_in_4_bits(runs: Path) -> None:
    first, second = (lines(runs / name, "completions.jsonl") for name in ("one", "two"))

    assert [line["completion"] for line in first] == [line["completion"] for line in second]
    assert len({line["completion"] for line in first}) > len(first) / 2, "they are sampled"
    losses = {"loss": 0, "grad_norm": 0, "eval_loss": 0}
    for line, other in zip(lines(runs / "one"), lines(runs / "two"), strict=True):
        for key in losses.keys() & line.keys():
            assert line[key] == pytest.approx(other[key], abs=2e-5), key
            losses[key] += 1
    assert losses == {"loss": 4, "grad_norm": 4, "eval_loss": 2}


@pytest.mark.long
def test_a_resumed_run_ends_with_the_same_bytes(runs: Path) -> None:
    for name in ("final/model.safetensors", "completions.jsonl"):
        assert (runs / "again" / name).read_bytes() == (runs / "two" / name).read_bytes()


@pytest.mark.long
def test_an_evaluation_measures_what_the_last_validation_measured(runs: Path) -> None:
    last = [line["eval_loss"] for line in lines(runs / "two") if "eval_loss" in line][-1]

    metrics = tuner.evaluate(runs / "two", batch_size=8).metrics

    assert metrics["divergence"] == pytest.approx(last, rel=1e-4)


@pytest.mark.long
def test_the_report_shows_the_completions(runs: Path) -> None:
    report = (runs / "two" / "report.html").read_text()

    assert json.dumps(lines(runs / "two", "completions.jsonl")[0]["completion"])[1:6] in report


@pytest.mark.long
def test_a_student_comes_closer_to_its_teacher_on_answers_that_it_has_not_seen(runs: Path) -> None:
    settings = ("--lr", "3e-3", "--set", "global_batch_size=32", "--max-steps", "30")
    train(runs, *RUN, *settings, "--work-dir", "student")

    losses = [line["eval_loss"] for line in lines(runs / "student") if "eval_loss" in line]
    assert losses[-1] < losses[0] - 0.3
    start = pretrained_path(load("tiny_full_sample_e1").config.model)
    before, after = (apart(student, runs) for student in (start, str(runs / "student" / "final")))
    assert after < before / 2


def apart(student: str, runs: Path) -> float:
    """Return the mean KL divergence of a student from its teacher over the tokens of the validation's right answers."""
    load_from = transformers.AutoModelForCausalLM.from_pretrained
    models = [load_from(path, dtype=torch.float32).eval() for path in (student, str(runs / "teacher" / "final"))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(runs / "teacher" / "final")
    divergences = []
    for row in lines(runs / "student", "samples.jsonl"):
        question = [{"role": "user", "content": row["prompt"].rpartition("user: ")[2]}]
        prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
        start, ids = len(tokenizer(prompt).input_ids), tokenizer(prompt + row["right"]).input_ids
        with torch.no_grad():
            ours_TV, theirs_TV = (
                model(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1) for model in models
            )
        divergences.append((ours_TV.exp() * (ours_TV - theirs_TV)).sum(-1))
    return float(torch.cat(divergences).mean())
