"""The types of what an encoder makes of conversations and texts.

A tokenizer encodes text (`text_encoder`); a vision model's processor encodes text with images (`image_encoder`). This
module loads no library but numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tuner.data.sample import Sample

Tokens = npt.NDArray[np.int32]
"""Ids of shape [tokens]."""
Weights = npt.NDArray[np.float32]
"""How much each token's loss weighs, of shape [tokens]."""
Labelled = tuple[Tokens, Tokens]
"""Input ids and labels, int32 of shape [tokens]; a label of -100 carries no loss."""
Row = dict[str, Any]
"""One row by its columns; see `layouts`."""


class Part(NamedTuple):
    """The tokens of the first `num_turns` turns of a conversation; of a text, 0 turns.

    `weights` are those of the tokens that carry loss; None: each has 1.
    """

    labelled: Labelled
    num_turns: int = 0
    weights: Weights | None = None


@dataclass(frozen=True)
class Encoded:
    """A sample and its tokens: one sequence, or the two sides of a pair. `weights`, of one sequence, as in `Part`."""

    place: str
    sample: Sample
    sides: list[Labelled]
    weights: Weights | None = None


class Unrendered(ValueError):
    """The chat template cannot render a conversation, or its assistant turns cannot be told apart."""
