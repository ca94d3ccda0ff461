"""The machines of a launch: this one or others that flags name, and as the numbers that `fit` needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tuner.errors import Option, Text, UsageError
from tuner.fit import gpu_catalog, sizes
from tuner.fit.gpu_catalog import KnownGpu
from tuner.fit.levels import Machines
from tuner.fit.step_time import NETWORK_BYTES_S, Cluster
from tuner.machine import hardware
from tuner.machine.hardware import Gpu, Hardware, Precision
from tuner.machine.launchers import filled, resolve
from tuner.machine.libraries import LINEAR_ATTENTION, missing_kernels
from tuner.machine.topology import LaunchFlags, Topology, planned


class MachineFlags(NamedTuple):
    """The machines that flags name; sizes and rates are texts such as "80GB" and "8x400Gb/s".

    Args:
        gpus: GPUs of each node. None: the number of this machine.
        gpu: Their product, such as "a100-80g".
        gpu_memory: Their memory, in place of the product.
        host_memory: Memory of each node.
        interconnect: Network of each node: adds the seconds of a step on several GPUs.
        utilisation: Part of the GPU's peak that is reached. None: it is computed.
    """

    gpus: int | None = None
    gpu: str | None = None
    nodes: int = 1
    gpu_memory: str | None = None
    host_memory: str | None = None
    interconnect: str | None = None
    utilisation: float | None = None


HERE = MachineFlags()
ASSUMED_GPU = "a100-80g"
"""The GPU to plan for if this machine has no GPU and no flag names one."""


class RunMachines(NamedTuple):
    """Where a recipe runs: one node of the machines, all nodes and ranks, and how fast they compute and communicate.

    Args:
        cluster: None if the GPUs are not known.
        name: The planned machines in words.
    """

    hardware: Hardware
    topology: Topology
    cluster: Cluster | None
    name: str = ""

    @classmethod
    def of(cls, hardware: Hardware, topology: Topology) -> RunMachines:
        """Return machines without a named network."""
        slowest = slowest_gpu(hardware)
        cluster = Cluster(topology.num_nodes, slowest, topology.nproc_per_node) if slowest else None
        return cls(hardware, topology, cluster)

    @property
    def _lacks_mixers(self) -> bool:
        """Whether linear attention has no kernels there; GPUs that are named are not here, and have those of [gpu]."""
        is_here = any(gpu.uuid for gpu in self.hardware.gpus)
        return not self.hardware.has_nvidia or (is_here and bool(missing_kernels(LINEAR_ATTENTION)))

    def to_fit(self, precision: Precision, disk: str) -> Machines:
        """Return the numbers that `fit` needs; all ranks of a run return the same numbers.

        Args:
            disk: `zero.choice.disk_of` the recipe.
        """
        topology = self.topology
        on_fullest = max(topology.tasks, default=topology.nproc_per_node)
        is_uneven = on_fullest * topology.num_nodes != topology.world_size
        return Machines(
            on_fullest,
            self.hardware.smallest_gpu_bytes,
            topology.num_nodes,
            self.hardware.host_memory_bytes,
            precision.weight_bytes,
            disk,
            old_gpus=self.hardware.has_old_gpus,
            plain_mixers=self._lacks_mixers,
            uneven_ranks=topology.world_size if is_uneven else 0,
        )


def look_up(flags: MachineFlags, environ: Mapping[str, str], file: LaunchFlags | None = None) -> RunMachines:
    """Return the machines that flags name; without flags this machine with its launch variables.

    Args:
        file: The launch settings of the DeepSpeed config, if it has any.

    Raises:
        UsageError: a number of GPUs without a GPU here or a name, an unknown name, or launch variables that contradict.
    """
    this_machine, gpus, gpu = hardware.detect(environ), flags.gpus, flags.gpu
    if flags == HERE:
        return RunMachines.of(this_machine, find_topology(LaunchFlags(), file, environ, this_machine))
    if gpu is None and not this_machine.gpus:
        problem, fix = "this machine has no GPU, so the kind of GPU is unknown", f"Add: {Option('gpu', 'a100-80g')}."
        raise UsageError(problem, where=Option("gpus"), fix=fix)
    one_node = node(this_machine, gpus, known_gpu(gpu) if gpu else None)
    return RunMachines.of(one_node, planned(flags.nodes, len(one_node.gpus)))


def planned_machines(flags: MachineFlags, environ: Mapping[str, str]) -> RunMachines:
    """Return the machines to plan for: those that flags name, or this machine. Nothing starts, so no variables count.

    Raises:
        UsageError: two flags set the same thing, or a size or a name is not known.
    """
    gpus, gpu, gpu_memory = flags.gpus, flags.gpu, flags.gpu_memory
    if gpu and gpu_memory:
        where = f"{Option('gpu')} and {Option('gpu_memory')}"
        raise UsageError("both set the GPU's memory", where=where, fix="Use one of them.")
    host_bytes = sizes.parse_bytes(flags.host_memory, Option("host_memory")) if flags.host_memory else 0
    base_machine, assumed = Hardware() if gpu or gpu_memory else hardware.detect(environ), ""
    if not (gpu or gpu_memory or base_machine.gpus):
        gpus, gpu = gpus or 8, ASSUMED_GPU
        assumed = f" (assumed, because this machine has no GPU; set {Option('gpus')} and {Option('gpu')})"
    if gpu_memory:
        # The capability tells bf16 from fp16, which take as much.
        kind: Gpu | None = Gpu(gpu_memory, sizes.parse_bytes(gpu_memory, Option("gpu_memory")), (0, 0))
    else:
        kind = known_gpu(gpu) if gpu else None
    # Machines that are named are not here: nothing is known against their compiler.
    one_node = node(base_machine._replace(has_compiler=True) if kind else base_machine, gpus, kind)
    if not one_node.smallest_gpu_bytes:
        problem = f"the memory of {one_node.maker} accelerators is unknown"
        raise UsageError(problem, where=Option("gpu_memory"), fix=f"Set it: {Option('gpu_memory', '64GB')}.")
    one_node = one_node._replace(host_memory_bytes=host_bytes or one_node.host_memory_bytes)
    count, first = len(one_node.gpus), one_node.gpus[0]
    product = gpu_catalog.find(gpu) if gpu else gpu_catalog.like(first.name, first.memory_bytes)
    nodes = f"{flags.nodes} node{'s' * (flags.nodes > 1)}"
    name = Text(f"{nodes} with {f'{count} x {kind.name}{assumed}' if kind else one_node.describe()}")
    return RunMachines(one_node, planned(flags.nodes, count), _planned_cluster(flags, product, count), name)


def _planned_cluster(flags: MachineFlags, product: KnownGpu | None, count: int) -> Cluster | None:
    """Return what the seconds of a step are computed with, or None if the GPU's speed is not known."""
    if flags.utilisation is not None and not 0 < flags.utilisation <= 1:
        message = f"{flags.utilisation} is no part of a peak"
        raise UsageError(message, where=Option("utilisation"), fix="Use 0.3 to 0.6.")
    rate = NETWORK_BYTES_S
    if flags.interconnect is not None:
        rate = sizes.parse_rate(flags.interconnect, Option("interconnect"))
        if product is None:
            fix = f"Set it: {Option('gpu', 'a100-80g')}."
            raise UsageError("estimating seconds needs the GPU's speed", where=Option("interconnect"), fix=fix)
    return Cluster(flags.nodes, product, count, rate, flags.utilisation) if product else None


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
        less = "after a failure the command that needs less memory is printed"
        fix = f"Remove it: {less}. Or start one node without --launcher."
        raise UsageError(f"retry on {topology.describe()}", where=Option("on_oom"), fix=fix)
    if max_restarts and not topology.is_supervised:
        restarts = "must restart them, as `tuner submit --max-restarts` does with Slurm"
        fix = f"Remove it: whatever starts the ranks {restarts}."
        raise UsageError(f"restarts with {topology.describe()}", where=Option("max_restarts"), fix=fix)
    if bind_cores and not topology.is_supervised:
        problem, fix = "what starts the ranks binds them to cores", "srun --cpu-bind=cores, mpirun --bind-to core."
        raise UsageError(f"{problem}, and here that is not this command", where="--bind-cores-to-rank", fix=fix)


def node(machine: Hardware, gpus: int | None, kind: Gpu | None) -> Hardware:
    """Return one node with this number and kind of GPUs; None keeps the number or the kind of this machine."""
    if kind is None:
        # If the GPUs differ, the smallest decides what fits.
        smallest = min(machine.gpus, key=lambda gpu: gpu.memory_bytes)
        return machine if gpus in (None, len(machine.gpus)) else machine._replace(gpus=(smallest,) * gpus)
    # The host's memory of another machine is unknown, so it is not judged.
    return machine._replace(gpus=(kind,) * (gpus or 1), host_memory_bytes=0)


def known_gpu(name: str) -> Gpu:
    """Return the GPU of a product's name.

    Raises:
        UsageError: no such GPU is known.
    """
    product = gpu_catalog.find(name)
    return Gpu(gpu_catalog.spelled(name), product.memory_bytes, product.compute_capability)


def slowest_gpu(hardware: Hardware) -> KnownGpu | None:
    """Return the slowest GPU as a known product; None without GPUs, or if one of them is not known."""
    products = [gpu_catalog.like(gpu.name, gpu.memory_bytes) for gpu in hardware.gpus]
    known = [product for product in products if product]
    return min(known, key=lambda product: product.peak_flops, default=None) if len(known) == len(products) else None
