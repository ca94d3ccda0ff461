"""What the columns of rows say that an objective does not learn from: pairs, judgements, scores.

It refuses nothing: such rows may be meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tuner.data.formats import cells
from tuner.data.sample import Chat, Feedback, Pair
from tuner.data.sample_kinds import learners_of, methods_of
from tuner.recipes.schema.objectives import facts_of

_REJECTED = ("rejected", "rejected_response", "rejected_messages", "rejected_output", "response_rejected")
_LABELS = ("label", "kto_tag")
_SCORES = ("reward", "rewards", "score")


def hint(rows: Sequence[Mapping[str, Any]], name: str, objective: str) -> str | None:
    """Return what the columns of the first rows say that the objective does not learn from; None if that is nothing."""
    rows_of_objective = facts_of(objective).rows
    if rows_of_objective not in ("conversations", "texts") or not rows:
        return None
    if rejected := _column(rows, _REJECTED, bool):
        names = ", ".join(repr(name) for name in ("chosen", rejected) if any(name in row for row in rows))
        learners = methods_of(learners_of(Pair))
        return f"the rows are pairs of answers ({names}), of which {objective} ignores the rejected ones: {learners}."
    of_feedback = methods_of(learners_of(Feedback))
    if label := _column(rows, _LABELS, lambda value: cells.truth(value) is not None):
        column_option = "" if label == "label" else f", columns.label={label}"
        return (
            f"the rows say which answers are good ({label!r}), and {objective} learns all of them, the bad ones too: "
            f"{of_feedback}{column_option}."
        )
    if score := _column(rows, _SCORES, _is_number):
        return (
            f"the rows score their answers ({score!r}), and {objective} learns all of them alike. Keep the rows with "
            f"good answers, or write 'label' true or false instead: {of_feedback}."
        )
    if rows_of_objective == "texts" and name != "text":
        return (
            f"the rows are conversations, and {objective} trains every token of them, the questions too: "
            f"{methods_of(learners_of(Chat)[:1])} trains the answers."
        )
    return None


def _column(rows: Sequence[Mapping[str, Any]], names: Sequence[str], fits: Callable[[Any], bool]) -> str | None:
    """Return the first of the named columns that every row has with a value that fits."""
    return next((name for name in names if all(name in row and fits(row[name]) for row in rows)), None)


def _is_number(value: object) -> bool:
    try:
        return not isinstance(value, bool | list | dict) and math.isfinite(float(str(value)))
    except ValueError:
        return False
