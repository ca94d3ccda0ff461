"""The known formats of a row: what columns each needs, how it is told from them, who reads it; functions of users too.

It reads no files and knows no tokens. Text in a row is data: nothing of it is evaluated.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from tuner.data.formats import cells, chats, image_places, turns
from tuner.data.formats.cells import Misfit, Row, TrackedRow
from tuner.data.sample import Chat, Feedback, Message, Pair, Prompt, Sample, unmarked
from tuner.errors import DataError

PROMPTS = ("prompt", "question", "instruction", "query", "input", *chats.TURNS)
"""The columns that a prompt stands in, the first of them wins."""


def _is_hh(row: Row) -> bool:
    """Say whether the two answers are hh-rlhf's texts of whole chats."""
    texts = (row.get("chosen"), row.get("rejected"))
    return all(isinstance(text, str) and text.lstrip().startswith("Human:") for text in texts)


def read_preference(row: Row) -> Pair:
    """Read `chosen` and `rejected`: answers to the prompt's column, or whole conversations with the same beginning."""
    if _is_hh(row):
        both = [chats.spoken_hh(cells.text_of(row, name)) for name in ("chosen", "rejected")]
    else:
        both = [chats.turns_of(row, name, chats.answer) for name in ("chosen", "rejected")]
    chosen, rejected = map(_answered, both, ("chosen", "rejected"), (row, row))
    if _is_answer(chosen) and _is_answer(rejected):
        prompt = _prompt(row)
    else:
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        prompt = [*chats.leading_system(row, prompt), *prompt]
    return Pair(prompt, chosen, rejected, *turns.for_template(row))


def _answered(messages: Sequence[Message], name: str, row: Row) -> list[Message]:
    """Return the turns up to the assistant's last."""
    answered_turns = chats.up_to_answer(messages, row)
    if not answered_turns:
        raise Misfit(f"{name!r} has no assistant turn")
    return answered_turns


def _is_answer(messages: Sequence[Message]) -> bool:
    return bool(messages[0]["role"] == "assistant")


def _prompt(row: Row) -> list[Message]:
    """Return the turns before the answers."""
    name = cells.first_of(row, *PROMPTS)
    if isinstance(turns.spelled(row.get(name), name), str):
        return [*chats.system_turn(row), chats.user(chats.instruction(row, name))]
    return chats.prompt_of(row, name)


def _shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return how many turns both conversations begin with, up to the last that is not the assistant's."""
    alike = list(takewhile(lambda both: unmarked(both[0]) == unmarked(both[1]), zip(chosen, rejected, strict=False)))
    while alike and alike[-1][0]["role"] == "assistant":
        alike.pop()
    if not alike:
        raise Misfit("'chosen' and 'rejected' do not begin with the same turns")
    return len(alike)


def read_chosen(row: Row) -> Chat:
    """Read the better answer of a pair as a conversation."""
    pair = read_better_response(row) if "better_response_id" in row else read_preference(row)
    return Chat([*pair.prompt, *pair.chosen], pair.tools, pair.chat_template_kwargs)


def read_better_response(row: Row) -> Pair:
    """Read two answers and the number, 0 or 1, of the better one, as PKU-SafeRLHF has them."""
    number = cells.column(row, "better_response_id")
    better = None if isinstance(number, bool) else cells.truth(number)
    if better is None:
        raise Misfit(f"better_response_id is {number!r}, not 0 or 1")
    chosen, rejected = ([chats.answer(cells.text_of(row, f"response_{at}"))] for at in (int(better), int(not better)))
    return Pair(chats.prompt_of(row, "prompt"), chosen, rejected, *turns.for_template(row))


def read_feedback(row: Row) -> Feedback:
    """Read an answer and its label: prompt and completion, or one conversation, of which the last answer is judged."""
    label = cells.truth(cells.column(row, "label"))
    if label is None:
        raise Misfit(f"label is {row['label']!r}, not true, false, 1 or 0")
    if "completion" in row:
        prompt, completion = chats.prompt_of(row, "prompt"), chats.turns_of(row, "completion", chats.answer)
    else:
        messages = chats.messages_of(row, cells.first_of(row, *chats.TURNS))
        conversation = [*chats.leading_system(row, messages), *chats.up_to_answer(messages, row)]
        start = max((at for at, turn in enumerate(conversation, 1) if turn["role"] != "assistant"), default=0)
        prompt, completion = conversation[:start], conversation[start:]
    return Feedback(prompt, _answered(completion, "completion", row), label, *turns.for_template(row))


def read_prompt(row: Row) -> Prompt:
    """Read a prompt without its answer. A text without a system turn is not rendered with the chat template."""
    messages = chats.prompt_of(row, "prompt")
    is_text = isinstance(turns.spelled(row["prompt"], "prompt"), str) and not chats.system_turn(row)
    return Prompt(messages, {}, row["prompt"] if is_text else None, *turns.for_template(row))


@dataclass(frozen=True)
class Format:
    """`read` raises `Misfit`; `matches` looks at columns and at what their values begin with: by default never.

    `columns` are all that it reads. `before` are formats that fit the same rows and are not meant where this one is;
    'text' is meant only where no other fits. `claims` is a weaker `matches`, for objectives that learn from no format
    that matches: the row is then read as this one, and what is wrong with it is named.
    """

    kind: type
    needs: str
    columns: tuple[str, ...]
    read: Callable[[Row], Sample]
    matches: Callable[[Row], bool] = lambda row: False
    before: tuple[str, ...] = ()
    claims: Callable[[Row], bool] = lambda row: False


def _has(*needed: str) -> Callable[[Row], bool]:
    return lambda row: all(name in row for name in needed)


def _turn_has(*keys: str) -> Callable[[Row], bool]:
    return lambda row: any(key in cells.first_turn(row, chats.TURNS) for key in keys)


def _is_messages(row: Row) -> bool:
    first = cells.first_turn(row, chats.TURNS)
    return ("role" in first and "value" not in first) or ("messages" in row and not first)


def _is_feedback(row: Row) -> bool:
    return cells.truth(row.get("label")) is not None and _is_labelled(row)


def _is_labelled(row: Row) -> bool:
    has_answer = _has("prompt", "completion")(row) or any(map(row.__contains__, chats.TURNS))
    return "label" in row and has_answer


_FOR_TEMPLATE = ("tools", "functions", "chat_template_kwargs")
_MORE = ("system", *_FOR_TEMPLATE, *image_places.COLUMNS)
_BETTER_RESPONSE = ("prompt", "response_0", "response_1", "better_response_id")
_QUESTIONS_AND_ANSWERS = tuple(dict.fromkeys(name for both in chats.QUESTIONS_AND_ANSWERS for name in both))

_ANSWERS = ("completion", "chosen", "rejected", *_BETTER_RESPONSE[1:], *chats.TURNS)


def _is_prompt(row: Row) -> bool:
    """Return whether a row has a prompt, and no answer that another format reads."""
    answered = any(_has(*both)(row) for both in chats.QUESTIONS_AND_ANSWERS)
    return "prompt" in row and not answered and not any(map(row.__contains__, _ANSWERS))


FORMATS: dict[str, Format] = {
    "messages": Format(
        Chat,
        "a column 'messages' (or 'conversations') of turns with 'role' and 'content'",
        (*chats.TURNS, *_MORE),
        chats.read_messages,
        _is_messages,
    ),
    "sharegpt": Format(
        Chat,
        "a column 'conversations' of turns with 'from' and 'value'",
        (*chats.TURNS, *_MORE),
        chats.read_sharegpt,
        _turn_has("from", "value"),
    ),
    "llava": Format(
        Chat,
        "the columns of 'sharegpt'; each image stands before the text of its turn, as in LLaVA's code and XTuner",
        (*chats.TURNS, *_MORE),
        chats.read_llava,
    ),
    "rounds": Format(
        Chat,
        "a column 'conversation' of rounds with 'input' and 'output' (or 'human' and 'assistant')",
        ("conversation", "conversations", *_MORE),
        chats.read_rounds,
        _turn_has("output", "assistant"),
    ),
    "alpaca": Format(
        Chat,
        "columns 'instruction', 'output' and perhaps 'input', or one of the pairs "
        + ", ".join(f"'{question}'/'{reply}'" for question, reply in chats.QUESTIONS_AND_ANSWERS[1:]),
        (*_QUESTIONS_AND_ANSWERS, "input", "history", *_MORE),
        chats.read_alpaca,
        lambda row: any(_has(*both)(row) for both in chats.QUESTIONS_AND_ANSWERS),
    ),
    "prompt_completion": Format(
        Chat,
        "columns 'prompt' and 'completion', texts or lists of turns",
        ("prompt", "completion", *_MORE),
        chats.read_prompt_completion,
        _has("prompt", "completion"),
    ),
    "oasst1": Format(
        Chat,
        "a column 'text' such as '### Human: ...### Assistant: ...'",
        ("text", *_MORE),
        chats.read_oasst1,
        lambda row: str(row.get("text")).lstrip().startswith("### Human:"),
    ),
    "moss": Format(
        Chat,
        "a column 'chat' of turns 'turn_1', 'turn_2' ... with 'Human' and 'MOSS'",
        ("chat", "meta_instruction", *_MORE),
        chats.read_moss,
        lambda row: isinstance(row.get("chat"), dict),
    ),
    "msagent": Format(
        Chat,
        "a column 'conversations' of turns with 'from' and 'value'; the answers contain '<|startofthink|>'",
        (*chats.TURNS, *_MORE),
        chats.read_msagent,
        lambda row: "<|startofthink|>" in str(row.get("conversations")),
        before=("sharegpt",),
    ),
    "refcoco": Format(
        Chat,
        "columns 'sents', 'bbox', 'width', 'height' and 'image', as XTuner writes RefCOCO: the answer is the box",
        (*chats.BOX_COLUMNS, *_MORE),
        chats.read_referring,
        _has("sents", "bbox"),
    ),
    "inv_refcoco": Format(
        Chat,
        "the columns of 'refcoco'; the answer is the description of the box",
        (*chats.BOX_COLUMNS, *_MORE),
        chats.read_identifying,
    ),
    "prompt": Format(
        Prompt,
        "a column 'prompt', a text or a list of turns, and perhaps others, which rewards get",
        ("prompt", "answer", "system", *_FOR_TEMPLATE),
        read_prompt,
        _is_prompt,
    ),
    "text": Format(str, "a column 'text'", ("text",), lambda row: cells.text_of(row, "text"), _has("text")),
    "preference": Format(
        Pair,
        "columns 'chosen' and 'rejected': answers to a prompt column, or two conversations with the same beginning",
        ("chosen", "rejected", *PROMPTS, *_MORE),
        read_preference,
        _has("chosen", "rejected"),
    ),
    "better_response": Format(
        Pair,
        "columns 'prompt', 'response_0', 'response_1' and 'better_response_id'",
        (*_BETTER_RESPONSE, *_MORE),
        read_better_response,
        _has(*_BETTER_RESPONSE),
    ),
    "feedback": Format(
        Feedback,
        "a column 'label' of true, false, 1 or 0 beside 'prompt' and 'completion' or a column of turns",
        ("prompt", "completion", "label", *chats.TURNS, *_MORE),
        read_feedback,
        _is_feedback,
        before=("prompt_completion", "messages", "sharegpt"),
        claims=_is_labelled,
    ),
    "chosen": Format(
        Chat,
        "the columns of 'preference' or 'better_response'; only the better answers are used",
        (*_BETTER_RESPONSE, "chosen", "rejected", *PROMPTS, *_MORE),
        read_chosen,
    ),
}


def user_function(name: str) -> Callable[[Row], Any]:
    """Import the function that `my_package.my_module:my_function` names: a row in, messages or a text out.

    Raises:
        DataError: there is no such module or function.
    """
    module, _, function = name.partition(":")
    try:
        imported = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        fix = "Install the package, or put its folder on PYTHONPATH."
        raise DataError(f"cannot import {module!r}: {error}", where="dataset.format", fix=fix) from error
    if not callable(imported):
        fix = "Write it as 'my_package.my_module:my_function'."
        raise DataError(f"{module} has no function {function!r}", where="dataset.format", fix=fix)
    return imported  # type: ignore[no-any-return]


def sample_of(name: str, row: Row, place: str) -> tuple[Sample, Row]:
    """Return what the function that `name` names makes of a row, and the columns that it returns.

    Raises:
        DataError: there is no such function, or it returns no sample.
    """
    returned = user_function(name)(row)
    if isinstance(returned, str):
        return returned, {}
    try:
        returned_row = {"messages": returned} if isinstance(returned, list) else returned
        returned_row = TrackedRow(returned_row) if isinstance(returned_row, Mapping) else returned_row
        shape = next((shape for shape in _RETURNED if shape in returned_row), "messages")
        return _RETURNED[shape](returned_row), returned_row
    except (Misfit, TypeError, AttributeError) as error:
        fix = (
            "Return a text, a list of messages, or a row of format 'messages', 'prompt_completion', 'preference' "
            "or 'feedback'."
        )
        raise DataError(f"{name} did not return a sample: {error}", where=place, of_row=True, fix=fix) from error


# The first column that one of a user's rows has tells what it is.
_RETURNED: dict[str, Callable[[Row], Sample]] = {
    "chosen": read_preference,
    "label": read_feedback,
    "completion": chats.read_prompt_completion,
    "messages": chats.read_messages,
}
