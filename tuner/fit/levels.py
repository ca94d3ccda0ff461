"""The ZeRO levels, what of each costs memory, and whether one fits: data that `estimate` and `advice` make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from tuner.zero import presets
from tuner.zero.config import AUTO, Buckets, bucket_sizes, expert_ranks, is_on

_REDUCE_BUCKET = _ALLGATHER_BUCKET = 500_000_000
_PREFETCH = 50_000_000
_MAX_LIVE = 1_000_000_000
_SUB_GROUP = 1_000_000_000
_PERSISTENCE = 100_000


class Costs(NamedTuple):
    """What of a DeepSpeed config costs memory. Bucket sizes count elements.

    `master_bytes` are those of a trained parameter's master, and of its gradient in the optimizer's step;
    `state_part` is the part of its usual size that the optimizer's own state has.
    """

    stage: int
    offload_optimizer: bool = False
    offload_param: bool = False
    overlap: bool = False
    reduce_bucket: int = _REDUCE_BUCKET
    allgather_bucket: int = _ALLGATHER_BUCKET
    prefetch: int = _PREFETCH
    max_live: int = _MAX_LIVE
    sub_group: int = _SUB_GROUP
    hpz: int = 1
    max_reuse: int = _MAX_LIVE
    persistence: int = _PERSISTENCE
    """ZeRO-3 never shards again a weight of at most so many elements."""
    optimizer_buffers: int = 0
    """Where the optimizer's states are on disks: how many of a sub-group's tensors are in the host's memory at once."""
    param_buffers: int = 0
    """The same of weights on disks: how many of `param_buffer` elements. DeepSpeed makes them whole."""
    param_buffer: int = 0
    """0: it is left to `estimate.swap_buffer`."""
    params_in_host: int = 0
    """Where weights are on disks: at most so many that are trained stay in the host's memory, beside the buffers."""
    master_bytes: int = 4
    state_part: float = 1.0
    expert_ranks: int = 1
    """How many ranks divide the experts of a layer among them."""

    @property
    def offloads(self) -> bool:
        """Whether it moves something to the host's memory or to disks."""
        return self.offload_optimizer or self.offload_param

    @property
    def swaps(self) -> bool:
        """Whether it moves something to disks."""
        return bool(self.optimizer_buffers or self.param_buffers)

    @classmethod
    def of_preset(cls, name: str, hidden_size: int) -> Costs:
        """Return what one of the package's presets (or 'none') means for a model of this hidden size."""
        return cls.of_config(presets.find(name).config, hidden_size)

    @classmethod
    def of_config(cls, config: Mapping[str, Any], hidden_size: int = 0) -> Costs:
        """Return what a DeepSpeed config means; DeepSpeed's defaults where it is silent or says 'auto'.

        Args:
            hidden_size: Gives the buckets of a preset their sizes; a final config has them.
        """
        sizes = bucket_sizes(hidden_size) if hidden_size else {}
        written = config.get("zero_optimization") or {}
        zero = {key: sizes.get(key) if value == AUTO else value for key, value in written.items()}
        stage = int(zero.get("stage") or 0)

        def held(key: str, default: int) -> int:
            values = (zero.get(key), zero.get(f"stage3_{key}"), default)
            return int(next(value for value in values if value is not None))

        overlaps = zero.get("overlap_comm")
        has_half_masters = any(is_on(config, block, f"{block}_master_weights_and_grads") for block in ("bf16", "fp16"))
        return cls(
            stage=stage,
            offload_optimizer=_offloaded(zero, "offload_optimizer"),
            offload_param=stage == 3 and _offloaded(zero, "offload_param"),
            overlap=stage == 3 if overlaps is None else bool(overlaps),
            reduce_bucket=held("reduce_bucket_size", _REDUCE_BUCKET),
            allgather_bucket=held("allgather_bucket_size", _ALLGATHER_BUCKET),
            prefetch=held("prefetch_bucket_size", _PREFETCH),
            max_live=held("max_live_parameters", _MAX_LIVE),
            sub_group=held("sub_group_size", _SUB_GROUP),
            hpz=held("zero_hpz_partition_size", 1),
            max_reuse=held("max_reuse_distance", _MAX_LIVE),
            persistence=held("param_persistence_threshold", _PERSISTENCE),
            optimizer_buffers=_of_disk(zero, "offload_optimizer", "buffer_count", 4),
            param_buffers=_of_disk(zero, "offload_param", "buffer_count", 5),
            param_buffer=_of_disk(zero, "offload_param", "buffer_size", 0),
            params_in_host=_of_disk(zero, "offload_param", "max_in_cpu", 1_000_000_000),
            master_bytes=2 if has_half_masters else 4,
            state_part=0.5 if is_on(config, "bf16", "bf16_optimizer_states") else 1.0,
            expert_ranks=expert_ranks(config),
        )


def _offloaded(zero: Mapping[str, Any], block: str) -> bool:
    return (zero.get(block) or {}).get("device", "none") not in ("none", None)


def _of_disk(zero: Mapping[str, Any], block: str, key: str, default: int) -> int:
    """Return a number of a block that swaps to a disk, the default where it is open; 0 where it names no disk."""
    settings = zero.get(block) or {}
    is_on_disk = zero.get("stage") == 3 and settings.get("device") == "nvme"
    value = settings.get(key, AUTO)
    return int(default if value == AUTO else value) if is_on_disk else 0


_MOST_PREFETCHED = 500_000_000
"""A layer of more weights, as of many experts, is not gathered ahead: it takes long, and so hides what it gathers."""
_REDUCED = 100_000_000
"""Gradients that are sent at a time, where there is room: 0.2 GB in 16 bits, those of a few matrices of 8B."""


def large_buckets(hidden_size: int, largest_layer: int, trained: int) -> Buckets:
    """Return what ranks send at a time where GPUs have room: ZeRO-3 then has a whole layer ahead, not one matrix.

    Args:
        hidden_size: Of the model; nothing is smaller than its `bucket_sizes`.
        largest_layer: Parameters of its largest layer; 0: none is gathered ahead.
        trained: Parameters that are trained: no more gradients are sent at a time.
    """
    least = bucket_sizes(hidden_size)
    return Buckets(
        max(least["reduce_bucket_size"], min(_REDUCED, trained)),
        max(least["stage3_prefetch_bucket_size"], largest_layer if largest_layer <= _MOST_PREFETCHED else 0),
    )


class Peak(NamedTuple):
    """Bytes of one GPU at the peak of a step, and of one host. `gpu` and `host` hold the lines; their sums are totals.

    `model_states` are weights, gradients and optimizer states at the end of backward, by the published formulas.
    """

    gpu: dict[str, float]
    host: dict[str, float]
    model_states: float

    @property
    def gpu_bytes(self) -> float:
        return sum(self.gpu.values())

    @property
    def host_bytes(self) -> float:
        return sum(self.host.values())


class Machines(NamedTuple):
    """`num_nodes` nodes alike; sizes in bytes. host_bytes 0: not known, so the host is not judged.

    `disk` is a folder on a disk that each of them has to swap to; empty: none is named.
    """

    gpus_per_node: int
    gpu_bytes: int
    num_nodes: int = 1
    host_bytes: int = 0
    weight_bytes: int = 2
    disk: str = ""
    old_gpus: bool = False
    """Some GPU has a compute capability below 8.0: SDPA has no kernel for grouped heads there."""
    plain_mixers: bool = False
    """There are no kernels for linear attention: transformers computes it, and keeps much more."""
    uneven_ranks: int = 0
    """All ranks, if the nodes have different numbers of them; `gpus_per_node` is then the largest of these numbers."""

    @property
    def world_size(self) -> int:
        return self.uneven_ranks or self.gpus_per_node * self.num_nodes


class Fit(NamedTuple):
    """A level by name and by what it costs, what it needs, and whether that is there."""

    level: str
    costs: Costs
    peak: Peak
    machines: Machines

    @property
    def spare_gpu_bytes(self) -> float:
        """What is left on a GPU; below 0: what is missing."""
        return self.machines.gpu_bytes - self.peak.gpu_bytes

    @property
    def spare_host_bytes(self) -> float:
        return self.machines.host_bytes - self.peak.host_bytes if self.machines.host_bytes else 0.0

    @property
    def room(self) -> float:
        """The part of a GPU, or of a host where that is less, that is left; below 0 it is missing."""
        host = self.spare_host_bytes / self.machines.host_bytes if self.machines.host_bytes else 1.0
        return min(self.spare_gpu_bytes / self.machines.gpu_bytes, host)

    @property
    def fits(self) -> bool:
        return self.spare_gpu_bytes >= 0 and self.spare_host_bytes >= 0

    @property
    def offloads(self) -> bool:
        return self.costs.offloads

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values; sizes are whole bytes."""
        gpu = {name: int(size) for name, size in self.peak.gpu.items()}
        return {
            "gpu_bytes": {"model_states": int(self.peak.model_states), **gpu, "total": sum(gpu.values())},
            "host_bytes": int(self.peak.host_bytes),
            "host": {name: int(size) for name, size in self.peak.host.items()},
            "fits": self.fits,
            "spare_gpu_bytes": int(self.spare_gpu_bytes),
            "spare_host_bytes": int(self.spare_host_bytes) if self.machines.host_bytes else None,
        }
