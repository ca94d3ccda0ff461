"""Where tuner reaches into what DeepSpeed saves and loads, and in which version.

Version seen: DeepSpeed 0.19.8. It decides nothing about a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from tuner.machine.libraries import require_names


def check_names() -> None:
    """Refuse a DeepSpeed in which one of the names is gone. Raises as `compat.check_names`."""
    require_names("deepspeed", DeepSpeedEngine, "module_state_dict", "save_checkpoint", "load_checkpoint")
    require_names("deepspeed", DeepSpeedEngine, "_load_checkpoint", "_get_all_zero_checkpoints")
    require_names("deepspeed", DeepSpeedZeroOptimizer_Stage3, "_prepare_sub_group", "_release_sub_group")
    require_names("deepspeed", DeepSpeedEngine, "_zero3_consolidated_16bit_state_dict", "zero_nvme_offload_optimizer")


def load_by(load: Callable[[Any, str], Any]) -> None:
    """Have a function take the place of what DeepSpeed's engines load checkpoints with, given engine and folder."""
    DeepSpeedEngine.load_checkpoint = lambda engine, folder, **_: load(engine, folder)


def load_swapped_whole() -> None:
    """Have engines that swap to a disk load the whole of a checkpoint.

    DeepSpeed 0.19.8 copies the swapped files back and leaves out the rest: small weights with their states, how many
    steps each state has seen, and that there are swapped states at all, so that the next step begins with empty ones
    (measured: a loss of 6.1278 in the place of 6.1244).
    """
    load = DeepSpeedEngine._load_checkpoint

    @wraps(load)
    def load_all(engine: Any, folder: str, tag: str, **given: Any) -> Any:
        loaded = load(engine, folder, tag, **given)
        if engine.zero_nvme_offload_optimizer():  # before it copies the files
            saved = engine._get_all_zero_checkpoints(folder, tag)
            _load_in_memory(engine.optimizer, saved[dist.get_rank(group=engine.optimizer.dp_process_group)])
        return loaded

    DeepSpeedEngine._load_checkpoint = load_all


def _load_in_memory(optimizer: Any, saved: dict[str, Any]) -> None:
    """Load what a checkpoint of ZeRO-3 holds itself; the tensors that were on the disk are empty in it."""
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


def _make_files(optimizer: Any, place: int, state: dict[str, Any]) -> None:
    """Swap out empty states of a sub-group, so that the swapper knows them when their files are put in place."""
    length = int(optimizer.fp16_partitioned_groups_flat_numel[place])
    optimizer._prepare_sub_group(place, set())
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not value.numel():
            state[name] = torch.zeros(length, dtype=value.dtype)
    optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[place]] = state
    optimizer._release_sub_group(place, set())


def leave_out_frozen(engine: Any) -> None:
    """Keep frozen weights out of the checkpoints that an engine saves, and let it load such.

    DeepSpeed 0.19.8 can leave them out (DeepSpeed#3953), but by name: it keeps the second name of a tied one and what
    quantization adds; and transformers asks for it where the model is PEFT's alone.
    """
    engine.save_checkpoint = partial(type(engine).save_checkpoint, engine, exclude_frozen_parameters=True)
    engine.module_state_dict = partial(_trained, engine)


def _trained(engine: Any, **options: Any) -> dict[str, Any]:
    """Return what DeepSpeed saves of the model, without frozen weights."""
    frozen, state = _frozen(engine.module), type(engine).module_state_dict(engine, **options)
    return {
        name: value for name, value in state.items() if frozen.isdisjoint(accumulate(name.split("."), "{}.{}".format))
    }


def _frozen(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}


def expect_no_frozen(model: Any, keys: Any) -> None:
    """Take away from the `missing_keys` of a load what is frozen; a hook after `load_state_dict`.

    It is the base model's, which was loaded before; anything else that a checkpoint lacks is an error.
    """
    frozen = _frozen(model)
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen]


def whole_weights(engine: Any, *, trained_alone: bool) -> dict[str, Any]:
    """Return ZeRO-3's weights in the compute type, whole, on rank 0 and nothing on others; every rank takes part.

    DeepSpeed's public `save_16bit_model` writes them as a pickle, and accelerate's `get_state_dict` gathers frozen
    weights too.
    """
    return engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=trained_alone) or {}
