from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.refused import refused
from tuner.data import formats
from tuner.data.sample import Chat, Feedback, Pair, Sample, lacks
from tuner.data.sample_kinds import WrongKind, for_objective, kinds_of
from tuner.errors import DataError
from tuner.recipes.schema.objectives import OBJECTIVES

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
BETTER, WORSE = {"role": "assistant", "content": "good"}, {"role": "assistant", "content": "bad"}
SYSTEM = {"role": "system", "content": "Be brief."}
HH = {"chosen": "\n\nHuman: q\n\nAssistant: good", "rejected": "\n\nHuman: q\n\nAssistant: bad"}


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [USER, ANSWER]}, "messages"),
        ({"conversations": [USER, ANSWER]}, "messages"),
        ({"messages": None}, "messages"),
        ({"conversations": [{"from": "human", "value": "q"}]}, "sharegpt"),
        ({"conversations": [{"role": "human", "value": "q"}]}, "sharegpt"),
        ({"conversations": '[{"from": "human", "value": "q"}]'}, "sharegpt"),
        # Parquet gives every turn the keys of all turns.
        ({"conversations": [{"from": None, "value": None, "role": "user", "content": "q"}]}, "messages"),
        ({"conversation": [{"input": "q", "output": "a"}]}, "rounds"),
        ({"conversation": [{"human": "q", "assistant": "a"}]}, "rounds"),
        ({"text": "### Human: q### Assistant: a"}, "oasst1"),
        ({"text": "plain"}, "text"),
        ({"text": "plain", "messages": [USER, ANSWER]}, "messages"),
        ({"instruction": "q", "input": "", "output": "a", "text": "all of it"}, "alpaca"),
        ({"instruction": "q", "response": "a"}, "alpaca"),
        ({"query": "q", "response": "a"}, "alpaca"),
        ({"prompt": "q", "response": "a"}, "alpaca"),
        ({"question": "q", "answer": "a"}, "alpaca"),
        ({"problem": "q", "solution": "a", "answer": "3"}, "alpaca"),
        ({"prompt": "q", "completion": "a"}, "prompt_completion"),
        ({"prompt": "q", "completion": "a", "label": True}, "feedback"),
        ({"prompt": "q", "completion": "a", "label": "chemistry"}, "prompt_completion"),
        ({"messages": [USER, ANSWER], "label": 0}, "feedback"),
        ({"messages": [USER, ANSWER], "label": 3}, "messages"),
        (HH, "preference"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "preference"),
        ({"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 0}, "better_response"),
        ({"chat": {"turn_1": {"Human": "q", "MOSS": "a"}}}, "moss"),
        ({"conversations": [{"from": "assistant", "value": "<|startofthink|>..."}]}, "msagent"),
    ],
)
def test_the_format_is_detected_from_columns_and_first_words(row: dict[str, Any], name: str) -> None:
    assert formats.detect([row], "here") == name


def test_a_text_column_is_oasst1_only_if_every_first_row_is() -> None:
    assert formats.detect([{"text": "### Human: q### Assistant: a"}, {"text": "plain"}], "here") == "text"


def test_where_the_first_rows_have_no_format_in_common_the_first_that_has_one_decides() -> None:
    assert formats.detect([{"question": "q", "answer": "a"}, {"note": "x"}], "here") == "alpaca"
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    assert formats.detect([{"conversations": []}, {"conversations": turns}], "here") == "sharegpt"


@pytest.mark.parametrize(
    ("row", "objective", "name"),
    [
        ({"messages": [USER, ANSWER], "chosen": [USER, BETTER], "rejected": [USER, WORSE]}, "sft", "messages"),
        ({"messages": [USER, ANSWER], "chosen": [USER, BETTER], "rejected": [USER, WORSE]}, "dpo", "preference"),
        ({"messages": [USER, ANSWER], "label": True}, "sft", "messages"),
        ({"messages": [USER, ANSWER], "label": True}, "kto", "feedback"),
        # What no objective of the run learns from is named all the same: the row's own error says more.
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, "sft", "preference"),
    ],
)
def test_of_several_formats_the_one_that_the_objective_learns_from_is_meant(
    row: dict[str, Any], objective: str, name: str
) -> None:
    assert formats.detect([row], "here", objective=objective) == name


def test_ambiguous_columns_say_which_formats_could_be_meant() -> None:
    with refused(DataError, "here") as caught:
        formats.detect([{"prompt": "q", "completion": "a", "response": "b"}], "here")
    assert [name for name in formats.FORMATS if f"'{name}'" in (caught.value.fix or "")] == [
        "alpaca",
        "prompt_completion",
    ]


def test_unknown_columns_are_listed_with_the_known_formats() -> None:
    with refused(DataError, "here") as caught:
        formats.detect([{"picture": "q", "caption": "a"}], "here")

    assert all(name in str(caught.value) for name in formats.FORMATS)


def test_misspelt_columns_name_the_nearest_format_and_what_it_needs() -> None:
    with refused(DataError, "here") as caught:
        formats.detect([{"instrution": "q", "outptu": "a"}], "here")
    assert all(name in (caught.value.fix or "") for name in ("'alpaca'", "'instruction'", "'output'"))


def test_detection_looks_at_the_renamed_columns() -> None:
    row = {"better": "a", "worse": "b", "ask": "q"}
    columns = {"prompt": "ask", "chosen": "better", "rejected": "worse"}

    assert formats.detect([row], "here", columns=columns) == "preference"


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("messages", {"messages": None}, "'messages' is null, not a list"),
        ("messages", {"messages": "hi"}, "of type str, not a list"),
        ("messages", {"messages": [USER, "hi"]}, "turn 2 is of type str"),
        ("messages", {"messages": [USER, {"role": "asistant", "content": "a"}]}, "did you mean 'assistant'?"),
        ("messages", {"messages": [USER, {"role": "assistant", "content": None}]}, "content of turn 2 is null"),
        ("messages", {"messages": [USER, {"role": "assistant"}]}, "turn 2 has no 'content', only role"),
        ("messages", {"messages": [{**USER, "content": [{"type": "image_url"}]}, ANSWER]}, "'image_url'"),
        ("messages", {"messages": [{**USER, "content": "\ud83d"}, ANSWER]}, "surrogate"),
        ("messages", {"messages": [USER, ANSWER], "tools": "{"}, "its tools is no JSON"),
        ("messages", {"messages": [USER, {**ANSWER, "tool_calls": "add(1)"}]}, "tool_calls of turn 2 is no JSON"),
        ("messages", {"message": [USER, ANSWER]}, "no column 'messages' (did you mean 'message'?)"),
        ("sharegpt", {"conversations": [{"from": "martian", "value": "a"}]}, "unknown role 'martian' (known: "),
        ("rounds", {"conversation": [{"input": "q"}]}, "turn 1 has no 'output', only input"),
        ("alpaca", {"instruction": "q", "output": None}, "output is null, not text"),
        ("alpaca", {"instruction": 3, "output": "a"}, "instruction is of type int"),
        ("alpaca", {"instruction": "q", "output": "a", "response": "b"}, "'instruction' and 'output' or 'instruction'"),
        ("alpaca", {"instruction": "q", "output": "a", "history": ["q"]}, "item 1 of its history is not a question"),
        ("prompt_completion", {"prompt": [USER, ANSWER], "completion": "a"}, "'prompt' ends with the assistant's turn"),
        ("prompt_completion", {"prompt": [], "completion": "a"}, "'prompt' is an empty list"),
        ("oasst1", {"text": "Hello ### Human: q### Assistant: a"}, "does not start with '### Human:'"),
        ("text", {"text": None}, "text is null"),
        ("moss", {"chat": []}, "'chat' is of type list, not an object"),
        ("moss", {"chat": {"turn_1": "hi"}}, "turn_1 is of type str, not an object"),
        ("preference", {"chosen": "a", "rejected": "b"}, "no column 'prompt'"),
        ("preference", {"chosen": [USER], "rejected": [USER, WORSE]}, "'chosen' has no assistant turn"),
        ("preference", {"chosen": [USER, BETTER], "rejected": [SYSTEM, WORSE]}, "do not begin with the same turns"),
        (
            "better_response",
            {"prompt": "q", "response_0": "a", "response_1": "b", "better_response_id": 2},
            "is 2, not",
        ),
        ("feedback", {"prompt": "q", "completion": "a", "label": "good"}, "label is 'good', not true, false, 1 or 0"),
        ("feedback", {"messages": [USER], "label": True}, "'completion' has no assistant turn"),
    ],
)
def test_a_row_without_its_format_s_shape_is_refused_with_its_place(name: str, row: dict[str, Any], says: str) -> None:
    with refused(DataError, "rows.jsonl:7") as caught:
        formats.read_sample(name, row, "rows.jsonl:7")

    assert says in str(caught.value)
    assert f"its columns are {', '.join(row)}" in str(caught.value)


def test_a_misfit_names_the_format_that_would_fit() -> None:
    with refused(DataError, "x") as caught:
        formats.read_sample(
            "rounds", {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "x"
        )
    assert "format='sharegpt'" in (caught.value.fix or "")


def test_an_unknown_format_names_the_nearest() -> None:
    with refused(DataError, "dataset.format") as caught:
        formats.read_sample("alpacca", {}, "x")
    assert "'alpaca'" in (caught.value.fix or "")


WORDS = st.sampled_from(["", "q", "### Human: a### Assistant: b", "\n\nHuman: x\n\nAssistant: y", "[1]", "{", "user"])
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS
KEYS = st.sampled_from(["role", "content", "from", "value", "input", "output", "tool_calls", "function", "turn_1"])
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=8)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(formats.FORMATS)), st.data())
def test_whatever_a_row_holds_it_is_read_or_refused_as_data(name: str, data: st.DataObject) -> None:
    row = data.draw(st.dictionaries(st.sampled_from(formats.FORMATS[name].columns), VALUES, min_size=1))

    for act in (lambda: formats.read_sample(name, row, "rows.jsonl:7"), lambda: formats.detect([row], "rows.jsonl")):
        try:
            act()
        except DataError as error:
            assert str(error.where).startswith("rows.jsonl")


def test_text_that_looks_like_code_stays_text() -> None:
    text = "{{ 7 * 7 }} {% raise %} __import__('os')"

    assert formats.read_sample("text", {"text": text}, "") == text


def test_a_system_turn_is_given_to_conversations_that_have_none() -> None:
    own = {"role": "system", "content": "Mine."}
    pair, feedback = {"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "completion": "a", "label": 1}

    bare, whole, paired, rated = (
        formats.read_sample(name, row, "x", system="Be brief.")
        for name, row in [
            ("messages", {"messages": [USER, ANSWER]}),
            ("messages", {"messages": [own, USER, ANSWER]}),
            ("preference", pair),
            ("feedback", feedback),
        ]
    )

    assert bare == Chat([SYSTEM, USER, ANSWER])
    assert whole == Chat([own, USER, ANSWER])
    assert isinstance(paired, Pair) and paired.prompt == [SYSTEM, USER]
    assert isinstance(rated, Feedback) and rated.prompt == [SYSTEM, USER]


def test_a_system_turn_for_plain_text_is_refused() -> None:
    with refused(DataError, "my.jsonl:1"):
        formats.read_sample("text", {"text": "a"}, "my.jsonl:1", system="Be brief.")


TEXT, CHAT = "a", Chat([USER, ANSWER])
PAIR, FEEDBACK = Pair([USER], [BETTER], [WORSE], [{"type": "function"}]), Feedback([USER], [BETTER], True)
SAMPLES: tuple[Sample, ...] = (TEXT, CHAT, PAIR, FEEDBACK)


def test_each_objective_takes_its_kinds_and_names_the_objectives_of_the_others() -> None:
    for objective, kinds in ((name, kinds_of(name)) for name in OBJECTIVES):
        for sample in SAMPLES:
            if isinstance(sample, kinds):
                assert for_objective(sample, objective, "mine", "x")
                continue
            with refused(WrongKind, "my.jsonl:1") as caught:
                for_objective(sample, objective, "mine", "my.jsonl:1")
            others = [other for other in OBJECTIVES if isinstance(sample, kinds_of(other))]
            assert all(other == "sft" or f"{other}_lora" in str(caught.value) for other in others)


def test_fine_tuning_on_pairs_names_the_format_of_chosen_answers() -> None:
    with refused(WrongKind, "x") as caught:
        for_objective(PAIR, "sft", "preference", "x")
    assert all(way in (caught.value.fix or "") for way in ("dpo_lora", "format='chosen'"))


def test_a_pair_is_a_good_and_a_bad_answer_to_kto() -> None:
    good, bad = for_objective(PAIR, "kto", "preference", "x")

    assert good == Feedback([USER], [BETTER], True, PAIR.tools)
    assert bad == Feedback([USER], [WORSE], False, PAIR.tools)


def test_what_teaches_nothing_is_told() -> None:
    tie = Pair([USER], [BETTER], [BETTER])
    nothing = [" \n", Chat([USER]), Chat([USER, {**ANSWER, "content": ""}]), Chat([]), tie]

    assert all(lacks(sample) for sample in nothing)
    assert not any(lacks(sample) for sample in SAMPLES)
    assert [lacks(part) is None for part in for_objective(tie, "kto", "preference", "x")] == [False]
    assert not lacks(Chat([USER, {**ANSWER, "content": "", "tool_calls": [{}]}]))


def test_a_function_of_the_users_reads_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_of_tests.py").write_text(
        "def chat(row): return [{'role': 'user', 'content': row['q']}, {'role': 'assistant', 'content': row['a']}]\n"
        "def text(row): return row['q']\n"
        "def pair(row): return {'prompt': row['q'], 'chosen': row['a'], 'rejected': 'No.'}\n"
        "def marked(row): return {'prompt': row['q'], 'completion': row['a'], 'label': True}\n"
        "def two(row): return {'prompt': row['q'], 'completion': row['a']}\n"
        "def wrong(row): return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    row = {"q": "Why?", "a": "Because."}
    asked, said = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}

    made = [
        formats.read_sample(f"mine_of_tests:{name}", row, "my.jsonl:1") for name in ("chat", "text", "two", "marked")
    ]
    renamed = formats.read_sample(
        "mine_of_tests:pair", {"q": "Why?", "b": "Because."}, "my.jsonl:1", columns={"a": "b"}
    )

    assert made == [Chat([asked, said]), "Why?", Chat([asked, said]), Feedback([asked], [said], True)]
    assert renamed == Pair([asked], [said], [{"role": "assistant", "content": "No."}])
    for name, told in {
        "mine_of_tests:wrong": "my.jsonl:1: .*did not return a sample",
        "mine_of_tests:gone": "has no function 'gone'",
        "no_such_module_of_mine:chat": "cannot import 'no_such_module_of_mine'",
    }.items():
        with pytest.raises(DataError, match=told):
            formats.read_sample(name, row, "my.jsonl:1")
