"""Readers of the row formats that hold preferences: pairs of answers, and answers marked good or bad.

They know no other format than their own; `formats` names and chooses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tuner.data.formats import cells, chats
from tuner.data.formats.cells import Misfit, Row
from tuner.data.sample import Chat, Feedback, Message, Pair

PROMPTS = ("prompt", "question", "instruction", "query", "input", *chats.TURNS)
"""The columns that a prompt stands in, the first of them wins."""


def _is_hh(row: Row) -> bool:
    """Say whether the two answers are hh-rlhf's texts of whole chats."""
    texts = (row.get("chosen"), row.get("rejected"))
    return all(isinstance(text, str) and text.lstrip().startswith("Human:") for text in texts)


def read_preference(row: Row) -> Pair:
    """Read `chosen` and `rejected`: answers to the prompt's column, or whole conversations that begin alike."""
    if _is_hh(row):
        both = [chats.spoken_hh(cells.text_of(row, name)) for name in ("chosen", "rejected")]
    else:
        both = [chats.turns_of(row, name, chats.answer) for name in ("chosen", "rejected")]
    chosen, rejected = (_answered(messages, name) for messages, name in zip(both, ("chosen", "rejected"), strict=True))
    if _is_answer(chosen) and _is_answer(rejected):
        prompt = _prompt(row)
    else:
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        prompt = [*chats.leading_system(row, prompt), *prompt]
    return Pair(prompt, chosen, rejected, cells.tools(row))


def _answered(messages: Sequence[Message], name: str) -> list[Message]:
    """Return the turns up to the assistant's last.

    Raises:
        Misfit: there is none.
    """
    turns = chats.up_to_answer(messages)
    if not turns:
        raise Misfit(f"{name!r} has no assistant turn")
    return turns


def _is_answer(messages: Sequence[Message]) -> bool:
    return bool(messages[0]["role"] == "assistant")


def _prompt(row: Row) -> list[Message]:
    """Return the turns before the answers."""
    name = cells.first_of(row, *PROMPTS)
    if isinstance(row.get(name), str):
        return [*chats.system_turn(row), chats.user(chats.instruction(row, name))]
    return chats.prompt_of(row, name)


def _shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Return how many turns both conversations begin with, up to the last that is not the assistant's."""
    alike = list(takewhile(lambda both: both[0] == both[1], zip(chosen, rejected, strict=False)))
    while alike and alike[-1][0]["role"] == "assistant":
        alike.pop()
    if not alike:
        raise Misfit("'chosen' and 'rejected' do not begin with the same turns")
    return len(alike)


def read_chosen(row: Row) -> Chat:
    """Read the better answer of a pair as a conversation."""
    pair = read_better_response(row) if "better_response_id" in row else read_preference(row)
    return Chat([*pair.prompt, *pair.chosen], pair.tools)


def read_better_response(row: Row) -> Pair:
    """Read two answers and the number, 0 or 1, of the better one, as PKU-SafeRLHF has them."""
    better = cells.column(row, "better_response_id")
    if better not in (0, 1) or isinstance(better, bool):
        raise Misfit(f"better_response_id is {better!r}, not 0 or 1")
    chosen, rejected = ([chats.answer(cells.text_of(row, f"response_{at}"))] for at in (better, 1 - better))
    return Pair(chats.prompt_of(row, "prompt"), chosen, rejected, cells.tools(row))


def read_feedback(row: Row) -> Feedback:
    """Read an answer and its label: prompt and completion, or one conversation whose last answer is meant."""
    label = cells.column(row, "label")
    if label not in (0, 1):
        raise Misfit(f"label is {label!r}, not true, false, 1 or 0")
    if "completion" in row:
        prompt, completion = chats.prompt_of(row, "prompt"), chats.turns_of(row, "completion", chats.answer)
    else:
        turns = chats.messages_of(row, cells.first_of(row, *chats.TURNS))
        whole = [*chats.leading_system(row, turns), *chats.up_to_answer(turns)]
        start = max((at for at, turn in enumerate(whole, 1) if turn["role"] != "assistant"), default=0)
        prompt, completion = whole[:start], whole[start:]
    return Feedback(prompt, _answered(completion, "completion"), bool(label), cells.tools(row))
