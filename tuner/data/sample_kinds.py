"""Which samples each objective learns from, by the kind of its rows.

It reads no rows, and makes no tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuner.data.sample import Chat, Feedback, Message, Pair, Prompt, Sample, is_whole, lacks, marks_in, spoken, unmarked
from tuner.errors import DataError, Option
from tuner.recipes.schema.objectives import OBJECTIVES, RowKind, facts_of

_SAMPLES: dict[RowKind, tuple[type, ...]] = {
    "conversations": (Chat,),
    "texts": (str, Chat),
    "pairs": (Pair,),
    "judged": (Feedback, Pair),
    "prompts": (Prompt, Chat),
}
"""What rows become. Where answers are judged one by one, a pair is one good answer and one bad one."""

ANSWER = "answer"
"""The column with the answer that a conversation was cut before."""
_TURNS = ("messages", "conversations")
_WHAT = {
    Chat: "conversations",
    str: "plain text",
    Pair: "preference data (pairs of answers)",
    Feedback: "feedback (answers marked good or bad)",
    Prompt: "prompts without answers",
}


class WrongKind(DataError):
    """Rows that are well formed, and not what the objective learns from."""


def kinds_of(objective: str) -> tuple[type, ...]:
    return _SAMPLES[facts_of(objective).rows]


def learners_of(kind: type) -> tuple[str, ...]:
    return tuple(name for name in OBJECTIVES if kind in kinds_of(name))


def for_objective(sample: Sample, objective: str, name: str, place: str) -> tuple[Sample, ...]:
    """Return what the objective learns from a sample of format `name`: itself, or the two answers of a pair.

    A pair is taken apart if the objective judges single answers. A pair of equal answers stays whole: it `lacks`
    something.

    Raises:
        WrongKind: the objective does not learn from this kind of data; all rows of a format are of one kind, those of
            a function of the user's are not.
        DataError: a turn is not to be trained, or in part, and the objective trains or scores every token, or compares
            answers.
    """
    if not isinstance(sample, kinds_of(objective)):
        wanted_kinds = " or ".join(_WHAT[kind] for kind in kinds_of(objective))
        problem = f"format {name!r} holds {_WHAT[type(sample)]}, and objective {objective} needs {wanted_kinds}"
        raise WrongKind(problem, where=place, of_row=":" in name, fix=_way_out(sample, objective))
    if facts_of(objective).rows == "texts" and isinstance(sample, Chat):
        _refuse_untrained(sample.messages, f"objective {objective} trains every token of a conversation", place)
    if facts_of(objective).scores and isinstance(sample, Pair):
        turns = [*sample.chosen, *sample.rejected]
        _refuse_untrained(turns, f"objective {objective} scores an answer as a whole", place)
    if isinstance(sample, Pair | Feedback):
        answers = [sample.chosen, sample.rejected] if isinstance(sample, Pair) else [sample.completion]
        if not all(map(is_whole, [*sample.prompt, *itertools.chain(*answers)])):
            problem = f"a part of a turn is to be trained, and objective {objective} compares whole turns"
            fix = "Give the turn a weight of 0 or 1 and no spans, or use objective sft."
            raise DataError(problem, where=place, of_row=True, fix=fix)
    if facts_of(objective).rows == "judged" and isinstance(sample, Pair) and not lacks(sample):
        of_template = sample.tools, sample.chat_template_kwargs
        return (
            Feedback(sample.prompt, sample.chosen, True, *of_template),
            Feedback(sample.prompt, sample.rejected, False, *of_template),
        )
    if facts_of(objective).rows == "prompts" and isinstance(sample, Chat):
        return (before_last_answer(sample),)
    return (sample,)


def marks_without_meaning(sample: Sample) -> tuple[str, ...]:
    """Return what turns of a prompt say about their own loss, which they never carry: 'weight', 'spans'."""
    turns = sample.prompt if isinstance(sample, Prompt) else sample.messages if isinstance(sample, Chat) else []
    return tuple(key for key in ("weight", "spans") if any(key in turn for turn in turns))


def _refuse_untrained(turns: Sequence[Message], reason: str, place: str) -> None:
    if any("weight" in turn or marks_in(turn) for turn in turns):
        problem = f"a turn is not to be trained whole, and {reason}"
        raise DataError(problem, where=place, of_row=True, fix="Use objective sft, or remove the key from the turn.")


def before_last_answer(chat: Chat) -> Prompt:
    """Return the conversation before its last answer, which becomes the column `answer`."""
    at = max((number for number, turn in enumerate(chat.messages) if turn["role"] == "assistant"), default=0)
    answer = spoken(chat.messages[at]) if at else None
    return Prompt(
        list(map(unmarked, chat.messages[:at])),
        {ANSWER: answer},
        tools=chat.tools,
        chat_template_kwargs=chat.chat_template_kwargs,
    )


def with_columns(sample: Sample, row: Mapping[str, Any]) -> Sample:
    """Return a prompt with the other columns of its row, which rewards get; other samples as they are."""
    if not isinstance(sample, Prompt):
        return sample
    sample = replace(sample, prompt=list(map(unmarked, sample.prompt)))
    other_columns = {key: value for key, value in row.items() if key not in (*_TURNS, "prompt")}
    return replace(sample, columns={**other_columns, **sample.columns})


def _way_out(sample: Sample, objective: str) -> str:
    methods = methods_of(learners_of(type(sample)))
    if isinstance(sample, Pair) and facts_of(objective).packs:
        return f"Train it with {methods}, or set format='chosen' to learn only from the chosen answers."
    return f"Train it with {methods}, or choose other data."


def methods_of(objectives: Sequence[str]) -> str:
    """Return the option that trains with the first of some objectives, and the others' words."""
    # Learning from conversations is what a method alone means; `recipes.catalog` composes the words.
    first, *others = ("lora" if facts_of(name).rows == "conversations" else f"{name}_lora" for name in objectives)
    return f"{Option('method', first)} (or {', '.join(others)})" if others else Option("method", first)
