"""The private parts of DeepSpeed's saving and loading that tuner uses or replaces.

Seen with DeepSpeed 0.19.8. It decides nothing about a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from tuner.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedModel


NAMES = (
    ("deepspeed", DeepSpeedEngine, "module_state_dict", "save_checkpoint", "load_checkpoint"),
    ("deepspeed", DeepSpeedEngine, "_load_checkpoint", "_get_all_zero_checkpoints"),
    ("deepspeed", DeepSpeedZeroOptimizer_Stage3, "_prepare_sub_group", "_release_sub_group"),
    ("deepspeed", DeepSpeedEngine, "_zero3_consolidated_16bit_state_dict", "zero_nvme_offload_optimizer"),
)


def load_by(load: Callable[[DeepSpeedEngine, str], tuple[str, JsonObject]]) -> None:
    """Replace the function that loads DeepSpeed's checkpoints by one that takes the engine and the folder."""
    DeepSpeedEngine.load_checkpoint = lambda engine, folder, **_: load(engine, folder)


def load_swapped_whole() -> None:
    """Make engines that swap to a disk load the whole checkpoint.

    DeepSpeed 0.19.8 copies the swapped files back and leaves out the rest: small weights with their states, the step
    counters of the states, and the fact that there are swapped states, so that the next step begins with empty states
    (measured: a loss of 6.1278 instead of 6.1244).
    """
    load = DeepSpeedEngine._load_checkpoint

    @wraps(load)
    def load_all(engine: DeepSpeedEngine, folder: str, tag: str, **options: object) -> object:
        loaded = load(engine, folder, tag, **options)
        if engine.zero_nvme_offload_optimizer():  # before it copies the files
            saved = engine._get_all_zero_checkpoints(folder, tag)
            _load_in_memory(engine.optimizer, saved[dist.get_rank(group=engine.optimizer.dp_process_group)])
        return loaded

    DeepSpeedEngine._load_checkpoint = load_all


def _load_in_memory(optimizer: DeepSpeedZeroOptimizer_Stage3, saved: JsonObject) -> None:
    """Load the tensors that a ZeRO-3 checkpoint itself holds; tensors that were swapped to the disk are empty in it."""
    for name in ("loss_scaler", "dynamic_loss_scale", "overflow"):
        setattr(optimizer, name, saved[name])
    weights = optimizer.fp32_partitioned_groups_flat
    # torch numbers the weights of a saved optimizer group by group.
    order = sorted(range(len(weights)), key=optimizer.sub_group_to_group_id.__getitem__)
    for number, place in enumerate(order):
        weight, master = weights[place], saved["fp32_flat_groups"][place]
        state = dict(saved["optimizer_state_dict"]["state"].get(number, {}))
        if master.numel():
            weight.data.copy_(master)
            optimizer.optimizer.state[weight] = state
        else:
            _make_files(optimizer, place, state)


def _make_files(optimizer: DeepSpeedZeroOptimizer_Stage3, place: int, state: JsonObject) -> None:
    """Swap out empty states of a sub-group, so that the swapper knows them before their files are copied."""
    length = int(optimizer.fp16_partitioned_groups_flat_numel[place])
    optimizer._prepare_sub_group(place, set())
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not value.numel():
            state[name] = torch.zeros(length, dtype=value.dtype)
    optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[place]] = state
    optimizer._release_sub_group(place, set())


def leave_out_frozen(engine: DeepSpeedEngine) -> None:
    """Leave frozen weights out of the checkpoints that an engine saves.

    DeepSpeed 0.19.8 can leave them out (DeepSpeed#3953), but by name: it keeps the second name of a tied weight and
    the tensors that quantization adds; and transformers uses this option only for PEFT's models.
    """
    engine.save_checkpoint = partial(type(engine).save_checkpoint, engine, exclude_frozen_parameters=True)
    engine.module_state_dict = partial(_trained, engine)


def _trained(engine: DeepSpeedEngine, **options: object) -> JsonObject:
    """Return the weights of the model that DeepSpeed saves, without the frozen ones."""
    frozen, state = _frozen(engine.module), type(engine).module_state_dict(engine, **options)
    return {
        name: value for name, value in state.items() if frozen.isdisjoint(accumulate(name.split("."), "{}.{}".format))
    }


def _frozen(model: PreTrainedModel) -> set[str]:
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}


class _LoadedKeys(Protocol):
    missing_keys: list[str]


def expect_no_frozen(model: PreTrainedModel, keys: _LoadedKeys) -> None:
    """Remove frozen weights from the `missing_keys` of a load; a hook after `load_state_dict`.

    They belong to the base model, which is loaded already; any other missing weight is an error.
    """
    frozen = _frozen(model)
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]


def whole_weights(engine: DeepSpeedEngine, *, trained_alone: bool) -> dict[str, torch.Tensor]:
    """Return the whole weights of ZeRO-3 in the compute type on rank 0, and {} on others; every rank takes part.

    DeepSpeed's public `save_16bit_model` writes them as a pickle, and accelerate's `get_state_dict` gathers frozen
    weights too.
    """
    weights: dict[str, torch.Tensor] | None
    weights = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=trained_alone)
    return weights or {}
