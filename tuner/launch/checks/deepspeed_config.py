"""What a run's DeepSpeed config needs of this machine: packages, compiled ops, writable folders, a disk to swap to.

It asks the compiler for libaio, and tests each folder with a temporary file.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tuner.errors import DiskError, MachineError
from tuner.files import JsonObject, sized
from tuner.fit.estimate import state_bytes
from tuner.fit.parameters import count, has_formula, num_parameters
from tuner.launch import builds
from tuner.launch.checks import Finding
from tuner.launch.checks.host import existing
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import disks, hardware
from tuner.machine.hardware import Hardware
from tuner.zero.choice import is_stage_0
from tuner.zero.config import ZERO, measurement_folders, packages, swaps

_LIBAIO = "apt install libaio-dev, or dnf install libaio-devel"
_THERE = "on the machine that trains, which cannot be checked from here"
_IN_MEMORY = "swap to memory: device = cpu"
_FP32_AND_GRADIENT = 8
"""Bytes of a trained weight in fp32 and of its gradient, which are swapped together with the optimizer's state."""


def config(run: ResolvedRun) -> Iterator[Finding]:
    """Find what the config needs and this machine lacks."""
    if _is_bare(run):
        return
    final = run.final

    def where(keys: tuple[str, ...]) -> str:
        dotted = ".".join(keys)  # of a value, or of a block
        texts = (origin.text for key, origin in final.origins.items() if f"{key}.".startswith(f"{dotted}."))
        return next(texts, final.name)

    yield from lacks(final.config, run.hardware, run.environ, where)


def compiles(run: ResolvedRun) -> Iterator[Finding]:
    """Report what DeepSpeed compiles before this run starts; a start prints the same when it compiles."""
    if not _is_bare(run) and (ops := builds.missing(run)):
        yield f"{builds.foretold(ops)}."


def _is_bare(run: ResolvedRun) -> bool:
    """Return whether DeepSpeed only averages gradients, and not in bf16, of which it had errors."""
    return is_stage_0(run.recipe, run.document) and run.precision.dtype != "bf16"


def lacks(
    config: JsonObject, this_machine: Hardware, environ: Mapping[str, str], where: Callable[[tuple[str, ...]], str]
) -> Iterator[MachineError | DiskError]:
    """Yield what a config needs and this machine lacks (apart from room on disks).

    Args:
        where: Returns the place of a key.
    """
    for keys, package in packages(config):
        if importlib.util.find_spec(package) is None:
            message = f"{'.'.join(keys)} is true, and {package} is not installed"
            yield MachineError(message, where=where(keys), fix=f"Install it (pip install {package}) or switch it off.")
    for keys, path in measurement_folders(config):
        if problem := _unwritable(path, direct=False):
            yield _no_folder(keys, path, problem, where)
    disks_used = list(swaps(config))
    for swap in disks_used:
        if problem := _unwritable(swap.path, direct=True):
            yield _no_folder((ZERO, swap.block, "nvme_path"), swap.path, problem, where)
    if disks_used and not builds.came_compiled("async_io") and (lack := _no_libaio(this_machine, environ)):
        message, fix = lack
        yield MachineError(message, where=where((ZERO, disks_used[0].block, "device")), fix=f"{fix}, or {_IN_MEMORY}.")


def _no_folder(keys: tuple[str, ...], path: Path, problem: str, where: Callable[[tuple[str, ...]], str]) -> DiskError:
    return DiskError(f"{'.'.join(keys)} = {str(path)!r}: {problem}", where=where(keys), fix="Use another folder.")


def _no_libaio(this_machine: Hardware, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Return what DeepSpeed lacks for swapping to disk, and how to install it; None if nothing is missing."""
    if not this_machine.has_compiler:
        tools = "g++ and ninja, and nvcc beside GPUs"
        return f"DeepSpeed compiles the op that swaps to disk, and {tools} are not installed", f"Install {tools}"
    if not hardware.has_libaio(environ):
        message = "DeepSpeed swaps to disk with libaio, and the library or its header libaio.h is not installed"
        return message, f"{_LIBAIO} (outside the system's folders: CFLAGS and LDFLAGS)"
    return None


def swap_space(run: ResolvedRun) -> Iterator[Finding]:
    """Find a disk with too little room for swapping."""
    needed_bytes: dict[int, float] = {}
    folders: dict[int, Path] = {}
    for swap in swaps(run.final.config):
        folder = existing(swap.path)
        if not _unwritable(folder, direct=True):
            disk = folder.stat().st_dev
            needed_bytes[disk], folders[disk] = needed_bytes.get(disk, 0.0) + _swapped_bytes(run, swap.block), folder
    for disk, folder in folders.items():
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < needed_bytes[disk]:
            message = f"{sized(free_bytes)} are free, and this run swaps {sized(needed_bytes[disk])} to the disk"
            yield DiskError(message, where=folder, fix=f"Free space, use another nvme_path, or {_IN_MEMORY}.")


def swap_disks(run: ResolvedRun) -> Iterator[Finding]:
    """Report how fast the disks for swapping are, which are in memory or on a network, and what cannot be resumed."""
    if run.state.nvme_weights_alone:
        yield "this run cannot be resumed: its weights are on NVMe and its optimizer is in memory."
    for path in sorted({swap.path for swap in swaps(run.final.config)}):
        folder = existing(path)
        if _unwritable(folder, direct=True):
            continue
        speed = f"{path} takes {disks.write_bytes_per_s(folder) / 1e9:.1f} GB/s of writes"
        if disks.is_memory(folder):
            yield f"{path} is in memory ({disks.file_system(folder)}), so swapping there frees none."
        elif disks.is_network(folder):
            yield f"{speed}, and is on another machine ({disks.file_system(folder)}): use a local disk."
        else:
            yield f"{speed}, measured for half a second."


def unknown(run: ResolvedRun) -> Iterator[Finding]:
    """Report what the machines of a run that starts elsewhere need; it cannot be checked from here."""
    for keys, package in packages(run.final.config):
        yield f"{'.'.join(keys)} needs {package} {_THERE}."
    for keys, path in measurement_folders(run.final.config):
        yield f"{'.'.join(keys)} = {str(path)!r} must be writable {_THERE}."
    for swap in swaps(run.final.config):
        must = f"libaio with its header ({_LIBAIO}) and room in {str(swap.path)!r}"
        yield f"{swap.block}.device = 'nvme' needs {must} {_THERE}."


def _unwritable(path: Path, *, direct: bool) -> str | None:
    """Return why no file can be made in a folder, or in the nearest folder above it that exists; None if it can.

    Args:
        direct: Whether the file is written around the cache (O_DIRECT), as DeepSpeed does when it swaps.
    """
    folder = existing(path)
    try:
        import tempfile  # it takes 5 ms, and few runs swap to a disk

        with tempfile.NamedTemporaryFile(dir=folder) as file:
            if direct:
                os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except OSError as error:
        return f"{folder} cannot be written into{' with O_DIRECT' * direct}: {error.strerror}"
    return None


def _swapped_bytes(run: ResolvedRun, block: str) -> float:
    """Return the bytes that one node swaps: the whole is divided among all ranks."""
    config, architecture = run.recipe.config, run.recipe.config.architecture
    if architecture is None or not has_formula(architecture):
        return 0.0
    of_a_node = run.topology.nproc_per_node / run.topology.world_size
    if block == "offload_param":
        return of_a_node * run.precision.weight_bytes * num_parameters(architecture)
    return of_a_node * (_FP32_AND_GRADIENT + state_bytes(config)) * count(config, architecture).trainable
