"""Fits samples into rows of a fixed length.

It does not know where tokens come from; the result depends on the tokens alone, never on a number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from trl import pack_dataset

from tuner.data.layouts import IMAGES, WEIGHTS

_NUMBERS = "numbers"
# Samples that are packed together. Bounds the memory (about 8 bytes per token) and keeps 32-bit offsets from
# overflowing; a chunk leaves at most a few rows part-filled, so the efficiency of the whole hardly changes.
SAMPLES_PER_CHUNK = 16_384


def pack(samples: datasets.Dataset, max_length: int, path: Path, pack_length: int | None = None) -> datasets.Dataset:
    """Fit samples into rows, best fit first, and write them to `path`. No token is lost or repeated.

    Args:
        max_length: Tokens of a row at most; a longer sample is split.
        pack_length: Tokens that a row is filled to, `max_length` or less; a longer sample has its row to itself.
            None: `max_length`.
    """
    shown = samples.data.column(IMAGES) if IMAGES in samples.column_names else None
    columns = [name for name in ("input_ids", "labels", WEIGHTS) if name in samples.column_names]
    samples, length = samples.select_columns(columns), pack_length or max_length
    if shown is not None:  # its lists have other lengths than the tokens, which TRL does not pack
        samples = _numbered(samples)
    with _no_progress_bars():
        long = _longer(samples, length) if length < max_length else []
        if not long:
            packed = _packed(samples, length, SAMPLES_PER_CHUNK, path)
        else:
            scratch = [path.with_name(f"{part}-{path.name}") for part in ("long", "short")]
            # A chunk of one sample: its parts share a row with no other.
            parts = [_packed(samples.select(long), max_length, 1, scratch[0])]
            if short := sorted({*range(len(samples))} - {*long}):
                parts.append(_packed(samples.select(short), length, SAMPLES_PER_CHUNK, scratch[1]))
            packed = _written([part.data.table for part in parts], path)
            for file in scratch:
                file.unlink(missing_ok=True)
    if shown is not None:
        packed = _with_images(packed, shown, path)
    assert num_tokens(packed) == num_tokens(samples)
    return packed


def _longer(samples: datasets.Dataset, length: int) -> list[int]:
    """Return the numbers of the samples of more than `length` tokens."""
    column = samples.data.column("input_ids")
    return cast(list[int], pc.indices_nonzero(pc.greater(pc.list_value_length(column), length)).to_pylist())


def _packed(samples: datasets.Dataset, length: int, chunk: int, path: Path) -> datasets.Dataset:
    options = {"batch_size": chunk, "cache_file_name": str(path), "load_from_cache_file": False}
    return pack_dataset(samples, length, "bfd_split", options)


def _written(parts: list[pa.Table], path: Path) -> datasets.Dataset:
    with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, parts[0].schema) as writer:
        for part in parts:
            writer.write_table(part.cast(parts[0].schema))
    return datasets.Dataset.from_file(str(path))


def _numbered(samples: datasets.Dataset) -> datasets.Dataset:
    """Return samples with their number beside each of their tokens."""
    lengths = pc.list_value_length(samples.data.column("input_ids")).to_numpy()
    numbers = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    column = pa.ListArray.from_arrays(offsets, numbers)
    return datasets.Dataset(samples.data.table.append_column(_NUMBERS, column))


def _with_images(packed: datasets.Dataset, shown: pa.ChunkedArray, path: Path) -> datasets.Dataset:
    """Return packed rows with the images of their samples, in the order of their tokens, instead of the numbers."""
    table = packed.data.table.combine_chunks()
    numbers = table.column(_NUMBERS).to_pylist()
    all_images = shown.to_pylist()
    images = [[image for number in dict.fromkeys(row) for image in all_images[number]] for row in numbers]
    # The metadata of `datasets` name the columns.
    without = table.drop_columns([_NUMBERS]).replace_schema_metadata()
    unused = path.with_name(f"unused-{path.name}")
    path.rename(unused)  # its memory map stays valid
    written = _written([without.append_column(IMAGES, pa.array(images, shown.type))], path)
    unused.unlink()
    return written


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    # Every rank would draw its own.
    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def num_tokens(dataset: datasets.Dataset) -> int:
    return sum(len(column.flatten()) for column in dataset.data.column("input_ids").chunks)
