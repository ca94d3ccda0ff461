"""NEFTune: noise on the embeddings that a model trains on (Jain et al., 2023, arXiv:2310.05914).

Each number of a token's embedding gets one drawn from [-1, 1], times alpha / sqrt(L * d): d is the width, and L the
tokens of the token's own sample. transformers takes those of the row instead, so packed and padded samples would get
less noise. What is drawn depends on the seed, the step and the micro-batch alone: a resumed run draws what it would
have drawn, and no other random number changes.

Shapes: B rows, T tokens of the longest of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tuner.data.encoder import Row
from tuner.machine.libraries import replaced

LENGTHS = "sample_lengths"
"""The key of a batch that holds, for each token, how many its sample has; 0 for padding."""


def lengths_of(rows: Sequence[Row], input_ids_BT: Tensor) -> Tensor:
    """Return the length of the sample of each token, of the shape of a batch that was made of these rows."""
    of_rows = [torch.cat([torch.full((length,), length) for length in row["seq_lengths"]]) for row in rows]
    lengths_BT = torch.cat(of_rows)[None] if len(input_ids_BT) == 1 else pad_sequence(of_rows, batch_first=True)
    assert lengths_BT.shape == input_ids_BT.shape, "rows are padded at their ends"
    return lengths_BT


@dataclass
class EmbeddingNoise:
    """Adds noise to what an embedding returns while a micro-batch is trained on. `rank` draws other noise than others.

    Args:
        embedding: The module that turns tokens into vectors of width d.
        alpha: The paper's; 5, 10 and 15 there.
    """

    embedding: torch.nn.Module
    alpha: float
    seed: int
    rank: int
    _batch: tuple[Tensor, torch.Generator] | None = field(default=None, init=False)
    _at: tuple[int, int] = field(default=(0, 0), init=False)

    def __post_init__(self) -> None:
        self.embedding.register_forward_hook(self._added)

    @contextmanager
    def on(self, lengths_BT: Tensor, step: int) -> Iterator[None]:
        """Add noise inside of the block, to the next micro-batch of an optimizer step.

        Args:
            lengths_BT: Of the sample of each token, on the device that computes; see `lengths_of`.
            step: Optimizer steps before this one.
        """
        self._at = step, (self._at[1] + 1 if self._at[0] == step else 0)
        words = np.random.SeedSequence([self.seed, self.rank, *self._at]).generate_state(1, np.uint64)
        generator = torch.Generator(lengths_BT.device).manual_seed(int(words[0] >> np.uint64(1)))
        with replaced(self, _batch=(lengths_BT, generator)):
            yield

    def _added(self, _: torch.nn.Module, __: object, embeddings_BTD: Tensor) -> Tensor:
        if self._batch is None:
            return embeddings_BTD
        lengths_BT, generator = self._batch
        # The samples of padding have no length, and it gets no noise.
        sizes_BT = self.alpha / (lengths_BT * embeddings_BTD.shape[-1]).sqrt()
        sizes_BT = sizes_BT.masked_fill(lengths_BT == 0, 0)
        noise_BTD = torch.empty_like(embeddings_BTD).uniform_(-1, 1, generator=generator)
        return embeddings_BTD + noise_BTD * sizes_BT[..., None].to(embeddings_BTD.dtype)
