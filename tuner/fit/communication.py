"""Bytes that ranks send each step at every ZeRO level, and what a step costs in seconds on paper.

It takes plain numbers: no recipe, no machine.

Sources: Rajbhandari et al., ZeRO, 2020 (arXiv:1910.02054), section 7 (volumes); Patarasuk and Yuan, Bandwidth optimal
all-reduce, 2009 (a ring moves (N-1)/N of the tensor for a gather or a scatter, twice that for an all-reduce);
Wang et al., ZeRO++, 2023 (arXiv:2306.10209), section 3 (hierarchical partitioning); Kaplan et al., 2020
(arXiv:2001.08361), section 2.1 (2 FLOPs a parameter and token forward, 4 backward).
"""

from __future__ import annotations

from typing import NamedTuple

from tuner.fit.gpu_catalog import KnownGpu

UTILISATION = 0.4
"""The part of a GPU's peak that training reaches."""
USUAL_UTILISATION = (0.2, 0.6)
"""The least and the most that is usual (docs/plan.md names the published figures)."""
NETWORK_BYTES_S = 50e9
"""A node's network where nobody says: one adapter of 400 Gb/s, the least that nodes of eight GPUs are sold with."""
HIERARCHICAL = "deepspeed_zero3_hpz"
"""ZeRO-3 with zero_hpz_partition_size = GPUs of a node: the backward gathers stay inside the node."""
SHARDED = ("deepspeed_zero3", "deepspeed_zero3_offload", HIERARCHICAL)


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


def traffic(
    level: str, trainable_bytes: float, frozen_bytes: float, world_size: int, accumulation: int, gpus_per_node: int = 1
) -> Traffic:
    """Return what a rank sends for one step of `accumulation` micro-batches.

    none, ZeRO-1: gradients once a step (all-reduce; or reduce-scatter and a gather of the new weights, as much).
    ZeRO-2: gradients every micro-batch, the new weights once. ZeRO-3: all weights, frozen ones too, for the forward
    and again for the backward of every micro-batch, and the gradients of every micro-batch.

    Args:
        level: A level of `fit.levels.LEVELS`, or `HIERARCHICAL`.
        trainable_bytes: 16-bit bytes of the trained weights (their gradients are as large).
        frozen_bytes: Bytes of the frozen weights as they are stored, without what every rank keeps whole.
        world_size: Ranks.
        accumulation: Micro-batches a step.
        gpus_per_node: For `HIERARCHICAL`: the ranks that hold a whole copy together.
    """
    ring, weights = (world_size - 1) / world_size, trainable_bytes + frozen_bytes
    if level == HIERARCHICAL:
        inside = (gpus_per_node - 1) / gpus_per_node * weights * accumulation
        return Traffic(ring * weights * accumulation, ring * trainable_bytes * accumulation, inside)
    if level in SHARDED:
        return Traffic(2 * ring * weights * accumulation, ring * trainable_bytes * accumulation)
    reduces = accumulation if level.startswith("deepspeed_zero2") else 1
    return Traffic(ring * trainable_bytes, ring * trainable_bytes * reduces)


def step_flops(
    active_parameters: float, trained_share: float, tokens: float, *, recompute: bool, attention: float = 0.0
) -> float:
    """Return the FLOPs of one step on `tokens` tokens.

    Args:
        active_parameters: Parameters a token passes through.
        trained_share: The part of them that is trained: frozen weights need no gradients of their own (2 FLOPs less).
        tokens: Of one step.
        recompute: Gradient checkpointing runs the forward twice.
        attention: FLOPs of a token's attention scores and their sum of values in the forward pass; the backward pass
            takes twice as many, trained or not.
    """
    return tokens * (active_parameters * (2 + 2 + 2 * trained_share + 2 * recompute) + attention * (3 + recompute))


def seconds(volume: Traffic, cluster: Cluster) -> float:
    """Return the seconds of the volume: a ring is as slow as its slowest link, a node's network is shared by its GPUs.

    All rings of a node's GPUs run over the node's network together, so the network carries the volume of one rank.
    """
    between = volume.between_bytes
    slowest = between / cluster.link_bytes_s
    if cluster.num_nodes > 1:
        slowest = max(slowest, between / cluster.network_bytes_s)
    return slowest + volume.inside_bytes / cluster.link_bytes_s


def step_time(level: str, volume: Traffic, flops: float, cluster: Cluster) -> StepTime:
    """Return one step's time; ZeRO-3 hides its communication behind arithmetic, the others show all of theirs.

    Args:
        flops: Of one rank's share of the step.
    """
    compute_s, communication_s = flops / cluster.flops_s, seconds(volume, cluster)
    hidden_s = compute_s if level in SHARDED else 0.0  # overlap_comm is on in our presets at stage 3 alone
    return StepTime(compute_s, communication_s, max(0.0, communication_s - hidden_s))
