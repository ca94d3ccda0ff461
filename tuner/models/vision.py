"""Vision-language models: their processor, their parts, and a pass of the tower on every rank.

vision       the tower, which reads pixels
projector    what turns its output into embeddings of the LLM
language     the LLM with its head
sound        what reads sound, which is never trained
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from tuner import assets, vocabulary
from tuner.errors import Key, ModelError
from tuner.models import compat
from tuner.recipes.schema import Adapter, AnyPart, Model, VisionPart
from tuner.recipes.schema.architecture import NOT_ON_IMAGES
from tuner.recipes.schema.unlearned_layers import without_gradient

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor
    from transformers import PreTrainedModel, ProcessorMixin

_PROJECTORS = {"merger", "deepstack_merger_list"}
"""Modules inside Qwen-VL's tower that are its projector."""
_OF_SOUND = {"audio_tower", "embed_audio"}
"""Modules of Gemma 4 that read sound."""

OUTSIDE_LLM = [
    *("model.vision_tower", "model.visual", "model.vision_model", "vision_model"),
    *("model.multi_modal_projector", "model.connector", "model.embed_vision", "multi_modal_projector"),
    *("model.audio_tower", "model.embed_audio"),
    "lm_head",
]
"""What QLoRA keeps in 16 bits: towers, projectors and the head by their full names in transformers 5.24.

bitsandbytes 0.50.2 takes a name without its parents for a part of other names, and then quantizes all three parts.
"""


def load_processor(model: Model, path: str, **options: object) -> ProcessorMixin:
    """Load the processor of a vision-language model, with the recipe's chat template if it names one.

    Call it inside `pretrained.explained`, with the result of `load.pretrained_path` and the options of
    `arguments.load_options`.

    Raises:
        ModelError: the folder has no processor, or it cannot read images.
    """
    if message := NOT_ON_IMAGES.get(AutoConfig.from_pretrained(path, **options).model_type):
        raise ModelError(message, where="model.path", fix=f"Train its LLM alone on text: {Key('model.images', False)}.")
    processor = compat.processor(path, **options)
    if getattr(processor, "image_processor", None) is None or getattr(processor, "image_token", None) is None:
        message = f"{path!r} has no processor of images, such as preprocessor_config.json"
        fix = f"Copy the model again with all its files; to train the LLM alone on text: {Key('model.images', False)}."
        raise ModelError(message, where="model.path", fix=fix)
    tokenizer = processor.tokenizer
    recipe_template = assets.chat_template(model.chat_template) if model.chat_template else None
    model_template = assets.without_image_parts(processor.chat_template or tokenizer.chat_template or "") or None
    template = recipe_template or model_template
    assets.check_defaults(template, model.chat_template_kwargs)
    with_values = template and assets.with_defaults(template, model.chat_template_kwargs)
    tokenizer.chat_template = processor.chat_template = with_values
    vocabulary.let_pad(tokenizer, path)
    return processor


def parts_of(model: PreTrainedModel) -> dict[str, AnyPart]:
    """Return the part of the model that each weight belongs to, by the weight's full name."""
    tower, llm = _prefix(model, tower_of(model)), _prefix(model, model.get_decoder())

    def part_of(name: str) -> AnyPart:
        if not _OF_SOUND.isdisjoint(name.split(".")):
            return "sound"
        if name.startswith((f"{llm}.", "lm_head")):
            return "language"
        if name.startswith(f"{tower}.") and _PROJECTORS.isdisjoint(name.split(".")):
            return "vision"
        return "projector"

    return {name: part_of(name) for name, _ in model.named_parameters()}


def tower_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the module that reads pixels.

    Raises:
        ModelError: the model has none.
    """
    tower: torch.nn.Module = model.get_encoder(modality="image")
    if tower is model or tower is model.base_model:
        message = f"{type(model).__name__} has no vision tower that tuner knows"
        raise ModelError(message, where="model.images", fix=f"Train its LLM alone: {Key('model.images', False)}.")
    return tower


def _prefix(model: PreTrainedModel, module: torch.nn.Module) -> str:
    return next(str(name) for name, other in model.named_modules() if other is module)


def freeze(model: PreTrainedModel, parts: tuple[VisionPart, ...]) -> None:
    """Freeze the weights of some parts, and those that read sound.

    Raises:
        ModelError: no part is left to train.
    """
    part_of = parts_of(model)
    for name, weight in model.named_parameters():
        if part_of[name] in (*parts, "sound"):
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise ModelError("all parts of the model are frozen", where="model.freeze", fix="Remove one of them.")


def trains_tower(model: PreTrainedModel) -> bool:
    """Return whether a weight of the tower is trained; the modules of an adapter count."""
    part_of = parts_of(model)
    return any(weight.requires_grad for name, weight in model.named_parameters() if part_of[name] == "vision")


def lora_targets(model: PreTrainedModel, adapter: Adapter) -> str | list[str]:
    """Return PEFT's target_modules for an adapter on the LLM alone, or also on the other parts.

    'all-linear' and the names of layers would reach into the tower too: its layers have the same names.
    """
    targets = adapter.target_modules
    if adapter.vision or (isinstance(targets, str) and targets != "all-linear"):
        return targets if isinstance(targets, str) else list(targets)
    llm = model.get_decoder()
    head = model.get_output_embeddings()
    linear = {
        name.rpartition(".")[2]
        for name, module in llm.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    names = linear if isinstance(targets, str) else {str(name).rpartition(".")[2] for name in targets}
    return rf"{re.escape(_prefix(model, llm))}\..*\b({'|'.join(map(re.escape, sorted(names)))})"


def reading_sound(model: PreTrainedModel) -> str | None:
    """Return a regular expression for the full names of the layers that read sound; None if the model has none."""
    names = "|".join(sorted(_OF_SOUND))
    return rf".*\b(?:{names})\..*" if "sound" in parts_of(model).values() else None


def linear_layers_of(model: PreTrainedModel) -> list[str]:
    """Return the names of the tower's linear layers, within the tower, on which LoRA learns; without a projector."""
    tower = tower_of(model)
    within = f"{_prefix(model, tower)}."
    names = [
        f"{within}{name}"
        for name, module in tower.named_modules()
        if isinstance(module, torch.nn.Linear) and _PROJECTORS.isdisjoint(name.split("."))
    ]
    unlearned = {*without_gradient(names)}
    return [name.removeprefix(within) for name in names if name not in unlearned]


def outside_llm(model: PreTrainedModel) -> str:
    """Return a regular expression for the full names of the layers that are not the LLM's."""
    parent, _, llm = _prefix(model, model.get_decoder()).rpartition(".")
    other_parts = [re.escape(name) for name, _ in model.get_submodule(parent).named_children() if name != llm]
    return rf"{re.escape(parent)}\.(?:{'|'.join(other_parts)})\..*"


class TowerOnEveryRank:
    """Lets a model run its tower on a blank image, at weight 0, in a pass without images.

    A rank with text alone would skip the tower: DeepSpeed's ranks then wait for each other in different collectives,
    or reduce buckets of different sizes. The features are added before the LLM: at ZeRO-3 a hook on the embedding
    fails in the backward pass, and one after the model fails in the forward pass (DeepSpeed 0.19.8).

    Args:
        model: The model, before an adapter is added.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.base = model.base_model
        self.blank: Mapping[str, Tensor] | None = None
        """The pixels of the blank image for the next pass; None: the batch has images."""
        model.get_decoder().register_forward_pre_hook(self._add, with_kwargs=True)

    def _add(
        self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        if self.blank is None:
            return None
        features = self.base.get_image_features(**self.blank, return_dict=True)
        # Qwen3-VL adds more features in its first layers.
        values = (features.pooler_output, getattr(features, "deepstack_features", None))
        nothing = sum(0 * tensor.sum() for tensor in _tensors(values))
        embeddings = kwargs["inputs_embeds"]
        return args, {**kwargs, "inputs_embeds": embeddings + nothing.to(embeddings.dtype)}


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
