"""Writes token rows to an Arrow file and fits them into rows of a fixed length.

It does not know where tokens come from; the result depends on the tokens alone, never on a number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
from trl import pack_dataset

from tuner.data.masks import IGNORED, Tokens

_TOKENS = pa.list_(pa.int32())
_SCHEMA = pa.schema([("input_ids", _TOKENS), ("labels", _TOKENS), ("seq_lengths", _TOKENS)])
# Samples that are packed together. Bounds the memory (about 8 bytes per token) and keeps 32-bit offsets from
# overflowing; a chunk leaves at most a few rows part-filled, so the efficiency of the whole hardly changes.
SAMPLES_PER_CHUNK = 16_384


def write_rows(path: Path, batches: Iterable[Sequence[tuple[Tokens, Tokens]]]) -> datasets.Dataset:
    """Write batches of (input ids, labels) to `path` and return them memory-mapped, one sample a row."""
    with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, _SCHEMA) as writer:
        for batch in batches:
            if batch:
                writer.write_batch(_record_batch(batch))
    return datasets.Dataset.from_file(str(path))


def _record_batch(batch: Sequence[tuple[Tokens, Tokens]]) -> pa.RecordBatch:
    lengths = np.array([len(ids) for ids, _ in batch], dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = [np.concatenate([pair[at] for pair in batch]) for at in (0, 1)]
    lists = [pa.ListArray.from_arrays(offsets, column) for column in columns]
    ones = np.arange(len(batch) + 1, dtype=np.int32)
    return pa.RecordBatch.from_arrays([*lists, pa.ListArray.from_arrays(ones, lengths)], schema=_SCHEMA)


def pack(samples: datasets.Dataset, max_length: int, path: Path) -> datasets.Dataset:
    """Fit samples into rows of at most `max_length` tokens, best fit first, and write them to `path`.

    A longer sample is split, and its parts are samples of their own. No token is lost or repeated.
    """
    options = {
        "batch_size": SAMPLES_PER_CHUNK,
        "cache_file_name": str(path),
        "load_from_cache_file": False,
    }
    with _no_progress_bars():
        packed = pack_dataset(samples.select_columns(["input_ids", "labels"]), max_length, "bfd_split", options)
    assert num_tokens(packed) == num_tokens(samples)
    return packed


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


def ignore_starts(labels: Tokens, max_length: int | None) -> Tokens:
    """Take the loss off the first token of a sample, and of each part of `max_length` it will be split into.

    Nothing precedes that token, so nothing predicts it; done here, counts of trained tokens are what the loss sees.
    """
    labels[:: max_length or len(labels) or 1] = IGNORED
    return labels


def num_tokens(dataset: datasets.Dataset) -> int:
    """Return the number of tokens in all rows."""
    return sum(len(column.flatten()) for column in dataset.data.column("input_ids").chunks)
