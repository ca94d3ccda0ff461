from __future__ import annotations

from typing import Any

import pytest

from tuner.data import formats
from tuner.data.sample import Chat, Feedback, Pair, lacks


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "s"}
GPT = {"from": "gpt", "value": "good"}, {"from": "gpt", "value": "bad"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "good", "rejected": "bad"},
        {"question": "q", "chosen": "good", "rejected": "bad"},
        {"input": "q", "chosen": "good", "rejected": "bad"},
        {"prompt": [user("q")], "chosen": [bot("good")], "rejected": [bot("bad")]},
        {"prompt": "q", "chosen": [bot("good")], "rejected": [bot("bad")]},
        # ultrafeedback_binarized and orpo-dpo-mix-40k: whole conversations, with the prompt once more.
        {"prompt": "q", "chosen": [user("q"), bot("good")], "rejected": [user("q"), bot("bad")]},
        {"chosen": [user("q"), bot("good")], "rejected": [user("q"), bot("bad")]},
        {"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: q\n\nAssistant: bad"},
        # LLaMA-Factory: ShareGPT turns that end with the question, and one turn on each side.
        {"conversations": [{"from": "human", "value": "q"}], "chosen": GPT[0], "rejected": GPT[1]},
        {"prompt": "q", "response_0": "bad", "response_1": "good", "better_response_id": 1},
        {"prompt": "q", "response_0": "bad", "response_1": "good", "better_response_id": "1"},
        {"prompt": "q", "response_0": "good", "response_1": "bad", "better_response_id": 0},
    ],
)
def test_a_pair_in_any_of_its_shapes_is_a_prompt_and_two_answers(row: dict[str, Any]) -> None:
    name = formats.detect([row], "here", objective="dpo")

    assert formats.read_sample(name, row, "") == Pair([user("q")], [bot("good")], [bot("bad")])
    assert formats.read_sample("chosen", row, "") == Chat([user("q"), bot("good")])


@pytest.mark.parametrize("given", ["row", "turn"])
def test_a_pair_has_a_system_turn_from_its_column_or_its_conversation(given: str) -> None:
    whole = [SYSTEM] if given == "turn" else []
    row = {"chosen": [*whole, user("q"), bot("good")], "rejected": [*whole, user("q"), bot("bad")], "system": "s"}

    assert formats.read_sample("preference", row, "") == Pair([SYSTEM, user("q")], [bot("good")], [bot("bad")])


def test_a_text_prompt_is_followed_by_its_input_and_led_by_the_system_column() -> None:
    row = {"instruction": "Add.", "input": "1 2", "chosen": "3", "rejected": "4", "system": "s"}

    assert formats.read_sample("preference", row, "") == Pair([SYSTEM, user("Add.\n1 2")], [bot("3")], [bot("4")])


def test_turns_that_both_begin_with_are_the_prompt_up_to_the_last_that_is_not_the_assistant_s() -> None:
    shared = [user("q1"), bot("a1"), user("q2"), bot("same")]
    row = {"chosen": [*shared, user("q3"), bot("good")], "rejected": [*shared, user("other"), bot("bad"), user("x")]}

    assert formats.read_sample("preference", row, "") == Pair(
        [user("q1"), bot("a1"), user("q2")],
        [bot("same"), user("q3"), bot("good")],
        [bot("same"), user("other"), bot("bad")],
    )


def test_hh_conversations_differ_in_their_last_answer() -> None:
    start = "\n\nHuman: q1\n\nAssistant: a1\n\nlast line\n\nHuman: Human: q2"
    row = {"chosen": f"{start}\n\nAssistant: good", "rejected": f"{start}\n\nAssistant:"}

    pair = formats.read_sample("preference", row, "")

    assert pair == Pair([user("q1"), bot("a1\n\nlast line"), user("Human: q2")], [bot("good")], [bot("")])


def test_equal_answers_are_a_pair_that_teaches_nothing() -> None:
    same = [user("q"), bot("a")]

    pair = formats.read_sample("preference", {"chosen": same, "rejected": list(same)}, "")

    assert pair == Pair([user("q")], [bot("a")], [bot("a")])
    assert lacks(pair)


YES, NO = (True, 1, 1.0, "true", " TRUE ", "1"), (False, 0, "False", "0")


@pytest.mark.parametrize(("label", "is_good"), [(label, label in YES) for label in (*YES, *NO)], ids=str)
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "a"},
        {"prompt": [user("q")], "completion": [bot("a")]},
        {"messages": [user("q"), bot("a")]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    ],
)
def test_feedback_is_a_prompt_an_answer_and_a_label(row: dict[str, Any], label: Any, is_good: bool) -> None:
    assert formats.read_sample("feedback", {**row, "label": label}, "") == Feedback([user("q")], [bot("a")], is_good)


def test_feedback_on_a_conversation_means_its_last_answer() -> None:
    turns = [SYSTEM, user("q1"), bot("a1"), user("q2"), bot("a2"), user("q3")]
    tools = [{"type": "function", "function": {"name": "f"}}]

    feedback = formats.read_sample("feedback", {"messages": turns, "label": True, "tools": tools}, "")

    assert feedback == Feedback(turns[:4], [bot("a2")], True, tools)
