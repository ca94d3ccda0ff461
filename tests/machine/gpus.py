"""Machines to plan for: facts of real GPUs, none of which need be here."""

from __future__ import annotations

from tuner.machine.hardware import Gpu, Hardware

GIB = 1024**3
H200 = Gpu("NVIDIA H200", 141 * GIB, (9, 0), "GPU-h200")
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 * GIB, (8, 0), "GPU-a100")
H100 = Gpu("NVIDIA H100 80GB HBM3", 81559 * 1024**2, (9, 0), "GPU-h100")
RTX4090 = Gpu("NVIDIA GeForce RTX 4090", 24564 * 1024**2, (8, 9), "GPU-4090")
T4 = Gpu("Tesla T4", 15 * GIB, (7, 5), "GPU-t4")
V100 = Gpu("Tesla V100-SXM2-32GB", 32 * GIB, (7, 0), "GPU-v100")
CPU = Hardware((), 2, 16 * GIB, True)


def machine(*gpus: Gpu, has_compiler: bool = True) -> Hardware:
    """Return a machine of 16 cores with these GPUs."""
    return Hardware(gpus, 16, 256 * GIB, has_compiler)
