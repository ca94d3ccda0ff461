"""`tuner copy`: one recipe as a standalone, commented file."""

from __future__ import annotations

from pathlib import Path

import click

from tuner import paths
from tuner.cli.help import Command
from tuner.cli.options import OptionValue, json_option, override_options, overrides, recipe_argument
from tuner.cli.say import say, say_json
from tuner.files import write_new_text
from tuner.recipes import loading
from tuner.recipes.names import Name
from tuner.zero import choice


@click.command(
    cls=Command,
    examples=("tuner copy qwen3_8b_qlora_alpaca_e1 my_recipe.py",),
    json_keys={
        "tuner copy RECIPE --json": "`recipe`, `written`, `warnings`",
    },
    uses={
        "a recipe as a file": "`tuner copy RECIPE`",
    },
)
@recipe_argument("name")
@click.argument("dest", required=False, type=click.Path(path_type=Path))
@override_options
@json_option
def command(name: Name | None, dest: Path | None, allow_code: bool, as_json: bool, **changes: OptionValue) -> None:
    """Write a recipe as one file of its own, with every value and a comment on each.

    NAME is a recipe, or leave it out and give --model and --data. DEST is the file. [default: ./NAME.py]
    If DEST ends in .yaml, the recipe is written as YAML, without the comments.
    """
    recipe = loading.load(name, overrides(**changes), allow_code=allow_code)
    for warning in recipe.warnings:
        say(f"WARNING: {warning}", err=True)
    path = paths.new_file(dest, recipe.name, "DEST", ".py", ".yaml")
    recipe = choice.without_catalog(recipe)
    text = recipe.standalone_yaml if path.suffix == ".yaml" else recipe.standalone
    write_new_text(path, text(f" Train it: tuner train {path.name}"))
    if as_json:
        say_json({"recipe": recipe.name, "written": [str(path)], "warnings": list(recipe.warnings)})
    else:
        say(f"Wrote {path}. Next: tuner train {path if path.is_absolute() else f'./{path}'}")
