"""What one row becomes, and which objectives learn from it.

It reads no rows: `formats` makes samples, `masks` turns them into tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tuner.errors import DataError
from tuner.recipes.schema.objectives import OBJECTIVES, RowKind, facts_of

Message = dict[str, Any]
"""A turn in the words of chat templates: role, content, perhaps tool_calls, reasoning_content ...

`weight` 0 on an assistant's turn means that it carries no loss.
"""


@dataclass(frozen=True)
class Chat:
    """A conversation that ends with the assistant's turn. `tools` are JSON schemas for the chat template."""

    messages: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Pair:
    """A prompt and two ways to go on from it. A plain text is one message: the user's prompt, the assistant's answer.

    `prompt` ends before the assistant's turn; `chosen` and `rejected` are the turns after it.
    """

    prompt: list[Message]
    chosen: list[Message]
    rejected: list[Message]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Feedback:
    """A prompt, the turns after it, and whether they are good (`label`). A plain text is one message, as in `Pair`."""

    prompt: list[Message]
    completion: list[Message]
    label: bool
    tools: list[Any] | None = None


Sample = Chat | str | Pair | Feedback

_SAMPLES: dict[RowKind, tuple[type, ...]] = {
    "conversations": (Chat,),
    "texts": (str, Chat),
    "pairs": (Pair,),
    "judged": (Feedback, Pair),
}
"""What rows become. Where answers are judged one by one, a pair is one good answer and one bad one."""
KINDS = {name: _SAMPLES[block.facts.rows] for name, block in OBJECTIVES.items()}
"""What each objective learns from."""

IGNORED = -100
"""The label of a token that carries no loss."""

EQUAL, NO_ANSWER = "both answers are the same", "there is no answer"

_WHAT = {
    Chat: "conversations",
    str: "plain text",
    Pair: "preference data (pairs of answers)",
    Feedback: "feedback (answers marked good or bad)",
}


class WrongKind(DataError):
    """Rows that are well formed, and not what the objective learns from."""


def for_objective(sample: Sample, objective: str, name: str, place: str) -> tuple[Sample, ...]:
    """Return what the objective learns from a sample of format `name`: itself, or the two answers of a pair.

    A pair is taken apart if the objective judges single answers.

    A pair of equal answers stays whole there too: it `lacks` something.

    Raises:
        WrongKind: the objective does not learn from this kind of data; all rows of a format are of one kind, those of
            a function of the user's are not.
    """
    if not isinstance(sample, KINDS[objective]):
        wanted = " or ".join(_WHAT[kind] for kind in KINDS[objective])
        what = f"format {name!r} holds {_WHAT[type(sample)]}, and objective {objective} needs {wanted}"
        raise WrongKind(what, where=place, of_row=":" in name, fix=_way_out(sample, objective))
    if facts_of(objective).rows == "judged" and isinstance(sample, Pair) and not lacks(sample):
        return (
            Feedback(sample.prompt, sample.chosen, True, sample.tools),
            Feedback(sample.prompt, sample.rejected, False, sample.tools),
        )
    return (sample,)


def lacks(sample: Sample) -> str | None:
    """Return why a sample holds nothing to learn, None where it does; callers count it as dropped."""
    if isinstance(sample, str):
        return None if sample.strip() else "the text is empty"
    if isinstance(sample, Pair):
        return None if sample.chosen != sample.rejected else EQUAL
    turns = sample.messages if isinstance(sample, Chat) else sample.completion
    answers = [turn for turn in turns if turn["role"] == "assistant"]
    if not answers:
        return NO_ANSWER
    says = ("content", "tool_calls", "reasoning_content")
    return None if any(any(map(turn.get, says)) for turn in answers) else "every answer is empty"


def _way_out(sample: Sample, objective: str) -> str:
    others = "/".join(other for other, kinds in KINDS.items() if isinstance(sample, kinds))
    if isinstance(sample, Pair) and facts_of(objective).packs:
        return f"Train it with objective {others}, or set format='chosen' to learn only from the chosen answers."
    return f"Train it with objective {others}, or choose other data."
