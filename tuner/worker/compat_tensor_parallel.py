"""Tensor parallelism by DeepSpeed's AutoTP: what tuner changes of it, and whole weights out of the parts of ranks.

Seen with DeepSpeed 0.19.8, PEFT 0.21.2 and transformers 5.24. It decides nothing about a run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject import layers
from deepspeed.module_inject.auto_tp import AutoTP, PartitionType
from deepspeed.module_inject.layers import LinearLayer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.tensor_parallel import config as config_module
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import groups
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from tuner.files import JsonObject
from tuner.worker.compat_expert_parallel import whole_shape

_replace_layer = AutoTP._replace_with_config
_sum_gradients = AutoTP.register_replicated_grad_hooks
_plan_of = config_module._get_hf_tp_plan
_HAS_HOOK = "_ds_grad_allreduce_registered"


NAMES = (
    ("deepspeed", AutoTP, "_create_row_parallel_layer", "_create_column_parallel_layer", "_gather_zero3_params"),
    ("deepspeed", layers, "DS_TENSOR_MODEL_PARALLEL", "DS_AUTOTP_UC_META"),
    ("deepspeed", LinearLayer, "_all_gather_shards"),
    ("deepspeed", DeepSpeedEngine, "autotp_size", "_consolidated_16bit_state_dict"),
)


def prepare() -> None:
    """Let AutoTP split LoRA with the layer below it, and leave the head whole; call it once, before the engine."""
    AutoTP._replace_with_config = _with_adapter
    AutoTP.register_replicated_grad_hooks = _sum_trained_gradients
    config_module._get_hf_tp_plan = _without_head
    # For the Trainer's saves.
    DeepSpeedEngine._consolidated_16bit_state_dict = lambda engine, exclude_frozen_parameters=False: (
        whole_weights(engine, trained_alone=exclude_frozen_parameters) or None
    )


def as_written(used: JsonObject, written: JsonObject) -> JsonObject:
    """Return the config that DeepSpeed uses as deepspeed.json has it, if ranks split the layers.

    DeepSpeed writes the size and the type again (`merge_tp_model_init_into_config`). It counts all ranks as
    data-parallel ones, and so do transformers and accelerate: they get no batch of a step, which they use for nothing.
    """
    if "tensor_parallel" not in written:
        return used
    kept = {key: value for key, value in used["tensor_parallel"].items() if key in written["tensor_parallel"]}
    return {**used, "tensor_parallel": kept, "train_batch_size": written["train_batch_size"]}


def _with_adapter(self: Any, child: nn.Module, name: str) -> nn.Module:
    """Split a layer, and of a LoRA layer the base and the half that has the split axis: A by rows, or B by columns.

    AutoTP takes PEFT's layer, which has a weight, for the base layer, and loses the adapter.
    """
    if not isinstance(child, BaseTunerLayer):
        return _replace_layer(self, child, name)
    split = self.partition_config.find_matching_spec(f"{name}.weight", self._get_model_type())
    if split is None or split.partition_type == PartitionType.SKIP:
        return child
    child.base_layer = _replace_layer(self, child.base_layer, name)
    is_by_rows = split.partition_type == PartitionType.ROW
    halves = child.lora_A if is_by_rows else child.lora_B
    make = self._create_row_parallel_layer if is_by_rows else self._create_column_parallel_layer
    for adapter, half in list(halves.items()):
        self._gather_zero3_params(half)
        halves[adapter] = make(half, split, f"{name}.{'lora_A' if is_by_rows else 'lora_B'}.{adapter}")
    return child


def _sum_trained_gradients(self: Any, model: nn.Module) -> None:
    """Sum the gradients of weights that are whole on each rank and see a part of the heads, if they are trained."""
    for weight in model.parameters():
        if not weight.requires_grad:
            setattr(weight, _HAS_HOOK, True)  # torch refuses a hook for the gradient of a frozen weight
    _sum_gradients(self, model)


def _without_head(model: Any) -> dict[str, str] | None:
    """Return transformers' plan of a model without the head: tuner's losses read the head's whole weight."""
    plan, head = _plan_of(model), model.get_output_embeddings()
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if module is head}
    return plan and {pattern: kind for pattern, kind in plan.items() if pattern.rpartition(".")[2] not in names}


def is_part(weight: torch.Tensor) -> bool:
    """Return whether the ranks of a group have different parts of a weight; the others are the same on each."""
    return bool(getattr(weight, layers.DS_TENSOR_MODEL_PARALLEL, False))


def num_elements(weight: torch.Tensor) -> int:
    """Return the number of elements of a whole weight, of which this rank may have a part, or some of the experts."""
    shape = getattr(weight, layers.DS_AUTOTP_UC_META, {}).get("original_shape") or whole_shape(weight)
    return int(torch.Size(shape).numel()) if shape else int(getattr(weight, "ds_numel", weight.numel()))


def group_of(engine: DeepSpeedEngine) -> dist.ProcessGroup:
    """Return the ranks that share each matrix."""
    return groups.get_tensor_model_parallel_group()


def whole_weights(engine: DeepSpeedEngine, *, trained_alone: bool) -> dict[str, torch.Tensor]:
    """Return the whole weights in the compute type on the CPU of rank 0, and {} on others; every rank takes part.

    DeepSpeed's own function replaces the old weight by a gathered one, and then by a new part of it: at ZeRO-1
    and 2 the old one was a view of what the optimizer updates, so a save would end the training of the split weights.
    """
    model, shards = engine.module, engine.zero_optimization_stage() == 3
    all_weights: dict[str, torch.Tensor] = {}
    first_name: dict[int, str] = {}
    for prefix, module in model.named_modules():
        weights = {
            f"{prefix}.{name}" if prefix else name: weight
            for name, weight in module.named_parameters(recurse=False)
            if weight.requires_grad or not trained_alone
        }
        with GatheredParameters(list(weights.values()), enabled=shards and bool(weights)):
            for name, weight in weights.items():
                kept_name = first_name.setdefault(id(weight), name)
                value = _joined(module, weight) if kept_name == name and is_part(weight) else weight.detach()
                if dist.get_rank() == 0:
                    all_weights[name] = all_weights[kept_name] if kept_name != name else value.to("cpu", copy=True)
    if dist.get_rank() == 0 and not trained_alone:
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        all_weights |= {name: value.cpu() for name, value in model.state_dict().items() if name not in names}
    return all_weights


def _joined(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return the whole weight of the parts that the ranks of a group have; the part stays as it is."""
    split = getattr(weight, layers.DS_AUTOTP_UC_META)
    joined: torch.Tensor = module._all_gather_shards(
        weight.detach(), split["partition_sizes"], dim=split["partition_dim"]
    )
    return joined
