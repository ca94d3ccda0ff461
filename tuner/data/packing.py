"""Fits samples into rows of a fixed length.

It does not know where tokens come from; the result depends on the tokens alone, never on a number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from trl import pack_dataset

# Samples that are packed together. Bounds the memory (about 8 bytes per token) and keeps 32-bit offsets from
# overflowing; a chunk leaves at most a few rows part-filled, so the efficiency of the whole hardly changes.
SAMPLES_PER_CHUNK = 16_384


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


def num_tokens(dataset: datasets.Dataset) -> int:
    """Return the number of tokens in all rows."""
    return sum(len(column.flatten()) for column in dataset.data.column("input_ids").chunks)
