"""Turns a row into a sample by its format, tells the format from the columns, and explains rows that do not fit.

It reads no files and knows no tokens. Text in a row is data: nothing of it is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from tuner.data import limits
from tuner.data.formats.cells import Misfit, Row, TrackedRow, names
from tuner.data.formats.chosen_turns import chosen
from tuner.data.formats.columns import Columns, check_names, refuse_media, renamed
from tuner.data.formats.image_places import ImagePaths, with_images
from tuner.data.formats.known import FORMATS, Format, sample_of, user_function
from tuner.data.formats.turns import LOSS_COLUMNS, left_out_by
from tuner.data.sample import Chat, Owner, Sample, TrainedTurns
from tuner.data.sample_kinds import kinds_of
from tuner.errors import DataError, Option, did_you_mean, nearest, options

_NO_FORMAT = "no known format"
_HERE = ImagePaths()

__all__ = ["FORMATS", "Chat", "Format", "ImagePaths", "Misfit", "Sample", "detect", "read_sample", "user_function"]


class MixedShapes(DataError):
    """Rows of one data set that have several formats: no setting fits them all."""


def detect(rows: Sequence[Row], place: str, *, columns: Columns | None = None, objective: str | None = None) -> str:
    """Return the name of the format that all of the first `rows` have, or else the first of them that has one.

    Args:
        rows: At least one row, before `columns` are renamed.
        columns: The user's names for columns, as for `read_sample`.
        objective: If several formats fit, the one that this objective learns from is taken.

    Raises:
        DataError: no format is known for these columns, or several are.
    """
    check_names(columns, {name for candidate in FORMATS.values() for name in candidate.columns}, "any format")
    mapped = [renamed(row, columns, place) for row in rows]
    fitting = _fitting(mapped, objective) or next(filter(None, (_fitting([row], objective) for row in mapped)), [])
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        problem = f"cannot detect the row format from the columns {names(mapped[0])}"
        raise DataError(problem, where=place, fix=_closest(mapped[0]))
    either = " or ".join(map(repr, fitting))
    problem = f"the columns {names(mapped[0])} could be of format {either}"
    raise DataError(problem, where=place, fix=f"Set dataset.format to the right one: {either}.")


def mixed(
    rows: Iterable[tuple[str, Row]], place: str, *, columns: Columns | None, objective: str
) -> MixedShapes | None:
    """Return the error of rows, each with its place, that have several formats; None where they have one."""
    places_by_shape: dict[str, list[str]] = {}
    for where, row in rows:
        places_by_shape.setdefault(_shape(row, where, columns, objective), []).append(where)
    if len(places_by_shape.keys() - {_NO_FORMAT}) < 2:
        return None
    count = sum(map(len, places_by_shape.values()))
    shapes = ", ".join(
        f"{len(places):,} of {shape} (the first at {places[0]})" for shape, places in places_by_shape.items()
    )
    fix = (
        f"Use the same columns in all rows, or put each kind into its own file: "
        f"{options(Option('data', 'a.jsonl'), Option('data', 'b.jsonl'))}."
    )
    return MixedShapes(f"its rows have different columns: of the first {count:,} rows {shapes}", where=place, fix=fix)


def _shape(row: Row, place: str, columns: Columns | None, objective: str) -> str:
    try:
        mapped = renamed(row, columns, place)
        fitting = _fitting([mapped], objective)
        for name in fitting:
            FORMATS[name].read(mapped)
    except (DataError, Misfit):  # a row that is wrong by itself is no other shape
        return _NO_FORMAT
    return " or ".join(f"format {name!r}" for name in fitting) or _NO_FORMAT


def _closest(row: Row) -> str:
    alike = {
        name: sum(nearest(str(column), candidate.columns) is not None for column in row)
        for name, candidate in FORMATS.items()
    }
    best = max(alike, key=lambda name: alike[name])
    closest = f"The nearest format is {best!r}, which needs {FORMATS[best].needs}. " if alike[best] else ""
    return f"{closest}Rename the columns with dataset.columns, or set dataset.format to one of {', '.join(FORMATS)}."


def _fitting(rows: Sequence[Row], objective: str | None) -> list[str]:
    fit = [name for name, candidate in FORMATS.items() if all(candidate.matches(row) for row in rows)]
    wanted_kinds = kinds_of(objective) if objective else ()
    claimed = (
        name
        for name, candidate in FORMATS.items()
        if candidate.kind in wanted_kinds and all(map(candidate.claims, rows))
    )
    fit = [name for name in fit if FORMATS[name].kind in wanted_kinds] or [*claimed] or fit
    beaten = {other for name in fit for other in FORMATS[name].before} | ({"text"} if len(fit) > 1 else set())
    return [name for name in fit if name not in beaten]


def named(name: str) -> Format:
    """Return the format of that name. Raises DataError: there is no such format."""
    if name not in FORMATS:
        hint = did_you_mean(name, FORMATS, see=", ".join(FORMATS))
        raise DataError(f"there is no row format {name!r}", where="dataset.format", fix=hint)
    return FORMATS[name]


def read_sample(
    name: str,
    row: Row,
    place: str,
    *,
    columns: Columns | None = None,
    system: str | None = None,
    images: ImagePaths = _HERE,
    trained: TrainedTurns = "all",
    on_unread: Callable[[tuple[Owner, str]], object] = lambda unread: None,
    on_left_out: Callable[[str], object] | None = None,
) -> Sample:
    """Return the sample that a row of format `name` is.

    Args:
        name: One of `FORMATS`, or a function of the user's: 'my_package.my_module:my_function'.
        columns: A format's column -> this data set's: {'prompt': 'question'} takes the value whatever it is;
            a value with braces, '{context}\\n{question}', makes a text of several columns.
        system: A system turn for conversations that have none.
        images: Where the paths of images begin.
        trained: Which turns carry loss.
        on_unread: Called once for each key with content that nothing was made of: what it belongs to, and its name.
        on_left_out: Called with the column that leaves the whole row out of the training. None: no column does.

    Raises:
        DataError: the format or a column is unknown, or the row is too long or does not have its format's shape, or it
            asks for loss that it cannot have.
    """
    is_own = ":" in name
    if not is_own:
        check_names(columns, named(name).columns, f"format {name!r}")
    row = renamed(row, columns, place)
    sample, mapped = sample_of(name, row, place) if is_own else (None, TrackedRow(row))
    try:
        sample = with_images(FORMATS[name].read(mapped) if sample is None else sample, mapped, images, place)
        if on_left_out and (column := left_out_by(mapped)):
            on_left_out(column)
        for owner, key in dict.fromkeys(mapped.unread() if isinstance(mapped, TrackedRow) else ()):
            on_unread(("loss column" if owner == "column" and key in LOSS_COLUMNS else owner, key))
        if not is_own:
            refuse_media(mapped, sample, FORMATS[name].columns, place)
    except Misfit as misfit:
        problem, fix = f"{name} did not return a sample: {misfit}", None
        if not is_own:
            problem = f"the row does not fit format {name!r}: {misfit}; its columns are {names(mapped)}"
            fix = _other_format(name, mapped)
        raise DataError(problem, where=place, of_row=True, fix=fix) from misfit
    try:
        sample = chosen(_with_system(sample, system, place), trained)
    except Misfit as misfit:
        fix = "Remove it from the turn, or choose other turns with dataset.trained_turns."
        raise DataError(str(misfit), where=place, of_row=True, fix=fix) from misfit
    if limits.size(sample) > limits.MAX_SAMPLE_BYTES:
        raise limits.too_long("what the row holds", place)
    return sample


def _with_system(sample: Sample, system: str | None, place: str) -> Sample:
    if not system:
        return sample
    if isinstance(sample, str):
        problem = "dataset.system is set, but plain text has no system turn"
        raise DataError(problem, where=place, of_row=True, fix="Unset dataset.system, or use a chat format.")
    turns = sample.messages if isinstance(sample, Chat) else sample.prompt
    if any(turn["role"] == "system" for turn in turns):
        return sample
    turns = [{"role": "system", "content": system}, *turns]
    return replace(sample, messages=turns) if isinstance(sample, Chat) else replace(sample, prompt=turns)


def _other_format(name: str, row: Row) -> str:
    for other, candidate in FORMATS.items():
        try:
            if other != name and candidate.matches(row) and candidate.read(row):
                return f"Set format={other!r}, which fits this row, or correct the row."
        except Misfit:
            continue
    return f"Correct or remove the row; {name!r} needs {FORMATS[name].needs}."
