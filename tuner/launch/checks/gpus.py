"""The GPUs of a run: their attention and precision, torch's kernels for them, their free memory.

It asks the driver and opens no CUDA context, because a context takes memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tuner.errors import Key, MachineError, Option, RecipeError
from tuner.files import sized
from tuner.fit.parameters import built, has_formula
from tuner.launch.checks import Finding
from tuner.launch.kernels import has_no_flash, what_varlen_lacks
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import hardware, libraries
from tuner.machine.hardware import Gpu, GpuUse
from tuner.recipes.schema.architecture import VARLEN, Architecture

_WHERE = "model.attn_implementation"
_BLOCK = 64
"""The weights that share a scale in bitsandbytes' 4 bits."""
_HIDDEN_BYTES = 1024**3
"""More memory than drivers and monitors use on an idle GPU."""


def attention(run: ResolvedRun) -> Iterator[Finding]:
    """Find varlen that would not compute the model, and flash attention that GPUs, packages or fp32 do not allow."""
    kernel = run.recipe.config.model.attn_implementation
    auto = Key("model.attn_implementation", "auto")
    if kernel == VARLEN and (lacks := what_varlen_lacks(run.recipe.config, run.hardware, run.precision.dtype)):
        yield RecipeError(f"{VARLEN} attention {lacks}", where=_WHERE, fix=f"Use {auto}.")
    if kernel not in libraries.FLASH:
        return
    if has_no_flash(run.recipe.config):
        yield RecipeError(f"{kernel} does not compute this model", where=_WHERE, fix=f"Use {auto}.")
    instead = f"{Key('model.attn_implementation', 'sdpa')}, which packs and masks the same way."
    package, needed, _ = libraries.FLASH[kernel]
    weakest = min((gpu.compute_capability for gpu in run.hardware.gpus), default=None)
    if weakest is None:
        yield MachineError(f"{kernel} needs a GPU, and none is visible", where=_WHERE, fix=f"Use {instead}")
    elif not run.hardware.has_nvidia:
        message = f"{kernel} needs NVIDIA GPUs, and this machine has {run.hardware.maker} ones"
        yield MachineError(message, where=_WHERE, fix=f"Use {instead}")
    elif weakest < needed:
        least, has = (".".join(map(str, capability)) for capability in (needed, weakest))
        message = f"{kernel} needs compute capability {least} or more, and a GPU of this machine has {has}"
        yield MachineError(message, where=_WHERE, fix=f"Use {instead}")
    # transformers 5 takes the hub's kernel where `kernels` is installed instead (modeling_utils.py).
    elif not any(map(libraries.is_installed, (package, "kernels"))):
        yield MachineError(f"{kernel} needs the package {package}", where=_WHERE, fix=f"Install it, or use {instead}")
    if run.precision.dtype == "fp32":
        fix = f"Use {Key('dtype', 'bf16')}, or {instead}"
        yield RecipeError(f"{kernel} needs bf16 or fp16, and this run uses fp32", where=_WHERE, fix=fix)


def offloading(run: ResolvedRun) -> Iterator[Finding]:
    """Find activation offloading without a GPU, or for an objective for which TRL does not support it."""
    where, fix = "train_cfg.activation_offloading", f"Use {Key('activation_offloading', False)}."
    if not run.recipe.config.train_cfg.activation_offloading:
        return
    objective = run.recipe.config.objective
    if not objective.facts.offloads_activations:
        yield RecipeError(f"TRL does not support activation offloading for {objective.type}", where=where, fix=fix)
    if not run.hardware.gpus:
        yield MachineError("activation offloading needs a GPU, and none is visible", where=where, fix=fix)


def four_bits(run: ResolvedRun) -> Iterator[Finding]:
    """Find quantized weights on a device without kernels of bitsandbytes, and those that a CPU's kernels store badly.

    Source: bitsandbytes 0.50, README, "Accelerator support": CUDA, ROCm, XPU, Gaudi and CPUs.
    """
    config = run.recipe.config
    if config.quantization and config.quantization.bits == 4 and run.hardware.device == "cpu":
        yield from _stored_badly(config.architecture)
    if run.hardware.device not in ("npu", "mps"):
        return
    message = f"bitsandbytes does not support quantized weights on {run.hardware.maker} accelerators"
    if config.quantization is not None:
        yield MachineError(message, where="quantization", fix=f"Use the method lora: {Key('quantization', None)}.")
    if config.objective.taught_by and config.objective.taught_by.bits == 4:
        yield MachineError(message, where="objective.teacher_bits", fix=f"Use {Key('teacher_bits', 16)}.")


def _stored_badly(architecture: Architecture | None) -> Iterator[str]:
    """Warn of matrices with rows that are not whole blocks: at 96 numbers a row, 4 bits have an error of 23 %, not 9 %.

    Measured with bitsandbytes 0.50.2 on normally distributed weights; rows of 64, 128 or 320 numbers are stored well.
    """
    if architecture is None or not has_formula(architecture):
        return
    linears = [linear for linear in built(architecture).all_linears() if linear.quantizable]
    if widths := sorted({linear.inputs for linear in linears if linear.inputs % _BLOCK}):
        listed = ", ".join(map(str, widths))
        yield (
            f"quantization: on a CPU, bitsandbytes stores matrices with rows of {listed} numbers in 4 bits with two to "
            f"four times the error, because {_BLOCK} does not divide them. Use a GPU, or the method lora."
        )


def liger(run: ResolvedRun) -> Iterator[Finding]:
    """Find Liger's kernels without a GPU, or without their package."""
    where, fix = "model.use_liger_kernel", f"Use {Key('use_liger_kernel', False)}, which computes the same."
    if run.recipe.config.model.use_liger_kernel is not True:
        return
    if not run.hardware.gpus:
        yield MachineError("Liger kernels need a GPU, and none is visible", where=where, fix=fix)
    elif not libraries.is_installed("liger_kernel"):
        install = f"Install it (pip install 'tuner-deepspeed[gpu]'). {fix}"
        yield MachineError("liger-kernel is not installed", where=where, fix=install)


def precision(run: ResolvedRun) -> Iterator[Finding]:
    """Find GPUs that only emulate the run's bf16, and GPUs without kernels in this torch."""
    used = _used(run) if run.hardware.has_nvidia else ()
    slow = sorted({gpu.name for gpu in used if gpu.compute_capability < (8, 0)})
    if run.precision.dtype == "bf16" and slow:
        yield f"bf16 is emulated on {', '.join(slow)} and several times slower than fp16: {Key('dtype', 'fp16')}."
    for gpu in {gpu.name: gpu for gpu in used}.values():
        problem = libraries.cuda_problem(gpu.compute_capability)
        if problem:
            fix = "Install torch from PyTorch's index for another CUDA version."
            yield MachineError(f"torch has no kernels for {gpu.name}: {problem}", where="torch", fix=fix)


def spread(run: ResolvedRun) -> Iterator[Finding]:
    """Find tasks of Slurm that are spread unevenly over the nodes, and GPUs that no task uses."""
    topology, num_gpus = run.topology, len(run.hardware.gpus)
    if len(set(topology.tasks)) > 1:
        tasks_per_node = -(-topology.world_size // topology.num_nodes)
        counts = ", ".join(map(str, topology.tasks))
        yield f"the nodes run {counts} tasks: srun --ntasks-per-node={tasks_per_node} gives each node as many."
    if topology.tasks and topology.nproc_per_node < num_gpus:
        idle = num_gpus - topology.nproc_per_node
        yield f"{idle} of {num_gpus} GPUs of a node stay idle: srun --ntasks-per-node={num_gpus} uses all."


def driver(run: ResolvedRun) -> Iterator[Finding]:
    """Find a driver that is too old for the CUDA that torch was built for."""
    if run.hardware.has_nvidia:
        yield from too_old_driver(hardware.cuda_driver_version(), libraries.torch_cuda_version())


def too_old_driver(has: tuple[int, int] | None, built: str | None) -> Iterator[MachineError]:
    """Yield why a driver cannot run a torch built for CUDA `built`; within one major version every driver can.

    Source: NVIDIA, CUDA Compatibility, "Minor Version Compatibility".
    """
    if has and built and has[0] < int(built.split(".")[0]):
        message = f"torch is built for CUDA {built}, and the driver supports CUDA up to {has[0]}.{has[1]}"
        fix = f"Update NVIDIA's driver, or install torch from PyTorch's index for CUDA {has[0]}."
        yield MachineError(message, where="NVIDIA's driver", fix=fix)


def busy(run: ResolvedRun) -> Iterator[Finding]:
    """Find other processes on the run's GPUs; an error if they leave less memory than the run needs."""
    use = hardware.gpu_use() if run.hardware.has_nvidia else {}
    needed = run.fit.peak.gpu_bytes if run.fit else 0.0
    for gpu in _used(run):
        if gpu.uuid in use:
            yield from _busy(gpu, use[gpu.uuid], needed, ignored=run.request.ignore_fit)


def _busy(gpu: Gpu, use: GpuUse, needed: float, *, ignored: bool) -> Iterator[Finding]:
    others = [(pid, size) for pid, size in use.processes if pid != os.getpid()]
    used_bytes = gpu.memory_bytes - use.free_bytes
    if not others and used_bytes < _HIDDEN_BYTES:
        return
    users = ", ".join(f"pid {pid} has {sized(size)}" for pid, size in others) or "processes that are not visible here"
    text = f"{gpu.name} ({gpu.uuid}) is in use: {users}; {sized(use.free_bytes)} of {sized(gpu.memory_bytes)} are free"
    if needed > use.free_bytes and not ignored:
        ways = "Wait until they end, stop them, choose other GPUs with CUDA_VISIBLE_DEVICES"
        fix = f"{ways}, or start anyway with {Option('ignore_fit', True)}."
        yield MachineError(f"{text}, and the run needs about {sized(needed)}", where="the GPUs", fix=fix)
    else:
        yield f"{text}."


def _used(run: ResolvedRun) -> tuple[Gpu, ...]:
    """Return the GPUs of the ranks that this process starts; a task of Slurm looks only at its own GPU."""
    gpus, rank = run.hardware.gpus, run.topology.local_rank
    if rank is not None:
        return gpus[rank : rank + 1] or gpus[:1]
    return gpus[: run.topology.nproc_per_node]
