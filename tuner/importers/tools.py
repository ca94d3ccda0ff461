"""Detects which tool a config file or a command line belongs to, and converts it to a recipe.

The only module that knows all the tools; it writes no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from tuner import paths
from tuner.errors import UsageError, did_you_mean, words_of
from tuner.importers import marks, python_file, shell_commands
from tuner.importers.document import ForeignConfig
from tuner.importers.imported_recipe import Imported, recipe_from
from tuner.importers.translation import Tool, Translation
from tuner.recipes import document_file
from tuner.recipes.recipe_file import DOCUMENTS

_TOOLS = {
    "llamafactory": "llamafactory",
    "trl": "trl",
    "axolotl": "axolotl",
    "xtuner": "xtuner",
    "torchtune": "torchtune",
    "roll": "roll",
    "ms-swift": "swift",
    "training-arguments": "training_arguments",
}
"""Value of --from -> the module that knows the tool."""
_PROGRAMS = {"trl": "trl", "llamafactory-cli": "llamafactory", "axolotl": "axolotl", "swift": "ms-swift"}
"""Program on a command line -> value of --from."""
NAMES = tuple(_TOOLS)


def import_config(words: Sequence[str], tool: str | None = None) -> Imported:
    """Return the recipe for a config file or a command line of another tool.

    Args:
        words: One path, or the words of a command line. The command line may name a config file.
        tool: One of `NAMES`. None: detected from the keys.

    Raises:
        RecipeError: a key or value in the file is wrong; the error names its line.
        UsageError: the tool cannot be detected, or the file is a recipe of tuner.
    """
    document = _document(words)
    if tool is None and document.name.endswith(DOCUMENTS) and document_file.holds_recipe(document.values):
        fix = f"Train it: tuner train {document.name}"
        raise UsageError(f"{document.name} is a recipe of tuner", where="tuner import", fix=fix)
    source_tool = _named(tool, document)
    translation = Translation(source_tool.begin(document), source_tool)
    translation.run()
    return recipe_from(translation)


def _document(words: Sequence[str]) -> ForeignConfig:
    path = Path(words[0])
    if len(words) == 1 and path.suffix in DOCUMENTS:
        return ForeignConfig.of_yaml(path)
    if len(words) == 1 and path.suffix == ".py":
        return python_file.read_python_file(path)
    if len(words) == 1 and path.suffix in (".sh", ".bash"):
        return shell_commands.read_script(path)
    if paths.is_file(path) and (options := [word for word in words[1:] if word.startswith("-")]):
        raise UsageError(f"no such option: {options[0]}", where="tuner import", fix="See tuner import --help.")
    if document := shell_commands.read_words(words if len(words) > 1 else words_of(words[0], "tuner import")):
        return document
    raise UsageError(f"{words[0]!r} is not a config that can be imported", where="tuner import", fix=_FIX)


_FIX = "Give a .yaml, .json or .py file, a shell script, or a command line such as: trl sft --model_name_or_path ..."


def tool_named(name: str) -> Tool:
    """Return the tool for a value of --from."""
    return import_module(f"tuner.importers.{_TOOLS[name]}").TOOL  # type: ignore[no-any-return]


def _named(name: str | None, document: ForeignConfig) -> Tool:
    if name is not None:
        if name not in _TOOLS:
            known = f"Known: {', '.join(NAMES)}."
            raise UsageError(f"no tool {name!r}", where="--from", fix=did_you_mean(name, NAMES) or known)
        return tool_named(name)
    if Path(document.name).suffix == ".py":
        return tool_named("xtuner")
    if document.command:
        return tool_named(_PROGRAMS[document.command[0]])
    candidates = [name for name in marks.owners(document.values) if name in _TOOLS]
    if len(candidates) == 1:
        return tool_named(candidates[0])
    owner = f"could be of {' or '.join(candidates)}" if candidates else "belongs to no known tool"
    fix = f"Add: --from {'|'.join(candidates or NAMES)}"
    raise UsageError(f"{document.name} {owner}", where="tuner import", fix=fix)
