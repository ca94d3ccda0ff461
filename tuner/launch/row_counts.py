"""The rows of a recipe's data: how many local files hold, how long their samples are, and which rows are alike.

Rows are counted in milliseconds and without the libraries of training. A row is what `data.readers` reads as one; what
takes longer, or other libraries, is left to the worker.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

from tuner import assets, paths
from tuner.data import copies, formats, images, readers, token_estimate
from tuner.data.holdout import Holdout, Sides
from tuner.data.pipeline import Pipeline
from tuner.data.readers import text_files
from tuner.data.sample import Chat, Pair, TrainedTurns
from tuner.errors import DataError, TunerError
from tuner.files import read_json_object
from tuner.fit import parameters
from tuner.launch import steps
from tuner.launch.steps import DatasetSize
from tuner.recipes import catalog, starting_weights
from tuner.recipes.schema import Dataset, MixtureEntry, RecipeConfig, Rows
from tuner.recipes.schema.architecture import Tower

_Limits = tuple[int | None, int | None]
"""The most and the fewest pixels of an image; None: no limit."""
Lengths = tuple[tuple[int, ...], ...]
"""The tokens of the samples of each sampled row."""
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_MIB = 1024**2
_MAX_BYTES = {".jsonl": 64 * _MIB, ".txt": 64 * _MIB, ".json": 8 * _MIB, ".csv": 16 * _MIB}
"""The largest files that are counted: it takes about a tenth of a second."""
_MAX_READ = 1_000
"""The most rows that are read before the start: a tenth of a second."""
_DETECT_ROWS = 8
_MAX_FILES = 1_000
_VALIDATION = re.compile(r"(?<![^\W_])(validation|valid|dev|val)(?![^\W_])")
_SPLITS = re.compile(r"(?<![^\W_])(train|training|validation|valid|dev|val|test|testing|eval|evaluation)(?![^\W_])")
"""How `datasets` tells a validation split, or any, from the names of files and folders: a word of its own."""
_SAVED = {"dataset_dict.json", "state.json"}
"""Files of a folder that `save_to_disk` of `datasets` wrote; they name the files that hold the rows."""


def dataset_sizes(config: RecipeConfig) -> tuple[DatasetSize, ...]:
    """Return the training data set, or those of the mixture, as far as it can be counted here."""
    dataset = config.train_dataloader.dataset
    if dataset.streaming:
        return (DatasetSize(None, "they are streamed, and max_steps ends the run"),)
    a_row = config.objective.samples_a_row
    judges_single_answers = config.objective.facts.rows == "judged"
    counts_tokens = steps.packs(config) or config.reads_images
    return tuple(
        _less_held_out(source, number, dataset, config.objective.type)._replace(
            samples_a_row=_answers_a_row(data_set, config.objective.type) if judges_single_answers else a_row,
            lengths=tuple(chain.from_iterable(_lengths(data_set, config))) if counts_tokens else (),
            parts_a_row=_parts_a_row(data_set, config),
        )
        for number, (source, data_set) in enumerate(zip(_weighted(dataset), dataset.data_sets, strict=True))
    )


def sample_tokens(config: RecipeConfig) -> float | None:
    """Return the length of a token's sample in packed rows, the mean over all tokens.

    None if samples are not packed, or their rows are not counted here.
    """
    return steps.sample_tokens(config, dataset_sizes(config)) if steps.packs(config) else None


def is_counted(rows: Rows) -> bool:
    """Return whether a data set is in local files that are counted before the start."""
    return not isinstance(_files(rows), str)


def num_rows(dataset: Dataset) -> int | None:
    """Return the rows of one pass over a data set or a mixture, held out or not; None if they are not counted."""
    rows_taken = [source.taken for source in _weighted(dataset)]
    counted = sum(filter(None, rows_taken))
    return None if None in rows_taken else min(counted, dataset.max_rows or counted)


def num_held_out(dataset: Dataset, objective: str) -> int | None:
    """Return how many rows of one pass are held out for validation; None if that is not counted."""
    without_training = dataset.model_copy(update={"held_out": True})
    sizes = enumerate(_weighted(dataset))
    rows_taken = [_less_held_out(size, number, without_training, objective).taken for number, size in sizes]
    return None if None in rows_taken else sum(filter(None, rows_taken))


class ReadRow(NamedTuple):
    """A row of a small data set: the number of its set in the mixture, its key (`data.copies`), and its place."""

    number: int
    key: int
    place: str


def read_rows(dataset: Dataset, objective: str) -> tuple[ReadRow, ...] | None:
    """Return the rows of one pass over small local data sets, held out or not; None if they are not read here."""
    count, local_sets = num_rows(dataset), [data_set for data_set in map(_as_file, dataset.data_sets) if data_set]
    if dataset.streaming or not count or count > _MAX_READ or len(local_sets) < len(dataset.data_sets):
        return None
    source_values = {"mixture": tuple(local_sets)} if dataset.mixture else {"path": local_sets[0].path}
    block = dataset.model_copy(update={**source_values, "val_split": None, "held_out": False})
    places = [paths.expanded(assets.asset(data_set.path or "")) for data_set in local_sets]
    return _read_once(block.model_dump_json(), objective, _changed([*chain(*map(paths.matching, places))]))


def _as_file(data_set: Rows) -> Rows | None:
    """Return a data set with its only file as its path; None if it has no local file, or a function makes its rows."""
    files = _files(data_set)
    if isinstance(files, str) or ":" in (data_set.format or ""):
        return None
    local_path = paths.local(data_set.path) if data_set.path else None
    if local_path is None or not paths.is_folder(local_path):
        return data_set
    return data_set.model_copy(update={"path": str(files[0])}) if len(files) == 1 else None


@cache  # the split, the plan and the checks ask for the same rows
def _read_once(block: str, objective: str, files: tuple[tuple[Path, int], ...]) -> tuple[ReadRow, ...] | None:
    pipeline = Pipeline(Dataset.model_validate_json(block), objective)
    try:
        rows = pipeline.mixture.read(lambda _: None)
        return tuple(ReadRow(row.number, pipeline.key_of(row, placed), placed[0]) for row, placed in rows)
    except TunerError:  # training reports it
        return None


def num_copies(dataset: Dataset, objective: str) -> tuple[int, int] | None:
    """Return how many rows have the question and answer of another row, and of how many; None if no such are known."""
    placed_keys = {(row.key, copies.place_of(row.place)) for row in read_rows(dataset, objective) or ()}
    num = copies.count(placed_keys)
    return (num, len(placed_keys)) if num else None


def warnings(config: RecipeConfig) -> tuple[str, ...]:
    """Return what local rows say against the run: columns that it does not learn from, copies in the validation."""
    return (*_hints(config), *filter(None, [_leak_warning(config)]))


def _hints(config: RecipeConfig) -> tuple[str, ...]:
    """Return what the columns of the first rows say that the objective does not learn from."""
    dataset = config.train_dataloader.dataset
    hints: dict[str, None] = {}
    for data_set in map(_as_file, dataset.data_sets):
        if data_set and data_set.format is None:
            with suppress(TunerError):  # the checks before the start report it
                hints |= dict.fromkeys(Pipeline(_alone(dataset, data_set), config.objective.type).hints)
    return tuple(hints)


def _alone(dataset: Dataset, data_set: Rows) -> Dataset:
    """Return the block of one data set of a mixture."""
    of_rows = {name: getattr(data_set, name) for name in Rows.model_fields}
    return dataset.model_copy(update={**of_rows, "mixture": None, "val_split": None})


def _leak_warning(config: RecipeConfig) -> str | None:
    """Return the warning about validation rows with the question and answer of a training row.

    None if there are no such rows, and if the rows are not all read here: then the ranks look.
    """
    val = config.val_dataloader
    if val is None or val.dataset.held_out:
        return None
    objective = config.objective.type
    trained = read_rows(config.train_dataloader.dataset, objective)
    validated = None if trained is None else read_rows(val.dataset, objective)
    if trained is None or validated is None:
        return None
    place_of_key = {row.key: row.place for row in reversed(trained)}
    places = {place: place_of_key.get(key) for _, key, place in validated}
    both = [(place, trained_place) for place, trained_place in places.items() if trained_place]
    if not both:
        return None
    validated_at, trained_at = both[0]
    return f"{copies.leak_warning(len(both), len(places))} The first: {validated_at} has those of {trained_at}."


def _weighted(dataset: Dataset) -> list[DatasetSize]:
    """Return the data set, or those of a mixture with their weights, before rows are held out."""
    return [
        _limited(_counted(data_set), data_set) if isinstance(data_set, MixtureEntry) else _counted(data_set)
        for data_set in dataset.data_sets
    ]


def _limited(counted: DatasetSize, data_set: MixtureEntry) -> DatasetSize:
    """Return the size of a data set of a mixture: with its weight, and at most its max_rows."""
    if counted.rows is None or data_set.max_rows is None or counted.rows <= data_set.max_rows:
        return counted._replace(weight=data_set.weight)
    num_bytes = counted.num_bytes * data_set.max_rows // counted.rows
    return counted._replace(rows=data_set.max_rows, num_bytes=num_bytes, weight=data_set.weight)


def with_sampled_length(config: RecipeConfig, batch: int) -> RecipeConfig:
    """Return the recipe with a max_length that `batch` of its rows need together, judged by sampled rows.

    A batch is counted as its longest row and rows of the mean length: most rows are much shorter than max_length. The
    recipe does not change if no rows can be sampled.

    Args:
        batch: How many rows lie end to end.
    """
    dataset = config.train_dataloader.dataset
    data_sets = () if dataset.streaming else dataset.data_sets
    lengths = [length for data_set in data_sets for row in _lengths(data_set, config) for length in row]
    if not lengths:
        return config
    longest, mean = max(lengths), sum(lengths) / len(lengths)
    tokens = max(dataset.pack_tokens, longest) if steps.packs(config) else mean + (longest - mean) / batch
    return config.with_values({"train_dataloader.dataset.max_length": min(dataset.max_length, math.ceil(tokens))})


def _parts_a_row(rows: Rows, config: RecipeConfig) -> float | None:
    """Return how many samples a row becomes on average; None if that is not known of rows with several answers."""
    files = _files(rows)
    if isinstance(files, str) or config.objective.facts.rows not in ("conversations", "texts"):
        return 1.0
    folder = _tokenizer_folder(config)
    if sampled := _sampled(rows, files, config, folder) if folder or config.model.chat_template else ():
        return sum(map(len, sampled)) / len(sampled)
    if config.objective.facts.rows == "texts":
        return 1.0
    trained = config.train_dataloader.dataset.trained_turns
    return None if _has_several_answers(_changed(files), _as_json(rows), config.objective.type, trained) else 1.0


@cache  # as `_lengths_once`
def _has_several_answers(files: tuple[tuple[Path, int], ...], rows: str, objective: str, trained: TrainedTurns) -> bool:
    block = Rows.model_validate_json(rows)
    samples = token_estimate.samples_of_rows([file for file, _ in files], block, objective, trained)
    return trained != "everything" and any(
        isinstance(sample, Chat) and len(token_estimate.answers_of(sample)) > 1 for sample in samples
    )


def _changed(files: Sequence[Path]) -> tuple[tuple[Path, int], ...]:
    return tuple((file, file.stat().st_mtime_ns) for file in files)


def _as_json(rows: Rows) -> str:
    return json.dumps({name: getattr(rows, name) for name in Rows.model_fields})


def _lengths(rows: Rows, config: RecipeConfig) -> Lengths:
    """Return the tokens of the samples of sampled rows; empty if they are not in files here.

    Without the model's tokenizer they are empty too, unless the model reads images: a file's size says nothing of them.
    """
    files, folder = _files(rows), _tokenizer_folder(config)
    if isinstance(files, str) or (folder is None and not config.reads_images):
        return ()
    return _sampled(rows, files, config, folder)


def _tokenizer_folder(config: RecipeConfig) -> Path | None:
    """Return the model's folder if its tokenizer can be read there."""
    folder = paths.local(config.model.path or "")
    return folder if folder and paths.is_file(folder / "tokenizer.json") else None


def _sampled(rows: Rows, files: Sequence[Path], config: RecipeConfig, folder: Path | None) -> Lengths:
    dataset, template = config.train_dataloader.dataset, config.model.chat_template
    text = (
        catalog.chat_template(template) if template else starting_weights.chat_template_of(folder) if folder else None
    )
    text = text and assets.with_defaults(text, config.model.chat_template_kwargs)
    tower = config.architecture.vision_config if config.reads_images and config.architecture else None
    any_size = tower is not None and not (tower.num_tokens or tower.image_size)
    return _lengths_once(
        _changed(files),
        _as_json(rows),
        config.objective.type,
        folder,
        text,
        tower,
        (
            (dataset.image_max_pixels, dataset.image_min_pixels),
            _pixels_of_processor(folder) if folder and any_size else (None, None),
        ),
        dataset.trained_turns,
    )


def _pixels_of_processor(folder: Path) -> _Limits:
    """Return the most and the fewest pixels to which a Qwen-VL's processor resizes an image, where its files say so."""
    for name in _PROCESSORS:
        config = read_json_object(folder / name)
        inner = config.get("image_processor")
        image_config = inner if isinstance(inner, dict) else config
        size = image_config.get("size")
        edges = size if isinstance(size, dict) else {}
        if max_pixels := image_config.get("max_pixels") or edges.get("longest_edge"):
            return max_pixels, image_config.get("min_pixels") or edges.get("shortest_edge")
    return None, None


@cache  # the global batch and the steps ask for the same rows
def _lengths_once(
    files: tuple[tuple[Path, int], ...],
    rows: str,
    objective: str,
    folder: Path | None,
    chat_template: str | None,
    tower: Tower | None,
    limits_of_pixels: tuple[_Limits, ...],
    trained: TrainedTurns,
) -> Lengths:
    def tokens_of_image(size: tuple[int, int] | None) -> int:
        if size:
            for max_pixels, min_pixels in limits_of_pixels:
                size = images.within(size, max_pixels, min_pixels)
        return parameters.tokens_of_image(tower, size) if tower else 0

    block = Rows.model_validate(json.loads(rows))
    paths_of_files = [file for file, _ in files]
    return token_estimate.lengths(paths_of_files, block, objective, folder, chat_template, tokens_of_image, trained)


def _less_held_out(counted: DatasetSize, number: int, dataset: Dataset, objective: str) -> DatasetSize:
    """Return the size of a data set without the rows that are held out.

    Copies of a row are on one side: where the rows are not read here, all are counted as different ones.
    """
    if counted.rows is None:
        return counted
    holdout = Holdout.of(dataset)
    if holdout is None:
        return counted
    if holdout.keeps_copies_together and (read := read_rows(dataset, objective)) is not None:
        sides = Sides(holdout)
        kept = [row.number for row in read if sides.keeps(row.number, row.key)]
        rows = kept.count(number)
    else:
        first = dataset.first_alike(number)  # the same rows are held out wherever they stand in a mixture
        if dataset.mixture and dataset.max_rows:
            return DatasetSize(None, "which rows of the mixture are held out shows when they are read")
        max_rows, weight = min(counted.rows, dataset.max_rows or counted.rows), counted.weight
        if holdout.keeps_copies_together and weight < 1:  # rows that are not drawn are not read
            max_rows, weight = math.ceil(Fraction(str(weight)) * max_rows), 1.0
        rows = holdout.count(first, max_rows, weight)
    return DatasetSize(rows, num_bytes=counted.num_bytes * rows // max(1, counted.rows))


def _counted(rows: Rows) -> DatasetSize:
    files = _files(rows)
    if isinstance(files, str):
        return DatasetSize(None, files)
    stats = [(file, file.stat()) for file in files]
    try:
        num_rows = sum(_num_rows(file, stat.st_mtime_ns, stat.st_size) for file, stat in stats)
    except DataError:
        return DatasetSize(None, f"{rows.path} cannot be read directly")
    return DatasetSize(num_rows, num_bytes=sum(stat.st_size for _, stat in stats))


@cache  # a global batch of 'auto' and the steps ask for the same files
def _num_rows(file: Path, mtime_ns: int, num_bytes: int) -> int:
    bad: list[DataError] = []  # a row that cannot be read is a row too
    if readers.kind(file) in (".json", ".csv"):
        return sum(1 for _ in readers.rows_of_file(file, bad.append)) + len(bad)
    return sum(1 for _, line in text_files.lines(file, bad.append) if line.rstrip()) + len(bad)


def _answers_a_row(rows: Rows, objective: str) -> int | None:
    """Return the judged answers in a row: 2 for preference data, 1 for feedback; None if it is not known."""
    name, files = rows.format, _files(rows)
    try:
        every = chain.from_iterable(map(readers.rows_of_file, files if isinstance(files, list) else ()))
        if name is None and (head := [row for _, row in islice(every, _DETECT_ROWS)]):
            name = formats.detect(head, str(rows.path), columns=rows.columns, objective=objective)
    except DataError:
        return None
    # Only ranks run a user's row function.
    row_format = formats.FORMATS.get(name or "")
    return None if row_format is None else 1 + (row_format.kind is Pair)


def has_validation(folder: Path) -> bool:
    """Return whether the files of a folder hold a validation split, as `datasets` tells from their names."""
    splits = read_json_object(folder / "dataset_dict.json").get("splits")
    if isinstance(splits, list):
        return "validation" in splits
    return any(_VALIDATION.search(name) for name in _names_in(folder))


def _names_in(folder: Path) -> list[str]:
    """Return the files of a folder and those below it, without hidden ones."""
    names = (file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file())
    return [str(name) for name in names if not any(part.startswith((".", "__")) for part in name.parts)]


def files_of_folder(folder: Path) -> list[Path]:
    """Return the training data of a folder: all its files, or the one called train beside other splits.

    The folder itself is returned if `datasets` may tell the splits in another way, and if there are too many files.
    """
    names = _names_in(folder)
    if len(names) > _MAX_FILES or not _SAVED.isdisjoint(names):
        return [folder]
    if any(_SPLITS.search(name) for name in names):
        is_flat = not any("/" in name for name in names)
        names = [name for name in names if Path(name).stem == "train"]
        names = names if is_flat and len(names) == 1 else []
    return [folder / name for name in names if readers.kind(Path(name))] or [folder]


def _files(rows: Rows) -> list[Path] | str:
    """Return the files of a data set, or why they are not counted."""
    if rows.path is None:
        return "no data is given yet"
    local_path = paths.local(rows.path)
    if local_path is None:
        return f"{rows.path} is on the hub"
    files = files_of_folder(local_path) if paths.is_folder(local_path) else paths.matching(local_path)
    if not files:
        return f"{rows.path} does not exist"
    if "[" in rows.split:
        return f"{rows.path} is read in part: {rows.split}"
    if files == [local_path] and not local_path.is_file():
        return f"{rows.path} is a folder"
    if other := next((file for file in files if file.suffix.lower() not in _MAX_BYTES), None):
        return f"{other.name} is not plain text"
    max_bytes = min(_MAX_BYTES[file.suffix.lower()] for file in files)
    if sum(file.stat().st_size for file in files) > max_bytes:
        return f"{rows.path} is larger than {max_bytes // _MIB} MiB"
    return files
