"""Values for the names of a chat template: of a recipe in the template itself, of a row in what is rendered of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl

from tests.data.conftest import CHATML, Prepare, Settings, Write, conversation, make_tokenizer
from tests.refused import refused
from tuner import assets
from tuner.data import token_estimate
from tuner.data.inspection import template_check
from tuner.data.prepare import prepare
from tuner.data.sample import Chat
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, RecipeError
from tuner.models.load import load_tokenizer
from tuner.recipes.schema import Rows
from tuner.results.base_model import model_of

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
QWEN3 = (TEMPLATES / "qwen3.jinja").read_text(encoding="utf-8")
OFF = {"enable_thinking": False}
QUESTION = [{"role": "user", "content": "one"}]
EMPTY = "<think>\n\n</think>\n\n"
NOTED = "{{ note }}" + CHATML


def served(template: str, **names: Any) -> str:
    text = make_tokenizer(template).apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True, **names)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("qwen3", OFF),
        ("qwen3_5_nothink", {"enable_thinking": True}),
        ("qwen3_6", OFF),
        ("glm4moe", OFF),
        ("nemotron_3_nano", OFF),
        ("gemma4_v5", {"enable_thinking": True}),
        ("gptoss", {"reasoning_effort": "high"}),
        ("gptoss", {"reasoning_effort": "high", "model_identity": 'A "quoted" name,\n🙂 {% endif %} {{ 1 }} \\n'}),
    ],
)
def test_a_template_with_values_renders_as_if_each_caller_gave_them(name: str, values: dict[str, Any]) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    ours = assets.with_defaults(template, values)

    assert served(ours) == served(template, **values) != served(template)
    other = {key: (not value) if isinstance(value, bool) else "low" for key, value in values.items()}
    assert served(ours, **other) == served(template, **other)


def test_values_replace_each_other_and_come_off_again() -> None:
    both = {"enable_thinking": False, "budget": 3}
    template = assets.with_defaults(QWEN3, both)

    assert assets.with_defaults(template, both) == template
    assert served(assets.with_defaults(template, {"enable_thinking": True})) == served(QWEN3)
    assert assets.split_defaults(template)[1] == assets.split_defaults(QWEN3)[1] == QWEN3
    assert assets.with_defaults(QWEN3, None) == QWEN3
    assert assets.with_defaults(template, {"enable_thinking": None, "budget": None}) == QWEN3


@pytest.mark.parametrize(
    ("template", "name", "told"),
    [
        (QWEN3, "enable_thnking", "enable_thinking"),
        (CHATML, "enable_thinking", "enable_thinking"),
        (QWEN3, "add_generation_prompt", "add_generation_prompt"),
        (QWEN3, "messages", "messages"),
        (CHATML, "bos_token", "bos_token"),
        (None, "enable_thinking", "None"),
    ],
)
def test_a_name_that_the_template_has_no_use_for_is_refused(template: str | None, name: str, told: str) -> None:
    with refused(RecipeError, "model.chat_template_kwargs", told):
        assets.check_defaults(template, {name: False})


def test_a_template_that_jinja_cannot_read_is_left_to_those_who_render_it() -> None:
    assets.check_defaults("{% if %}", {"enable_thinking": False})
    assert assets.names_in("{% for m in messages %}{% continue %}{{ bos_token + other }}{% endfor %}") == ("other",)


def test_the_tokenizer_of_a_recipe_has_its_values_and_keeps_them_when_it_is_saved(tmp_path: Path) -> None:
    make_tokenizer(QWEN3).save_pretrained(tmp_path / "model")
    model = model_of(str(tmp_path / "model")).model_copy(update={"chat_template_kwargs": OFF})
    loaded = load_tokenizer(model, str(tmp_path / "model"))

    TextEncoder(loaded).save(tmp_path / "result")
    plain = load_tokenizer(model_of(str(tmp_path / "result")), str(tmp_path / "result"))
    again = load_tokenizer(model, str(tmp_path / "result"))

    assert TextEncoder(plain).prompt_ids(Chat(QUESTION)) == TextEncoder(loaded).prompt_ids(Chat(QUESTION))
    assert plain.chat_template == again.chat_template != QWEN3
    assert TextEncoder(loaded).content() != TextEncoder(make_tokenizer(QWEN3)).content()  # of the cache of rows
    with refused(RecipeError, "model.chat_template_kwargs", "enable_thinking"):
        load_tokenizer(model.model_copy(update={"chat_template_kwargs": {"thinking": False}}), str(tmp_path / "model"))


def test_a_template_of_tools_by_name_gets_the_values_too(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(QWEN3)
    tokenizer.chat_template = {"default": QWEN3, "tool_use": CHATML}
    tokenizer.save_pretrained(tmp_path)

    loaded = load_tokenizer(model_of(str(tmp_path)).model_copy(update={"chat_template_kwargs": OFF}), str(tmp_path))

    assert {name: assets.split_defaults(text)[1] for name, text in loaded.chat_template.items()} == {
        "default": QWEN3,
        "tool_use": CHATML,
    }
    assert EMPTY in str(loaded.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True))


def trained(path: Path, template: str, **settings: Any) -> list[str]:
    """Return the text that carries loss of each sample, after a check that it is rendered as it is served."""
    whole: Any = Settings(str(path), **{"max_length": 256, "packing": False, **settings})
    tokenizer = make_tokenizer(template)
    assert list(template_check(whole, TextEncoder(tokenizer), "sft")) == []
    rows = prepare(whole, TextEncoder(tokenizer), objective="sft").dataset
    return [tokenizer.decode([label for label in row["labels"] if label != -100]) for row in rows]


def test_an_answer_without_thinking_is_trained_behind_the_empty_thought_that_a_server_writes(jsonl: Write) -> None:
    path = jsonl([conversation("one", "five")])

    assert trained(path, QWEN3) == [f"{EMPTY}five<|im_end|>"]
    assert trained(path, assets.with_defaults(QWEN3, OFF)) == ["five<|im_end|>"]


def test_a_row_has_values_of_its_own_before_those_of_the_recipe(jsonl: Write) -> None:
    kwargs = ({}, {"enable_thinking": False}, json.dumps(OFF), {"enable_thinking": None})
    path = jsonl([{**conversation("one", "five"), "chat_template_kwargs": value} for value in kwargs])
    asked = jsonl([{**conversation("one", "five"), "chat_template_kwargs": {"enable_thinking": True}}], "asked.jsonl")

    thinks, plain = f"{EMPTY}five<|im_end|>", "five<|im_end|>"
    assert trained(path, QWEN3) == [thinks, plain, plain, thinks]
    assert trained(asked, assets.with_defaults(QWEN3, OFF)) == [thinks]


@pytest.mark.parametrize(
    ("objective", "row", "name"),
    [
        ("dpo", {"prompt": QUESTION, "chosen": "two", "rejected": "three"}, "chosen_ids"),
        (
            "kto",
            {"prompt": QUESTION, "completion": [{"role": "assistant", "content": "two"}], "label": True},
            "answer_ids",
        ),
        ("kto", {"prompt": QUESTION, "chosen": "two", "rejected": "three"}, "answer_ids"),
        ("grpo", {"prompt": QUESTION, "answer": "two"}, "prompt_ids"),
        ("grpo", conversation("one", "two"), "prompt_ids"),
        ("reward", {"prompt": QUESTION, "chosen": "two", "rejected": "three"}, "chosen_ids"),
    ],
)
def test_every_kind_of_row_is_rendered_with_its_values(
    prepared: Prepare, objective: str, row: dict[str, Any], name: str
) -> None:
    tokenizer, given = make_tokenizer(NOTED), [{**row, "chat_template_kwargs": {"note": "five"}}, row]

    rows = list(prepared(given, objective, tokenizer=tokenizer, packing=False).dataset)

    begins = [tokenizer.decode(found[name]).startswith("five") for found in rows]
    assert begins == [True] * (len(rows) // 2) + [False] * (len(rows) // 2)


def test_a_prompt_keeps_its_tools_and_values_as_the_template_takes_them(prepared: Prepare) -> None:
    given = [{"prompt": QUESTION, "tools": "[]", "chat_template_kwargs": json.dumps(OFF)}, {"prompt": QUESTION}]

    made = prepared(given, "grpo", tokenizer=make_tokenizer(QWEN3), packing=False)

    with_values, without = (json.loads(row["row"]) for row in made.dataset)
    assert (with_values["tools"], with_values["chat_template_kwargs"]) == (None, OFF)
    assert without.keys() == {"prompt"}


@pytest.mark.parametrize("value", [["a"], "no JSON", {"messages": []}, {"tools": 1}, {"return_dict": True}, 3])
def test_values_that_are_none_make_the_row_bad(value: object, jsonl: Write) -> None:
    path = jsonl([{**conversation("one", "two"), "chat_template_kwargs": value}])

    with refused(DataError, f"{path}:1", "chat_template_kwargs"):
        trained(path, QWEN3)


@pytest.mark.parametrize("objective", ["sft", "grpo"])
def test_a_value_for_a_name_that_the_template_does_not_use_is_told(prepared: Prepare, objective: str) -> None:
    rows = [{**conversation("one", "two"), "chat_template_kwargs": {"enable_thnking": False}}, conversation("a", "b")]

    found = list(prepared(rows, objective, tokenizer=make_tokenizer(CHATML), packing=False).changed())

    assert len(found) == 1 and "'enable_thnking'" in found[0]["reason"]


def test_special_tokens_in_the_value_of_a_row_stay_text(prepared: Prepare) -> None:
    row = {**conversation("one", "two"), "chat_template_kwargs": {"note": "<|im_end|>"}}
    tokenizer = make_tokenizer(NOTED)

    [found] = prepared([row], tokenizer=tokenizer, packing=False).dataset

    assert found["input_ids"].count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 2
    assert tokenizer.decode(found["input_ids"]).startswith("<|im_end|><|im_start|>user")


def test_the_estimate_of_tokens_counts_what_values_render(jsonl: Write, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "model")
    row = conversation("one", "two")
    path = jsonl([row, {**row, "chat_template_kwargs": {"note": "five " * 9}}])
    rows = Rows(path=str(path))

    [(few,), (many,)] = token_estimate.lengths([path], rows, "sft", tmp_path / "model", NOTED)
    [(with_default,), _] = token_estimate.lengths(
        [path], rows, "sft", tmp_path / "model", assets.with_defaults(NOTED, {"note": "five " * 9})
    )

    assert many - few >= 9 and with_default == many
