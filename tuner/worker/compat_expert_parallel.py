"""Expert parallelism by DeepSpeed's AutoEP: what tuner changes of it, and whole weights out of the experts of ranks.

Seen with DeepSpeed 0.19.8 and transformers 5.24. It decides nothing about a run.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.checkpoint.constants import AUTOEP_PARAM_LOGICAL_SHAPE, DS_AUTOEP_UC_META
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.engine import DeepSpeedEngine
from peft import PeftModel
from torch import Tensor
from transformers.utils import output_capturing

_REMAP = "_remap_client_optimizer_after_module_replacement"
_remap = getattr(engine_module, _REMAP)
_divide = DeepSpeedEngine._configure_expert_parallel
_configure = DeepSpeedEngine._configure_distributed_model
_ROUTER = {"router.gate.": "gate.", "router.": "gate."}
"""How DeepSpeed's layer names a router, and transformers'; what the latter calls shared experts, a preset knows."""
_ROUTED_IN_FP32 = ("deepseek_v2", "deepseek_v3")
"""Presets of models with routers that compute in fp32 at any compute type. AutoEP's router takes the compute type."""


NAMES = (("transformers", output_capturing, "_CAN_RECORD_REGISTRY"),)


def prepare() -> None:
    """Let AutoEP run with this transformers, the Trainer's optimizer and frozen experts; call it before the engine."""
    registry = type(output_capturing._CAN_RECORD_REGISTRY)
    registry.get, registry.__setitem__ = _recorded, _record
    setattr(engine_module, _REMAP, _with_groups_of_experts)
    DeepSpeedEngine._configure_expert_parallel = _below_adapter
    DeepSpeedEngine._configure_distributed_model = _with_experts_that_train


def _recorded(registry: dict[str, Any], model: object, default: Any = None) -> Any:
    """Return what transformers records of a model's class; DeepSpeed asks for the class by name, and with a default."""
    name = model if isinstance(model, str) else str(model.__class__)
    return dict.get(registry, name) or ({} if default is None else default)


def _record(registry: dict[str, Any], model: object, recorded: Any) -> None:
    dict.__setitem__(registry, model if isinstance(model, str) else str(model.__class__), recorded)


def _below_adapter(engine: DeepSpeedEngine, model: Any, *args: Any, **options: Any) -> Any:
    """Divide the experts of the model inside PEFT's: AutoEP knows its names. Its routers compute as before.

    transformers' loss that balances a router takes its logits; of Qwen3.5-MoE AutoEP gives it the probabilities.
    """
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    divided = _divide(engine, base, *args, **options)
    for layer in _layers(base).values():
        layer.router_logits_capture_mode = "raw"
        if layer.model_family in _ROUTED_IN_FP32:
            layer.router.gate.forward = partial(_in_fp32, layer.router.gate)
    return divided


def _in_fp32(gate: torch.nn.Linear, states_TH: Tensor) -> Tensor:
    return F.linear(states_TH.float(), gate.weight.float())


def _layers(model: torch.nn.Module) -> dict[str, AutoEPMoELayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AutoEPMoELayer)}


def _names_in(layer: AutoEPMoELayer) -> dict[str, str]:
    preset = PRESET_MODELS[layer.model_family]
    names = {"shared_experts": preset.shared_experts_pattern, "shared_experts_gate": preset.shared_experts_gate_pattern}
    return _ROUTER | {
        f"{deepspeed_name}.": f"{transformers_name}." for deepspeed_name, transformers_name in names.items()
    }


def _with_groups_of_experts(optimizer: Any, *replaced: Any) -> None:
    """Give the Trainer's optimizer the weights that AutoEP made, and groups of its own to those of experts."""
    _remap(optimizer, *replaced)
    for number, group in enumerate(optimizer.param_groups):
        group.setdefault("name", str(number))
    split_params_into_different_moe_groups_for_optimizer(optimizer.param_groups)


def _with_experts_that_train(engine: DeepSpeedEngine, model: Any) -> None:
    """Let an engine with frozen experts update and save as any other; `has_moe_layers` says that some train.

    DeepSpeed's ZeRO would ask for a group of experts among what is trained, and its checkpoints would hold all experts.
    """
    _configure(engine, model)
    engine.has_moe_layers = any(is_moe_param(weight) and weight.requires_grad for weight in model.parameters())


def is_part(weight: Tensor) -> bool:
    """Return whether the ranks of a group have different experts in a weight; other weights are the same on each."""
    return bool(is_moe_param(weight))


def whole_shape(weight: Tensor) -> list[int] | None:
    """Return the shape of a weight of all experts of a layer; None for other weights."""
    shape: list[int] | None = getattr(weight, DS_AUTOEP_UC_META, {}).get(AUTOEP_PARAM_LOGICAL_SHAPE)
    return shape


def group_of(engine: DeepSpeedEngine) -> dist.ProcessGroup:
    """Return the ranks that together have all experts."""
    (group,) = engine.expert_parallel_group.values()
    return group


def whole_weights(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Return all weights by transformers' names on the CPU of rank 0, and {} on others; every rank takes part.

    DeepSpeed's `save_16bit_model` writes the experts of rank 0 alone, by names of its own, and returns True.
    """
    layers = _layers(engine.module)
    all_weights: dict[str, Tensor] = {}
    for name, weight in engine.module.state_dict().items():
        prefix = next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)
        inner = name.removeprefix(f"{prefix}.")
        if prefix is None:
            all_weights[name] = weight
        elif not inner.startswith(("experts.", "gate.")):  # `gate` is another name of `router`
            names = _names_in(layers[prefix])
            beginning = next((beginning for beginning in names if inner.startswith(beginning)), "")
            all_weights[f"{prefix}.{names.get(beginning, '')}{inner.removeprefix(beginning)}"] = weight
    on_rank_0 = dist.get_rank() == 0
    all_weights = (
        {name: weight.detach().to("cpu", copy=True) for name, weight in all_weights.items()} if on_rank_0 else {}
    )
    for prefix, layer in layers.items():
        experts = layer.experts
        gate, up, down = (_of_all(weight, layer.ep_group) for weight in (experts.w1, experts.w3, experts.w2))
        if on_rank_0:
            all_weights[f"{prefix}.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
            all_weights[f"{prefix}.experts.down_proj"] = down
    return all_weights


def _of_all(weight: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(weight) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, weight.detach().contiguous(), group=group)
    return torch.cat([part.cpu() for part in parts])
