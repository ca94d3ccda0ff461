"""ROLL's student and teacher become the objective distill; what it does otherwise is listed."""

from __future__ import annotations

import pytest

from tests.importers.test_roll_pipeline import translated, values_of
from tuner.importers.translation import Outcome

PIPELINE = {
    **{"student_pretrain": "small", "teacher_pretrain": "large", "sequence_length": 1024, "max_steps": 500},
    **{"question_key": "instruction", "answer_key": "output", "distill_loss_weight": 0.85, "logits_topk": 64},
    **{"kd_temperature": 2, "teacher_temperature": 2, "kd_objective": "js_divergence", "distill_on_prompt": False},
    "student": {
        "training_args": {"learning_rate": 2.0e-5, "per_device_train_batch_size": 2},
        "data_args": {"file_name": "rows.jsonl"},
        "strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3}}},
        "device_mapping": "list(range(0,8))",
    },
    "teacher": {"model_args": {"dtype": "bf16"}, "device_mapping": "list(range(0,8))"},
}


def test_a_students_pipeline_is_translated() -> None:
    translation = translated(PIPELINE)
    values = values_of(translation)

    assert (translation.objective, translation.obstacle) == ("distill", None)
    expected = {
        **{"objective.teacher": "large", "objective.beta": 0.5, "objective.temperature": 2},
        **{"train_cfg.max_steps": 500, "train_dataloader.dataset.max_length": 1024},
        "optim_wrapper.optimizer.lr": 2e-5,
    }
    assert {key: values[key] for key in expected} == expected


def test_what_tuner_does_otherwise_is_listed() -> None:
    entries = {entry.setting.key: entry for entry in translated(PIPELINE, {"teacher_temperature": 1}).entries}

    for key, outcome, text in (
        ("teacher_pretrain", Outcome.CHANGED, "completions that it writes itself"),
        ("distill_loss_weight", Outcome.CHANGED, "the divergence alone"),
        ("teacher_temperature", Outcome.CHANGED, "objective.temperature"),
        ("logits_topk", Outcome.LEFT_OUT, "all tokens"),
        ("teacher.device_mapping", Outcome.LEFT_OUT, "objective.teacher_bits"),
    ):
        assert entries[key].outcome is outcome and text in str(entries[key].why), key
    assert entries["teacher_pretrain"].is_learned and entries["distill_loss_weight"].is_learned


DIVERGENCES = [("forward_kl", 0.0), ("reverse_kl", 1.0), (None, 0.0), ("adaptive_kl", None)]


@pytest.mark.parametrize(("word", "beta"), DIVERGENCES)
def test_the_divergence_is_that_of_roll_or_is_named(word: str | None, beta: float | None) -> None:
    assert values_of(translated(PIPELINE, {"kd_objective": word})).get("objective.beta") == beta


def test_a_student_without_a_teacher_is_refused_by_name() -> None:
    assert "add teacher_pretrain" in str(translated(PIPELINE, {"teacher_pretrain": None}).obstacle)
