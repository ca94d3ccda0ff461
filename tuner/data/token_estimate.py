"""How many tokens the rows of local files have, from a sample of them; before training, in milliseconds.

It reads with the readers and formats of training, renders with jinja2 and encodes with `tokenizers`, and loads no
library that training waits for. A model folder without a tokenizer.json has no estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from tuner import paths
from tuner.assets import without_generation_marks
from tuner.data import formats, images, limits, readers
from tuner.data.readers.text_files import Cursor, Row
from tuner.data.sample import Chat, Image, images_of, text_of
from tuner.errors import DataError
from tuner.recipes.schema import Rows

_ROWS = 128
"""Rows of the sample, spread evenly over the files: many data sets are sorted."""
_PLACES = 16
"""Places of a large file that are read, a few rows at each."""
_SMALL_BYTES = 256 * 1024
"""A file of this size is read whole."""
_BYTES_PER_TOKEN = 4
"""Of English text, about."""
_MAX_CHARACTERS = 32 * 1024
"""Of a text; a longer one is encoded up to here, and its tokens are scaled."""


def lengths(
    files: Sequence[Path],
    rows: Rows,
    objective: str,
    folder: Path | None,
    chat_template: str | None,
    tokens_of_image: Callable[[tuple[int, int] | None], int] = lambda size: 0,
) -> tuple[int, ...]:
    """Return the tokens of each sampled row; empty if they cannot be known here.

    Args:
        files: Local files.
        rows: The data set that they hold: its format, columns and system prompt.
        objective: Decides between formats that share their columns.
        folder: The model's, with its tokenizer.json; None: texts are counted by their bytes.
        chat_template: The text of the template, if the model has one.
        tokens_of_image: The tokens that an image of this size becomes; None: its file cannot be read.
    """
    tokenizer = _tokenizer(folder / "tokenizer.json") if folder else None
    if folder and tokenizer is None:
        return ()
    try:
        sampled = [(file, row) for file in files for row in _sampled(file, max(1, _ROWS // len(files)))]
        if not sampled:
            return ()
        every = [row for _, row in sampled]
        name = rows.format or formats.detect(every, str(rows.path), columns=rows.columns, objective=objective)
    except DataError:  # training reports it
        return ()
    if ":" in name:  # a function of the user's runs in the ranks alone
        return ()
    samples = [sample for file, row in sampled if (sample := _sample(name, row, rows, file))]
    shown = [
        sum(tokens_of_image(_size_of(image)) for image in images_of(one.messages)) if isinstance(one, Chat) else 0
        for one in samples
    ]
    texts = [_text(sample, chat_template) for sample in samples]
    begun = [text[:_MAX_CHARACTERS] for text in texts]
    if tokenizer:
        counts = [len(one) for one in tokenizer.encode_batch(begun, add_special_tokens=False)]
    else:
        counts = [len(text.encode()) // _BYTES_PER_TOKEN for text in begun]
    return tuple(
        round(count * len(text) / len(text[:_MAX_CHARACTERS])) + of_images
        for count, text, of_images in zip(counts, texts, shown, strict=True)
        if text
    )


@cache
def _tokenizer(file: Path) -> Any:
    """Return the tokenizer of a file, or None if the library reads no tokenizer in it."""
    from tokenizers import Tokenizer  # 15 ms, of no use where no rows are counted

    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # the library raises a bare Exception for whatever is wrong with the file
        return None


def _sampled(file: Path, count: int) -> Iterator[Row]:
    """Yield about `count` rows of a file, evenly spread."""
    size = file.stat().st_size
    if size <= _SMALL_BYTES or not readers.can_seek(file):
        every = [row for _, row in readers.read(file, _leave_out)]
        yield from every[:: max(1, -(-len(every) // count))]
        return
    for number in range(_PLACES):
        some = readers.read(file, _leave_out, Cursor(offset=size * number // _PLACES))
        # Behind an offset the first row is a part of one, which may read as a whole one in plain text.
        yield from (row for _, row in islice(some, bool(number), bool(number) + max(1, count // _PLACES)))


def _leave_out(_: DataError) -> None:
    """Leave out a row that cannot be read; training reports it."""


def _sample(name: str, row: Row, rows: Rows, file: Path) -> Chat | str | None:
    """Return what is tokenized of a row, or None if training cannot read it either."""
    places = formats.ImagePaths(paths.expanded(rows.image_folder) if rows.image_folder else None, (file,))
    try:
        sample = formats.read(name, row, str(file), columns=rows.columns, system=rows.system, images=places)
    except DataError:
        return None
    return sample if isinstance(sample, Chat | str) else None


def _size_of(image: Image) -> tuple[int, int] | None:
    try:
        return images.size_of(image)
    except DataError:  # training reports it
        return None


def _text(sample: Chat | str, chat_template: str | None) -> str:
    if isinstance(sample, str):
        return sample
    return _rendered(sample, chat_template) if chat_template else _contents(sample)


def _contents(chat: Chat) -> str:
    return "\n".join(text_of(turn["content"]) for turn in chat.messages)


def _rendered(chat: Chat, chat_template: str) -> str:
    """Return the text of a conversation without its images."""
    texts = [{**turn, "content": text_of(turn["content"])} for turn in chat.messages]
    # Templates of models that read images may loop over the parts of a content; over a text they find nothing.
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in texts]
    for messages in (texts, parts):
        try:
            with limits.memory(), limits.processor_time(TimeoutError()):
                text = str(_compiled(chat_template).render(messages=messages, tools=chat.tools, bos_token=""))
        except Exception:  # noqa: S112  # a template is someone else's program; training reports what it cannot render
            continue
        if texts[-1]["content"].strip() in text:
            return text
    return _contents(chat)


@cache
def _compiled(chat_template: str) -> Any:
    """Return a template compiled with the functions and the sandbox that transformers 5.23 gives it."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(without_generation_marks(chat_template))


def _refuse(message: str) -> None:
    raise ValueError(message)
