"""Experts in 4 bits: fused weights [experts, rows, columns] that are quantized as they load, and PEFT's LoRA on them.

A module keeps each such weight packed, and bitsandbytes unpacks it whenever the module reads it. Seen with bitsandbytes
0.50.2, PEFT 0.21.2, transformers 5.24 and torch 2.13. It decides nothing about a recipe.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft import PeftModel
from peft.tuners.lora import layer as lora
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name

from tuner.errors import ModelError
from tuner.machine.libraries import require_names
from tuner.recipes.schema.measured import LARGEST_IN_4_BITS

_BLOCK = 64
"""The numbers that share a scale, as in the linear layers of transformers."""


class ExpertsToo(BitsAndBytesConfig):  # type: ignore[misc]
    """A config of 4 bits with which `from_pretrained` quantizes fused experts besides linear layers.

    Raises:
        MachineError: a library lacks a name that this builds on.
    """

    def __init__(self, **settings: object) -> None:
        from bitsandbytes.nn import parametrize as of_bitsandbytes

        require_names("bitsandbytes", of_bitsandbytes, *_HOOKS, "Bnb4bitParametrization")
        require_names("peft", lora, "_LoraFactorsProxy", "ParamWrapper")
        require_names("peft", lora.ParamWrapper, "_activate_lora", "get_delta_factors", "get_param")
        require_names("transformers", Bnb4BitHfQuantizer, "param_needs_quantization", "get_quantize_ops", _AT_END)
        AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"] = _Quantizer
        super().__init__(**settings)


_HOOKS = ("_enable_parametrization_cache", "_disable_parametrization_cache")
_AT_END = "_process_model_after_weight_loading"


class Packed(NamedTuple):
    """One weight of a module in 4 bits."""

    module: nn.Module
    name: str

    @property
    def state(self) -> Any:
        """bitsandbytes' shape, type and scales."""
        return self.module.parametrizations[self.name][0].quant_state

    @property
    def weight(self) -> nn.Parameter:
        """The packed numbers, [bytes, 1]; at ZeRO-3 what is left of them here."""
        return self.module.parametrizations[self.name].original

    def whole(self) -> Tensor:
        """Return the unpacked weight without LoRA."""
        return self.module.parametrizations[self.name][0](self.weight)


def packed_of(module: nn.Module, name: str) -> Packed | None:
    kind = getattr(sys.modules.get("bitsandbytes.nn.parametrize"), "Bnb4bitParametrization", None)
    if kind is None or not parametrize.is_parametrized(module, name):
        return None
    return Packed(module, name) if isinstance(module.parametrizations[name][0], kind) else None


def packed_in(model: nn.Module) -> list[Packed]:
    """Return all weights in 4 bits that are no linear layers'."""
    parametrized = [module for module in model.modules() if parametrize.is_parametrized(module)]
    both = [(module, name) for module in parametrized for name in module.parametrizations]
    return [packed for module, name in both if (packed := packed_of(module, name))]


def fused_in(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of all experts in one tensor by name; transformers' classes of them end in `Experts`."""
    if not type(module).__name__.endswith("Experts"):
        return {}
    weights = module.named_parameters(recurse=False)
    return {name: weight for name, weight in weights if weight.ndim == 3 and weight.numel() <= LARGEST_IN_4_BITS}


def has_experts(model: nn.Module) -> bool:
    """Return whether a model has fused experts, in 4 bits or not."""
    return bool(packed_in(model)) or any(fused_in(module) for module in model.modules())


def _is_fused(model: PreTrainedModel, name: str) -> bool:
    module, key = get_module_from_name(model, name)
    return key in fused_in(module)


class _Quantizer(Bnb4BitHfQuantizer):  # type: ignore[misc]
    """transformers' own, which hands it one whole tensor at a time: those of single experts are merged before."""

    def __init__(self, quantization_config: BitsAndBytesConfig, **options: object) -> None:
        super().__init__(quantization_config, **options)
        self.loaded: defaultdict[nn.Module, dict[str, tuple[Tensor, Any]]] = defaultdict(dict)
        self.of_other_shapes: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **options: object) -> bool:
        is_wanted = isinstance(self.quantization_config, ExpertsToo) and _is_fused(model, param_name)
        return is_wanted or super().param_needs_quantization(model, param_name, **options)

    def get_quantize_ops(self) -> Any:
        return _Operation(self)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **options: object) -> PreTrainedModel:
        """Pack what was loaded.

        Raises:
            ModelError: a weight has another shape than the model, which transformers says of other weights alone.
        """
        for name, (shape, expected) in self.of_other_shapes.items():
            problem = f"{name} has the shape {shape} in the model's files, and {expected} by its config.json"
            raise ModelError(problem, where="model.path", fix="Download or copy the model again.")
        for module, weights in self.loaded.items():
            pack(module, weights)
        self.loaded.clear()
        return super()._process_model_after_weight_loading(model, **options)


class _Operation(Bnb4bitQuantize):  # type: ignore[misc]
    """What is done with a loaded tensor: a weight of experts is packed, and what takes its place holds no memory."""

    def convert(
        self, input_dict: dict[str, Any], full_layer_name: str | None = None, model: Any = None, **options: object
    ) -> dict[str, nn.Parameter]:
        from bitsandbytes.functional import quantize_4bit

        name, value = next(iter(input_dict.items()))
        if not _is_fused(model, name):
            names = {"full_layer_name": full_layer_name, "model": model}
            converted: dict[str, nn.Parameter] = super().convert(input_dict, **names, **options)
            return converted
        config = self.hf_quantizer.quantization_config
        module, key = get_module_from_name(model, name)
        weight = value[0] if isinstance(value, list) else value
        if weight.shape != (shape := getattr(module, key).shape):
            self.hf_quantizer.of_other_shapes[name] = tuple(weight.shape), tuple(shape)
        packed, state = quantize_4bit(
            weight.contiguous(),
            blocksize=_BLOCK,
            compress_statistics=config.bnb_4bit_use_double_quant,
            quant_type=config.bnb_4bit_quant_type,
        )
        self.hf_quantizer.loaded[module][key] = packed, state
        return {name: _without_memory(state, packed.device)}


def _without_memory(state: Any, device: torch.device) -> nn.Parameter:
    """Return a weight with the shape and the type of an unpacked one; all its numbers are the same one."""
    return nn.Parameter(torch.zeros((), dtype=state.dtype, device=device).expand(state.shape), requires_grad=False)


def pack(module: nn.Module, weights: Mapping[str, tuple[Tensor, Any]]) -> None:
    """Replace weights of a module by packed ones: bitsandbytes' numbers, and its shape, type and scales."""
    from bitsandbytes.nn import parametrize as of_bitsandbytes

    # In the order of the module, in which PEFT nests its layers, and so names what it saves.
    for name in [name for name, _ in module.named_parameters(recurse=False) if name in weights]:
        packed, state = weights[name]
        _keep_packed(module, name, nn.Parameter(packed, requires_grad=False), state)
    # They are unpacked once a pass. bitsandbytes' hook for state dicts is left out: under its names DeepSpeed would
    # not find that the weights are frozen, and save them in each checkpoint.
    begin, end = (getattr(of_bitsandbytes, name) for name in _HOOKS)
    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end, always_call=True)


def _keep_packed(module: nn.Module, name: str, packed: nn.Parameter, state: Any) -> None:
    """Replace a weight by its packed form, which is unpacked whenever the weight is read."""
    from bitsandbytes.nn.parametrize import Bnb4bitParametrization

    module.register_parameter(name, packed)
    parametrize.register_parametrization(module, name, Bnb4bitParametrization(state), unsafe=True)


@contextmanager
def open_to_peft(model: nn.Module) -> Iterator[None]:
    """Show PEFT weights of the experts' shapes, so that it finds them; after the block its LoRA is on packed ones.

    PEFT 0.21 compares the name of a weight that is unpacked as it is read with whole names alone, and so matches
    nothing, without an error.
    """
    packed_experts = [(experts, experts.weight, experts.state) for experts in packed_in(model)]
    for experts, weight, state in packed_experts:
        parametrize.remove_parametrizations(experts.module, experts.name, leave_parametrized=False)
        experts.module.register_parameter(experts.name, _without_memory(state, weight.device))
    for wrapper in _wrappers(model):
        wrapper.__class__ = lora.ParamWrapper
    try:
        yield
    finally:
        for experts, weight, state in packed_experts:
            _keep_packed(experts.module, experts.name, weight, state)
        for wrapper in _wrappers(model):
            if packed_of(wrapper.get_base_layer(), wrapper.parameter_name):
                wrapper.__class__ = _OnPacked


def keep_open(model: PeftModel) -> None:
    """Let PEFT find the experts also for a further adapter: TRL adds one, as a copy of what training began with."""
    add = model.add_adapter

    def add_opened(*arguments: Any, **options: Any) -> Any:
        with open_to_peft(model):
            return add(*arguments, **options)

    model.add_adapter = add_opened


def _wrappers(model: nn.Module) -> list[lora.ParamWrapper]:
    return [module for module in model.modules() if isinstance(module, lora.ParamWrapper)]


class _OnPacked(lora.ParamWrapper):  # type: ignore[misc]
    """PEFT's LoRA on a weight in 4 bits: its update is added to what has been unpacked.

    PEFT's own reads the weight before it adds its update, and torch keeps the value that was read: the update has no
    effect, and its factors no gradient. It also merges into a copy that is thrown away.
    """

    def _packed(self) -> Packed | None:
        return packed_of(self.get_base_layer(), self.parameter_name)

    def get_param(self) -> nn.Parameter:
        """Return a weight with the shape and type of the unpacked one, for code that asks for no more."""
        packed = self._packed()
        return _without_memory(packed.state, packed.weight.device) if packed else super().get_param()

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        if self._packed() is None:
            with super()._activate_lora(active_adapters):
                yield
            return
        steps = self.get_base_layer().parametrizations[self.parameter_name]
        number = len(steps)
        for name in active_adapters:
            if name in self.lora_A:
                steps.append(lora._LoraFactorsProxy(*self.get_delta_factors(name)))
        try:
            with parametrize.cached():
                yield
        finally:
            while len(steps) > number:
                del steps[-1]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge into the unpacked weight, which takes the place of the packed one."""
        if packed := self._packed():
            unpacked = packed.whole()
            parametrize.remove_parametrizations(packed.module, packed.name, leave_parametrized=False)
            packed.module.register_parameter(packed.name, nn.Parameter(unpacked, requires_grad=False))
        super().merge(safe_merge=safe_merge, adapter_names=adapter_names)


def check_matched(model: PeftModel) -> None:
    """Check that PEFT has put LoRA on some weight for each name of `target_parameters`.

    Raises:
        ModelError: a name matches nothing, which PEFT 0.21 does not say where another one does.
    """
    target_parameters = [
        name for config in model.peft_config.values() for name in getattr(config, "target_parameters", None) or ()
    ]
    targets = [
        # A router in 4 bits is a linear layer, whose weight PEFT knows without its name.
        f".{name.replace('.base_layer', '')}.{getattr(module, 'parameter_name', 'weight')}"
        for name, module in model.named_modules()
        if isinstance(module, lora.LoraLayer)
    ]
    for name in target_parameters:
        if not any(target.endswith(f".{name}") for target in targets):
            raise ModelError(f"the adapter's {name!r} is no weight of this model", where="adapter.target_modules")
