"""Matches a PEFT adapter with its base model, and merges it into each weight.

The base has no weights here. PEFT's own layers do the arithmetic, one layer at a time, in fp32.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import torch
from peft import PeftConfig, PeftType, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from transformers import PreTrainedModel

from tuner.errors import ModelError, Option, TunerError
from tuner.paths import ADAPTER
from tuner.pretrained import explained
from tuner.results.tensors import Stored

STEM = "adapter_model"
MISFITS = (ValueError, TypeError, AttributeError, RuntimeError)
"""Exceptions that PEFT raises for an adapter that does not fit the model, or has fields of a wrong type."""
_PREFIX = "base_model.model."
_NAME = "default"
AS_IT_WAS = tuple(f"{place}.weight" for place in ("base_layer", "original_module", "modules_to_save"))
"""Name endings of embeddings that PEFT saves besides an adapter on them: the original, or a second copy."""
_KEEP_THE_BASE = (True, False, "gaussian", "eva", "orthogonal")
_CHANGE_THE_BASE = ("pissa", "olora")
"""Values of init_lora_weights with which PEFT subtracts the initial adapter from the base's weight."""
_NOT_MERGED = (
    *("lora_bias", "trainable_token_indices", "layer_replication", "use_qalora", "use_bdlora", "arrow_config"),
    *("kasa_config", "monteclora_config", "alora_invocation_tokens", "velora_config"),
)
"""Fields of LoraConfig that tuner never sets, and that change more than one weight of a layer."""


def read_config(folder: Path) -> PeftConfig:
    """Return the configuration of an adapter. Raises ModelError: it cannot be read."""
    with explained(str(folder), ADAPTER):
        config = PeftConfig.from_pretrained(str(folder))
        if not isinstance(config.base_model_name_or_path, str | None):
            raise TypeError("base_model_name_or_path is not a string")
        return config


def fit_rows(model: PreTrainedModel, stored: Stored) -> None:
    """Resize a base's embeddings to those that the adapter holds, if training added rows."""
    embeddings = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is embeddings)
    embedding = stored.shapes.get(f"{_PREFIX}{name}.weight")
    if embedding is not None and embedding.shape[0] > embeddings.weight.shape[0]:
        model.resize_token_embeddings(embedding.shape[0], mean_resizing=False)  # the adapter has their values


class Adapter:
    """An adapter, and the names of the base's tensors that it changes."""

    def __init__(self, folder: Path, config: PeftConfig, model: PreTrainedModel, base: str) -> None:
        """Match the adapter in `folder` with `model`, its base without weights. `model` is changed.

        Raises:
            ModelError: the adapter belongs to another base, or its kind cannot be merged.
        """
        check_mergeable(config)
        self._stored, self._base = Stored(folder, STEM), base
        lora = deepcopy(config)
        lora.base_model_name_or_path = None  # otherwise PEFT looks for the base on the hub
        lora.inference_mode = True
        self._config = lora
        fit_rows(model, self._stored)
        self.num_rows = model.config.get_text_config().vocab_size
        try:
            adapted = get_peft_model(model, lora, low_cpu_mem_usage=True, autocast_adapter_dtype=False)
        except MISFITS as error:
            raise self._misfit(str(error).splitlines()[0]) from error
        expected = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        saved = {name: tensor for name, tensor in self._stored.shapes.items() if not name.endswith(AS_IT_WAS)}
        for name in sorted(expected.keys() ^ saved.keys()):
            problem = "the base has no such module" if name in saved else "it is missing in the adapter"
            raise self._misfit(f"{name}: {problem}")
        for name, tensor in expected.items():
            if tensor.shape != saved[name].shape:
                raise self._misfit(f"{name} is {tuple(saved[name].shape)}, not {tuple(tensor.shape)}")
        modules = dict(adapted.base_model.model.named_modules())
        layers = {name: module for name, module in modules.items() if isinstance(module, LoraLayer)}
        self._of_weight = {_weight(name, layer): (name, layer) for name, layer in layers.items()}
        # `replaced`: tensors of the base that the adapter holds completely; `changed`: those and the merged ones.
        self.replaced = {
            f"{name}.{key}"
            for name, module in modules.items()
            if isinstance(module, ModulesToSaveWrapper)
            for key in module.modules_to_save[_NAME].state_dict()
        }
        self.changed = self.replaced | self._of_weight.keys()

    def _misfit(self, problem: str) -> ModelError:
        fix = f"Give the base that it was trained on: {Option('base', 'PATH')}."
        return ModelError(f"the adapter does not fit the base {self._base!r}: {problem}", where=Option("base"), fix=fix)

    def change(self, name: str, weight: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor of the base with the adapter merged, in the base's type; on 'meta', only its shape.

        Raises:
            TunerError: the result is not finite.
        """
        shape_alone = weight is not None and weight.is_meta
        if name in self.replaced:
            stored = f"{_PREFIX}{name}"
            tensor = self._stored.shapes[stored] if shape_alone else self._stored.load(stored)
            return tensor if weight is None else tensor.to(weight.dtype)
        assert weight is not None, f"a layer without a base weight: {name}"
        if shape_alone:
            return weight
        module, key = self._of_weight[name][0], name.rpartition(".")[2]
        layer = deepcopy(self._of_weight[name][1])
        setattr(layer.get_base_layer(), key, torch.nn.Parameter(weight.float(), requires_grad=False))
        if self._config.init_lora_weights in _CHANGE_THE_BASE:
            layer.update_layer(_NAME, layer.r[_NAME], layer.lora_alpha[_NAME], config=self._config)
        tensors = {
            key: self._stored.load(f"{_PREFIX}{module}.{_saved(key)}").float()
            for key in layer.state_dict()
            if not key.startswith("base_layer.")
        }
        layer.load_state_dict(tensors, strict=False, assign=True)
        try:
            layer.merge(safe_merge=True)
        except ValueError as error:
            raise TunerError(f"{name} becomes non-finite with the adapter merged into it") from error
        merged: torch.Tensor = getattr(layer.get_base_layer(), key).data
        return merged.to(weight.dtype)


def _weight(name: str, layer: LoraLayer) -> str:
    """Return the name of the base's tensor that a layer changes; on fused experts PEFT nests its layers."""
    return f"{name.replace('.base_layer', '')}.{getattr(layer, 'parameter_name', 'weight')}"


def _saved(key: str) -> str:
    """Return PEFT's name for a saved tensor of a layer."""
    if key.startswith("lora_magnitude_vector."):
        return "lora_magnitude_vector"
    return key.replace(f".{_NAME}", "")


def kind_of(config: PeftConfig) -> str:
    return str(getattr(config.peft_type, "value", config.peft_type))


def check_mergeable(config: PeftConfig) -> None:
    """Check that an adapter can be merged into its base, one tensor at a time. Raises ModelError: it cannot."""
    problem = f"an adapter of {kind_of(config)}"
    if config.peft_type == PeftType.LORA:  # AdaLora's config is one of LoRA too
        odd = [name for name in _NOT_MERGED if getattr(config, name)] + (["bias"] if config.bias != "none" else [])
        if config.init_lora_weights not in (*_KEEP_THE_BASE, *_CHANGE_THE_BASE):
            odd.append(f"init_lora_weights={config.init_lora_weights!r}")
        if not odd:
            return
        problem = f"LoRA with {', '.join(odd)}"
    raise ModelError(f"{problem} cannot be merged", where=ADAPTER, fix=f"Export it without {Option('merge', True)}.")
