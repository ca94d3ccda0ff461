"""`tuner import`: another tool's config or command line as a recipe file, and what became of each of its keys."""

from __future__ import annotations

import re
from pathlib import Path

import click

from tuner import paths
from tuner.cli import complete
from tuner.cli.help import Command
from tuner.cli.say import Style, columns, say, say_json
from tuner.errors import UsageError
from tuner.files import JsonObject, write_new_text
from tuner.importers import deepspeed, recipe_text, tools
from tuner.importers.imported_recipe import Imported
from tuner.importers.translation import Outcome

_STYLES: dict[str, Style] = {
    "not a key of the tool": {"fg": "yellow"},
    "changed in meaning": {"fg": "yellow"},
    "no counterpart": {"dim": True},
}
_LEAST_COLUMNS = 20


@click.command(
    cls=Command,
    examples=("tuner import llamafactory.yaml -o my_recipe.py",),
    json_keys={
        "tuner import FILE --json": "`tool`, `base`, `written`, `entries`, `notes`, `obstacle`",
    },
    uses={
        "the config of another tool": "`tuner import FILE`; `tuner train FILE` trains it as it is",
    },
    context_settings={"ignore_unknown_options": True},
)
@click.argument("source", metavar="FILE|COMMAND...", nargs=-1, required=True, shell_complete=complete.files)
@click.option(
    "-o",
    "dest",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Recipe file to write. [default: named after the source]",
)
@click.option("--from", "tool", metavar="TOOL", help="Tool that the config belongs to, if its keys do not show it.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@click.option("--debug", is_flag=True, help="Show the Python traceback of an error.")
def command(source: tuple[str, ...], dest: Path | None, tool: str | None, as_json: bool, debug: bool) -> None:
    """Convert another tool's config into a recipe, and show what became of each key.

    FILE is a YAML or JSON of LLaMA-Factory, TRL, Axolotl, torchtune, ROLL, ms-swift or transformers'
    TrainingArguments, an XTuner .py, or a shell script that calls one of them; COMMAND is such a command line. It is
    only read, never run.
    """
    imported = tools.import_config(source, tool)
    path = paths.new_file(dest, _name(source), "-o", ".py")
    written = _write(imported, path)
    if as_json:
        say_json(_json(imported, written))
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
    config_path = path.with_suffix(".deepspeed.json")
    config = deepspeed.text(imported.values.get("deepspeed"))
    if config and config_path.exists():
        raise UsageError(f"{config_path} exists", where="-o", fix="Choose another name; nothing was overwritten.")
    if config:
        write_new_text(config_path, config)
    write_new_text(path, recipe_text.text(imported, str(config_path) if config else None))
    return [path, config_path] if config else [path]


def _json(imported: Imported, written: list[Path]) -> JsonObject:
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
    """Print the keys by what became of them, those that need a look first; lines are wrapped in a terminal."""
    from textwrap import wrap

    files = {entry.setting.where.rpartition(":")[0] for entry in imported.entries}
    places = [
        entry.setting.where.rpartition(":")[2] if len(files) == 1 else entry.setting.where for entry in imported.entries
    ]
    widest = max(map(len, places), default=0)
    indent = widest + max((len(entry.setting.name) for entry in imported.entries), default=0) + 4
    terminal = columns()
    room = None if terminal is None else max(terminal - indent, _LEAST_COLUMNS)
    for outcome in (Outcome.UNKNOWN, Outcome.CHANGED, Outcome.LEFT_OUT, Outcome.TRANSLATED, Outcome.TAKEN):
        rows = [
            (place, entry) for place, entry in zip(places, imported.entries, strict=True) if entry.outcome is outcome
        ]
        if rows:
            say(f"{outcome}:", bold=True)
        for place, entry in rows:
            text = ": ".join(filter(None, (entry.ours, entry.why)))
            lines = (wrap(text, room, break_on_hyphens=False) if room else None) or [text]
            head = f"  {place:>{widest}} {entry.setting.name}".ljust(indent)
            for before, line in zip((head, *[" " * indent] * len(lines)), lines, strict=False):
                say(before + line, **_STYLES.get(outcome, {}))
    for note in imported.notes:
        say(note)
