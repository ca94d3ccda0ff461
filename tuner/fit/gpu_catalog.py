"""GPUs that people train on: memory, peak arithmetic and links, from the makers' data sheets.

It does not look at this machine; `machine.hardware` does.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tuner.errors import UsageError, did_you_mean

MIB = 1024**2


class KnownGpu(NamedTuple):
    """One product.

    `memory_mib` is what its driver reports; `peak_tflops` are dense 16-bit matrix operations with 32-bit sums, without
    sparsity; `link_gb_s` are 10^9 bytes a second in one direction (NVLink, or PCIe).
    """

    memory_mib: int
    peak_tflops: float
    link_gb_s: float
    compute_capability: tuple[int, int]

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib * MIB

    @property
    def peak_flops(self) -> float:
        return self.peak_tflops * 1e12

    @property
    def link_bytes_s(self) -> float:
        return self.link_gb_s * 1e9


GPUS = {
    "t4": KnownGpu(15360, 65, 16, (7, 5)),
    "v100-16g": KnownGpu(16384, 125, 150, (7, 0)),
    "v100-32g": KnownGpu(32768, 125, 150, (7, 0)),
    "rtx3090": KnownGpu(24576, 71, 32, (8, 6)),
    "rtx4090": KnownGpu(24564, 165, 32, (8, 9)),
    "rtx5090": KnownGpu(32607, 210, 64, (12, 0)),
    "a10": KnownGpu(23028, 125, 32, (8, 6)),
    "a10g": KnownGpu(23028, 70, 32, (8, 6)),
    "a30": KnownGpu(24576, 165, 32, (8, 0)),
    "a40": KnownGpu(46068, 150, 32, (8, 6)),
    "a6000": KnownGpu(49140, 155, 32, (8, 6)),
    "rtx6000-ada": KnownGpu(49140, 182, 32, (8, 9)),
    "l4": KnownGpu(23034, 121, 32, (8, 9)),
    "l40": KnownGpu(46068, 181, 32, (8, 9)),
    "l40s": KnownGpu(46068, 362, 32, (8, 9)),
    "a100-40g": KnownGpu(40960, 312, 300, (8, 0)),
    "a100-80g": KnownGpu(81920, 312, 300, (8, 0)),
    "a800-80g": KnownGpu(81920, 312, 200, (8, 0)),
    "h100-80g": KnownGpu(81559, 989, 450, (9, 0)),
    "h100-pcie": KnownGpu(81559, 756, 64, (9, 0)),
    "h100-nvl": KnownGpu(95830, 835, 300, (9, 0)),
    "h800-80g": KnownGpu(81559, 989, 200, (9, 0)),
    "h20": KnownGpu(97871, 148, 450, (9, 0)),
    "h200": KnownGpu(143771, 989, 450, (9, 0)),
    "b200": KnownGpu(183359, 2250, 900, (10, 0)),
    "mi300x": KnownGpu(196592, 1307, 448, (9, 4)),
}

_ALIASES = {"v100": "v100-16g", "a100": "a100-40g", "a800": "a800-80g", "h100": "h100-80g", "h800": "h800-80g"}
"""A short name means the product's smallest memory: a plan must not count on more than is there."""


def find(name: str, where: str = "--gpu") -> KnownGpu:
    """Return the GPU that `name` means, in any spelling of case, dashes and 'GB'.

    Raises:
        UsageError: no such GPU is known; the message holds the nearest name.
    """
    key = spelled(name)
    without_dashes = {product.replace("-", ""): product for product in GPUS}
    product = _ALIASES.get(key) or without_dashes.get(key.replace("-", ""))
    if product is None:
        hint = did_you_mean(key, [*GPUS, *_ALIASES]) or f"Known: {', '.join(GPUS)}."
        raise UsageError(f"unknown GPU {name!r}", where=where, fix=f"{hint} Or give its size: --gpu-memory 80GB.")
    return GPUS[product]


def spelled(name: str) -> str:
    """Return a name as the table spells it: 'NVIDIA A100-SXM4-80GB' -> 'a100-80g'."""
    text = re.sub(r"nvidia|geforce|amd|instinct|tesla|sxm\d*|hbm\d*e?|\(.*\)", " ", name.lower())
    text = re.sub(r"(\d+)\s*gi?b\b", r"\1g", text)
    return re.sub(r"[\s_-]+", "-", text).strip("-").replace("rtx-", "rtx").replace("rtxa", "a")


def like(name: str, memory_bytes: int) -> KnownGpu | None:
    """Return the product that a driver's name and memory mean (peak and links for an estimate), or None."""
    key = spelled(name)
    for stem in (key, re.sub(r"-\d+g$", "", key), re.sub(r"(-pcie)?-\d+g$", "", key)):
        family = [gpu for known, gpu in GPUS.items() if known == stem or re.sub(r"-\d+g$", "", known) == stem]
        if family:
            return min(family, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    return None
