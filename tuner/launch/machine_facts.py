"""The machines of a launch: this one or others that flags name, and as the numbers that `fit` needs."""

from __future__ import annotations

from collections.abc import Mapping

from tuner.errors import UsageError
from tuner.fit import gpu_catalog
from tuner.fit.communication import Cluster
from tuner.fit.gpu_catalog import KnownGpu
from tuner.fit.levels import Machines
from tuner.machine import hardware
from tuner.machine.hardware import Gpu, Hardware
from tuner.machine.launchers import filled, resolve
from tuner.machine.topology import LaunchFlags, Topology, planned
from tuner.zero.precision import Precision

AskedMachines = tuple[int | None, str | None, int]
"""What `gpus`, `gpu` and `nodes` say: GPUs of each node, their product, and the number of nodes."""
HERE: AskedMachines = (None, None, 1)
ASSUMED_GPU = "a100-80g"
"""Where none is here and none is named."""


def look_up(
    asked: AskedMachines, environ: Mapping[str, str], file: LaunchFlags | None = None
) -> tuple[Hardware, Topology]:
    """Return the machines that are asked for, where nothing is said this one with what its launch variables say.

    Args:
        file: What the DeepSpeed config says of the launch, where it is one that does.

    Raises:
        UsageError: a number of GPUs without a GPU here or a name, an unknown name, or launch variables that contradict.
    """
    here, (gpus, gpu, nodes) = hardware.detect(environ), asked
    if asked == HERE:
        return here, resolve(filled(LaunchFlags(), file, environ), environ, len(here.gpus))
    if gpu is None and not here.gpus:
        raise UsageError(
            "this machine has no GPU, so the kind of GPU is unknown", where="--gpus", fix="Add: --gpu a100-80g."
        )
    made = node(here, gpus, known_gpu(gpu) if gpu else None)
    return made, planned(nodes, len(made.gpus))


def node(here: Hardware, gpus: int | None, kind: Gpu | None) -> Hardware:
    """Return one node as it is asked for: so many GPUs of a kind, where nothing is said those that are here."""
    if kind is None:
        # Where those that are here differ, the smallest decides what fits.
        smallest = min(here.gpus, key=lambda gpu: gpu.memory_bytes)
        return here if gpus in (None, len(here.gpus)) else here._replace(gpus=(smallest,) * gpus)
    # Nobody knows the host's memory of a machine that is not here, so it is not judged.
    return here._replace(gpus=(kind,) * (gpus or 1), host_memory_bytes=0)


def known_gpu(name: str) -> Gpu:
    """Return the GPU that a product's name means.

    Raises:
        UsageError: no such GPU is known.
    """
    product = gpu_catalog.find(name)
    return Gpu(gpu_catalog.spelled(name), product.memory_bytes, product.compute_capability)


def fit_machines(topology: Topology, hardware: Hardware, precision: Precision) -> Machines:
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
