"""The published formulas of model states, which the estimate is held against."""

from __future__ import annotations


def model_state_bytes(level: str, trainable: int, frozen_bytes: float, num_ranks: int) -> float:
    """Return the bytes of weights, gradients and Adam states that one GPU holds at the end of backward.

    With T trainable parameters, N ranks and F bytes of frozen weights, mixed precision:
    none 16T + F; ZeRO-1 4T + 12T/N + F; ZeRO-2 2T + 14T/N + F; ZeRO-3 (16T + F)/N; offloading the optimizer leaves
    2T (ZeRO-2) or 2T/N (ZeRO-3); offloading the parameters too leaves 0.

    Source: Rajbhandari et al., ZeRO, 2020 (arXiv:1910.02054), section 3 and figure 1, with K = 12.
    """
    return {
        "none": 16 * trainable + frozen_bytes,
        "deepspeed_zero1": 4 * trainable + 12 * trainable / num_ranks + frozen_bytes,
        "deepspeed_zero2": 2 * trainable + 14 * trainable / num_ranks + frozen_bytes,
        "deepspeed_zero2_offload": 2 * trainable + frozen_bytes,
        "deepspeed_zero3": (16 * trainable + frozen_bytes) / num_ranks,
        "deepspeed_zero3_offload": 0,
    }[level]
