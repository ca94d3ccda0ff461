"""How many tokens the rows of local files have, from a sample of them; before training, in milliseconds.

It reads with the readers and formats of training, renders with jinja2 and encodes with `tokenizers`, and loads no
library that training waits for. A model folder without a tokenizer.json has no estimate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from itertools import islice
from os.path import commonprefix
from pathlib import Path
from typing import Any

from tuner import paths
from tuner.assets import without_generation_marks
from tuner.data import formats, images, limits, readers
from tuner.data.readers.text_files import Cursor, Row
from tuner.data.sample import Chat, Image, Message, TrainedTurns, has_loss, images_of, lacks, text_of
from tuner.errors import DataError
from tuner.files import read_bytes
from tuner.recipes.schema import Rows
from tuner.recipes.schema.objectives import facts_of

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
_MAX_COMPARED = 4
"""Answers of a long conversation that are compared with what follows them, if these change nothing."""
_TOKEN = re.compile(r"<[^<>\s]+>")
"""A special token, as most tokenizers write them."""


def lengths(
    files: Sequence[Path],
    rows: Rows,
    objective: str,
    folder: Path | None,
    chat_template: str | None,
    tokens_of_image: Callable[[tuple[int, int] | None], int] = lambda size: 0,
    trained: TrainedTurns = "all",
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of the samples of each sampled row; empty if they cannot be known here.

    A row is one sample, or one for each answer that the chat template renders otherwise once other turns follow; none
    if it is left out.

    Args:
        rows: The data set that they hold: its format, columns and system prompt.
        objective: Decides between formats that share their columns.
        folder: The model's, with its tokenizer.json; None: texts are counted by their bytes.
        chat_template: The text of the template, if the model has one.
        tokens_of_image: The tokens that an image of this size becomes; None: its file cannot be read.
    """
    tokenizer = _tokenizer(folder / "tokenizer.json") if folder else None
    if folder and tokenizer is None:
        return ()
    samples = samples_of_rows(files, rows, objective, trained)
    splits = facts_of(objective).rows == "conversations" and trained != "everything"
    texts = [_texts(sample, chat_template, splits=splits) if sample else [] for sample in samples]
    begun = [text[:_MAX_CHARACTERS] for texts_of_sample in texts for text in texts_of_sample]
    if tokenizer:
        counts = iter([len(encoding) for encoding in tokenizer.encode_batch_fast(begun, add_special_tokens=False)])
    else:
        counts = iter([len(text.encode()) // _BYTES_PER_TOKEN for text in begun])
    of_images = [
        sum(tokens_of_image(_size_of(image)) for image in images_of(sample.messages)) if isinstance(sample, Chat) else 0
        for sample in samples
    ]
    return tuple(
        tuple(round(next(counts) * max(1.0, len(text) / _MAX_CHARACTERS)) + image_tokens for text in texts_of_sample)
        for texts_of_sample, image_tokens in zip(texts, of_images, strict=True)
    )


def samples_of_rows(
    files: Sequence[Path], rows: Rows, objective: str, trained: TrainedTurns
) -> list[Chat | str | None]:
    """Return what is tokenized of sampled rows, without rows that cannot be read; None for a row that is left out."""
    try:
        sampled = [(file, row) for file in files for row in _sampled(file, max(1, _ROWS // len(files)))]
        if not sampled:
            return []
        every = [row for _, row in sampled]
        name = rows.format or formats.detect(every, str(rows.path), columns=rows.columns, objective=objective)
    except DataError:  # training reports it
        return []
    if ":" in name:  # a function of the user's runs in the ranks alone
        return []
    samples: list[Chat | str | None] = []
    for file, row in sampled:
        with suppress(DataError):  # training reports it
            samples += _sample(name, row, rows, file, trained)
    return samples


@cache
def _tokenizer(file: Path) -> Any:
    """Return the tokenizer of a file, or None if the library reads no tokenizer in it."""
    from tokenizers import Tokenizer  # 15 ms, of no use where no rows are counted

    try:
        return Tokenizer.from_buffer(read_bytes(file))
    except Exception:  # the library raises a bare Exception for whatever is wrong with the file
        return None


def _sampled(file: Path, count: int) -> Iterator[Row]:
    """Yield about `count` rows of a file, evenly spread, without those that cannot be read; training reports them."""
    size = file.stat().st_size
    if size <= _SMALL_BYTES or not readers.can_seek(file):
        every = [row for _, row in readers.rows_of_file(file, lambda _: None)]
        yield from every[:: max(1, -(-len(every) // count))]
        return
    for number in range(_PLACES):
        rows = readers.rows_of_file(file, lambda _: None, Cursor(offset=size * number // _PLACES))
        # Behind an offset the first row is a part of one, which may read as a whole one in plain text.
        yield from (row for _, row in islice(rows, bool(number), bool(number) + max(1, count // _PLACES)))


def _sample(name: str, row: Row, rows: Rows, file: Path, trained: TrainedTurns) -> list[Chat | str | None]:
    """Return what is tokenized of a row; [] if that is not its text."""
    places = formats.ImagePaths(paths.expanded(rows.image_folder) if rows.image_folder else None, (file,))
    left_out: list[str] = []
    sample = formats.read_sample(
        name,
        row,
        str(file),
        columns=rows.columns,
        system=rows.system,
        images=places,
        trained=trained,
        on_left_out=left_out.append,
    )
    if not isinstance(sample, Chat | str):
        return []
    return [None if left_out or lacks(sample) else sample]


def _size_of(image: Image) -> tuple[int, int] | None:
    try:
        return images.size_of(image)
    except DataError:  # training reports it
        return None


@limits.memory()  # not for each text: it takes 40 us, and a sample of rows has hundreds
def _texts(sample: Chat | str, chat_template: str | None, *, splits: bool) -> list[str]:
    """Return the texts that a sample becomes; `splits` if each answer is trained as a server renders it."""
    if isinstance(sample, str):
        return [sample]
    if chat_template is None:
        return [_contents(sample.messages)]
    answers = answers_of(sample) if splits else []
    if len(answers) < 2:
        return [_rendered(sample, len(sample.messages), chat_template)]
    parts: list[str] = []
    end = 0
    for count, number in enumerate(answers, 1):
        prompt = _rendered(sample, number, chat_template, prompt=True)
        text = _rendered(sample, number + 1, chat_template)
        answer = text_of(sample.messages[number]["content"])
        text = text if text.startswith(prompt) else prompt + answer
        if parts and _goes_on(parts[-1], end, text):
            parts[-1] = text
        else:
            parts.append(text)
        if len(parts) == 1 and count == _MAX_COMPARED < len(answers):
            return [_rendered(sample, len(sample.messages), chat_template)]
        at = text.rfind(answer.strip(), len(prompt))
        end = len(text.rstrip()) if at < 0 else at + len(answer.strip())
    return parts


def answers_of(chat: Chat) -> list[int]:
    """Return the numbers of the turns with loss."""
    return [at for at, turn in enumerate(chat.messages) if has_loss(turn)]


def _goes_on(before: str, end: int, text: str) -> bool:
    """Return whether a text begins with another one, of which an answer ends at `end`, with the end of that answer."""
    if not text.startswith(before[:end]):
        return False
    if text.startswith(before.rstrip()):
        return True
    # Phi 3's writes another token behind the end of the last answer; gpt-oss ends that one with another token.
    alike = commonprefix([before[end:], text[end:]])  # noqa: RUF071  # of texts, not of paths
    return _TOKEN.search(alike) is not None


def _contents(messages: Sequence[Message]) -> str:
    return "\n".join(text_of(turn["content"]) for turn in messages)


def _rendered(chat: Chat, end: int, chat_template: str, *, prompt: bool = False) -> str:
    """Return the text of the first `end` turns without images; with `prompt` the start of an answer follows."""
    messages = chat.messages[:end]
    texts = [{**turn, "content": text_of(turn["content"])} for turn in messages]
    # Templates of models that read images may loop over the parts of a content; over a text they find nothing.
    parts = [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in texts]
    for turns in (texts, parts):
        options = {"messages": turns, "tools": chat.tools, "bos_token": "", "add_generation_prompt": prompt}
        options |= chat.chat_template_kwargs or {}
        try:
            with limits.processor_time(TimeoutError()):
                text = str(_compiled(chat_template).render(**options))
        except Exception:  # noqa: S112  # a template is someone else's program; training reports what it cannot render
            continue
        # An answer that begins the conversation has no turn before it.
        if not texts or texts[-1]["content"].strip() in text:
            return text
    return _contents(messages)


@cache
def _compiled(chat_template: str) -> Any:
    """Return a template compiled with the functions and the sandbox that transformers 5.24 gives it."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(without_generation_marks(chat_template))


def _refuse(message: str) -> None:
    raise ValueError(message)
