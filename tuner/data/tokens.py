"""A sample as tokens, and a row of the trainer's: data that `encoding` and `layouts` make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tuner.data.sample import Sample

Tokens = npt.NDArray[np.int32]
Labelled = tuple[Tokens, Tokens]
"""Input ids and labels, int32 of shape [tokens]; a label of -100 carries no loss."""
Row = dict[str, Any]
"""One row by its columns; see `layouts`."""


@dataclass(frozen=True)
class Encoded:
    """A sample and its tokens: one sequence, or the two sides of a pair."""

    place: str
    sample: Sample
    sides: list[Labelled]
