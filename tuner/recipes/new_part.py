"""The text of a new part: of a model, from its config.json; of a data set, from its first rows.

It writes no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tuner import paths
from tuner.errors import ModelError, UsageError
from tuner.files import JsonObject, read_json_object
from tuner.recipes import catalog, model_facts, starting_weights
from tuner.recipes.standalone import render, render_docstring

_WEIGHTS = (".safetensors", ".bin")
_LONGEST = 90


def refuse_name(name: str) -> None:
    """Check the name of a new part.

    Raises:
        UsageError: the name has characters that recipe names cannot have.
    """
    if not catalog.NAME.fullmatch(name):
        raise UsageError(f"{name!r} is not a valid name for a part", where="NAME", fix=f"Use {catalog.NAME_RULE}.")


def facts_of(config_path: Path) -> JsonObject:
    """Return the architecture in a config.json, given as a file or by its folder.

    Raises:
        ModelError: there is no such file, or it lacks facts that planning needs.
    """
    file = config_path / "config.json" if config_path.is_dir() else config_path
    if not paths.is_file(file):
        fix = "Give a model's folder, or its config.json."
        raise ModelError(f"there is no file {str(file)!r}", where="--from", fix=fix)
    architecture = model_facts.read_architecture(config_path)
    if architecture is None:
        message = f"it does not describe a language model that can be planned: {model_facts.why_unknown(config_path)}"
        raise ModelError(message, where=file, fix="Use the config.json that the model was published with.")
    return architecture


def path_of(config_path: Path) -> str:
    """Return the value for `model.path`: the folder with the weights, or the hub id in config.json."""
    folder = config_path if config_path.is_dir() else config_path.parent
    if config_path.is_dir() or any(file.suffix in _WEIGHTS for file in folder.iterdir()):
        return str(folder)
    name = read_json_object(config_path).get("_name_or_path")
    return name if isinstance(name, str) and "/" in name and paths.is_hub_id(name) else str(folder)


def model(summary: str, path: str, config_path: Path, architecture: Mapping[str, object]) -> str:
    """Return the text of a model part.

    Args:
        summary: The line that `tuner list` shows.
        path: A folder, or an id on the hub.
        config_path: The config.json that `architecture` was read from, or its folder.
    """
    folder = config_path if config_path.is_dir() else config_path.parent
    lines = [
        render_docstring(summary),
        "",
        "model = dict(",
        "    # The weights to start from: a folder, or an id on the Hugging Face hub.",
        f"    path={render(path, 4)},",
        "    # Of a hub id: a branch, a tag, or a commit in 40 digits. Without it: the newest.",
        '    # revision="main",',
        *_template_lines(folder),
        ")",
        "",
        f"# Facts about the model that planning needs, under the keys of its config.json ({config_path}).".replace(
            "\n", " "
        ),
        f"architecture = {render({**architecture}, 0)}",
    ]
    return "\n".join(lines) + "\n"


def _template_lines(folder: Path) -> Iterator[str]:
    has_tokenizer = paths.is_file(folder / "tokenizer_config.json") or paths.is_file(folder / "chat_template.jinja")
    if has_tokenizer and starting_weights.chat_template_of(folder) is None:
        yield "    # Its tokenizer has no chat template, as is usual for base models. Conversations need one: a name of"
        yield "    # `tuner list`, or a path to a .jinja file."
    else:
        yield "    # The tokenizer's own chat template is used. Another one: a name of `tuner list`, or a path to a"
        yield "    # .jinja file."
    yield '    # chat_template="chatml",'


def dataset(
    summary: str,
    path: str,
    split: str,
    row_format: str,
    columns: Mapping[str, str],
    row_columns: Sequence[str],
    objectives: Sequence[str],
    image_folder: str | None = None,
) -> str:
    """Return the text of a data-set part.

    Args:
        summary: The line that `tuner list` shows.
        columns: A format's column -> the data set's, for those that the user named.
        row_columns: The columns of the rows.
        objectives: The objectives that learn from rows of this format.
        image_folder: Where the paths of images begin, if the user named it.
    """
    lines = [
        render_docstring(summary),
        "",
        f"# Columns: {_some(row_columns)}.".replace("\n", " "),
        f"# Objectives that learn from it: {', '.join(objectives)}.",
        "train_dataloader = dict(",
        "    dataset=dict(",
        "        # A file, a folder of files, a pattern ('data/*.jsonl'), or an id on the Hugging Face hub.",
        f"        path={render(path, 8)},",
        *([f"        split={render(split, 8)},"] if split != "train" else []),
        "        # The row format, detected from its columns; docs/own-data.md lists all of them.",
        f"        format={render(row_format, 8)},",
        "        # A format's column -> the data set's, where they differ.",
        f"        {'' if columns else '# '}columns={render(dict(columns), 8) if columns else _EXAMPLE},",
        *([f"        image_folder={render(image_folder, 8)},"] if image_folder else []),
        "        # Tokens; a longer sample is split when packing, else truncated. `tuner data` shows the lengths.",
        "        # max_length=4096,",
        "        # A system prompt for conversations that have none.",
        '        # system="You answer in one sentence.",',
        "        # Up to this many bad rows are left out and listed; more are an error.",
        "        # bad_rows=0,",
        "    ),",
        ")",
    ]
    return "\n".join(lines) + "\n"


_EXAMPLE = 'dict(prompt="question")'


def _some(names: Sequence[str]) -> str:
    text = ", ".join(names)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
