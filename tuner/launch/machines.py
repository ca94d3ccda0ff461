"""The machines of a launch as the plain numbers that `fit` calculates with."""

from __future__ import annotations

from tuner.fit import gpu_catalog
from tuner.fit.communication import Cluster
from tuner.fit.gpu_catalog import KnownGpu
from tuner.fit.levels import Machines
from tuner.machine.hardware import Hardware, Precision
from tuner.machine.topology import Topology


def machines(topology: Topology, hardware: Hardware, precision: Precision) -> Machines:
    """Return their number, and the memory of each."""
    return Machines(
        topology.nproc_per_node,
        hardware.smallest_gpu_bytes,
        topology.num_nodes,
        hardware.host_memory_bytes,
        precision.weight_bytes,
        old_gpus=hardware.has_old_gpus,
    )


def slowest_gpu(hardware: Hardware) -> KnownGpu | None:
    """Return the slowest of the GPUs as a product; None without any, or where one of them is not known."""
    products = [gpu_catalog.like(gpu.name, gpu.memory_bytes) for gpu in hardware.gpus]
    known = [product for product in products if product]
    if len(known) < len(products):
        return None
    return min(known, key=lambda product: product.peak_flops, default=None)


def cluster(hardware: Hardware, topology: Topology) -> Cluster | None:
    """Return how fast the machines compute and talk; None where the GPUs are not known."""
    slowest = slowest_gpu(hardware)
    return Cluster.of(slowest, topology.num_nodes) if slowest else None
