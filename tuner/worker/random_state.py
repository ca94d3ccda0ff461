"""What dropout draws from on this rank: kept, and put back."""

from __future__ import annotations

import torch
from deepspeed.accelerator import get_accelerator


def random_states() -> tuple[torch.Tensor, ...]:
    """Return what dropout draws from: the states of the CPU's and of the accelerator's random numbers."""
    accelerator = get_accelerator()
    own = (accelerator.get_rng_state(),) if accelerator.device_name() != "cpu" else ()
    return (torch.get_rng_state(), *own)


def set_random_states(states: tuple[torch.Tensor, ...]) -> None:
    """Let dropout draw what it would have drawn when `random_states` returned these."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        get_accelerator().set_rng_state(states[1])
