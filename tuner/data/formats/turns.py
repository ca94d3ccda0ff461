"""One turn of a row becomes a message in the words of chat templates: its role, text, tool calls and thinking.

It knows the words of OpenAI, ShareGPT, LLaMA-Factory, ms-swift and others, and no format as a whole. Text that holds
calls is JSON or it is wrong: what a template makes of anything else is no call that a program can run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tuner.assets import is_reserved
from tuner.data import limits
from tuner.data.formats import cells
from tuner.data.formats.cells import Misfit, Row
from tuner.data.sample import Mark, Message, text_of
from tuner.data.unique_keys import unique_keys

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
_LIKE_TURNS = re.compile(
    rf"""\s*\[\s*\{{\s*['"](?:role|from|content|value)['"]\s*:.*['"](?:{"|".join(_ROLES)})['"].*\]\s*\Z""", re.DOTALL
)
"""The text of a list of turns, as pandas writes it into a CSV file too: `str` of an array of numpy is no list."""
_CALLERS = ("function_call", "tool_call")
"""The roles of ShareGPT and ms-swift for turns that hold calls of tools."""
LOSS_KEYS = (
    "train",  # Axolotl
    "training",  # Axolotl's earlier configs
    "loss",  # ms-swift, GLM-4, XTuner
    "loss_scale",  # ms-swift
    "weight",  # OpenAI, Mistral
    "loss_weight",  # LLaMA-Factory
    "loss_mask",
    "step_loss_mask",  # slime
    "output_with_loss",  # XTuner's rounds
    "trained",
    "trainable",
)
"""The keys of a turn that say whether it is trained, each with the tools that use it."""
_MASK_KEYS = ("masked", "mask")
"""Those that say that it is not; `masked` is torchtune's."""
_LOSS_ALONE = {"loss_scale", "loss_weight", "loss_mask", "step_loss_mask", "output_with_loss", "sample_weight"}
"""The columns of a row that say nothing but how it is trained; the others may hold a person's weight, or a text."""
_ROW_KEYS = {*LOSS_KEYS, *_MASK_KEYS, "sample_weight"}
LOSS_COLUMNS = {*_ROW_KEYS, "margin"}
"""The columns that other tools weigh a row by; `margin` is TRL's for reward models."""
SPANS = "spans"
"""The key of a turn that weighs parts of its text."""
_DETAILS = ("train_detail", "training_detail")
"""Axolotl's keys for that."""
_DETAIL = ("begin_offset", "end_offset", "train")
_SPAN_SHAPE = "a list of [begin, end, weight]"
_KEPT = ("name", "tool_call_id")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_THOUGHT = re.compile(r"\A\s*(<think>.*?</think>)?", re.DOTALL)
_BETWEEN = re.compile(r"(?:\s|</?tool_call>)*")
"""What stands between the calls of one text, also in the tags that Hermes and Qwen write."""
_ARGUMENTS = ("arguments", "parameters")
"""OpenAI's word, and that of Llama's own calls."""
_BESIDE = ("id", "type", "name", "function", "index")
"""What a call holds beside its arguments."""


def messages_of(turns: Sequence[Row]) -> list[Message]:
    """Return turns as messages. Calls of tools that are a turn of their own join the assistant's turn before them.

    Raises:
        Misfit: a turn has an unknown role, no text, or calls that are no JSON.
    """
    messages: list[Message] = []
    for number, turn in enumerate(turns, 1):
        message = _message(turn, number)
        # The template writes one turn of the assistant, with its text and all its calls.
        if messages and messages[-1]["role"] == "assistant" and _speaker(turn, number) in _CALLERS:
            message = _joined(messages.pop(), message, number)
        messages.append(message)
    return messages


def spelled(value: Any, name: str) -> Any:
    """Return the turns that a text such as a CSV cell spells, as JSON or as Python writes them; another value as it is.

    Raises:
        Misfit: the text begins as a list of turns does, and is none.
    """
    turns = cells.listed(value, allows_repeated_keys=True)  # the reader of turns refuses them
    if turns is not value:
        return turns if turns and all(map(_is_turn, turns)) else value
    if isinstance(value, str) and _LIKE_TURNS.match(value):
        raise Misfit(f"{name} is the text of a list of turns, and neither JSON nor a list as Python writes it")
    return value


def _is_turn(value: Any) -> bool:
    keys = (("role", "content"), ("from", "value"))
    return isinstance(value, Mapping) and any(
        content in value and isinstance(value.get(role), str) and value[role] in _ROLES for role, content in keys
    )


def _joined(before: Message, call: Message, number: int) -> Message:
    if before.get("weight", 1) != call.get("weight", 1):
        raise Misfit(f"turn {number} is one turn of the assistant with the turn before it, and their weights differ")
    calls = [*before.get("tool_calls", ()), *call["tool_calls"]]
    mark = {"weight": call["weight"]} if "weight" in call else {}  # a mark of either is one of both
    return {**before, **mark, "content": before["content"] + call["content"], "tool_calls": calls}


def _is_sharegpt(turn: Row) -> bool:
    return "from" in turn or turn.get("value") is not None


def _speaker(turn: Row, number: int) -> Any:
    return cells.value(turn, ("from", "role") if _is_sharegpt(turn) else ("role",), number)


def _message(turn: Row, number: int) -> Message:
    speaker = _speaker(turn, number)
    role = cells.role(speaker, _ROLES, number)
    key = "value" if _is_sharegpt(turn) and turn.get("content") is None else "content"
    content: str | list[Message]
    if speaker in _CALLERS:
        content, calls = _calls_in_text(turn, key, number)
    else:
        calls = _calls_of(turn, number)
        content = _content(turn, key, number, role) if turn.get(key) is not None or not calls else ""
    if calls and role != "assistant":
        raise Misfit(f"turn {number} is the {role}'s and has tool calls")
    message: Message = {"role": role, "content": content}
    message |= {key: turn[key] for key in _KEPT if turn.get(key)}
    if calls:
        message["tool_calls"] = calls
    if reasoning := next((turn[key] for key in _REASONING if turn.get(key)), None):
        # transformers copies it to the other words for it, which some templates read.
        message["reasoning_content"] = cells.text(reasoning, f"reasoning of turn {number}")
    return {**message, **marks_of(turn, number, "" if speaker in _CALLERS else content)}


def marks_of(turn: Row, number: int, content: str | list[Message]) -> Message:
    """Return what a turn says about its own loss: `weight` and `spans`, those of them that it has a word for.

    `content` is what the model reads of it; empty if its text is calls of tools.

    Raises:
        Misfit: a key holds what is no weight, two contradict each other, or spans do not lie in the text.
    """
    values = {key: turn[key] for key in (*LOSS_KEYS, *_MASK_KEYS) if turn.get(key) is not None}
    where = f"turn {number}"
    weights = {key: _weight(value, key, where) for key, value in values.items()}
    _refuse_contradiction(values, weights, where)
    marks: Message = {"weight": next(iter(weights.values()))} if weights else {}
    spans = _spans(turn, where, content)
    if spans and any(turn.get(key) for key in _DETAILS):
        if marks.get("weight") == 0:  # it counts more than its parts do in Axolotl
            return marks
        marks = {"weight": 1, **marks}
    return {**marks, SPANS: spans} if spans else marks


def _weight(value: Any, key: str, where: str) -> float:
    if key in _MASK_KEYS:
        return 1 - _flag(value, key, where, "a mask", "true, false, 1 or 0")
    return _weight_of(value, f"{where} has {key}")


def _weight_of(value: Any, has: str) -> float:
    if not isinstance(value, int | float) or not 0 <= value <= 1:
        raise Misfit(f"{has} = {value!r}, and a weight is true, false or a number from 0 to 1")
    return int(value) if value in (0, 1) else float(value)


def _spans(turn: Row, where: str, content: str | list[Message]) -> list[Mark]:
    """Return the spans of a turn in the order of its text."""
    keys = [key for key in (SPANS, *_DETAILS) if turn.get(key)]
    if not keys:
        return []
    if len(keys) > 1:
        raise Misfit(f"{where} has both {keys[0]} and {keys[1]}")
    [key] = keys
    values = cells.listed(turn[key])
    if not isinstance(values, list | tuple):
        raise Misfit(f"{key} of {where} is {cells.kind(values)}, not {_SPAN_SHAPE}")
    text, read = text_of(content), _detail if key in _DETAILS else _span
    spans = sorted(read(value, f"item {at} of {key} of {where}", len(text)) for at, value in enumerate(values, 1))
    if other := next(((first, two) for first, two in pairwise(spans) if two[0] < first[1]), None):
        raise Misfit(f"{key} of {where}: {[*other[0][:2]]} and {[*other[1][:2]]} overlap")
    return _with_gaps(spans, len(text)) if key in _DETAILS else spans


def _span(value: Any, where: str, length: int) -> Mark:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise Misfit(f"{where} is not [begin, end, weight]")
    begin, end, weight = value
    return _placed(begin, end, where, length, _weight_of(weight, f"{where} has a weight"))


def _detail(value: Any, where: str, length: int) -> Mark:
    """Read one of Axolotl's; the character at its end belongs to it."""
    if not isinstance(value, Mapping) or set(value) - {*_DETAIL} or not {*_DETAIL} <= set(value):
        raise Misfit(f"{where} is not an object of {', '.join(_DETAIL)}")
    weight = _weight_of(value["train"], f"{where} has train")
    return _placed(value["begin_offset"], value["end_offset"], where, length, weight, behind=1)


def _placed(first: Any, last: Any, where: str, length: int, weight: float, *, behind: int = 0) -> Mark:
    """Return a span that ends `behind` characters behind `last`. In Parquet the numbers of a list are all floats."""
    if any(not isinstance(at, int | float) or isinstance(at, bool) or at != at // 1 for at in (first, last)):
        raise Misfit(f"{where} does not begin and end at numbers of characters")
    begin, end = int(first), int(last) + behind
    if not 0 <= begin < end <= length:
        raise Misfit(f"{where} is from character {begin} to {end}, and the text has {length}")
    return begin, end, weight


def _with_gaps(spans: Sequence[Mark], length: int) -> list[Mark]:
    """Return Axolotl's spans with those between them, which carry no loss there."""
    ends = [0, *(end for _, end, _ in spans)]
    gaps = [(end, begin, 0) for end, begin in zip(ends, [*(begin for begin, *_ in spans), length], strict=True)]
    return sorted([*spans, *(gap for gap in gaps if gap[0] < gap[1])])


def left_out_by(row: Row) -> str | None:
    """Return the column that leaves a whole row out of the training; None if it is trained.

    The name of a column may have another meaning too: then it is read if it holds true, false or a number from 0 to 1.

    Raises:
        Misfit: a column asks for a part of the loss; or columns, or a column and a turn, contradict each other.
    """
    values = {key: _number_of_cell(row[key]) for key, value in row.items() if _weighs(key, value)}
    trained = {key: _flag(value, key, "the row") != (key in _MASK_KEYS) for key, value in values.items()}
    _refuse_contradiction(values, trained, "the row")
    if False not in trained.values():
        return None
    key = next(iter(trained))
    for turn in row.parts("turn") if isinstance(row, cells.TrackedRow) else ():
        if opposed := next((name for name in (*LOSS_KEYS, *_MASK_KEYS) if _wants_loss(turn, name)), None):
            both = f"{key} = {values[key]!r}, and a turn of it {opposed} = {turn[opposed]!r}"
            raise Misfit(f"the row has {both}, which contradict each other")
    return key


def _weighs(key: str, value: Any) -> bool:
    if key not in _ROW_KEYS or value is None or value == "":
        return False
    number = _number_of_cell(value)
    if number != number:  # pandas writes NaN where a row has no value
        return False
    return key in _LOSS_ALONE or (isinstance(number, int | float) and 0 <= number <= 1)


def _number_of_cell(value: Any) -> Any:
    """Return the truth or the number that a text such as a CSV cell spells, anything else as it is."""
    if not isinstance(value, str):
        return value
    if (truth := cells.truth(value)) is not None:
        return truth if value.strip().isalpha() else int(truth)
    try:
        return float(value)
    except ValueError:
        return value


def _wants_loss(turn: Row, key: str) -> bool:
    value = turn.get(key)
    return isinstance(value, int | float) and (value == 0 if key in _MASK_KEYS else 0 < value <= 1)


def _refuse_contradiction(values: Row, weights: Mapping[str, float], where: str) -> None:
    """Check that the loss keys of a turn or a row say one thing."""
    if len(set(weights.values())) > 1:
        both = " and ".join(f"{key} = {values[key]!r}" for key in weights)
        raise Misfit(f"{where} has {both}, which contradict each other")


_ALLOWED_OF_ROWS = "true, false, 1 or 0; rename the column if it means something else"


def _flag(value: Any, key: str, where: str, noun: str = "a row", allowed: str = _ALLOWED_OF_ROWS) -> bool:
    if key == "mask" and not isinstance(value, bool):  # 1 is "leave it out" to some, and "train it" to others
        raise Misfit(f"{where} has mask = {value!r}, which has two meanings; write train: true or false")
    if not isinstance(value, int | float) or value not in (0, 1):
        raise Misfit(f"{where} has {key} = {value!r}, and {noun} is whole or not at all: {allowed}")
    return bool(value)


def _content(turn: Row, key: str, number: int, role: str) -> str | list[Message]:
    read = cells.text if role == "assistant" else cells.content  # a model answers with text
    value = cells.value(turn, (key,), number)
    if isinstance(value, list):
        value = [cells.part_of(turn, part, "part") if isinstance(part, Mapping) else part for part in value]
        for name in (*LOSS_KEYS, *_MASK_KEYS):
            if any(isinstance(part, Mapping) and part.get(name) is not None for part in value):
                raise Misfit(f"a part of turn {number} has {name}; weigh it with {SPANS} of the turn: {_SPAN_SHAPE}")
    return read(value, f"{key} of turn {number}")


def _calls_of(turn: Row, number: int) -> list[Message]:
    """Return the calls under `tool_calls`, or under OpenAI's older `function_call`; none where the turn has neither."""
    new = _decoded(turn.get("tool_calls"), f"tool_calls of turn {number}")
    old = _decoded(turn.get("function_call"), f"function_call of turn {number}")
    if new and old:
        raise Misfit(f"turn {number} has both tool_calls and function_call")
    calls = (new if isinstance(new, list | tuple) else [new]) if new else [old] if old else []
    return [_call(turn, call, f"call {at} of turn {number}") for at, call in enumerate(calls, 1)]


def _calls_in_text(turn: Row, key: str, number: int) -> tuple[str, list[Message]]:
    """Return the thinking and the calls of a turn that consists of calls: one, a list, or several after each other."""
    where = f"{key} of turn {number}"
    value = cells.value(turn, (key,), number)
    if isinstance(value, Mapping | list | tuple):
        content, calls = "", [value]
    else:
        text = cells.text(value, where)
        thought = _THOUGHT.match(text)
        assert thought is not None, "it matches nothing too"
        content, calls = thought[1] or "", list(_values(text, thought.end(), where))
    calls = [
        call
        for call_or_list in calls
        for call in (call_or_list if isinstance(call_or_list, list | tuple) else [call_or_list])
    ]
    if not calls:
        raise Misfit(f"{where} holds no call of a tool")
    return content, [_call(turn, call, f"call {at} of turn {number}") for at, call in enumerate(calls, 1)]


def _values(text: str, start: int, where: str) -> Iterator[Any]:
    """Yield the JSON values that stand one after the other in a text from `start` on."""
    decoder = json.JSONDecoder(object_pairs_hook=unique_keys)
    while (start := _BETWEEN.match(text, start).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, start = decoder.raw_decode(text, start)
            if limits.too_deep(value):
                raise RecursionError
        except (ValueError, RecursionError) as error:
            raise Misfit(f"{where} is no JSON of a tool call: {_reason(error)}") from error
        yield value


def _decoded(value: Any, where: str) -> Any:
    """Return a value, or what it spells if it is a text; None for an empty one."""
    try:
        value = cells.listed(value)
    except Misfit as misfit:
        raise Misfit(f"{where} is no JSON: {misfit}") from misfit
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        decoded = json.loads(value, object_pairs_hook=unique_keys)
        if limits.too_deep(decoded):
            raise RecursionError
        return decoded
    except (ValueError, RecursionError) as error:
        raise Misfit(f"{where} is no JSON: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


def _call(turn: Row, value: Any, where: str) -> Message:
    """Return one call in OpenAI's words, which templates read; its arguments are an object."""
    call = _decoded(value, where)
    if not isinstance(call, Mapping):
        raise Misfit(f"{where} is {cells.kind(call)}, not an object")
    call = cells.part_of(turn, call, "call")
    if call.get("type") not in (None, "", "function"):
        raise Misfit(f"{where} is of type {call['type']!r}, and only 'function' is supported")
    function = call if call.get("function") is None else call["function"]
    if not isinstance(function, Mapping):
        raise Misfit(f"the function of {where} is {cells.kind(function)}, not an object")
    function = function if function is call else cells.part_of(call, function, "call")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise Misfit(f"{where} names no function")
    identity = {"id": call["id"]} if call.get("id") else {}
    return {"type": "function", **identity, "function": {"name": name, "arguments": _arguments(function, where)}}


def _arguments(function: Row, where: str) -> dict[str, Any]:
    """Return the arguments of a call: an object, which may be written as JSON text; nothing is an empty object."""
    key = next((key for key in _ARGUMENTS if function.get(key) is not None), None)
    if key is None:
        other_keys = [
            name for name, value in function.items() if name not in (*_BESIDE, *_ARGUMENTS) and value is not None
        ]
        if other_keys:
            raise Misfit(f"{where} has no 'arguments', only {', '.join(map(str, other_keys))}")
        return {}
    # OpenAI writes them as JSON text; most templates print them with `tojson`, which would quote that text again.
    arguments = _decoded(function[key], f"the {key} of {where}")
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise Misfit(f"the {key} of {where} are {cells.kind(arguments)}, not a JSON object")
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError as error:
        raise Misfit(f"the {key} of {where} are no JSON: {error}") from error
    except TypeError:  # a date of a Parquet file: the template has the word
        pass
    return dict(arguments)


def for_template(row: Row) -> tuple[list[Any] | None, dict[str, Any] | None]:
    """Return what a row gives the chat template beside its turns: the schemas of tools, and its own names.

    Raises:
        Misfit: the columns of either hold something else.
    """
    return _schemas(row), _names(row)


def _names(row: Row) -> dict[str, Any] | None:
    """Return the column `chat_template_kwargs`, as TRL reads it: an object, or JSON text of one."""
    values = _decoded(row.get("chat_template_kwargs"), "its chat_template_kwargs")
    if not values:
        return None
    if not isinstance(values, Mapping):
        raise Misfit(f"its chat_template_kwargs are {cells.kind(values)}, not a JSON object")
    if reserved := next(filter(is_reserved, map(str, values)), None):
        raise Misfit(f"its chat_template_kwargs have {reserved!r}, which the chat template gets otherwise")
    # Parquet gives every row the names of all rows, with nulls.
    return {str(name): value for name, value in values.items() if value is not None} or None


def _schemas(row: Row) -> list[Any] | None:
    """Return the JSON schemas of the column `tools`, or of OpenAI's older `functions`, as chat templates expect them.

    The column is a list, one schema, or JSON text of either; each schema may be JSON text too.
    """
    columns = {key: tools for key in ("tools", "functions") if (tools := _decoded(row.get(key), f"its {key}"))}
    if not columns:
        return None
    if len(columns) > 1:
        raise Misfit("it has both tools and functions")
    [(key, value)] = columns.items()
    listed = value if isinstance(value, list | tuple) else [value]
    tools = [_decoded(tool, f"its {key}") for tool in listed]
    if not all(isinstance(tool, Mapping) for tool in tools):
        raise Misfit(f"its {key} are not a list of JSON schemas")
    # Templates that look into a schema expect OpenAI's wrapping.
    return [
        tool if tool.get("function") or "name" not in tool else {"type": "function", "function": tool} for tool in tools
    ]
