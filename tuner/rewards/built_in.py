"""The rewards of the package, each a function of completions and the columns of their rows.

A completion is a text, or the messages of a turn. A function returns a number for each completion, or None where a row
lacks the right answer. It raises what its libraries raise; the callers catch it.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tuner.errors import MachineError, RewardError
from tuner.files import load_json, read_bytes
from tuner.recipes.schema import rewards as blocks
from tuner.recipes.schema.rewards import RewardBlock

Completion = str | Sequence[Mapping[str, object]]
"""A text, or messages such as [{'role': 'assistant', 'content': '4'}]."""
Scores = list[float | None]
Reward = Callable[..., Scores]
"""What TRL calls, with names: prompts and completions in, as many numbers out; other columns of the rows come too."""
_FENCE = re.compile(r"\A```\w*\n(.*)\n```\Z", re.DOTALL)


def text_of(completion: Completion) -> str:
    """Return the text of a completion: that of its last message, unless that is the result of a tool."""
    if isinstance(completion, str):
        return completion
    if not completion or completion[-1].get("role") == "tool":  # it ended before the model answered
        return ""
    return str(completion[-1].get("content") or "")


def built_in(block: RewardBlock) -> Reward:
    """Return the function of a reward of the package, except for a reward model.

    Raises:
        MachineError: a library that the reward needs is not installed.
        RewardError: the file cannot be read, or holds no JSON schema.
    """
    match block:
        case blocks.MathReward():
            return _of_answer(block.column, _math())
        case blocks.ExactReward():
            fold = str.casefold if block.ignore_case else str
            return _of_answer(
                block.column, lambda completion, answer: float(fold(completion.strip()) == fold(answer.strip()))
            )
        case blocks.ContainsReward(text=text):
            fold = str.casefold if block.ignore_case else str
            if text is not None:
                return _of_text(lambda completion: float(fold(text.strip()) in fold(completion)))
            return _of_answer(block.column, lambda completion, answer: float(fold(answer.strip()) in fold(completion)))
        case blocks.FormatReward():
            pattern = re.compile(block.pattern, re.DOTALL)
            return _of_text(lambda completion: float(pattern.fullmatch(completion.strip()) is not None))
        case blocks.JsonReward():
            return _of_text(_json(block.json_schema))
        case blocks.LengthReward():
            return _of_text(lambda completion: max(-1.0, -abs(len(completion) - block.target) / block.target))
    raise AssertionError(f"{block.type} is not a function of texts")


def _of_text(score: Callable[[str], float]) -> Reward:
    def reward(*, completions: Sequence[Completion], **_: object) -> Scores:
        return [score(text_of(completion)) for completion in completions]

    return reward


def _of_answer(column: str, score: Callable[[str, str], float | None]) -> Reward:
    def reward(*, completions: Sequence[Completion], **columns: Sequence[object]) -> Scores:
        if column not in columns:
            problem = f"the rows have no column {column!r}, which holds the right answer"
            column_names = ", ".join(sorted(set(columns) - {"prompts", "completions"})) or "no other columns"
            raise RewardError(problem, where="objective.rewards", fix=f"Set column to one of: {column_names}.")
        pairs = zip(completions, columns[column], strict=True)
        return [None if answer is None else score(text_of(completion), _answer(answer)) for completion, answer in pairs]

    return reward


def _answer(value: object) -> str:
    """Return the right answer as a text; a chat row's answer may be a message."""
    if isinstance(value, Mapping):
        return str(value.get("content") or "")
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return text_of(value)
    return str(value)


def _math() -> Callable[[str, str], float | None]:
    """Return a comparison by math-verify; None if the right answer is no number or expression."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify  # takes a second

    for module in ("parser", "grader"):  # they warn that there is no timeout of their own
        logging.getLogger(f"math_verify.{module}").setLevel(logging.ERROR)
    targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())

    def parsed(text: str) -> list[object]:
        # Its own timeouts raise signals. The caller has a deadline, which also ends a loop inside C.
        result: list[object] = parse(text, extraction_config=targets, parsing_timeout=None, raise_on_error=True)
        return result

    def score(completion: str, answer: str) -> float | None:
        # GSM8K writes its answer after '####', behind the way to it.
        written = answer.rpartition("####")[2].strip()
        right = parsed(written) or (parsed(f"${written}$") if "\\" in written else [])
        if not right:
            return None
        return float(verify(right, parsed(completion), timeout_seconds=None, raise_on_error=True))

    return score


def _json(schema: Mapping[str, object] | str | None) -> Callable[[str], float]:
    fits = _validator(schema)

    def score(completion: str) -> float:
        text = completion.strip()
        fenced = _FENCE.match(text)
        try:
            return float(fits(json.loads(fenced[1] if fenced else text)))
        except ValueError:
            return 0.0

    return score


def _validator(schema: Mapping[str, object] | str | None) -> Callable[[object], bool]:
    if schema is None:
        return lambda _: True
    try:
        from jsonschema import Draft202012Validator, SchemaError
    except ImportError as error:
        problem = "the reward 'json' with a schema needs jsonschema, which is not installed"
        raise MachineError(problem, fix="pip install jsonschema") from error
    where = schema if isinstance(schema, str) else "objective.rewards"
    try:
        document = load_json(read_bytes(Path(schema))) if isinstance(schema, str) else schema
        Draft202012Validator.check_schema(document)
    except (OSError, ValueError, SchemaError) as error:
        problem = f"the JSON schema cannot be used: {str(error).splitlines()[0]}"
        raise RewardError(problem, where=where, fix="Write a JSON Schema: https://json-schema.org") from error
    return Draft202012Validator(document).is_valid  # type: ignore[no-any-return]
