"""Torch's random numbers of the program that loads or asks a model: they go on as if nothing had been drawn here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept() -> Iterator[None]:
    """Give the random numbers of the CPU and of every GPU back as they were."""
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        yield


class Sequence:
    """Random numbers of one's own from a seed, drawn in parts."""

    def __init__(self, seed: int) -> None:
        with kept():
            torch.manual_seed(seed)
            self._remember()

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw the next ones inside."""
        with kept():
            torch.set_rng_state(self._cpu)
            torch.cuda.set_rng_state_all(self._gpus)
            try:
                yield
            finally:
                self._remember()

    def _remember(self) -> None:
        self._cpu, self._gpus = torch.get_rng_state(), torch.cuda.get_rng_state_all()
