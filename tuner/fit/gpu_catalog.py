"""A catalog of GPUs: what their makers' data sheets say, and what matrix products reach on them.

It looks at no machine; `machine.hardware` does.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tuner.errors import Option, UsageError, did_you_mean

MIB = 1024**2
_REACHED = 0.77
"""The part of its peak that matrix products reach on a GPU that was not measured: the median of those below."""


class KnownGpu(NamedTuple):
    """One product. `memory_bytes` is what its driver reports, `memory_bytes_s` the speed of its own memory.

    `peak_flops` are dense 16-bit matrix operations with 32-bit sums, without sparsity; `matmul_flops` are what the best
    matrix product reaches. `link_bytes_s` are those of one direction (NVLink, or PCIe).
    """

    memory_bytes: int
    peak_flops: float
    link_bytes_s: float
    compute_capability: tuple[int, int]
    memory_bytes_s: float
    matmul_flops: float

    @property
    def host_bytes_s(self) -> float:
        """Bytes a second between the GPU and its host in one direction: PCIe 3, 4 or 5 with 16 lanes."""
        major = self.compute_capability[0]
        return 64e9 if major >= 9 else 32e9 if major == 8 else 16e9


def of_sheet(
    memory_mib: int,
    peak_tflops: float,
    link_gb_s: float,
    capability: tuple[int, int],
    memory_gb_s: float,
    matmul_tflops: float = 0.0,
) -> KnownGpu:
    """Return a product by its data sheet; GB are 10^9 bytes.

    `matmul_tflops` are those in bf16 (fp16 before Ampere); 0: not measured. Measured by others: mag-/gpu_benchmark
    (github.com/mag-/gpu_benchmark, README.md); where that has none, fanghostt/transformers-benchmarks
    (github.com/fanghostt/transformers-benchmarks, README.md; V100, A6000) and stas00/ml-engineering
    (compute/accelerator/README.md, "Maximum Achievable Matmul FLOPS"; B200, and H200 as H100).
    """
    peak, matmul = peak_tflops * 1e12, matmul_tflops * 1e12
    return KnownGpu(memory_mib * MIB, peak, link_gb_s * 1e9, capability, memory_gb_s * 1e9, matmul or _REACHED * peak)


GPUS = {
    "t4": of_sheet(15360, 65, 16, (7, 5), 320),
    "v100-16g": of_sheet(16384, 125, 150, (7, 0), 900, 95),
    "v100-32g": of_sheet(32768, 125, 150, (7, 0), 900, 95),
    "rtx3090": of_sheet(24576, 71, 32, (8, 6), 936, 78.0),
    "rtx4090": of_sheet(24564, 165, 32, (8, 9), 1008, 178.5),
    "rtx5090": of_sheet(32607, 210, 64, (12, 0), 1792),
    "a10": of_sheet(23028, 125, 32, (8, 6), 600),
    "a10g": of_sheet(23028, 70, 32, (8, 6), 600, 69.7),
    "a30": of_sheet(24576, 165, 32, (8, 0), 933),
    "a40": of_sheet(46068, 150, 32, (8, 6), 696),
    "a6000": of_sheet(49140, 155, 32, (8, 6), 768, 95),
    "rtx6000-ada": of_sheet(49140, 364, 32, (8, 9), 960, 278.5),
    "l4": of_sheet(23034, 121, 32, (8, 9), 300, 91.4),
    "l40": of_sheet(46068, 181, 32, (8, 9), 864, 170.3),
    "l40s": of_sheet(46068, 362, 32, (8, 9), 864, 252.0),
    "a100-40g": of_sheet(40960, 312, 300, (8, 0), 1555, 267.9),
    "a100-80g": of_sheet(81920, 312, 300, (8, 0), 2039, 267.9),
    "a800-80g": of_sheet(81920, 312, 200, (8, 0), 2039, 267.9),
    "h100-80g": of_sheet(81559, 989, 450, (9, 0), 3350, 792.1),
    "h100-pcie": of_sheet(81559, 756, 64, (9, 0), 2000, 499.5),
    "h100-nvl": of_sheet(95830, 835, 300, (9, 0), 3938, 488.5),
    "h800-80g": of_sheet(81559, 989, 200, (9, 0), 3350, 792.1),
    "h20": of_sheet(97871, 148, 450, (9, 0), 4000),
    "h200": of_sheet(143771, 989, 450, (9, 0), 4800, 749.1),
    "b200": of_sheet(183359, 2250, 900, (10, 0), 8000, 1745),
    "mi300x": of_sheet(196592, 1307, 448, (9, 4), 5300, 758.3),
}

_ALIASES = {"v100": "v100-16g", "a100": "a100-40g", "a800": "a800-80g", "h100": "h100-80g", "h800": "h800-80g"}
"""A short name means the product's smallest memory: a plan must not count on more than is there."""


def find(name: str, where: str = Option("gpu")) -> KnownGpu:
    """Return the GPU that `name` means, in any spelling of case, dashes and 'GB'.

    Raises:
        UsageError: no such GPU is known; the message holds the nearest name.
    """
    key = spelled(name)
    without_dashes = {product.replace("-", ""): product for product in GPUS}
    product = _ALIASES.get(key) or without_dashes.get(key.replace("-", ""))
    if product is None:
        hint = did_you_mean(key, [*GPUS, *_ALIASES]) or f"Known: {', '.join(GPUS)}."
        raise UsageError(
            f"unknown GPU {name!r}", where=where, fix=f"{hint} Or give its size: {Option('gpu_memory', '80GB')}."
        )
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
        family = [gpu for gpu_name, gpu in GPUS.items() if gpu_name == stem or re.sub(r"-\d+g$", "", gpu_name) == stem]
        if family:
            return min(family, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    return None
