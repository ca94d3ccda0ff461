"""How long a step takes on paper: a roofline of what a rank computes and moves, and of the bytes that ranks send.

It looks at no machine and no recipe; `operations` counts, `gpu_catalog` knows the GPUs. docs/plan.md holds it to
published speeds.

Sources: Rajbhandari et al., ZeRO, 2020 (arXiv:1910.02054), section 7 (volumes); Patarasuk and Yuan, Bandwidth optimal
all-reduce, 2009 (a ring moves (N-1)/N of the tensor for a gather or a scatter, twice that for an all-reduce);
Wang et al., ZeRO++, 2023 (arXiv:2306.10209), section 3 (hierarchical partitioning).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from tuner.fit.gpu_catalog import KnownGpu
from tuner.fit.levels import Costs

Attention = Literal["flash", "flash_attention_3", "masked", "eager"]
"""How attention is computed: flash attention 2 (also in SDPA without a mask, and 'varlen') or 3, SDPA with a mask of
all pairs, plain products."""

OF_MEMORY = 0.85
"""The part of the memory's bandwidth that element-wise kernels reach. A 4090 reads 0.91 of it at most
(krrishnarraj/clpeak, issue 106); the rest is the start and the end of each kernel."""
OF_ATTENTION = {"flash": 0.6, "flash_attention_3": 0.5, "masked": 0.2, "eager": 0.77}
"""The part of the peak that attention reaches. Flash attention 2 reaches 0.5 to 0.73 on an A100 (Dao, 2023,
arXiv:2307.08691, abstract), 3 up to 0.75 forward on an H100 (Shah et al., 2024, arXiv:2407.08608, abstract), less
backward; 'masked' is an estimate, not a measurement; 'eager' are plain products."""
OF_ATTENTION_ON_HOPPER = {"flash": 0.35, "masked": 0.1}
"""The same from compute capability 9.0 on: flash attention 2 is not written for it (Shah et al., abstract)."""
KERNEL_S = 3e-6
"""Seconds of a kernel beside its work, until the next one runs at full speed: fitted to the steps of 1B on an H200."""
DISPATCH_S = 8e-6
"""Seconds of the processor to start a kernel from Python, for which small micro-batches wait. A layer of Llama took
1.4 ms (109 kernels), with PEFT's adapters 2.75 ms (168), on two busy cores with tensors of a few numbers: 13 to 16 us
each; the cores of a server are faster."""
HOST_UPDATE_S = 0.25e-9
"""Seconds of a host for Adam's update of one parameter: 0.22 to 0.26 s for 10^9 of them (Ren et al., ZeRO-Offload,
2021, arXiv:2101.06840, table 4)."""
OFF_BY = 0.2
"""The published speeds are within this part of the estimate (docs/plan.md)."""
NETWORK_BYTES_S = 50e9
"""The network of a node if none is named: one adapter of 400 Gb/s, the least that nodes of eight GPUs are sold with."""


class Operations(NamedTuple):
    """Counts of one rank and step.

    Args:
        matmul_flops: Of all matrix products but those of attention.
        forward_flops: Those of them in forward passes that are no recomputation.
        attention_flops: Of attention's scores, and of its sums of values.
        matmul_bytes: What matrix products read and write: weights, inputs, outputs, gradients.
        elementwise_bytes: What norms, rotary embeddings, activation functions and residual sums move; with eager
            attention the scores too.
        lora_bytes: What adapters move beside their base.
        loss_bytes: What the loss moves: logits, and what becomes of them.
        dequantized_bytes: Weights of 4 or 8 bits that are unpacked.
        update_bytes: What the optimizer's update moves on the GPU, and sums of gradients.
        host_updates: Parameters that this rank updates on the host.
        host_bytes: What passes between GPU and host.
    """

    matmul_flops: float = 0.0
    forward_flops: float = 0.0
    attention_flops: float = 0.0
    matmul_bytes: float = 0.0
    elementwise_bytes: float = 0.0
    lora_bytes: float = 0.0
    loss_bytes: float = 0.0
    dequantized_bytes: float = 0.0
    update_bytes: float = 0.0
    host_updates: float = 0.0
    host_bytes: float = 0.0
    kernels: float = 0.0
    micro_batches: int = 1
    attention: Attention = "flash"

    def times(self, number: float) -> Operations:
        """Return the counts of so many alike."""
        return self._with([number * value for value in self._sums])

    def plus(self, other: Operations) -> Operations:
        """Return the sums of both, and micro-batches and attention of this one."""
        return self._with([own_sum + other_sum for own_sum, other_sum in zip(self._sums, other._sums, strict=True)])

    @property
    def _sums(self) -> tuple[float, ...]:
        values: tuple[Any, ...] = self
        return values[:_NUM_SUMS]

    def _with(self, sums: Iterable[Any]) -> Operations:
        return self._replace(**dict(zip(self._fields, sums, strict=False)))


_NUM_SUMS = Operations._fields.index("micro_batches")


class Traffic(NamedTuple):
    """What one rank sends for one optimizer step, bytes. `between` may cross nodes, `inside` never does.

    `layer_bytes` are what layers wait for: sums over ranks that split them, and tokens on their way to divided experts.
    """

    gather_bytes: float = 0.0
    reduce_bytes: float = 0.0
    inside_bytes: float = 0.0
    layer_bytes: float = 0.0

    @property
    def between_bytes(self) -> float:
        return self.gather_bytes + self.reduce_bytes

    @property
    def total_bytes(self) -> float:
        return self.between_bytes + self.inside_bytes + self.layer_bytes


class Cluster(NamedTuple):
    """Nodes of one GPU alike; bytes a second of a node's network.

    `utilisation` is the part of the GPU's peak that the user says is reached; None: it is computed.
    """

    num_nodes: int
    gpu: KnownGpu
    gpus_per_node: int = 8
    network_bytes_s: float = NETWORK_BYTES_S
    utilisation: float | None = None


class StepTime(NamedTuple):
    """Seconds of one optimizer step, by what takes them."""

    matmul_s: float
    attention_s: float = 0.0
    elementwise_s: float = 0.0
    lora_s: float = 0.0
    loss_s: float = 0.0
    dequantize_s: float = 0.0
    kernels_s: float = 0.0
    update_s: float = 0.0
    communication_s: float = 0.0
    visible_communication_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of the forward and backward passes."""
        passes = (self.matmul_s, self.attention_s, self.elementwise_s, self.lora_s, self.loss_s, self.dequantize_s)
        return sum(passes) + self.kernels_s

    @property
    def total_s(self) -> float:
        return self.compute_s + self.update_s + self.visible_communication_s

    @property
    def beside_s(self) -> float:
        """Seconds of a step in which no token is computed: the update, and what ranks send and nothing hides."""
        return self.update_s + self.visible_communication_s


def zero_traffic(
    costs: Costs, trainable_bytes: float, frozen_bytes: float, world_size: int, accumulation: int
) -> Traffic:
    """Return what a rank sends for one step of `accumulation` micro-batches.

    Stage 0, ZeRO-1: gradients once a step (all-reduce; or reduce-scatter and a gather of the new weights, as much).
    ZeRO-2: gradients every micro-batch, the new weights once. ZeRO-3: all weights, frozen ones too, for the forward
    and again for the backward of every micro-batch, and the gradients of every micro-batch. With hierarchical
    partitioning (`costs.hpz` ranks hold a whole copy together) the gathers for the backward stay among these ranks.

    Args:
        trainable_bytes: 16-bit bytes of the trained weights (their gradients are as large).
        frozen_bytes: Bytes of the frozen weights as they are stored, without what every rank keeps whole.
    """
    ring, weights = (world_size - 1) / world_size, trainable_bytes + frozen_bytes
    if costs.stage == 3 and costs.hpz > 1:
        inside = (costs.hpz - 1) / costs.hpz * weights * accumulation
        return Traffic(ring * weights * accumulation, ring * trainable_bytes * accumulation, inside)
    if costs.stage == 3:
        return Traffic(2 * ring * weights * accumulation, ring * trainable_bytes * accumulation)
    reduces = accumulation if costs.stage == 2 else 1
    return Traffic(ring * trainable_bytes, ring * trainable_bytes * reduces)


def seconds(volume: Traffic, cluster: Cluster) -> float:
    """Return the seconds of the volume, without `layer_bytes`.

    A ring is as slow as its slowest link, a node's network is shared by its GPUs: all rings of a node's GPUs run over
    the node's network together, so the network carries the volume of one rank.
    """
    return _between(volume.between_bytes, cluster) + volume.inside_bytes / cluster.gpu.link_bytes_s


def _between(sent_bytes: float, cluster: Cluster) -> float:
    slowest = sent_bytes / cluster.gpu.link_bytes_s
    return max(slowest, sent_bytes / cluster.network_bytes_s) if cluster.num_nodes > 1 else slowest


def _within_layers(sent_bytes: float, costs: Costs, cluster: Cluster) -> float:
    """Return the seconds of what layers wait for: sums within a node, and tokens on their way to experts.

    A group of ranks that divide the experts may be larger than a node. Then the GPUs of a node share its network.
    """
    size, in_node = costs.expert_ranks, math.gcd(costs.expert_ranks, cluster.gpus_per_node)
    within_s = sent_bytes / cluster.gpu.link_bytes_s
    if cluster.num_nodes == 1 or size == in_node:
        return within_s
    outside = (size - in_node) / (size - 1)
    return max(within_s, outside * cluster.gpus_per_node * sent_bytes / cluster.network_bytes_s)


def step_time(costs: Costs, volume: Traffic, operations: Operations, cluster: Cluster) -> StepTime:
    """Return one step's time.

    Matrix products and attention take their FLOPs, everything else its bytes, one after the other. What ranks send is
    hidden behind what is computed at the same time, if the level overlaps: at ZeRO-3 all of it, at ZeRO-1 and 2 the
    gradients alone, behind the backward pass that they come from.
    """
    gpu = cluster.gpu
    time = _compute(operations, cluster)
    memory_s = 1 / (OF_MEMORY * gpu.memory_bytes_s)
    on_host = operations.host_updates * cluster.gpus_per_node * HOST_UPDATE_S
    update_s = operations.update_bytes * memory_s + on_host + operations.host_bytes / gpu.host_bytes_s
    hidden_s = 0.0
    if costs.overlap and costs.stage == 3:
        hidden_s = time.compute_s
    elif costs.overlap and costs.stage:
        backward_s = time.compute_s * (1 - operations.forward_flops / operations.matmul_flops)
        backwards = 1 if costs.stage == 2 else operations.micro_batches
        hidden_s = min(backward_s / backwards, _between(volume.reduce_bytes, cluster))
    communication_s, waits_s = seconds(volume, cluster), _within_layers(volume.layer_bytes, costs, cluster)
    visible_s = max(0.0, communication_s - hidden_s) + waits_s
    communication_s += waits_s
    return time._replace(update_s=update_s, communication_s=communication_s, visible_communication_s=visible_s)


def _compute(operations: Operations, cluster: Cluster) -> StepTime:
    gpu, memory_s = cluster.gpu, 1 / (OF_MEMORY * cluster.gpu.memory_bytes_s)
    flops, of_attention = operations.matmul_flops, operations.attention_flops
    if cluster.utilisation:
        return StepTime((flops + of_attention) / (gpu.peak_flops * cluster.utilisation))
    shares = OF_ATTENTION | (OF_ATTENTION_ON_HOPPER if gpu.compute_capability >= (9, 0) else {})
    time = StepTime(
        matmul_s=flops / gpu.matmul_flops + operations.matmul_bytes * memory_s,
        attention_s=of_attention / (shares[operations.attention] * gpu.peak_flops),
        elementwise_s=operations.elementwise_bytes * memory_s,
        lora_s=operations.lora_bytes * memory_s,
        loss_s=operations.loss_bytes * memory_s,
        dequantize_s=operations.dequantized_bytes * memory_s,
        kernels_s=operations.kernels * KERNEL_S,
    )
    waits_s = max(0.0, operations.kernels * DISPATCH_S - time.compute_s)
    return time._replace(kernels_s=time.kernels_s + waits_s)
