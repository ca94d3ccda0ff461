"""The DeepSpeed presets of the package: what each does is read from its JSON, never from its name.

A new preset is a JSON in `deepspeed_presets`, a line in `WHEN`, and one in `RUNGS` if `auto` may choose it.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from tuner.recipes import catalog
from tuner.recipes.catalog import PRESETS
from tuner.zero.config import NONE, OFFLOADS, Config, device, stage, stage_0, swaps_nowhere
from tuner.zero.jsonfile import read_json_config
from tuner.zero.lint import check

RUNGS = (
    NONE,
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero3",
    "deepspeed_zero2_offload",
    "deepspeed_zero3_offload",
    "deepspeed_zero3_nvme",
)
"""What `auto` may choose, in the order in which it tries them. Each shards more than the one before; those that
offload, which is several times slower and needs the host's memory, come after all others; the one that swaps to a disk,
which is slower still, is the last, and there only where a folder is named."""
WHEN = {
    NONE: "one GPU has enough memory (stage 0)",
    "deepspeed_zero1": "only the optimizer states do not fit; it has the least communication",
    "deepspeed_zero2": "the usual choice for LoRA, QLoRA, and full fine-tuning up to a few billion parameters",
    "deepspeed_zero3": "not even the weights fit",
    "deepspeed_zero2_offload": "the GPU is too small for Adam's states, and the host has enough memory"
    " (about `16x/N` bytes per rank)",
    "deepspeed_zero3_offload": "nothing that stays on the GPUs fits, and the host has enough memory; slow",
    "deepspeed_zero3_nvme": "not even the host has enough memory, and each node has a fast local disk: slowest, and the"
    " folder must be named",
}
"""When to take each preset: a column of docs/deepspeed-values.md."""


class Preset(NamedTuple):
    """A preset, or DeepSpeed at stage 0. Do not change `config`: it is shared. `is_rung`: `auto` may choose it."""

    name: str
    config: Config
    is_rung: bool

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return stage(self.config)

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The blocks that move tensors off the GPU: offload_optimizer, offload_param."""
        return tuple(block for block in OFFLOADS if device(self.config, block) != NONE)

    @property
    def needs_disk(self) -> bool:
        """Whether it swaps to a folder on a disk that is still to be named."""
        return any(swaps_nowhere(self.config, block) for block in OFFLOADS)


def names() -> tuple[str, ...]:
    """Return 'none' and the names of the package's presets, the rungs of `auto` first."""
    other_presets = (name for name in catalog.of_package(PRESETS) if name not in RUNGS)
    return (*RUNGS, *other_presets)


def find(name: str) -> Preset:
    """Return a preset of the package. A file of the user's catalog with its name replaces it.

    Raises:
        DeepSpeedConfigError: that file is wrong.
    """
    if name == NONE:
        return Preset(NONE, stage_0().value, is_rung=True)
    file = catalog.part_file(PRESETS, name)
    config = _shipped(file.path) if file.is_ours else check(read_json_config(file.path)).value
    return Preset(name, config, name in RUNGS)


def rungs(disk: str = "") -> tuple[Preset, ...]:
    """Return the presets that `auto` may choose, in its order; those that need a disk only where its folder is named.

    Args:
        disk: That folder; empty: none is named.
    """
    return tuple(preset for preset in map(find, RUNGS) if disk or not preset.needs_disk)


def of_stage(number: int, *, offloads: bool) -> Preset:
    """Return the rung at a ZeRO stage that offloads or not; if the stage has no such rung, the first one there."""
    of_this_stage = [preset for preset in rungs() if preset.stage == number]
    return next((preset for preset in of_this_stage if bool(preset.offloaded) is offloads), of_this_stage[0])


@lru_cache
def _shipped(path: Path) -> Config:
    return read_json_config(path).value
