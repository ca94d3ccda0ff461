"""The known shapes of a row, and how each becomes a conversation or a plain text.

It reads no files and knows no tokens. Text in a row is data: nothing of it is evaluated.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuner.errors import DataError, did_you_mean, nearest

Row = Mapping[str, Any]
Message = dict[str, Any]


class Misfit(ValueError):
    """A row that does not have its format's shape; the text says what is missing or wrong."""


@dataclass(frozen=True)
class Chat:
    """A conversation that ends with the assistant's turn. `tools` are JSON schemas for the chat template."""

    messages: list[Message]
    tools: list[Any] | None = None


Sample = Chat | str


@dataclass(frozen=True)
class Format:
    """`matches` looks at columns (and a text's first words) only; `read` raises `Misfit`."""

    needs: str
    matches: Callable[[Row], bool]
    read: Callable[[Row], Sample]


def detect(rows: Sequence[Row], place: str) -> str:
    """Return the name of the format that all of the first `rows` have, or else the first of them.

    Raises:
        DataError: no format is known for these columns.
    """
    for test in (rows, rows[:1]):
        for name, known in FORMATS.items():
            if all(known.matches(row) for row in test):
                return name
    needs = "; ".join(f"{name!r} needs {known.needs}" for name, known in FORMATS.items())
    what = f"the row format cannot be told from the columns {_columns(rows[0])}"
    raise DataError(what, where=place, fix=f"Rename the columns or set format. {needs}.")


def read(name: str, row: Row, place: str) -> Sample:
    """Return the conversation or text of a row of format `name`.

    Raises:
        DataError: the format is unknown, or the row does not have its shape.
    """
    if ":" in name:
        return _of_user(name, row, place)
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS, see=", ".join(FORMATS))
        raise DataError(f"there is no row format {name!r}", where="dataset.format", fix=hint)
    try:
        return FORMATS[name].read(row)
    except Misfit as misfit:
        what = f"the row does not fit format {name!r}: {misfit}; its columns are {_columns(row)}"
        raise DataError(what, where=place, fix=_other_format(name, row)) from misfit


def user_function(name: str) -> Callable[[Row], Any]:
    """Import the function that `my_package.my_module:my_function` names: a row in, messages or a text out.

    Raises:
        DataError: there is no such module or function.
    """
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        fix = "Install the package, or put its folder on PYTHONPATH."
        raise DataError(f"cannot import {module!r}: {error}", where="dataset.format", fix=fix) from error
    if not callable(found):
        fix = "Name a function as 'my_package.my_module:my_function'."
        raise DataError(f"{module} has no function {function!r}", where="dataset.format", fix=fix)
    return found  # type: ignore[no-any-return]


def _of_user(name: str, row: Row, place: str) -> Sample:
    made = user_function(name)(row)
    if isinstance(made, str):
        return made
    try:
        return _read_messages({"messages": made} if isinstance(made, list) else made)
    except (Misfit, TypeError, AttributeError) as error:
        fix = "Return a text, a list of messages, or {'messages': [...], 'tools': [...]}."
        raise DataError(f"{name} returned no sample: {error}", where=place, fix=fix) from error


def _other_format(name: str, row: Row) -> str:
    for other, known in FORMATS.items():
        try:
            if other != name and known.matches(row) and known.read(row):
                return f"Set format={other!r}, which fits this row, or correct the row."
        except Misfit:
            continue
    return f"Correct or remove the row; {name!r} needs {FORMATS[name].needs}."


def _columns(row: Row) -> str:
    return ", ".join(map(str, row)) or "(none)"


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KEPT = ("name", "tool_calls", "tool_call_id", "reasoning_content")


def _read_messages(row: Row) -> Chat:
    messages = [_openai_message(turn, number) for number, turn in enumerate(_turns(row), 1)]
    return _chat(messages, row)


def _openai_message(turn: Row, number: int) -> Message:
    if turn.get("weight") == 0:
        raise Misfit(f"turn {number} has weight 0, and turns without loss are not supported")
    extras = {key: turn[key] for key in _KEPT if turn.get(key)}
    if "tool_calls" in extras:
        extras["tool_calls"] = [_tool_call(call) for call in extras["tool_calls"]]
    silent = "tool_calls" in extras and turn.get("content") is None
    content = "" if silent else _text(_value(turn, "content", number), f"content of turn {number}")
    return {"role": _role(_value(turn, "role", number), _ROLES, number), "content": content, **extras}


def _tool_call(call: Any) -> Any:
    # OpenAI writes arguments as JSON text; most templates print them with `tojson`, which would quote that text again.
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function_response": "tool",
    "observation": "tool",
}


def _read_sharegpt(row: Row) -> Chat:
    messages = []
    for number, turn in enumerate(_turns(row), 1):
        role = _role(_value(turn, "from", number), _SHAREGPT_ROLES, number)
        messages.append({"role": role, "content": _text(_value(turn, "value", number), f"value of turn {number}")})
    return _chat(_system(row) + messages, row)


def _read_alpaca(row: Row) -> Chat:
    instruction = _text(_column(row, "instruction"), "instruction")
    extra = _text(row.get("input") or "", "input")
    user = f"{instruction}\n{extra}" if extra else instruction
    answer = {"role": "assistant", "content": _text(_column(row, "output"), "output")}
    return _chat([*_system(row), {"role": "user", "content": user}, answer], row)


# Only these two words after ### are turns: other ### (Markdown headings) belong to the answer.
_TURN = re.compile(r"### (Human|Assistant):")


def _read_oasst1(row: Row) -> Chat:
    before, *parts = _TURN.split(_text(_column(row, "text"), "text"))
    if before.strip() or not parts or parts[0] != "Human":
        raise Misfit("the text does not start with '### Human:'")
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(parts[::2], parts[1::2], strict=True)
    return _chat([{"role": roles[who], "content": said.strip()} for who, said in turns], row)


def _read_text(row: Row) -> str:
    return _text(_column(row, "text"), "text")


def _chat(messages: list[Message], row: Row) -> Chat:
    answers = [number for number, message in enumerate(messages, 1) if message["role"] == "assistant"]
    if not answers:
        raise Misfit("it has no assistant turn")
    # Turns after the last answer teach nothing, and some templates render earlier turns differently because of them.
    return Chat(messages[: answers[-1]], _tools(row))


def _tools(row: Row) -> list[Any] | None:
    tools = row.get("tools") or None
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise Misfit("its tools are text that is not JSON") from error
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Misfit("its tools are not a list of JSON schemas")
    return tools


def _system(row: Row) -> list[Message]:
    system = row.get("system")
    return [{"role": "system", "content": _text(system, "system")}] if system else []


def _turns(row: Row) -> Sequence[Row]:
    column = "conversations" if "conversations" in row and "messages" not in row else "messages"
    turns = _column(row, column)
    if not isinstance(turns, list | tuple):
        raise Misfit(f"{column!r} is {_kind(turns)}, not a list")
    if not turns:
        raise Misfit(f"{column!r} is an empty list")
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise Misfit(f"turn {number} is {_kind(turn)}, not an object")
    return turns


def _first_turn(row: Row) -> Row:
    for column in ("messages", "conversations"):
        turns = row.get(column)
        if isinstance(turns, list | tuple) and turns and isinstance(turns[0], dict):
            return turns[0]
    return {}


def _column(row: Row, name: str) -> Any:
    if name not in row:
        found = nearest(name, map(str, row))
        raise Misfit(f"it has no column {name!r}" + (f" (did you mean {found!r}?)" if found else ""))
    return row[name]


def _value(turn: Row, key: str, number: int) -> Any:
    if key not in turn:
        raise Misfit(f"turn {number} has no {key!r}, only {_columns(turn)}")
    return turn[key]


def _role(role: Any, known: Mapping[str, str], number: int) -> str:
    if not isinstance(role, str) or role not in known:
        found = nearest(role, known) if isinstance(role, str) else None
        hint = f"did you mean {found!r}?" if found else f"known: {', '.join(known)}"
        raise Misfit(f"turn {number} has the unknown role {role!r} ({hint})")
    return known[role]


def _text(value: Any, what: str) -> str:
    if isinstance(value, list) and value and all(isinstance(part, dict) for part in value):
        other = next((part.get("type") for part in value if part.get("type") != "text"), None)
        if other is None:
            return "".join(_text(part.get("text"), what) for part in value)
        raise Misfit(f"{what} holds a part of type {other!r}, and only 'text' can be trained on")
    if not isinstance(value, str):
        raise Misfit(f"{what} is {_kind(value)}, not text")
    # json reads "\ud83d" alone without complaint; the tokenizer would fail on it, far from the row.
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise Misfit(f"{what} holds half of a surrogate pair")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"of type {type(value).__name__}"


FORMATS: dict[str, Format] = {
    "messages": Format(
        "a column 'messages' (or 'conversations') of turns with 'role' and 'content'",
        lambda row: "role" in _first_turn(row) or ("messages" in row and "from" not in _first_turn(row)),
        _read_messages,
    ),
    "sharegpt": Format(
        "a column 'conversations' of turns with 'from' and 'value'",
        lambda row: "from" in _first_turn(row),
        _read_sharegpt,
    ),
    "oasst1": Format(
        "a column 'text' such as '### Human: ...### Assistant: ...'",
        lambda row: isinstance(row.get("text"), str) and row["text"].lstrip().startswith("### Human:"),
        _read_oasst1,
    ),
    "alpaca": Format(
        "columns 'instruction', 'output' and perhaps 'input'",
        lambda row: "instruction" in row and "output" in row,
        _read_alpaca,
    ),
    "text": Format("a column 'text'", lambda row: "text" in row, _read_text),
}
