"""What a DeepSpeed config needs of a machine beside ranks and GPUs: packages, a disk to swap to.

It reads a final config and looks at no machine; whether a need is met is `launch.checks.zero`'s to say.
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


def packages(config: Config) -> Iterator[tuple[Keys, str]]:
    """Yield each key that needs a package, with the package."""
    for block, package in _PACKAGES.items():
        if lookup(config, (block, "enabled")) is True:
            yield (block, "enabled"), package


def swaps(config: Config) -> Iterator[Swap]:
    """Yield the folders on NVMe disks; below stage 3 DeepSpeed keeps in memory what should go there."""
    for block in ("offload_optimizer", "offload_param"):
        if stage(config) == 3 and device(config, block) == "nvme":
            yield Swap(block, Path(str(lookup(config, (ZERO, block, "nvme_path")))))
