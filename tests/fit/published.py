"""The published formulas of model states, which the estimate is held against."""

from __future__ import annotations

from tuner.zero import presets


def model_state_bytes(level: str, trainable: int, frozen_bytes: float, num_ranks: int) -> float:
    """Return the bytes of weights, gradients and Adam states that one GPU holds at the end of backward.

    With T trainable parameters, N ranks and F bytes of frozen weights, mixed precision:
    none 16T + F; ZeRO-1 4T + 12T/N + F; ZeRO-2 2T + 14T/N + F; ZeRO-3 (16T + F)/N; offloading the optimizer leaves
    2T (ZeRO-2) or 2T/N (ZeRO-3); offloading the parameters too leaves 0.

    Source: Rajbhandari et al., ZeRO, 2020 (arXiv:1910.02054), section 3 and figure 1, with K = 12.
    """
    preset = presets.find(level)
    if "offload_param" in preset.offloaded:
        return 0
    whole = 2 * trainable if preset.offloaded else 16 * trainable
    if preset.stage == 3:
        return (whole + frozen_bytes) / num_ranks
    of_all_ranks = 0 if preset.offloaded else {0: 0, 1: 12, 2: 14}[preset.stage] * trainable
    return whole - of_all_ranks + of_all_ranks / num_ranks + frozen_bytes
