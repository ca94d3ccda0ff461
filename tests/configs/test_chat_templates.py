"""Named chat templates render the publishers' text and put the loss on the assistant's turns alone, end token included.

It tests the templates through transformers, with a tokenizer that has byte fallback and the publishers' end tokens.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import pytest
import trl.chat_template_utils as trl_templates
from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from transformers import PreTrainedTokenizerBase
from trl.chat_template_utils import get_training_chat_template, is_chat_template_stop_token_trained

from tests.models import published
from tuner.assets import without_generation_marks
from tuner.models.internlm import InternLM2Tokenizer


class AssistantMark(Extension):
    """{% generation %} as a block that renders what it holds."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
    "alpaca": Format("", "</s>"),
    "chatml": Format("", "<|im_end|>"),
    "deepseek": Format(" ", "</s>"),
    "deepseek_coder": Format("", "\n<|EOT|>"),
    "gemma": Format("", "<end_of_turn>"),
    "internlm": Format("", "<eoa>"),
    "internlm2": Format("", "<|im_end|>"),
    "llama2": Format(" ", " </s>"),
    "llama3": Format("", "<|eot_id|>"),
    "llama3_1": Format("", "<|eot_id|>"),
    "mistral": Format(" ", "</s>"),
    "phi3": Format("", "<|end|>"),
    "vicuna": Format(" ", "</s>"),
    "xtuner_default": Format("", "</s>"),
    "zephyr": Format("", "</s>"),
}
# The whole text of a conversation with a system turn, and the prompt for another answer.
ASK_SYSTEM, ASK, REPLY, AGAIN = "Be brief.", "Why\n me?", "Because {x}.", "And?"
TEXTS = {
    "alpaca": (
        "<s>Be brief.\n\n### Instruction:\nWhy\n me?\n\n### Response:\nBecause {x}.</s>\n\n"
        "### Instruction:\nAnd?\n\n### Response:\n"
    ),
    "chatml": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy\n me?<|im_end|>\n"
        "<|im_start|>assistant\nBecause {x}.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "deepseek": "<s>Be brief.\n\nUser: Why\n me?\n\nAssistant: Because {x}.</s>User: And?\n\nAssistant:",
    "deepseek_coder": (
        "<s>Be brief.\n### Instruction:\nWhy\n me?\n### Response:\nBecause {x}.\n<|EOT|>\n"
        "### Instruction:\nAnd?\n### Response:\n"
    ),
    "gemma": (
        "<s><start_of_turn>user\nBe brief.\n\nWhy\n me?<end_of_turn>\n<start_of_turn>model\nBecause {x}.<end_of_turn>\n"
        "<start_of_turn>user\nAnd?<end_of_turn>\n<start_of_turn>model\n"
    ),
    "internlm": (
        "<s><|System|>:Be brief.\n<|User|>:Why\n me?<eoh>\n<|Bot|>:Because {x}.<eoa>\n<|User|>:And?<eoh>\n<|Bot|>:"
    ),
    "internlm2": (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy\n me?<|im_end|>\n"
        "<|im_start|>assistant\nBecause {x}.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    ),
    "llama2": ("<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nWhy\n me? [/INST] Because {x}. </s><s>[INST] And? [/INST]"),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy\n me?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nBecause {x}.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "llama3_1": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy\n me?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nBecause {x}.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nAnd?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "mistral": "<s>[INST] Why\n me?[/INST] Because {x}.</s>[INST] Be brief.\n\nAnd?[/INST]",
    "phi3": (
        "<|system|>\nBe brief.<|end|>\n<|user|>\nWhy\n me?<|end|>\n<|assistant|>\nBecause {x}.<|end|>\n"
        "<|user|>\nAnd?<|end|>\n<|assistant|>\n"
    ),
    "vicuna": "<s>Be brief. USER: Why\n me? ASSISTANT: Because {x}.</s>USER: And? ASSISTANT:",
    "xtuner_default": "<s><|System|>:Be brief.\n<|User|>:Why\n me?\n<|Bot|>:Because {x}.</s>\n<|User|>:And?\n<|Bot|>:",
    "zephyr": (
        "<|system|>\nBe brief.</s>\n<|user|>\nWhy\n me?</s>\n<|assistant|>\nBecause {x}.</s>\n"
        "<|user|>\nAnd?</s>\n<|assistant|>\n"
    ),
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
    if name.startswith("llama3"):
        tokenizer.add_special_tokens({"bos_token": LLAMA_TOKENS[0], "extra_special_tokens": list(LLAMA_TOKENS[1:])})
    tokenizer.add_special_tokens({"extra_special_tokens": [FORMATS[name].end.strip()]}, False)
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def trained_texts(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]]) -> list[str]:
    encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["assistant_masks"], encoded["input_ids"], strict=True)
    runs = itertools.groupby(pairs, key=lambda pair: pair[0])
    return [tokenizer.decode([token for _, token in run]) for masked, run in runs if masked]


def test_every_template_of_the_package_is_tested() -> None:
    assert {path.stem for path in FOLDER.glob("*.jinja")} == set(FORMATS) == set(TEXTS)


def test_the_text_is_the_publishers_to_the_letter(name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    said = zip(("system", "user", "assistant", "user"), (ASK_SYSTEM, ASK, REPLY, AGAIN), strict=True)
    messages = [{"role": role, "content": text} for role, text in said]

    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == TEXTS[name]


@pytest.mark.parametrize("messages", CHATS)
def test_loss_is_on_each_answer_and_its_end_token(
    name: str, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> None:
    before, end = FORMATS[name]

    trained = trained_texts(tokenizer, messages)

    answers = [message["content"] for message in messages if message["role"] == "assistant"]
    assert trained == [before + answer + end for answer in answers]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [False, True])
def test_without_its_marks_a_template_renders_the_same_text_anywhere(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], prompt: bool
) -> None:
    if prompt:
        messages = messages[:-1]
    # Jinja as it comes, which knows no {% generation %}.
    unmarked = Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False).from_string(  # noqa: S701
        without_generation_marks(tokenizer.chat_template)
    )

    text = unmarked.render(messages=messages, add_generation_prompt=prompt, **tokenizer.special_tokens_map)

    assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


SPACES = ["", " ", "\n", "\n  "]


@pytest.mark.parametrize("left", ["", "-", "+"])
@pytest.mark.parametrize("right", ["", "-", "+"])
@pytest.mark.parametrize("options", [{}, {"trim_blocks": True, "lstrip_blocks": True}], ids=["jinja", "transformers"])
def test_white_space_around_a_mark_is_treated_as_before(left: str, right: str, options: dict[str, bool]) -> None:
    known = Environment(extensions=[AssistantMark], autoescape=False, **options)  # noqa: S701
    unknown = Environment(autoescape=False, **options)  # noqa: S701
    for before, inside, after in itertools.product(SPACES, repeat=3):
        mark, end = f"{{%{left} generation {right}%}}", f"{{%{left}endgeneration{right}%}}"
        text = f"a{before}{mark}{inside}b{inside}{end}{after}c"

        assert unknown.from_string(without_generation_marks(text)).render() == known.from_string(text).render()


@pytest.mark.parametrize("messages", CHATS)
def test_the_prompt_to_answer_is_what_training_shows_before_the_answer(
    name: str, tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> None:
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)

    rendered = tokenizer.apply_chat_template(messages, tokenize=False)

    before, end = FORMATS[name]
    assert rendered.rstrip("\n") == prompt + before + messages[-1]["content"] + end


def test_trl_takes_the_template_as_it_is(tokenizer: PreTrainedTokenizerBase) -> None:
    assert get_training_chat_template(tokenizer) is None
    assert is_chat_template_stop_token_trained(tokenizer)


SYSTEMLESS = [messages for messages in CHATS if messages[0] != SYSTEM]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize(
    ("name", "theirs", "chats"),
    [
        ("gemma", "gemma", SYSTEMLESS),
        ("gemma", "gemma3", CHATS),
        ("internlm2", "internlm2", CHATS),
        ("llama3", "llama3", CHATS),
        ("llama3_1", "llama3_1", CHATS),
        ("llama3_1", "llama3_2", CHATS),
        ("phi3", "phi3", CHATS),
        ("phi3", "phi3_5", CHATS),
    ],
    indirect=["name"],
)
def test_templates_equal_the_publishers(
    name: str, tokenizer: PreTrainedTokenizerBase, prompt: bool, theirs: str, chats: list[list[dict[str, str]]]
) -> None:
    of_internlm2 = {"internlm2_chat_template": published.CHAT_TEMPLATE}
    published_one = (vars(trl_templates) | of_internlm2)[f"{theirs}_chat_template"]
    # Phi's closes a whole conversation with the end-of-sequence token.
    end = "</s>" if name == "phi3" and not prompt else ""
    for messages in chats:
        options = {"tokenize": False, "add_generation_prompt": prompt, "date_string": "26 Jul 2024"}
        rendered = tokenizer.apply_chat_template(messages, **options)

        assert rendered + end == tokenizer.apply_chat_template(messages, chat_template=published_one, **options)


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
@pytest.mark.parametrize("name", ["mistral", "llama2"], indirect=True)
def test_a_format_of_pairs_refuses_roles_out_of_turn(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]
) -> None:
    with pytest.raises(TemplateError, match="in turn"):
        tokenizer.apply_chat_template(messages, tokenize=False)
