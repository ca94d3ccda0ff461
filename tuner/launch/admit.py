"""What makes a recipe admissible: the code that it names is allowed, and its model, teacher and data can be read.

Every command that opens what a recipe names asks here. A new condition is one more function in `OF_A_RUN`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tuner.errors import TunerError
from tuner.recipes import path_checks, trust
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig


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


def _reads(check: Callable[[RecipeConfig], None]) -> Admission:
    """Return the admission of what a recipe names: it can be read."""
    return lambda recipe, _: check(recipe.config)


_MODEL, _DATA, _TEMPLATE = map(_reads, (path_checks.check_model, path_checks.check_data, path_checks.check_template))
OF_CODE: tuple[Admission, ...] = (_code,)
"""Of a command that starts others on hosts: paths are those of the hosts, and each looks for them."""
OF_ROWS: tuple[Admission, ...] = (_code, _MODEL, _DATA, _TEMPLATE)
"""Of a command that shows rows as tokens."""
OF_A_RUN: tuple[Admission, ...] = (_code, _MODEL, _reads(path_checks.check_teacher), _DATA, _TEMPLATE)
"""Of a command that starts, measures or checks a run."""


def problems(recipe: Recipe, grant: Grant, admissions: Sequence[Admission] = OF_A_RUN) -> list[TunerError]:
    """Return everything that speaks against the recipe."""
    errors = []
    for admission in admissions:
        try:
            admission(recipe, grant)
        except TunerError as error:
            errors.append(error)
    return errors


def require(recipe: Recipe, grant: Grant, admissions: Sequence[Admission] = OF_A_RUN) -> None:
    """Refuse a recipe that is not admissible.

    Raises:
        TunerError: the first thing that speaks against it; the others often follow from it.
    """
    for admission in admissions:
        admission(recipe, grant)
