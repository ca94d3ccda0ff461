"""How long a step takes on paper: a catalog of GPUs, bytes that ranks send at every ZeRO level, seconds.

It looks at no machine; `machine.hardware` does. GPUs are described as in the makers' data sheets.

Sources: Rajbhandari et al., ZeRO, 2020 (arXiv:1910.02054), section 7 (volumes); Patarasuk and Yuan, Bandwidth optimal
all-reduce, 2009 (a ring moves (N-1)/N of the tensor for a gather or a scatter, twice that for an all-reduce);
Wang et al., ZeRO++, 2023 (arXiv:2306.10209), section 3 (hierarchical partitioning); Kaplan et al., 2020
(arXiv:2001.08361), section 2.1 (2 FLOPs a parameter and token forward, 4 backward).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tuner.errors import Option, UsageError, did_you_mean
from tuner.fit.levels import Level

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
        family = [gpu for known, gpu in GPUS.items() if known == stem or re.sub(r"-\d+g$", "", known) == stem]
        if family:
            return min(family, key=lambda gpu: abs(gpu.memory_bytes - memory_bytes))
    return None


# --- What ranks send, and the seconds of a step ---

UTILISATION = 0.4
"""The part of a GPU's peak that training reaches."""
USUAL_UTILISATION = (0.2, 0.6)
"""The least and the most that is usual (docs/plan.md names the published figures)."""
NETWORK_BYTES_S = 50e9
"""The network of a node if none is named: one adapter of 400 Gb/s, the least that nodes of eight GPUs are sold with."""


class Traffic(NamedTuple):
    """What one rank sends for one optimizer step, bytes. `between` may cross nodes, `inside` never does."""

    gather_bytes: float = 0.0
    reduce_bytes: float = 0.0
    inside_bytes: float = 0.0

    @property
    def between_bytes(self) -> float:
        return self.gather_bytes + self.reduce_bytes

    @property
    def total_bytes(self) -> float:
        return self.between_bytes + self.inside_bytes


class Cluster(NamedTuple):
    """Nodes alike; what a GPU computes in a second, and bytes a second of its link and of a node's network.

    `utilisation` is the part of the GPU's peak that `flops_s` is.
    """

    num_nodes: int
    flops_s: float
    link_bytes_s: float
    network_bytes_s: float
    utilisation: float = UTILISATION

    @classmethod
    def of(
        cls,
        product: KnownGpu,
        num_nodes: int,
        network_bytes_s: float = NETWORK_BYTES_S,
        utilisation: float = UTILISATION,
    ) -> Cluster:
        """Return nodes of one product of GPU."""
        return cls(num_nodes, product.peak_flops * utilisation, product.link_bytes_s, network_bytes_s, utilisation)


class StepTime(NamedTuple):
    """Seconds of one optimizer step."""

    compute_s: float
    communication_s: float
    visible_communication_s: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.visible_communication_s


def zero_traffic(
    level: Level, trainable_bytes: float, frozen_bytes: float, world_size: int, accumulation: int
) -> Traffic:
    """Return what a rank sends for one step of `accumulation` micro-batches.

    Stage 0, ZeRO-1: gradients once a step (all-reduce; or reduce-scatter and a gather of the new weights, as much).
    ZeRO-2: gradients every micro-batch, the new weights once. ZeRO-3: all weights, frozen ones too, for the forward
    and again for the backward of every micro-batch, and the gradients of every micro-batch. With hierarchical
    partitioning (`level.hpz` ranks hold a whole copy together) the gathers for the backward stay among these ranks.

    Args:
        level: The DeepSpeed config.
        trainable_bytes: 16-bit bytes of the trained weights (their gradients are as large).
        frozen_bytes: Bytes of the frozen weights as they are stored, without what every rank keeps whole.
        world_size: Ranks.
        accumulation: Micro-batches a step.
    """
    ring, weights = (world_size - 1) / world_size, trainable_bytes + frozen_bytes
    if level.stage == 3 and level.hpz > 1:
        inside = (level.hpz - 1) / level.hpz * weights * accumulation
        return Traffic(ring * weights * accumulation, ring * trainable_bytes * accumulation, inside)
    if level.stage == 3:
        return Traffic(2 * ring * weights * accumulation, ring * trainable_bytes * accumulation)
    reduces = accumulation if level.stage == 2 else 1
    return Traffic(ring * trainable_bytes, ring * trainable_bytes * reduces)


def flops_of_step(
    active_parameters: float,
    trained_share: float,
    tokens: float,
    *,
    recompute: bool,
    attention: float = 0.0,
    backward_share: float = 1.0,
) -> float:
    """Return the FLOPs of one step on `tokens` tokens.

    Args:
        active_parameters: Parameters a token passes through.
        trained_share: The part of them that is trained: frozen weights need no gradients of their own (2 FLOPs less).
        tokens: Of one step.
        recompute: Gradient checkpointing runs the forward twice.
        attention: FLOPs of a token's attention scores and their sum of values in the forward pass; the backward pass
            takes twice as many, trained or not.
        backward_share: The part of the parameters that gradients pass through; the rest has a forward pass alone.
    """
    of_weights = active_parameters * (2 + 2 * trained_share + backward_share * (2 + 2 * recompute))
    return tokens * (of_weights + attention * (1 + backward_share * (2 + recompute)))


def seconds(volume: Traffic, cluster: Cluster) -> float:
    """Return the seconds of the volume: a ring is as slow as its slowest link, a node's network is shared by its GPUs.

    All rings of a node's GPUs run over the node's network together, so the network carries the volume of one rank.
    """
    between = volume.between_bytes
    slowest = between / cluster.link_bytes_s
    if cluster.num_nodes > 1:
        slowest = max(slowest, between / cluster.network_bytes_s)
    return slowest + volume.inside_bytes / cluster.link_bytes_s


def step_time(level: Level, volume: Traffic, flops: float, cluster: Cluster) -> StepTime:
    """Return one step's time; ZeRO-3 that overlaps hides its communication behind arithmetic, others show all of it.

    Args:
        flops: Of one rank's share of the step.
    """
    compute_s, communication_s = flops / cluster.flops_s, seconds(volume, cluster)
    hidden_s = compute_s if level.stage == 3 and level.overlap else 0.0
    return StepTime(compute_s, communication_s, max(0.0, communication_s - hidden_s))
