"""The command that resumes a run, for the messages that tell a user to type it.

It looks at the run's recipe and at nothing else of the run.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from tuner.errors import RecipeError
from tuner.recipes.recipe_file import read_file


def resume_command(run: Path) -> str:
    """Return `tuner train RUN/recipe.py --resume RUN`, with --allow-code where that recipe is refused without it."""
    recipe = run / "recipe.py"
    allowed = ("--allow-code",) if _names_a_command(recipe) else ()
    return shlex.join(("tuner", "train", str(recipe), "--resume", str(run), *allowed))


def _names_a_command(recipe: Path) -> bool:
    """Return whether a run's recipe, which has every value, sets `log.notify` or `checkpoint.repository`.

    A recipe that cannot be read sets neither.
    """
    try:
        values = read_file(recipe).values
    except RecipeError:
        return False
    blocks = ((values.get("log"), "notify"), (values.get("checkpoint"), "repository"))
    return any(isinstance(block, dict) and block.get(key) for block, key in blocks)
