"""`tuner import`: another tool's config or command line as a recipe file, and what became of each of its keys."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tuner.cli import complete
from tuner.cli.help import Command
from tuner.cli.say import say

if TYPE_CHECKING:
    from tuner.importers.recipe import Imported

_PIPE_COLUMNS = 10_000
_STYLES = {"changed in meaning": "yellow", "no counterpart": "dim"}


@click.command(
    cls=Command,
    examples=("tuner import llamafactory.yaml -o my_recipe.py",),
    context_settings={"ignore_unknown_options": True},
)
@click.argument("source", metavar="FILE|COMMAND...", nargs=-1, required=True, shell_complete=complete.files)
@click.option("-o", "dest", type=click.Path(path_type=Path), help="The recipe file. Default: named after the source.")
@click.option("--from", "tool", metavar="TOOL", help="The tool that the config belongs to, if its keys do not show it.")
@click.option("--json", "as_json", is_flag=True, help="Print what happened to each key as JSON.")
@click.option("--debug", is_flag=True, help="Show a traceback for every error.")
def command(source: tuple[str, ...], dest: Path | None, tool: str | None, as_json: bool, debug: bool) -> None:
    """Convert another tool's config into a recipe, with a table of what happened to each key.

    A YAML or JSON of LLaMA-Factory, TRL, Axolotl, torchtune, ROLL, ms-swift or transformers' TrainingArguments, an
    XTuner .py, a shell script that calls one of them, or the command line itself. It is only read, never run.
    """
    from tuner.importers import tools
    from tuner.recipes import paths

    imported = tools.read(source, tool)
    path = paths.new_recipe(dest, _name(source), "-o")
    written = _write(imported, path)
    if as_json:
        from tuner.files import dump_json

        click.echo(dump_json(_json(imported, written)), nl=False)
        return
    _print(imported)
    if imported.obstacle:
        say(f"This recipe does not train what the source trains: {imported.obstacle}.", fg="yellow")
    say(f"Wrote {' and '.join(map(str, written))}. Next: tuner train {path if path.is_absolute() else f'./{path}'}")


def _name(source: tuple[str, ...]) -> str:
    """Return what a recipe of this file or command line is called."""
    words = source if len(source) > 1 else source[0].split()
    stem = Path(words[0]).stem if len(words) == 1 else "_".join(words[:2])
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", stem)


def _write(imported: Imported, path: Path) -> list[Path]:
    """Write the recipe, and beside it the DeepSpeed config that its source holds or names."""
    from tuner.errors import UsageError
    from tuner.files import write_new_text
    from tuner.importers import deepspeed, recipe_text

    beside = path.with_suffix(".deepspeed.json")
    config = deepspeed.text(imported.values.get("deepspeed"))
    if config and beside.exists():
        raise UsageError(f"{beside} exists", where="-o", fix="Choose another name; nothing was overwritten.")
    if config:
        write_new_text(beside, config)
    write_new_text(path, recipe_text.text(imported, str(beside) if config else None))
    return [path, beside] if config else [path]


def _json(imported: Imported, written: list[Path]) -> dict[str, Any]:
    return {
        "tool": imported.tool,
        "source": imported.source,
        "base": imported.base,
        "written": [str(path) for path in written],
        "entries": [entry.to_json() for entry in imported.entries],
        "notes": list(imported.notes),
        "obstacle": imported.obstacle,
    }


def _print(imported: Imported) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from tuner.errors import visible

    console = Console(width=None if Console().is_terminal else _PIPE_COLUMNS, highlight=False)
    table = Table("where", "key", "", "here", box=None, pad_edge=False, title=None, header_style="bold")
    for entry in imported.entries:
        here = ": ".join(part for part in (entry.ours, entry.why) if part)
        cells = (entry.given.where, entry.given.key, str(entry.outcome), here)
        style = _STYLES.get(str(entry.outcome), "")
        table.add_row(*(Text(visible(cell), style=style, overflow="fold") for cell in cells))
    console.print(table)
    for note in imported.notes:
        say(note)
