"""Readers of the row formats that hold conversations: each turns one row into a `Chat`.

They know no other format than their own; `formats` names and chooses them.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import dropwhile
from typing import Any

from tuner.data.formats import cells, turns
from tuner.data.formats.cells import Misfit, Row
from tuner.data.formats.chosen_turns import RESULT
from tuner.data.formats.image_places import MARK
from tuner.data.sample import Chat, Message, marks_in

TURNS = ("messages", "conversations", "conversation")
"""The columns that hold a list of turns, the first of them wins."""

QUESTIONS_AND_ANSWERS = (
    ("instruction", "output"),
    ("instruction", "response"),
    ("query", "response"),
    ("prompt", "response"),
    ("question", "answer"),
    ("problem", "solution"),
)

BOX_COLUMNS = ("sents", "bbox", "width", "height", "image", "images", "id")
_REFER = (
    "[refer] {}",
    "[refer] give me the location of {}",
    "[refer] where is {} ?",
    "[refer] from this image, tell me the location of {}",
    "[refer] the location of {} is",
    "[refer] could you tell me the location for {} ?",
    "[refer] where can I locate the {} ?",
)
_IDENTIFY = (
    "[identify] {}",
    "[identify] what object is in this location {}",
    "[identify] identify the object present at this location {}",
    "[identify] what is it in {}",
    "[identify] describe this object in {}",
    "[identify] this {} is",
    "[identify] the object in {} is",
)
"""XTuner's questions (xtuner/dataset/refcoco_json.py in 0.1.23)."""
_MAX_PIXELS = 1_000_000
"""A side of an image is shorter."""


def chat(messages: Sequence[Message], row: Row) -> Chat:
    """Return a conversation up to its last answer, with the row's tools; whole where it has no answer.

    Raises:
        Misfit: the tools are not a list of tools.
    """
    # Turns after the last answer teach nothing, and some templates render earlier turns differently because of them.
    return Chat(up_to_answer(messages, row) or list(messages), *turns.for_template(row))


def up_to_answer(messages: Sequence[Message], row: Row) -> list[Message]:
    """Return the turns up to the assistant's last; none where it has none."""
    end = max((number for number, message in enumerate(messages, 1) if message["role"] == "assistant"), default=0)
    if 0 < end < len(messages):
        cells.leave_out(row, "after the last answer")
    return list(messages[:end])


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def read_messages(row: Row) -> Chat:
    """Read turns of `role` and `content`, as OpenAI writes them."""
    messages = messages_of(row, cells.first_of(row, *TURNS))
    return chat([*leading_system(row, messages), *messages], row)


def system_turn(row: Row) -> list[Message]:
    """Return the turn of the column `system`, or none where it is missing or empty."""
    content = cells.text_if_any(row, "system")
    return [{"role": "system", "content": content}] if content else []


def leading_system(row: Row, messages: Sequence[Message]) -> list[Message]:
    """Return the row's own system turn, unless the conversation starts with one."""
    return [] if messages and messages[0]["role"] == "system" else system_turn(row)


def messages_of(row: Row, name: str) -> list[Message]:
    """Return the turns of a column, whether OpenAI's (`role`, `content`) or ShareGPT's (`from`, `value`)."""
    return turns.messages_of(cells.turns(row, name))


def read_sharegpt(row: Row) -> Chat:
    """Read turns of `from` and `value`; turns of the assistant before the first question are left out."""
    messages = messages_of(row, cells.first_of(row, "conversations", "conversation", "messages"))
    system = leading_system(row, messages)
    head = [message for message in messages[:1] if message["role"] == "system"]
    # Collections cut long conversations into parts, so rows begin with answers to questions that are not there.
    rest = [*dropwhile(lambda message: message["role"] == "assistant", messages[len(head) :])]
    if rest and len(head) + len(rest) < len(messages):
        cells.leave_out(row, "of the assistant before the first question")
    return chat([*system, *head, *rest], row)


def read_llava(row: Row) -> Chat:
    """Read turns of `from` and `value` as LLaVA's code and XTuner do: the image of a question stands before its text.

    XTuner's llava_map_fn.py: `<image>`, a line break, and the rest of the turn without white space around it.
    """
    read = read_sharegpt(row)
    return replace(read, messages=[_image_first(turn) if turn["role"] == "user" else turn for turn in read.messages])


def _image_first(turn: Message) -> Message:
    content = turn["content"]
    if MARK not in content:
        return turn
    return {**turn, "content": f"{MARK}\n" * content.count(MARK) + content.replace(MARK, "").strip()}


def read_rounds(row: Row) -> Chat:
    """Read rounds of `input` and `output`, XTuner's own shape, or of `human` and `assistant`."""
    messages: list[Message] = system_turn(row)
    for number, turn in enumerate(cells.turns(row, cells.first_of(row, "conversation", "conversations")), 1):
        messages += system_turn(turn)
        questions = (cells.text_if_any(turn, key, f"{key} of turn {number}") for key in ("input", "human"))
        messages += [user(question) for question in questions if question]
        reply = cells.text(cells.value(turn, ("output", "assistant"), number), f"output of turn {number}")
        messages.append({**answer(reply), **turns.marks_of(turn, number, reply)})
    return chat(messages, row)


def _pair_of_columns(row: Row) -> tuple[str, str] | None:
    """Return the columns of the question and of the answer, or None where the row has no such two."""
    pairs = [pair for pair in QUESTIONS_AND_ANSWERS if pair[0] in row and pair[1] in row]
    if len(pairs) > 1:
        either = " or ".join(f"{question!r} and {reply!r}" for question, reply in pairs)
        raise Misfit(f"question and answer could be {either}; set them with dataset.columns")
    return pairs[0] if pairs else None


def read_alpaca(row: Row) -> Chat:
    """Read one question and one answer; `input` follows the question after a line break."""
    question, reply = _pair_of_columns(row) or QUESTIONS_AND_ANSWERS[0]
    output = cells.text_of(row, reply)
    messages = [*system_turn(row), *_history(row), user(instruction(row, question))]
    # What Alpaca's makers wrote where their model gave no answer: nothing to learn.
    return Chat(messages) if output.strip() == "<nooutput>" else chat([*messages, answer(output)], row)


def _history(row: Row) -> list[Message]:
    """Return earlier questions and answers, as LLaMA-Factory writes them: a list of two texts each."""
    messages: list[Message] = []
    history = cells.listed(row.get("history"))
    if history is None or history in ("", {}):
        return []
    if not isinstance(history, list | tuple):
        raise Misfit(f"history is {cells.kind(history)}, not a list")
    for number, past in enumerate(history, 1):
        if not isinstance(past, list | tuple) or len(past) != 2:
            raise Misfit(f"item {number} of its history is not a question with its answer")
        question, reply = (cells.text(text, f"item {number} of history") for text in past)
        messages += [user(question), answer(reply)]
    return messages


def instruction(row: Row, name: str) -> str:
    """Return a question with the column `input` below it, where there is one."""
    question = cells.text_of(row, name)
    extra = cells.text_if_any(row, "input") if name != "input" else ""
    return f"{question}\n{extra}" if extra else question


def read_prompt_completion(row: Row) -> Chat:
    """Read a prompt and what follows it, each a text or a list of turns."""
    prompt, completion = prompt_of(row, "prompt"), turns_of(row, "completion", answer)
    return chat([*prompt, *completion], row)


def prompt_of(row: Row, name: str) -> list[Message]:
    """Return a prompt, with the row's system turn; a text is the user's."""
    messages = turns_of(row, name, user)
    if not messages:
        raise Misfit(f"{name!r} is an empty list")
    if messages[-1]["role"] == "assistant":
        raise Misfit(f"{name!r} ends with the assistant's turn, so nothing is left to answer")
    return [*leading_system(row, messages), *messages]


def turns_of(row: Row, name: str, of_text: Callable[[str], Message]) -> list[Message]:
    """Return a column's turns: a list of them, also as JSON, one alone, or a text that `of_text` makes a turn."""
    value = turns.spelled(cells.column(row, name), name)
    if isinstance(value, Mapping):
        return turns.messages_of([cells.part_of(row, value, "turn")])
    return messages_of(row, name) if isinstance(value, list | tuple) else [of_text(cells.text(value, name))]


# Only these two words after ### are turns: other ### (Markdown headings) belong to the answer.
_OASST1_TURN = re.compile(r"### (Human|Assistant):")
_HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


def read_oasst1(row: Row) -> Chat:
    """Read '### Human: ...### Assistant: ...', the text of Guanaco's selection from OpenAssistant."""
    return chat(_spoken(cells.text_of(row, "text"), _OASST1_TURN, "### Human:"), row)


def spoken_hh(text: str) -> list[Message]:
    r"""Return the turns of '\n\nHuman: ...\n\nAssistant: ...', the text of hh-rlhf."""
    return _spoken(text, _HH_TURN, r"\n\nHuman:")


def _spoken(dialog: str, marks: re.Pattern[str], start: str) -> list[Message]:
    before, *parts = marks.split(dialog)
    if before.strip() or not parts or parts[0] != "Human":
        raise Misfit(f"the text does not start with '{start}'")
    turn = {"Human": user, "Assistant": answer}
    return [turn[who](text.strip()) for who, text in zip(parts[::2], parts[1::2], strict=True)]


# Conversations with tool calls in formats of their own

_MOSS_MARKS = re.compile(r"\A\s*<\|[^|]*\|>:\s?|\s*<eo\w>\s*\Z")
_EXECUTED = re.compile(r"(<\|startofexec\|>.*?<\|endofexec\|>)", re.DOTALL)


def read_moss(row: Row) -> Chat:
    """Read MOSS's `chat` of numbered turns; what a tool returned is the user's turn, so that any template takes it."""
    dialog = cells.column(row, "chat")
    if not isinstance(dialog, dict):
        raise Misfit(f"'chat' is {cells.kind(dialog)}, not an object")
    named_turns = (
        (name, turn) for number in range(1, len(dialog) + 1) if (turn := dialog.get(name := f"turn_{number}"))
    )
    messages: list[Message] = []
    if system := cells.text_if_any(row, "meta_instruction").strip():
        messages.append({"role": "system", "content": system})
    for name, turn in named_turns:
        messages += _moss_turn(turn, name)
    return chat(messages, row)


def _moss_turn(turn: Any, name: str) -> list[Message]:
    if not isinstance(turn, dict):
        raise Misfit(f"{name} is {cells.kind(turn)}, not an object")
    texts = {key: cells.text_if_any(turn, key, f"{key} of {name}").strip() for key in _MOSS_KEYS}
    question, thoughts, commands, results, reply = (
        text if _unmarked(text) not in ("", "None") else "" for text in texts.values()
    )
    messages = [user(_unmarked(question))]
    if commands:
        # Its marks are kept: they tell a program which part of the answer to run.
        messages += [answer("\n".join(filter(None, (thoughts, commands)))), {**user(results), RESULT: True}]
        thoughts = ""
    return [*messages, answer("\n".join(filter(None, (thoughts, _unmarked(reply)))))]


_MOSS_KEYS = ("Human", "Inner Thoughts", "Commands", "Tool Responses", "MOSS")


def _unmarked(text: str) -> str:
    return _MOSS_MARKS.sub("", text).strip()


def read_msagent(row: Row) -> Chat:
    """Read ShareGPT turns with a tool's result inside an answer; that part becomes the user's turn, without loss."""
    sharegpt_chat = read_sharegpt(row)
    messages: list[Message] = []
    for turn in sharegpt_chat.messages:
        messages += _without_results(turn, row) if turn["role"] == "assistant" else [turn]
    return replace(sharegpt_chat, messages=messages)


def _without_results(turn: Message, row: Row) -> list[Message]:
    parts = [part.strip() for part in _EXECUTED.split(turn["content"])]
    if len(parts) > 1 and marks_in(turn):
        raise Misfit("a turn has spans and the result of a tool, which becomes a turn of its own")
    if len(parts) > 1 and not parts[-1]:  # a result that nothing follows has no answer to teach
        cells.leave_out(row, "of tools that no answer follows")
        parts = parts[:-2]
    reply = {"role": "assistant"} | ({"weight": turn["weight"]} if "weight" in turn else {})
    return [
        {**user(part), RESULT: True} if _EXECUTED.match(part) else {**reply, "content": part} for part in parts if part
    ]


def read_referring(row: Row) -> Chat:
    """Read a question for the box of a description."""
    description, box = _description_and_box(row)
    return _about_a_box(_REFER, description, box, row)


def read_identifying(row: Row) -> Chat:
    """Read a question for the description of a box."""
    description, box = _description_and_box(row)
    return _about_a_box(_IDENTIFY, box, description, row)


def _about_a_box(forms: tuple[str, ...], asked: str, reply: str, row: Row) -> Chat:
    """Return a question and its answer; the row alone decides which of seven forms the question has."""
    key = f"{row.get('image')} {row['sents']} {row['bbox']}"
    form = forms[hashlib.sha256(key.encode(errors="surrogatepass")).digest()[0] % len(forms)]
    # XTuner puts an image before the text of its turn.
    return chat([user(f"<image>\n{form.format(asked)}"), answer(reply)], row)


def _description_and_box(row: Row) -> tuple[str, str]:
    """Return the description, and the box as text: left, top, right and bottom in hundredths of the image."""
    if not any(row.get(name) for name in ("image", "images")):
        raise Misfit("it has no image")
    values = cells.listed(cells.column(row, "bbox"))
    if not isinstance(values, list | tuple) or len(values) != 4:
        raise Misfit("bbox is not four numbers: left, top, width, height")
    left, top, across, down = (_pixels(value, "bbox") for value in values)
    width, height = (_pixels(cells.column(row, name), name) for name in ("width", "height"))
    is_inside = left + across <= width + 1 and top + down <= height + 1  # COCO rounds boxes
    if not (across and down and width and height and is_inside):
        raise Misfit(f"the box {[left, top, across, down]} is not inside an image of {width:g} x {height:g} pixels")
    edges = left / width, top / height, (left + across) / width, (top + down) / height
    return cells.text_of(row, "sents"), "{" + "".join(f"<{int(edge * 100)}>" for edge in edges) + "}"


def _pixels(value: object, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 <= value < _MAX_PIXELS:  # type: ignore[arg-type, operator]
        raise Misfit(f"{name} holds {cells.kind(value)}, not a number of pixels")
    return float(value)  # type: ignore[arg-type]
