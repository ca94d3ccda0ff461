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
    """Return whether `log.notify` is set in a run's recipe, which has every value; one that cannot be read has none."""
    try:
        log = read_file(recipe).values.get("log")
    except RecipeError:
        return False
    return isinstance(log, dict) and bool(log.get("notify"))
