"""A DeepSpeed config as data: as a user chose it (`Document`), as training uses it (`FinalConfig`), and its needs.

It opens no file and looks at no machine.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tuner.errors import DeepSpeedConfigError
from tuner.machine.topology import LaunchFlags
from tuner.recipes.merging import Kind, Origin, Place, lookup

Config = dict[str, Any]
"""JSON values. Nothing has checked the config of a `Document`; `lint` has checked the one of a `FinalConfig`."""
ZERO = "zero_optimization"
OFFLOADS = ("offload_optimizer", "offload_param")
"""The blocks of `ZERO` that move tensors off the GPU."""
AUTOTP = ("tensor_parallel", "autotp_size")
"""How many ranks share each matrix of the layers."""
AUTOEP = ("expert_parallel", "autoep_size")
"""How many ranks divide the experts of a layer among them."""
STEPPING = (1, 2, 3)
"""The stages in which ZeRO's optimizer makes the step."""
_MEASUREMENTS = (
    ("flops_profiler", "output_file", "flops_profiler.txt"),
    ("csv_monitor", "output_path", "csv"),
    ("tensorboard", "output_path", "tensorboard"),
)
"""Blocks that write measurements, the key that says where, and our name for it; only the first names a file.

DeepSpeed's own defaults are standard output and the current folder."""
Keys = tuple[str | int, ...]
"""The path of a value: keys of objects, and indices of lists."""
BASE = "base"
"""The key in a recipe's `deepspeed` for the preset or file that its other values change. DeepSpeed has no such key."""
AUTO = "auto"
"""A value that tuner works out."""
NONE = "none"
"""Chosen in place of a preset: DeepSpeed at stage 0, which is plain data parallelism."""


@dataclass(frozen=True)
class Document:
    """A DeepSpeed config, and the place of each of its keys.

    Attributes:
        value: The config; numbers are as written, so 5e8 is a float.
        name: The path as the user typed it, or the name of the value in messages.
        positions: Line and column, both from 1, of each key of an object, by its full path.
        origins: The origin of leaves that are not written in the file `name`, such as line 4 of mine.py, or a flag.
        preset: The preset's name, or 'none', if the package brings the value.
        changes: The values laid over that preset.
        launch: Where an accelerate config says that a run starts.
        dtype: The compute type of an accelerate config; `mixed_precision` is its place.
        notes: What was left out of the file when it was read.
    """

    value: Config
    name: str
    positions: dict[Keys, tuple[int, int]] = field(default_factory=dict)
    origins: dict[Keys, Origin] = field(default_factory=dict)
    preset: str | None = None
    changes: Config = field(default_factory=dict)
    launch: LaunchFlags | None = None
    dtype: str | None = None
    notes: tuple[DeepSpeedConfigError, ...] = ()

    def place(self, keys: Keys = ()) -> Place:
        """Return the line and column of the key or of the nearest key around it that has one."""
        kind = Kind.PACKAGE if self.preset else Kind.FILE
        while keys:
            if keys in self.origins:
                return self.origins[keys].place
            if keys in self.positions:
                return Place(kind, self.name, *self.positions[keys])
            keys = keys[:-1]
        return Place(kind, self.name)

    def origin(self, keys: Keys) -> Origin:
        """Return where the value came from, and what it was laid over."""
        return self.origins.get(keys) or Origin(self.place(keys))

    @property
    def recipe_value(self) -> str | Config:
        """The recipe's `deepspeed` that means this config again: a preset's name, changes to one, or all values."""
        if self.preset is None:
            return self.value
        return {BASE: self.preset, **self.changes} if self.changes else self.preset

    def where(self, keys: Keys = ()) -> str:
        """Return that place for a message, as `name:line:column`."""
        return str(self.place(keys))


def stage_0() -> Document:
    """Return the config that 'none' means."""
    return Document({"zero_allow_untested_optimizer": True, ZERO: {"stage": 0}}, NONE, preset=NONE)


class FinalConfig(NamedTuple):
    """The config that training uses: strict JSON values, the origin of each leaf (dotted), and what was overridden."""

    name: str
    config: Config
    origins: dict[str, Origin]
    warnings: tuple[str, ...]
    from_catalog: bool
    """The values come from a preset or 'none', not from a user's JSON."""
    config_warnings: tuple[str, ...]
    """The part of the warnings that the config causes by itself, with any recipe and on any machine."""


def with_measurement_folders(final: FinalConfig, folder: Path) -> FinalConfig:
    """Return the config in which every enabled block writes its measurements to a place, by default to `folder`."""
    config, origins = copy.deepcopy(final.config), dict(final.origins)
    for block, key, name in _MEASUREMENTS:
        if is_on(config, block, "enabled") and not config[block].get(key):
            config[block][key] = str(folder / name)
            origins[f"{block}.{key}"] = Origin(Place(Kind.DERIVED, "derived: in the run directory"))
    return final._replace(config=config, origins=origins)


# --- Single settings of a config ---


def stage(config: Config) -> int:
    """Return the ZeRO stage as DeepSpeed will see it."""
    value = lookup(config, (ZERO, "stage"), 0)
    return value if isinstance(value, int) else 0


def expert_ranks(config: Mapping[str, Any]) -> int:
    """Return how many ranks divide the experts of a layer among them; 1 where each rank has all."""
    size, is_on = lookup(config, AUTOEP, 1), lookup(config, ("expert_parallel", "enabled"), True)
    return size if isinstance(size, int) and is_on else 1


def is_on(config: Mapping[str, Any], *keys: str) -> bool:
    """Return whether a switch is true."""
    return lookup(config, keys) is True


def device(config: Config, block: str) -> str:
    """Return where a block (offload_optimizer, offload_param) moves its tensors: 'cpu', 'nvme' or 'none'."""
    return str(lookup(config, (ZERO, block, "device"), "none"))


def swaps_nowhere(config: Config, block: str) -> bool:
    """Return whether a block swaps to a disk and names no folder on it; below stage 3 it is memory that is taken."""
    return stage(config) == 3 and device(config, block) == "nvme" and not lookup(config, (ZERO, block, "nvme_path"))


class Buckets(NamedTuple):
    """What ranks send at a time where GPUs have room for more than `bucket_sizes`, in elements."""

    reduce: int
    prefetch: int


def bucket_sizes(hidden_size: int) -> dict[str, int]:
    """Return the elements that "auto" means in the keys of `ZERO` that depend on a model's hidden size.

    Source: Hugging Face's values, transformers/integrations/deepspeed.py, HfTrainerDeepSpeedConfig.
    """
    return {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }


def has_zenflow(config: Config) -> bool:
    """Return whether the config has a zenflow block."""
    return isinstance(lookup(config, (ZERO, "zenflow")), dict)


_SHORT = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}


def short(dtype: object) -> str:
    """Return "fp16", "bf16" or "fp32" for any of DeepSpeed's names of it."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def computes_in(config: Config) -> str:
    """Return the compute type of a final config."""
    return next((dtype for dtype in ("bf16", "fp16") if is_on(config, dtype, "enabled")), "fp32")


def accumulates_in(config: Config) -> str:
    """Return the type in which gradients are added up."""
    dtype = lookup(config, ("data_types", "grad_accum_dtype"))
    return short(dtype) if dtype else computes_in(config)


def autocasts_to(config: Config) -> str | None:
    """Return the type of torch_autocast; None if it is off."""
    on = is_on(config, "torch_autocast", "enabled")
    return short(lookup(config, ("torch_autocast", "dtype"))) if on else None


# --- What a final config needs of a machine besides ranks and GPUs: packages, compiled ops, folders ---

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
"""The ops that DeepSpeed compiles at their first use, by DeepSpeed's names, each with a name for people."""
_OF_OPTIMIZERS = {"adam": "adam", "adamw": "adam", "lion": "lion", "adagrad": "adagrad", "lamb": "lamb"}
_ON_CPU = {"adam": "cpu_adam", "lion": "cpu_lion", "adagrad": "cpu_adagrad"}
_ON_GPU = {"adam": "fused_adam", "lion": "fused_lion", "lamb": "fused_lamb"}
_QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


class Swap(NamedTuple):
    """A folder on NVMe for the tensors of a block: offload_optimizer or offload_param."""

    block: str
    path: Path


def ops(config: Config, optimizer: str) -> tuple[str, ...]:
    """Return the ops that DeepSpeed compiles for a final config, in the order in which it needs them.

    Args:
        optimizer: The recipe's, which accelerate replaces by DeepSpeed's own if it is offloaded.

    Source: accelerate/utils/deepspeed.py, map_pytorch_optim_to_deepspeed; deepspeed/runtime/engine.py,
    _configure_basic_optimizer; deepspeed/runtime/swap_tensor; deepspeed/runtime/comm/coalesced_collectives.py.
    """
    offloaded = device(config, "offload_optimizer") != "none"
    config_type = lookup(config, ("optimizer", "type"))
    kind = _OF_OPTIMIZERS.get(str(config_type or optimizer).lower(), "adam")
    names = []
    if lookup(config, ("optimizer", "params", "torch_adam")) is True:
        pass  # torch's own, offloaded too, and the half of Muon that is Adam
    elif offloaded and (config_type or config.get("zero_force_ds_cpu_optimizer", True)):
        names.append(_ON_CPU.get(kind, "cpu_adam"))
    elif config_type and kind in _ON_GPU:
        names.append(_ON_GPU[kind])
    if any(lookup(config, (ZERO, key)) is True for key in _QUANTIZED):
        names.append("quantizer")
    if any(swaps(config)):
        names += ["pin_memory", "gds" if lookup(config, ("aio", "use_gds")) is True else "async_io"]
    return tuple(names)


def packages(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each key that needs a package, with the package."""
    for block, package in _PACKAGES.items():
        if lookup(config, (block, "enabled")) is True:
            yield (block, "enabled"), package


def swap_paths(config: Config) -> list[str]:
    """Return the folders on NVMe disks, each once."""
    return sorted({str(swap.path) for swap in swaps(config)})


def swaps(config: Config) -> Iterator[Swap]:
    """Yield the folders on NVMe disks; below stage 3 DeepSpeed keeps in memory what should go there."""
    for block in OFFLOADS:
        if stage(config) == 3 and device(config, block) == "nvme":
            yield Swap(block, Path(str(lookup(config, (ZERO, block, "nvme_path")))))


def measurement_folders(config: Config) -> Iterator[tuple[tuple[str, str], Path]]:
    """Yield each key of an enabled block that names a place for measurements, with the folder that is written to."""
    for block, key, name in _MEASUREMENTS:
        place = lookup(config, (block, key))
        if is_on(config, block, "enabled") and place:
            yield (block, key), Path(place).parent if Path(name).suffix else Path(place)
