"""The generation metrics of a validation."""

from __future__ import annotations

import pytest

from tuner.worker.answer_metrics import answer_metrics


def test_right_answers_have_the_best_scores_and_wrong_ones_the_worst() -> None:
    right = ["The capital of France is Paris .", "two words and three more"]

    assert answer_metrics(right, right) == pytest.approx({"exact_match": 1, "rouge_l": 1, "bleu": 100})
    assert answer_metrics(["", "nothing"], right) == pytest.approx({"exact_match": 0, "rouge_l": 0, "bleu": 0})


def test_rouge_l_is_the_longest_common_subsequence_of_words() -> None:
    measured = answer_metrics(["police kill the gunman"], ["Police killed the gunman"])

    assert measured["rouge_l"] == pytest.approx(0.75)  # 3 of 4 words each way
    assert measured["exact_match"] == 0


def test_a_character_of_chinese_counts_as_a_word() -> None:
    measured = answer_metrics(["法国的首都是里昂"], ["法国的首都是巴黎"])

    assert measured["rouge_l"] == pytest.approx(6 / 8)
    assert measured["bleu"] == pytest.approx(68.04, abs=0.01)  # (6/8 x 5/7 x 4/6 x 3/5) ** (1/4)


def test_white_space_makes_no_answer_wrong() -> None:
    assert answer_metrics([" 4\n2 "], ["4 2"])["exact_match"] == 1
