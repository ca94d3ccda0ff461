"""Named chat templates render the publishers' text and put the loss on the assistant's turns alone, end token included.

It tests the templates through transformers, with a tokenizer that has byte fallback and the publishers' end tokens.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trl.chat_template_utils as trl_templates
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, is_chat_template_stop_token_trained

from tests.worker.models import published
from tuner.worker.models.internlm2 import InternLM2Tokenizer

FOLDER = Path(__file__).parents[2] / "tuner" / "configs" / "chat_templates"
LLAMA_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
SYSTEM = {"role": "system", "content": "Antworte kurz.\nImmer."}
USER, ANSWER = {"role": "user", "content": "Wie heißt  du?"}, {"role": "assistant", "content": "書生 🙂,\n  sagt man"}
MORE, LAST = {"role": "user", "content": "Und weiter?"}, {"role": "assistant", "content": "x"}
CHAT = [SYSTEM, USER, ANSWER, MORE, LAST]
CHATS = ([USER, ANSWER], [SYSTEM, USER, ANSWER], [USER, ANSWER, MORE, LAST], CHAT)


class Format(NamedTuple):
    """What the assistant's turns begin and end with, as far as the model itself writes it."""

    before: str
    end: str


FORMATS = {
    "internlm2": Format("", "<|im_end|>"),
    "chatml": Format("", "<|im_end|>"),
    "mistral": Format(" ", "</s>"),
    "llama3_1": Format("", "<|eot_id|>"),
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    published.write_tokenizer(folder)
    return folder


@pytest.fixture(params=sorted(FORMATS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def tokenizer(name: str, tokenizer_folder: Path) -> PreTrainedTokenizerBase:
    tokenizer = InternLM2Tokenizer.from_pretrained(tokenizer_folder)
    if name == "llama3_1":
        tokenizer.add_special_tokens({"bos_token": LLAMA_TOKENS[0], "extra_special_tokens": list(LLAMA_TOKENS[1:])})
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def trained_texts(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[str]:
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["assistant_masks"], encoded["input_ids"], strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for masked, run in runs if masked]


def test_every_template_of_the_package_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(FORMATS)


@pytest.mark.parametrize("messages", CHATS)
def test_loss_is_on_each_answer_and_its_end_token(
    name: str, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> None:
    before, end = FORMATS[name]

    trained = trained_texts(tokenizer, messages)

    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert trained == [before + answer + end for answer in answers]


@pytest.mark.parametrize("messages", CHATS)
def test_generation_markers_add_no_text(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> None:
    unmarked = re.sub(r"{%-?\s*(end)?generation\s*-?%}", "", tokenizer.chat_template)
    assert unmarked != tokenizer.chat_template

    rendered = tokenizer.apply_chat_template(messages, tokenize=False)

    assert rendered == tokenizer.apply_chat_template(messages, tokenize=False, chat_template=unmarked)


@pytest.mark.parametrize("messages", CHATS)
def test_the_prompt_to_answer_is_what_training_shows_before_the_answer(
    name: str, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> None:
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)

    rendered = tokenizer.apply_chat_template(messages, tokenize=False)

    before, end = FORMATS[name]
    assert rendered.removesuffix("\n") == prompt + before + messages[-1]["content"] + end


def test_trl_takes_the_template_as_it_is(tokenizer: PreTrainedTokenizerBase) -> None:
    assert get_training_chat_template(tokenizer) is None
    assert is_chat_template_stop_token_trained(tokenizer)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("name", ["internlm2"], indirect=True)
def test_internlm2_equals_the_publishers_template(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], prompt: bool
) -> None:
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    theirs = published.CHAT_TEMPLATE
    expected = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt, chat_template=theirs
    )
    assert rendered == expected


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("theirs", [trl_templates.llama3_1_chat_template, trl_templates.llama3_2_chat_template])
@pytest.mark.parametrize("name", ["llama3_1"], indirect=True)
def test_llama3_1_equals_the_publishers_templates(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], prompt: bool, theirs: str
) -> None:
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

    options = {"add_generation_prompt": prompt, "date_string": "26 Jul 2024"}
    assert rendered == tokenizer.apply_chat_template(messages, tokenize=False, chat_template=theirs, **options)


@pytest.mark.parametrize("name", ["chatml"], indirect=True)
def test_chatml_has_no_beginning_of_sequence_token(tokenizer: PreTrainedTokenizerBase) -> None:
    rendered = tokenizer.apply_chat_template([USER, LAST], tokenize=False)

    assert rendered == "<|im_start|>user\nWie heißt  du?<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n"


@pytest.mark.parametrize("name", ["mistral"], indirect=True)
def test_mistral_puts_the_system_turn_before_the_last_question(tokenizer: PreTrainedTokenizerBase) -> None:
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)

    first = "<s>[INST] Wie heißt  du?[/INST] 書生 🙂,\n  sagt man</s>"
    assert rendered == first + "[INST] Antworte kurz.\nImmer.\n\nUnd weiter?[/INST] x</s>"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
    ],
)
def test_a_turn_that_would_be_lost_is_refused(tokenizer: PreTrainedTokenizerBase, message: dict[str, Any]) -> None:
    with pytest.raises(TemplateError, match="The chat template"):
        tokenizer.apply_chat_template([USER, message], tokenize=False)


def test_tools_are_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}

    with pytest.raises(TemplateError, match="no tools"):
        tokenizer.apply_chat_template([USER], tokenize=False, tools=[tool])


@pytest.mark.parametrize("messages", [[USER, USER], [ANSWER], [USER, SYSTEM, USER]])
@pytest.mark.parametrize("name", ["mistral"], indirect=True)
def test_mistral_refuses_roles_out_of_turn(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> None:
    with pytest.raises(TemplateError, match="in turn"):
        tokenizer.apply_chat_template(messages, tokenize=False)
