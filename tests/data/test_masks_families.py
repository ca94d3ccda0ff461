"""Loss on exactly the assistant's tokens, for every family of chat templates that TRL ships and for our own.

What must be trained is written down here, by family and by marker words, and is not computed from any mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trl
from tokenizers import AddedToken

from tests.data.conftest import make_tokenizer
from tests.data.test_masks import trained
from tests.each import each
from tuner import assets
from tuner.data import masks, templates
from tuner.data.rendering import Template, has_marks
from tuner.data.sample import Chat, Message
from tuner.errors import DataError

SHIPPED = Path(trl.__file__).parent / "chat_templates"
NAMED = assets.CONFIGS / "chat_templates"
FILES = {f"trl/{file.stem}": file for file in SHIPPED.glob("*.jinja")} | {
    f"named/{file.stem}": file for file in NAMED.glob("*.jinja")
}
# What a template spells as a token of its own; `\w` takes the letters of DeepSeek's in too.
TOKENS = re.compile(r"<[|｜][\w▁]+[|｜]?>|<\w+\|>|</s>|\[/?INST\]|<(?:start|end)_of_turn>|<end_of_utterance>|<eo[ah]>")


def stem(name: str) -> str:
    """Return the file's name without what it has for training."""
    return name.split("/")[1].removesuffix("_training")


def family(name: str) -> str:
    """Return the file's name without the number of its revision too."""
    return re.sub(r"_v\d$|(?<=lfm2_2_5)_\w+$", "", stem(name))


class Turn(NamedTuple):
    """What the model writes of its turn, around the answer."""

    before: str
    end: str


CHATML = Turn("", "<|im_end|>")
NO_THOUGHT = Turn("<think>\n\n</think>\n\n", "<|im_end|>")
# The generation prompt opens the thought, so the model begins by closing it.
OPEN_THOUGHT = Turn("\n</think>\n\n", "<|im_end|>")
SPACE = Turn(" ", "</s>")
PLAIN = Turn("", "</s>")
TURNS = {
    "cohere": Turn("", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": Turn("", "<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"),
    "deepseek_r1_distill": Turn("\n</think>\n\n", "<｜end▁of▁sentence｜>"),
    "deepseekv3": Turn("\n</think>\n\n", "<｜end▁of▁sentence｜>"),
    "diffusion_gemma": Turn("", "<turn|>"),
    "gemma": Turn("", "<end_of_turn>"),
    "gemma3": Turn("", "<end_of_turn>"),
    "gemma4": Turn("", "<turn|>"),
    # GLM stops where the next turn would begin.
    "glm4moe": Turn("\n<think></think>\n", "<|user|>"),
    "gptoss": Turn("<|channel|>final<|message|>", "<|return|>"),
    "idefics3": Turn(" ", "<end_of_utterance>"),
    "lfm2": CHATML,
    "lfm2_2_5": CHATML,
    "llama3": Turn("", "<|eot_id|>"),
    "llama3_1": Turn("", "<|eot_id|>"),
    "llama3_2": Turn("", "<|eot_id|>"),
    "llava_next": SPACE,
    "muse_glimmer": Turn(" to=user<|message|>", "<|eot|>"),
    "nemotron_3_5_lightning": Turn("</think>", "<|im_end|>"),
    "nemotron_3_nano": Turn("</think>", "<|im_end|>"),
    "nemotron_3_super": Turn("</think>", "<|im_end|>"),
    "nemotron_3_ultra": Turn("</think>", "<|im_end|>"),
    "phi3": Turn("", "<|end|>"),
    "phi3_5": Turn("", "<|end|>"),
    "qwen2_5": CHATML,
    "qwen2_5_vl": CHATML,
    "qwen3": NO_THOUGHT,
    "qwen3_5_nothink": CHATML,
    "qwen3_5_think": OPEN_THOUGHT,
    "qwen3_6": OPEN_THOUGHT,
    "qwen3_8": OPEN_THOUGHT,
    "qwen3_instruct_2507": CHATML,
    "qwen3_vl": CHATML,
    "smolvlm": Turn(" ", "<end_of_utterance>"),
    # Ours.
    "alpaca": PLAIN,
    "chatml": CHATML,
    "deepseek": SPACE,
    "deepseek_coder": Turn("", "\n<|EOT|>"),
    "internlm": Turn("", "<eoa>"),
    "internlm2": CHATML,
    "llama2": Turn(" ", " </s>"),
    "mistral": SPACE,
    "vicuna": SPACE,
    "xtuner_default": PLAIN,
    "zephyr": PLAIN,
}
# Where a call of a tool ends otherwise than an answer. Gemma's goes on in the same turn, with the tool's result.
CALL_END = {
    "diffusion_gemma": "<|tool_response>",
    "diffusion_gemma_training": "<tool_call|>",
    "gemma4": "<|tool_response>",
    "gemma4_v2": "<turn|>",
    "glm4moe": "<|observation|>",
    "gptoss": "<|call|>",
    "deepseekv3": "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
}
NO_SYSTEM = {"trl/gemma", "trl/gemma_training"}
# Of TRL's; ours show no tools. DeepSeek V3's shows calls and results, but no descriptions of tools.
NO_TOOLS = {
    *("cohere", "cohere2", "deepseek_r1_distill", "deepseekv3", "gemma", "gemma3", "idefics3", "lfm2", "llama3"),
    *("llava_next", "phi3", "phi3_5", "qwen2_5_vl", "smolvlm"),
}
TOOLED = {name for name in FILES if name.startswith("trl/") and stem(name) not in NO_TOOLS}
SHOWS_REASONING = {
    *("diffusion_gemma", "gemma4_v5", "glm4moe", "gptoss", "lfm2_2_5", "muse_glimmer", "nemotron_3_5_lightning"),
    *("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3", "qwen3_5_nothink", "qwen3_5_think"),
    *("qwen3_6", "qwen3_8"),
}

USER: Message = {"role": "user", "content": "askedone here"}
ANSWER: Message = {"role": "assistant", "content": "saidone <b>there</b>"}
MORE: Message = {"role": "user", "content": "askedtwo"}
LAST: Message = {"role": "assistant", "content": "saidtwo."}
SYSTEM: Message = {"role": "system", "content": "ruledword"}
EMPTY_SYSTEM: Message = {"role": "system", "content": ""}
CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "id": "abcdefghi", "function": {"name": "calledname", "arguments": {"why": "calledvalue"}}}
    ],
}
RESULT: Message = {"role": "tool", "content": "foundword", "name": "calledname", "tool_call_id": "abcdefghi"}
WHY = {"type": "object", "properties": {"why": {"type": "string", "description": "d"}}, "required": ["why"]}
TOOL = {"type": "function", "function": {"name": "calledname", "description": "describedword", "parameters": WHY}}


@cache
def template_of(name: str, change: Callable[[str], str] = str) -> Template:
    """Return the file's template after a change, chosen for a small tokenizer that has the template's tokens."""
    text = change(FILES[name].read_text(encoding="utf-8"))
    tokenizer = make_tokenizer(text)
    found = sorted(set(TOKENS.findall(text)))
    tokenizer.add_special_tokens(
        {"extra_special_tokens": [AddedToken(token, special=True, normalized=False) for token in found]}
    )
    return templates.choose_template(tokenizer)


def run(
    name: str, *messages: Message, tools: list[Any] | None = None, change: Callable[[str], str] = str
) -> tuple[str, list[str]]:
    """Return the text up to the last answer, and the text of each run of tokens with loss, in whatever part."""
    template = template_of(name, change)
    [parts] = masks.encode_chats(template, [("row", Chat(list(messages), tools))])
    runs = [run for part in parts for run in trained(template.tokenizer, *(each.tolist() for each in part.labelled))]
    return template.tokenizer.decode(parts[-1].labelled[0]), runs


def said(name: str, *answers: Message) -> list[str]:
    """Return what the model writes of a conversation with these answers."""
    turn = TURNS[family(name)]
    return [turn.before + answer["content"] + turn.end for answer in answers]


def with_a_comment(template: str) -> str:
    return "{#- One comment more. -#}" + template


def test_every_family_is_written_down() -> None:
    assert {family(name) for name in FILES} == TURNS.keys()


@each(sorted(FILES))
def test_loss_is_on_every_answer_with_its_end_and_on_nothing_else(name: str) -> None:
    assert run(name, USER, ANSWER)[1] == said(name, ANSWER)
    assert run(name, USER, ANSWER, MORE, LAST)[1] == said(name, ANSWER, LAST)


@each(sorted(FILES.keys() - NO_SYSTEM))
def test_a_system_turn_is_shown_and_has_no_loss(name: str) -> None:
    text, runs = run(name, SYSTEM, USER, ANSWER)

    assert "ruledword" in text
    assert runs == said(name, ANSWER)
    assert run(name, EMPTY_SYSTEM, USER, ANSWER)[1] == runs


@each(sorted(FILES))
def test_a_turn_of_weight_0_has_no_loss(name: str) -> None:
    assert run(name, USER, {**ANSWER, "weight": 0}, MORE, LAST)[1] == said(name, LAST)
    assert run(name, USER, ANSWER, {**MORE, "weight": 0}, {**LAST, "weight": 0})[1] == said(name, ANSWER)


@each(sorted(TOOLED))
def test_a_call_has_loss_and_what_the_tool_returns_has_none(name: str) -> None:
    text, (call, answer, after) = run(name, USER, CALLING, RESULT, ANSWER, MORE, LAST, tools=[TOOL])

    assert all(word in text for word in ("askedone", "askedtwo", "foundword", "describedword"))
    assert call.count("calledname") >= 1 and call.count("calledvalue") == 1 == text.count("calledvalue")
    keys = (name.removeprefix("trl/"), stem(name), family(name))
    assert call.endswith(next((CALL_END[key] for key in keys if key in CALL_END), TURNS[family(name)].end))
    assert not any(word in call for word in ("askedone", "foundword", "describedword", "saidone"))
    # Its prompt after a tool's result lacks the header of the turn.
    header = "<|turn>model\n" if name == "trl/diffusion_gemma" else ""
    assert [answer.removeprefix(header), after] == said(name, ANSWER, LAST)


@pytest.mark.parametrize("name", ["trl/deepseekv3", "trl/deepseekv3_training"])
def test_what_closes_a_tool_s_result_is_not_the_assistant_s(name: str) -> None:
    text, (call, answer) = run(name, USER, CALLING, RESULT, ANSWER)

    assert "foundword<｜tool▁output▁end｜><｜tool▁outputs▁end｜>saidone" in text
    assert call.endswith(CALL_END["deepseekv3"]) and "calledvalue" in call
    assert answer == "saidone <b>there</b><｜end▁of▁sentence｜>"


@each(sorted(FILES.keys() - TOOLED))
def test_a_template_without_tools_says_so(name: str) -> None:
    with pytest.raises(DataError, match="cannot render the conversation and its tools: ") as caught:
        run(name, USER, CALLING, RESULT, ANSWER, tools=[TOOL])

    assert caught.value.where == "row"


@pytest.mark.parametrize("name", ["trl/gptoss", "trl/llama3_1"])
def test_a_second_call_in_one_turn_is_not_lost_in_silence(name: str) -> None:
    two = {**CALLING, "tool_calls": CALLING["tool_calls"] * 2}

    with pytest.raises(DataError, match=r"all but one of a turn's tool calls|single tool-calls at once"):
        run(name, USER, two, RESULT, RESULT, ANSWER, tools=[TOOL])


@pytest.mark.parametrize("name", sorted(NO_SYSTEM))
def test_a_template_without_system_turns_says_so(name: str) -> None:
    with pytest.raises(DataError, match="System role not supported"):
        run(name, SYSTEM, USER, ANSWER)


@each(sorted(name for name in FILES if family(name) in SHOWS_REASONING or stem(name) in SHOWS_REASONING))
def test_reasoning_has_loss_wherever_it_is_shown(name: str) -> None:
    first, last = {**ANSWER, "reasoning_content": "thoughtone"}, {**LAST, "reasoning_content": "thoughttwo"}

    alone, [only] = run(name, USER, first)
    text, (earlier, later) = run(name, USER, first, MORE, last)

    assert alone.count("thoughtone") == 1 == only.count("thoughtone")
    assert text.count("thoughttwo") == 1 == later.count("thoughttwo")
    # Most templates show the reasoning of the turns after the last question alone.
    assert text.count("thoughtone") <= 1 == earlier.count("thoughtone")
    assert "asked" not in only + earlier + later
    for said_of_it, answer in ((only, ANSWER), (earlier, ANSWER), (later, LAST)):
        assert answer["content"] in said_of_it
    assert later.endswith(LAST["content"] + TURNS[family(name)].end)


@each(sorted(FILES), every=3)
def test_a_template_with_one_comment_more_masks_the_same_tokens(name: str) -> None:
    assert run(name, USER, ANSWER, MORE, LAST, change=with_a_comment) == run(name, USER, ANSWER, MORE, LAST)


@each(sorted(name for name in FILES if name.startswith("named/")))
def test_a_template_that_was_saved_without_its_marks_masks_the_same_tokens(name: str) -> None:
    bare = run(name, USER, ANSWER, MORE, LAST, change=assets.without_generation_marks)

    assert not has_marks(assets.without_generation_marks(FILES[name].read_text(encoding="utf-8")))
    assert bare == run(name, USER, ANSWER, MORE, LAST)
