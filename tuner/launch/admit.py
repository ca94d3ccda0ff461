"""What makes a recipe admissible: the code that it names is allowed, and its model, teacher and data can be read.

Every command that opens what a recipe names asks here. A new condition is one more check in `OF_A_RUN`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tuner.errors import TunerError
from tuner.recipes import trust
from tuner.recipes.path_checks import check_data, check_model, check_teacher, check_template
from tuner.recipes.recipe import Recipe
from tuner.recipes.schema import RecipeConfig

Check = Callable[[RecipeConfig], None]
"""Raises a TunerError if something that the recipe names cannot be read."""
OF_ROWS: tuple[Check, ...] = (check_model, check_data, check_template)
"""Of a command that shows rows as tokens."""
OF_A_RUN: tuple[Check, ...] = (check_model, check_teacher, check_data, check_template)
"""Of a command that starts, measures or checks a run."""


def problems(
    recipe: Recipe, checks: Sequence[Check] = OF_A_RUN, *, allow_code: bool, of_run: bool = False
) -> Iterator[TunerError]:
    """Yield everything that speaks against the recipe.

    Args:
        of_run: As `trust.refuse` takes it.
    """
    try:
        trust.refuse(recipe, allow_code=allow_code, of_run=of_run)
    except TunerError as error:
        yield error
    for check in checks:
        try:
            check(recipe.config)
        except TunerError as error:
            yield error


def require(recipe: Recipe, checks: Sequence[Check] = OF_A_RUN, *, allow_code: bool, of_run: bool = False) -> None:
    """Refuse a recipe that is not admissible.

    Raises:
        TunerError: the first thing that speaks against it; the others often follow from it.
    """
    for problem in problems(recipe, checks, allow_code=allow_code, of_run=of_run):
        raise problem
