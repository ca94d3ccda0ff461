"""`tuner new`: a part of your own catalog, written from a model's config.json or from a look at the data."""

from __future__ import annotations

from pathlib import Path

import click

from tuner import paths
from tuner.cli import complete
from tuner.cli.help import Command
from tuner.cli.options import all_of, catalog_option, debug_option, json_option
from tuner.cli.parts import parameters_of
from tuner.cli.say import say, say_json
from tuner.errors import Text, UsageError
from tuner.files import JsonObject, make_folder, write_new_text
from tuner.recipes import catalog, loading, new_part
from tuner.recipes.recipe_file import read_text


@click.group()
def command() -> None:
    """Add a model or a data set to your own catalog: ./tuner_configs, or the folder of --catalog.

    Recipe names can contain it at once: MODEL_METHOD_DATASET_eEPOCHS.
    """


_options = all_of(click.argument("name"), catalog_option, json_option, debug_option)


@command.command(
    cls=Command,
    examples=("tuner new model my_llama --from ./my-llama",),
    json_keys={
        "tuner new model NAME --from FOLDER --json": (
            "`kind`, `name`, `written`, `note`, `path`, `model_type`, `parameters`"
        ),
    },
    uses={
        "an own model by name": "`tuner new model NAME --from FOLDER`",
    },
)
@_options
@click.option(
    "--from",
    "source",
    required=True,
    metavar="FOLDER|CONFIG_JSON",
    type=click.Path(path_type=Path),
    shell_complete=complete.files,
    help="Folder of the model, or its config.json.",
)
@click.option(
    "--path", metavar="PATH", help="Where the weights are, if not in that folder: another folder or an id on the hub."
)
def model(name: str, source: Path, path: str | None, as_json: bool) -> None:
    """Add a model: NAME is its word in recipe names."""
    dest = _dest("models", name)
    model_facts = new_part.facts_of(source)
    where = path or _lasting(new_part.path_of(source))
    text = new_part.model(f"{where.rstrip('/').rpartition('/')[2]}: {_size(model_facts)}.", where, source, model_facts)
    answer = _write("models", name, dest, text, as_json=as_json)
    if as_json:
        say_json(
            {**answer, "path": where, "model_type": model_facts["model_type"], "parameters": parameters_of(model_facts)}
        )
    else:
        say(f"Next: tuner plan {name}_qlora_custom_e1 --gpu a100-80g{_again()}")


def _size(model_facts: JsonObject) -> str:
    """Return the model_type, and the number of parameters if they can be counted."""
    count = parameters_of(model_facts)
    if count is None:
        return f"{model_facts['model_type']}; the memory of this type cannot be planned"
    return f"{model_facts['model_type']}, {f'{count / 1e9:.1f}B' if count >= 1e9 else f'{count / 1e6:.1f}M'} parameters"


@command.command(
    cls=Command,
    examples=("tuner new dataset my_rows --from my.jsonl",),
    json_keys={
        "tuner new dataset NAME --from FILE --json": (
            "`kind`, `name`, `written`, `note`, `path`, `format`, `objectives`, `rows`, `is_all`, `bad_rows`"
        ),
    },
    uses={
        "an own data set by name": "`tuner new dataset NAME --from FILE`",
    },
)
@_options
@click.option(
    "--from",
    "path",
    required=True,
    metavar="PATH",
    shell_complete=complete.files,
    help="The data set: a file, a folder, or an id on the hub.",
)
@click.option("--split", default="train", help="Split of the data set, if it has several.")
@click.option("--format", "row_format", metavar="NAME", help="Row format. [default: detected from the columns]")
@click.option(
    "--column",
    "columns",
    multiple=True,
    metavar="OURS=THEIRS",
    help="A column under another name, such as prompt=question.",
)
@click.option(
    "--image-folder",
    metavar="PATH",
    shell_complete=complete.files,
    help="The folder in which the paths of images begin. [default: that of the data set's file]",
)
def dataset(
    name: str,
    path: str,
    split: str,
    row_format: str | None,
    columns: tuple[str, ...],
    image_folder: str | None,
    as_json: bool,
) -> None:
    """Add a data set: NAME is its word in recipe names. Its first rows are read."""
    from tuner.data import formats, pipeline

    dest = _dest("datasets", name)
    if row_format:
        formats.named(row_format)
    renamed = _columns(columns)
    try:
        rows = pipeline.first_look(path, split, row_format, renamed, image_folder)
    except pipeline.UnknownFormat as error:
        error.fix = Text(f"{error.fix} With tuner new, use --column OURS=THEIRS or --format NAME.")
        raise
    where = _lasting(path)
    count = f", {rows.num_rows:,} row{'s' * (rows.num_rows != 1)}" if rows.is_all else ""
    summary = f"{Path(path).name}: format {rows.format!r}{count}."
    folder = _lasting(image_folder) if image_folder else None
    text = new_part.dataset(
        summary=summary,
        path=where,
        split=split,
        row_format=rows.format,
        columns=renamed,
        row_columns=rows.columns,
        objectives=rows.objectives,
        image_folder=folder,
    )
    answer = _write("datasets", name, dest, text, as_json=as_json)
    if as_json:
        of_rows = {"format": rows.format, "objectives": list(rows.objectives), "bad_rows": rows.num_bad}
        looked_at = {"rows": rows.num_rows, "is_all": rows.is_all}
        say_json({**answer, "path": where, **of_rows, **looked_at})
        return
    if rows.num_bad:
        say(f"{rows.num_bad:,} of the first {rows.num_rows:,} rows do not fit: tuner data lists them.", fg="yellow")
    training = catalog.training_name(rows.objectives[0], catalog.DEFAULT_METHOD)
    model = "tiny_vision" if rows.has_images else "tiny"
    say(f"Next: tuner data {model}_{training}_{name}_e1{_again()}")


def _columns(pairs: tuple[str, ...]) -> dict[str, str]:
    if wrong := next((pair for pair in pairs if "=" not in pair), None):
        raise UsageError(f"{wrong!r} is not OURS=THEIRS", where="--column", fix="Use --column prompt=question.")
    return dict(pair.split("=", 1) for pair in pairs)


def _dest(kind: str, name: str) -> Path:
    """Return the file of a new part."""
    new_part.refuse_name(name)
    dest = (*catalog.given_folders(), Path(catalog.HERE))[0] / kind / f"{name}.py"
    if dest.exists() or dest.is_symlink():
        raise UsageError(f"{dest} exists", where="NAME", fix="Choose another name; nothing was overwritten.")
    return dest


def _lasting(path: str) -> str:
    """Return the path that the part stores: an absolute one in a catalog that several folders use."""
    local = paths.local(path)
    return str(local.absolute()) if local and catalog.given_folders() else path


def _write(kind: str, name: str, dest: Path, text: str, *, as_json: bool) -> JsonObject:
    """Check and write a part, and tell which parts of the same name it hides; return the same for --json."""
    loading.check_file(read_text(text, str(dest)))
    make_folder(dest.parent)
    write_new_text(dest, text)
    note = catalog.shadowing(kind, name)
    if not as_json:
        say(f"Wrote {dest}.")
    if note:
        say(f"NOTE: {note}", err=True)
    return {"kind": kind, "name": name, "written": [str(dest)], "note": note}


def _again() -> str:
    return "".join(f" --catalog {folder}" for folder in catalog.given_folders())
