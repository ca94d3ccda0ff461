"""The known shapes of a row: their names, how one is told from columns, and the mistakes a row can make.

It reads no files and knows no tokens. Text in a row is data: nothing of it is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from tuner.data import agents, chats, fields, limits, media, pairs
from tuner.data.columns import Columns, check_names, renamed
from tuner.data.fields import Misfit, Row, names
from tuner.data.functions import sample_of, user_function
from tuner.data.sample import KINDS, Chat, Feedback, Pair, Sample
from tuner.errors import DataError, did_you_mean, nearest

_NO_FORMAT = "no known format"

__all__ = ["FORMATS", "KINDS", "Chat", "Format", "Sample", "detect", "read", "user_function"]


class MixedShapes(DataError):
    """Rows of one data set that have several formats: no setting fits them all."""


@dataclass(frozen=True)
class Format:
    """`matches` looks at columns and at what their values begin with; `read` raises `Misfit`.

    `columns` are all that it reads. `before` are formats that fit the same rows and are not meant where this one is.
    """

    kind: type
    needs: str
    columns: tuple[str, ...]
    matches: Callable[[Row], bool]
    read: Callable[[Row], Sample]
    before: tuple[str, ...] = ()


def detect(rows: Sequence[Row], place: str, *, columns: Columns | None = None, objective: str | None = None) -> str:
    """Return the name of the format that all of the first `rows` have, or else the first of them.

    Args:
        rows: At least one row, before `columns` are renamed.
        place: The data set, for messages.
        columns: The user's names for columns, as for `read`.
        objective: Where several formats fit, one that this objective learns from is meant.

    Raises:
        DataError: no format is known for these columns, or several are.
    """
    check_names(columns, {name for known in FORMATS.values() for name in known.columns}, "any format")
    mapped = [renamed(row, columns, place) for row in rows]
    found = _fitting(mapped, objective) or _fitting(mapped[:1], objective)
    if len(found) == 1:
        return found[0]
    told = names(mapped[0])
    if not found:
        what = f"the row format cannot be told from the columns {told}"
        raise DataError(what, where=place, fix=_closest(mapped[0]))
    either = " or ".join(map(repr, found))
    what = f"the columns {told} could be of format {either}"
    raise DataError(what, where=place, fix=f"Set dataset.format to the one that is meant: {either}.")


def mixed(
    rows: Iterable[tuple[str, Row]], place: str, *, columns: Columns | None, objective: str
) -> MixedShapes | None:
    """Return the error of rows, each with its place, that have several formats; None where they have one."""
    found: dict[str, list[str]] = {}
    for where, row in rows:
        found.setdefault(_shape(row, where, columns, objective), []).append(where)
    if len(found.keys() - {_NO_FORMAT}) < 2:
        return None
    count = sum(map(len, found.values()))
    told = ", ".join(f"{len(places):,} of {shape} (the first at {places[0]})" for shape, places in found.items())
    fix = "Give all rows one shape, or write each shape into a file of its own and list the files in dataset.mixture."
    return MixedShapes(f"its rows have several shapes, of the first {count:,} rows {told}", where=place, fix=fix)


def _shape(row: Row, place: str, columns: Columns | None, objective: str) -> str:
    try:
        mapped = renamed(row, columns, place)
        fitting = _fitting([mapped], objective)
        for name in fitting:
            FORMATS[name].read(mapped)
    except (DataError, Misfit):  # a row that is wrong by itself is no other shape
        return _NO_FORMAT
    return " or ".join(f"format {name!r}" for name in fitting) or _NO_FORMAT


def _closest(row: Row) -> str:
    alike = {name: sum(nearest(str(one), known.columns) is not None for one in row) for name, known in FORMATS.items()}
    best = max(alike, key=lambda name: alike[name])
    told = f"The nearest is {best!r}, which needs {FORMATS[best].needs}. " if alike[best] else ""
    return f"{told}Rename the columns with dataset.columns, or set dataset.format to one of {', '.join(FORMATS)}."


def _fitting(rows: Sequence[Row], objective: str | None) -> list[str]:
    fit = [name for name, known in FORMATS.items() if all(known.matches(row) for row in rows)]
    wanted = KINDS[objective] if objective else ()
    fit = [name for name in fit if FORMATS[name].kind in wanted] or fit
    beaten = {other for name in fit for other in FORMATS[name].before}
    return [name for name in fit if name not in beaten]


def known(name: str) -> Format:
    """Return the format of that name.

    Raises:
        DataError: there is none.
    """
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS, see=", ".join(FORMATS))
        raise DataError(f"there is no row format {name!r}", where="dataset.format", fix=hint)
    return FORMATS[name]


def read(name: str, row: Row, place: str, *, columns: Columns | None = None, system: str | None = None) -> Sample:
    """Return the sample that a row of format `name` is.

    Args:
        name: One of `FORMATS`, or a function of the user's: 'my_package.my_module:my_function'.
        row: Its columns and their values.
        place: `file:line` of the row, for messages.
        columns: A format's column -> this data set's: {'prompt': 'question'} takes the value whatever it is;
            a value with braces, '{context}\\n{question}', makes a text of several columns.
        system: A system turn for conversations that have none.

    Raises:
        DataError: the format or a column is unknown, or the row is too long or does not have its format's shape.
    """
    if ":" in name:
        return _fitting_in(_with_system(sample_of(name, renamed(row, columns, place), place), system, place), place)
    check_names(columns, known(name).columns, f"format {name!r}")
    mapped = renamed(row, columns, place)
    try:
        sample = FORMATS[name].read(mapped)
        media.refuse(mapped, sample, FORMATS[name].columns, place)
        return _fitting_in(_with_system(sample, system, place), place)
    except Misfit as misfit:
        what = f"the row does not fit format {name!r}: {misfit}; its columns are {names(mapped)}"
        raise DataError(what, where=place, of_row=True, fix=_other_format(name, mapped)) from misfit


def _fitting_in(sample: Sample, place: str) -> Sample:
    if limits.size(sample) > limits.MAX_SAMPLE_BYTES:
        raise limits.too_long("what the row holds", place)
    return sample


def _with_system(sample: Sample, system: str | None, place: str) -> Sample:
    if not system:
        return sample
    if isinstance(sample, str):
        what = "dataset.system is set, and a plain text has no system turn"
        raise DataError(what, where=place, of_row=True, fix="Unset dataset.system, or take a format of conversations.")
    turns = sample.messages if isinstance(sample, Chat) else sample.prompt
    if any(turn["role"] == "system" for turn in turns):
        return sample
    turns = [{"role": "system", "content": system}, *turns]
    return replace(sample, messages=turns) if isinstance(sample, Chat) else replace(sample, prompt=turns)


def _other_format(name: str, row: Row) -> str:
    for other, known in FORMATS.items():
        try:
            if other != name and known.matches(row) and known.read(row):
                return f"Set format={other!r}, which fits this row, or correct the row."
        except Misfit:
            continue
    return f"Correct or remove the row; {name!r} needs {FORMATS[name].needs}."


def _read_text(row: Row) -> str:
    return fields.text_of(row, "text")


def _starts(row: Row, name: str, start: str) -> bool:
    value = row.get(name)
    return isinstance(value, str) and value.lstrip().startswith(start)


def _has(*needed: str) -> Callable[[Row], bool]:
    return lambda row: all(name in row for name in needed)


def _turn_has(*keys: str) -> Callable[[Row], bool]:
    return lambda row: any(key in fields.first_turn(row, chats.TURNS) for key in keys)


def _no_detection(_: Row) -> bool:
    return False


def _is_messages(row: Row) -> bool:
    first = fields.first_turn(row, chats.TURNS)
    return ("role" in first and "value" not in first) or ("messages" in row and not first)


def _is_feedback(row: Row) -> bool:
    return row.get("label") in (0, 1) and (_has("prompt", "completion")(row) or any(map(row.__contains__, chats.TURNS)))


_MORE = ("system", "tools")
_BETTER_RESPONSE = ("prompt", "response_0", "response_1", "better_response_id")
_QUESTIONS_AND_ANSWERS = tuple(dict.fromkeys(name for both in chats.QUESTIONS_AND_ANSWERS for name in both))

FORMATS: dict[str, Format] = {
    "messages": Format(
        Chat,
        "a column 'messages' (or 'conversations') of turns with 'role' and 'content'",
        (*chats.TURNS, *_MORE),
        _is_messages,
        chats.read_messages,
        before=("text",),
    ),
    "sharegpt": Format(
        Chat,
        "a column 'conversations' of turns with 'from' and 'value'",
        (*chats.TURNS, *_MORE),
        _turn_has("from", "value"),
        chats.read_sharegpt,
        before=("text",),
    ),
    "rounds": Format(
        Chat,
        "a column 'conversation' of rounds with 'input' and 'output' (or 'human' and 'assistant')",
        ("conversation", "conversations", *_MORE),
        _turn_has("output", "assistant"),
        chats.read_rounds,
        before=("text",),
    ),
    "alpaca": Format(
        Chat,
        "columns 'instruction', 'output' and perhaps 'input', or one of the pairs "
        + ", ".join(f"'{question}'/'{reply}'" for question, reply in chats.QUESTIONS_AND_ANSWERS[1:]),
        (*_QUESTIONS_AND_ANSWERS, "input", "history", *_MORE),
        lambda row: any(_has(*both)(row) for both in chats.QUESTIONS_AND_ANSWERS),
        chats.read_alpaca,
        before=("text",),
    ),
    "prompt_completion": Format(
        Chat,
        "columns 'prompt' and 'completion', texts or lists of turns",
        ("prompt", "completion", *_MORE),
        _has("prompt", "completion"),
        chats.read_prompt_completion,
        before=("text",),
    ),
    "oasst1": Format(
        Chat,
        "a column 'text' such as '### Human: ...### Assistant: ...'",
        ("text", *_MORE),
        lambda row: _starts(row, "text", "### Human:"),
        chats.read_oasst1,
        before=("text",),
    ),
    "moss": Format(
        Chat,
        "a column 'chat' of turns 'turn_1', 'turn_2' ... with 'Human' and 'MOSS'",
        ("chat", "meta_instruction", *_MORE),
        lambda row: isinstance(row.get("chat"), dict),
        agents.read_moss,
        before=("text",),
    ),
    "msagent": Format(
        Chat,
        "a column 'conversations' of turns with 'from' and 'value', whose answers hold '<|startofthink|>'",
        (*chats.TURNS, *_MORE),
        lambda row: "<|startofthink|>" in str(row.get("conversations")),
        agents.read_msagent,
        before=("sharegpt", "text"),
    ),
    "text": Format(str, "a column 'text'", ("text",), _has("text"), _read_text),
    "preference": Format(
        Pair,
        "columns 'chosen' and 'rejected': answers beside a prompt, or two conversations that begin alike",
        ("chosen", "rejected", *pairs.PROMPTS, *_MORE),
        _has("chosen", "rejected"),
        pairs.read_preference,
        before=("text",),
    ),
    "better_response": Format(
        Pair,
        "columns 'prompt', 'response_0', 'response_1' and 'better_response_id'",
        (*_BETTER_RESPONSE, *_MORE),
        _has(*_BETTER_RESPONSE),
        pairs.read_better_response,
        before=("text",),
    ),
    "feedback": Format(
        Feedback,
        "a column 'label' of true, false, 1 or 0 beside 'prompt' and 'completion' or a column of turns",
        ("prompt", "completion", "label", *chats.TURNS, *_MORE),
        _is_feedback,
        pairs.read_feedback,
        before=("prompt_completion", "messages", "sharegpt", "text"),
    ),
    "chosen": Format(
        Chat,
        "what 'preference' or 'better_response' needs; the worse answers are left out",
        (*_BETTER_RESPONSE, "chosen", "rejected", *pairs.PROMPTS, *_MORE),
        _no_detection,
        pairs.read_chosen,
    ),
}
