"""What makes a recipe admissible: the code that it names is allowed, and its model, teacher and data can be read.

Every command that opens what a recipe names asks here. A new condition is one more function in `OF_A_RUN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tuner.errors import TunerError
from tuner.recipes import path_checks, trust
from tuner.recipes.recipe import Recipe


class Grant(NamedTuple):
    """What a command allows.

    Args:
        code: Whether --allow-code was given.
        of_run: A run will start: also what it does when it ends counts, a command and an upload.
    """

    code: bool = False
    of_run: bool = False


Admission = Callable[[Recipe, Grant], None]
"""Raises a TunerError if the recipe is not admissible."""


def _code(recipe: Recipe, grant: Grant) -> None:
    trust.refuse(recipe, allow_code=grant.code, of_run=grant.of_run)


def _model(recipe: Recipe, _: Grant) -> None:
    path_checks.check_model(recipe.config)


def _teacher(recipe: Recipe, _: Grant) -> None:
    path_checks.check_teacher(recipe.config)


def _data(recipe: Recipe, _: Grant) -> None:
    path_checks.check_data(recipe.config)


def _template(recipe: Recipe, _: Grant) -> None:
    path_checks.check_template(recipe.config)


OF_ROWS: tuple[Admission, ...] = (_code, _model, _data, _template)
"""Of a command that shows rows as tokens."""
OF_A_RUN: tuple[Admission, ...] = (_code, _model, _teacher, _data, _template)
"""Of a command that starts, measures or checks a run."""


def problems(recipe: Recipe, grant: Grant, admissions: Sequence[Admission] = OF_A_RUN) -> list[TunerError]:
    """Return everything that speaks against the recipe."""
    found = []
    for admission in admissions:
        try:
            admission(recipe, grant)
        except TunerError as error:
            found.append(error)
    return found


def require(recipe: Recipe, grant: Grant, admissions: Sequence[Admission] = OF_A_RUN) -> None:
    """Refuse a recipe that is not admissible.

    Raises:
        TunerError: the first thing that speaks against it; the others often follow from it.
    """
    for admission in admissions:
        admission(recipe, grant)
