"""`tuner show`: one recipe, merged, with the origin of every value."""

from __future__ import annotations

from typing import Any

import click

from tuner.cli.options import override_options, overrides


@click.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help='Print {"recipe", "origins"} as JSON.')
@override_options
def command(name: str, as_json: bool, allow_code: bool, debug: bool, **changes: Any) -> None:
    """Show recipe NAME (or a .py file) as training would see it, and where each value comes from."""
    from tuner.cli.text import origins_json, with_origins
    from tuner.files import dump_json
    from tuner.recipes import recipe

    found = recipe.load(name, overrides(**changes), allow_code=allow_code)
    if as_json:
        click.echo(dump_json({"recipe": found.values, "origins": origins_json(found.origins)}), nl=False)
        return
    for line in with_origins(found.values, found.origins):
        click.echo(line)
