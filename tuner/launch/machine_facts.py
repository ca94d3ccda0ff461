"""The machines of a launch: this one or others that flags name, and as the numbers that `fit` needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tuner.errors import UsageError
from tuner.fit import step_time
from tuner.fit.levels import Machines
from tuner.fit.step_time import Cluster, KnownGpu
from tuner.machine import hardware
from tuner.machine.hardware import Gpu, Hardware, Precision
from tuner.machine.launchers import filled, resolve
from tuner.machine.topology import LaunchFlags, Topology, planned

AskedMachines = tuple[int | None, str | None, int]
"""The values of --gpus, --gpu and --nodes: GPUs of each node, their product, and the number of nodes."""
HERE: AskedMachines = (None, None, 1)
ASSUMED_GPU = "a100-80g"
"""The GPU to plan for if this machine has no GPU and no flag names one."""


class RunPlace(NamedTuple):
    """Where a recipe runs: one node of the machines, all nodes and ranks, and how fast they compute and communicate.

    Args:
        nvme_path: A folder on a disk that each node has to swap to.
        cluster: None if the GPUs are not known.
    """

    hardware: Hardware
    topology: Topology
    cluster: Cluster | None
    nvme_path: str = ""

    @classmethod
    def of(cls, hardware: Hardware, topology: Topology) -> RunPlace:
        """Return machines without a named network."""
        return cls(hardware, topology, cluster(hardware, topology))

    def machines(self, precision: Precision) -> Machines:
        """Return the numbers that `fit` needs; all ranks of a run return the same numbers."""
        topology = self.topology
        on_fullest = max(topology.tasks, default=topology.nproc_per_node)
        is_uneven = on_fullest * topology.num_nodes != topology.world_size
        return Machines(
            on_fullest,
            self.hardware.smallest_gpu_bytes,
            topology.num_nodes,
            self.hardware.host_memory_bytes,
            precision.weight_bytes,
            self.nvme_path,
            old_gpus=self.hardware.has_old_gpus,
            uneven_ranks=topology.world_size if is_uneven else 0,
        )


def look_up(named: AskedMachines, environ: Mapping[str, str], file: LaunchFlags | None = None) -> RunPlace:
    """Return the machines that flags name; without flags this machine with its launch variables.

    Args:
        file: The launch settings of the DeepSpeed config, if it has any.

    Raises:
        UsageError: a number of GPUs without a GPU here or a name, an unknown name, or launch variables that contradict.
    """
    here, (gpus, gpu, nodes) = hardware.detect(environ), named
    if named == HERE:
        return RunPlace.of(here, find_topology(LaunchFlags(), file, environ, here))
    if gpu is None and not here.gpus:
        raise UsageError(
            "this machine has no GPU, so the kind of GPU is unknown", where="--gpus", fix="Add: --gpu a100-80g."
        )
    one_node = node(here, gpus, known_gpu(gpu) if gpu else None)
    return RunPlace.of(one_node, planned(nodes, len(one_node.gpus)))


_NOT_OURS = "what starts the ranks binds them to cores, and here that is not this command"


def find_topology(
    flags: LaunchFlags, file: LaunchFlags | None, environ: Mapping[str, str], hardware: Hardware
) -> Topology:
    """Return the nodes and ranks of a run: flags count, then the launch settings of `file`, then the environment.

    Raises:
        UsageError: they contradict each other.
    """
    return resolve(filled(flags, file, environ), environ, len(hardware.gpus))


def refuse_unsupervised(topology: Topology, on_oom: str, max_restarts: int, *, bind_cores: bool) -> None:
    """Refuse what this process cannot do for ranks that another one starts.

    Raises:
        UsageError: another launcher starts the ranks, or, for --on-oom, they run on several nodes.
    """
    if on_oom == "retry" and (not topology.is_supervised or topology.num_nodes > 1):
        fix = (
            "Remove it: after a failure the command that needs less memory is printed. Or "
            "start one node without --launcher."
        )
        raise UsageError(f"retry on {topology.describe()}", where="--on-oom", fix=fix)
    if max_restarts and not topology.is_supervised:
        fix = (
            "Remove it: whatever starts the ranks must restart them, as `tuner submit --max-requeues` does with Slurm."
        )
        raise UsageError(f"restarts with {topology.describe()}", where="--max-restarts", fix=fix)
    if bind_cores and not topology.is_supervised:
        raise UsageError(_NOT_OURS, where="--bind-cores-to-rank", fix="srun --cpu-bind=cores, mpirun --bind-to core.")


def node(here: Hardware, gpus: int | None, kind: Gpu | None) -> Hardware:
    """Return one node with this number and kind of GPUs; None keeps the number or the kind of this machine."""
    if kind is None:
        # If the GPUs differ, the smallest decides what fits.
        smallest = min(here.gpus, key=lambda gpu: gpu.memory_bytes)
        return here if gpus in (None, len(here.gpus)) else here._replace(gpus=(smallest,) * gpus)
    # The host's memory of another machine is unknown, so it is not judged.
    return here._replace(gpus=(kind,) * (gpus or 1), host_memory_bytes=0)


def known_gpu(name: str) -> Gpu:
    """Return the GPU of a product's name.

    Raises:
        UsageError: no such GPU is known.
    """
    product = step_time.find(name)
    return Gpu(step_time.spelled(name), product.memory_bytes, product.compute_capability)


def slowest_gpu(hardware: Hardware) -> KnownGpu | None:
    """Return the slowest GPU as a known product; None without GPUs, or if one of them is not known."""
    if not hardware.gpus:
        return None
    products = [step_time.like(gpu.name, gpu.memory_bytes) for gpu in hardware.gpus]
    known = [product for product in products if product]
    if len(known) < len(products):
        return None
    return min(known, key=lambda product: product.peak_flops, default=None)


def cluster(hardware: Hardware, topology: Topology) -> Cluster | None:
    """Return how fast the machines compute and communicate; None if the GPUs are not known."""
    slowest = slowest_gpu(hardware)
    if slowest is None:
        return None
    return Cluster.of(slowest, topology.num_nodes)
