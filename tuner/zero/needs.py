"""What a DeepSpeed config needs of a machine beside ranks and GPUs: packages, compiled ops, a disk to swap to.

It reads a final config and looks at no machine; whether a need is met is `launch.checks.deepspeed_config`'s to say.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tuner.recipes.merging import lookup
from tuner.zero.rules import ZERO, Config, device, stage

Keys = tuple[str, ...]

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}
"""Blocks that need a package when they are enabled. Source: deepspeed/monitor/*.py."""
OPS = {
    "cpu_adam": "CPU Adam",
    "cpu_adagrad": "CPU Adagrad",
    "cpu_lion": "CPU Lion",
    "fused_adam": "fused Adam",
    "fused_lamb": "fused Lamb",
    "fused_lion": "fused Lion",
    "quantizer": "quantized communication",
    "pin_memory": "pinned memory",
    "async_io": "disk access",
    "gds": "GPUDirect storage",
}
"""What DeepSpeed compiles at its first use, in its own names, and what to call it."""
_OF_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "lion": "lion", "adagrad": "adagrad", "lamb": "lamb"}
_ON_CPU = {"adam": "cpu_adam", "lion": "cpu_lion", "adagrad": "cpu_adagrad"}
_ON_GPU = {"adam": "fused_adam", "lion": "fused_lion", "lamb": "fused_lamb"}
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


class Swap(NamedTuple):
    """A folder that takes what does not fit into memory, and what that is."""

    block: str
    path: Path

    @property
    def path_keys(self) -> Keys:
        return ZERO, self.block, "nvme_path"

    @property
    def device_keys(self) -> Keys:
        return ZERO, self.block, "device"


def ops(config: Config, optimizer: str) -> tuple[str, ...]:
    """Return what DeepSpeed compiles for a final config, in the order in which it needs it.

    Args:
        optimizer: The recipe's, which accelerate replaces by DeepSpeed's own where it is offloaded.

    Source: accelerate/utils/deepspeed.py, map_pytorch_optim_to_deepspeed; deepspeed/runtime/engine.py,
    _configure_basic_optimizer; deepspeed/runtime/swap_tensor; deepspeed/runtime/comm/coalesced_collectives.py.
    """
    offloaded = device(config, "offload_optimizer") != "none"
    own = lookup(config, ("optimizer", "type"))
    kind = _OF_OPTIMIZERS.get(str(own or optimizer).lower(), "adam")
    found = []
    if lookup(config, ("optimizer", "params", "torch_adam")) is True:
        pass  # torch's own, offloaded too, and the half of Muon that is Adam
    elif offloaded and (own or config.get("zero_force_ds_cpu_optimizer", True)):
        found.append(_ON_CPU.get(kind, "cpu_adam"))
    elif own and kind in _ON_GPU:
        found.append(_ON_GPU[kind])
    if any(lookup(config, (ZERO, key)) is True for key in _QUANTIZED):
        found.append("quantizer")
    if any(swaps(config)):
        found += ["pin_memory", "gds" if lookup(config, ("aio", "use_gds")) is True else "async_io"]
    return tuple(found)


def packages(config: Config) -> Iterator[tuple[Keys, str]]:
    """Yield each key that needs a package, with the package."""
    for block, package in _PACKAGES.items():
        if lookup(config, (block, "enabled")) is True:
            yield (block, "enabled"), package


def swap_paths(config: Config) -> list[str]:
    """Return the folders on NVMe disks, each once."""
    return sorted({str(swap.path) for swap in swaps(config)})


def swaps(config: Config) -> Iterator[Swap]:
    """Yield the folders on NVMe disks; below stage 3 DeepSpeed keeps in memory what should go there."""
    for block in ("offload_optimizer", "offload_param"):
        if stage(config) == 3 and device(config, block) == "nvme":
            yield Swap(block, Path(str(lookup(config, (ZERO, block, "nvme_path")))))
