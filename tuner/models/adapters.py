"""The adapter on the model to train: a new one, a trained one that is trained further, or LoRA on the tower alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub import try_to_load_from_cache
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from tuner import paths, vocabulary
from tuner.errors import Key, ModelError, Option
from tuner.models import compat_experts, mixers, vision
from tuner.pretrained import explained, tensors_of
from tuner.recipes.schema import Model, RecipeConfig, VisionLora, unlearned_layers

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

_NAME = "default"
"""PEFT's name of an adapter that has none."""
_COPIED = "adapter.modules_to_save"


def switch_off(model: PreTrainedModel) -> None:
    """Let the layers of a model compute without their adapters.

    transformers 5.24's `disable_adapters` does the same, but asks for PEFT 0.22, which is not released.
    """
    for module in model.modules():
        if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)):
            module.enable_adapters(enabled=False)


def with_adapter(model: PreTrainedModel, config: RecipeConfig, path: str) -> PeftModel:
    """Return the model with the recipe's adapter: a new one, or the trained one that the recipe names.

    Raises:
        ModelError: the adapter does not fit the model.
    """
    adapter = config.adapter
    assert adapter is not None
    targets: str | Sequence[str] = adapter.target_modules
    if config.reads_images:
        targets = vision.lora_targets(model, adapter)
    layers = [name for name, _ in model.named_modules()]
    if not adapter.path and (refusal := unlearned_layers.refusal(targets, layers)):
        raise refusal
    excluded = [
        unlearned_layers.WITHOUT_GRADIENT if unlearned_layers.without_gradient(layers) else None,
        vision.reading_sound(model) if config.reads_images else None,
    ]
    outside_llm = vision.outside_llm(model) if config.reads_images else ""
    lora = LoraConfig(
        # PEFT trains the new head of a reward model, and saves it with the adapter.
        task_type="SEQ_CLS" if config.objective.facts.scores else "CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
        exclude_modules="|".join(filter(None, excluded)) or None,
        rank_pattern={outside_llm: adapter.vision_r} if outside_llm and adapter.vision_r else {},
        alpha_pattern={outside_llm: adapter.vision_lora_alpha} if outside_llm and adapter.vision_lora_alpha else {},
        use_dora=adapter.use_dora,
        use_rslora=adapter.use_rslora,
        modules_to_save=adapter.modules_to_save,
        init_lora_weights=adapter.init_lora_weights,
        bias="none",
    )
    _check_copied(model, adapter.modules_to_save or (), is_new=not adapter.path)
    # Adapters in the compute type at every ZeRO level; PEFT's fp32 default breaks ZeRO-3 and doubles activations.
    try:
        with compat_experts.open_to_peft(model):
            if adapter.path:
                adapted = _continued(model, str(paths.expanded(adapter.path)), adapter.lora_dropout)
            else:
                # pissa_niter_N begins with random numbers, again when a run resumes.
                torch.manual_seed(config.randomness.seed)
                adapted = get_peft_model(model, lora, revision=commit(config.model, path), autocast_adapter_dtype=False)
    except (ValueError, TypeError) as error:
        message = f"the adapter does not fit this model: {str(error).rstrip('.')}"
        if isinstance(error, TypeError):  # PEFT's, of a module that has LoRA too
            raise ModelError(message, where=_COPIED, fix="Name no layer in it that gets LoRA.") from error
        raise ModelError(message, where="adapter.target_modules") from error
    except AttributeError as error:
        if not compat_experts.has_experts(model) or adapter.init_lora_weights in (True, "gaussian"):
            raise
        problem = f"{adapter.init_lora_weights!r} is for linear layers, and the experts are one weight"
        fix = f"Use {Key('init_lora_weights', True)}, or name the layers of attention in adapter.target_modules."
        raise ModelError(problem, where="adapter.init_lora_weights", fix=fix) from error
    compat_experts.check_matched(adapted)
    _check_reached(adapted)
    if compat_experts.packed_in(adapted):
        compat_experts.keep_open(adapted)
    head, objective = adapted.get_output_embeddings(), config.objective
    if objective.facts.reads_head and isinstance(head, BaseTunerLayer):
        raise vocabulary.untrained_head(objective.type, "lm_head")
    if objective.facts.reads_head and isinstance(head, TrainableTokensWrapper):
        problem = f"the adapter trains single tokens of tied embeddings, past which {objective.type} reads their weight"
        fix = "Merge it with PEFT's merge_and_unload, and put a new adapter on the result."
        raise ModelError(problem, where=paths.ADAPTED, fix=fix)
    if adapter.changes_base:
        _save_for_base(adapted, model.dtype)
    return adapted


def left_out(model: torch.nn.Module, config: RecipeConfig) -> list[str]:
    """Return the names of the layers that a recipe's new adapter is meant for, and that got none."""
    if config.adapter is None or config.adapter.path:
        return []
    base = model.get_base_model() if isinstance(model, PeftModel) else model
    linears = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear)]
    return unlearned_layers.left_out(config.adapter.target_modules, linears)


def _check_copied(model: PreTrainedModel, names: Sequence[str], *, is_new: bool) -> None:
    """Check that the modules that an adapter trains whole are there, and not quantized.

    PEFT 0.21 says nothing of a name that it does not find. Of experts in 4 bits it would copy the zeros that it is
    shown, and train them.

    Raises:
        ModelError: there is no such module, or it holds weights in 4 or 8 bits.
    """
    modules = {path: module for path, module in model.named_modules() if path}
    for name in names:
        copied = [module for path, module in modules.items() if path.endswith(name)]  # as PEFT finds them
        if not copied and is_new:
            raise ModelError(f"the model has no module {name!r}", where=_COPIED, fix="Remove it, or correct the name.")
        if any(not weight.is_floating_point() for module in copied for weight in module.parameters()):
            problem = f"{name!r} holds quantized weights, of which no copy can be trained"
            keys = f"{Key('quantization.experts', False)} (experts in 16 bits), {Key('quantization', None)} (LoRA)"
            raise ModelError(problem, where=_COPIED, fix=f"Remove it, or use {keys}.")


def _check_reached(model: PeftModel) -> None:
    """Check that no LoRA is on a layer whose weight is read past it, by a kernel or by the model's own code.

    Raises:
        ModelError: such LoRA would never have a gradient.
    """
    for mixer in mixers.mixers(model):
        for name, when in mixers.past_layers(mixer).items():
            if not isinstance(getattr(mixer, name), BaseTunerLayer):
                continue
            problem = f"LoRA on {name!r} would not learn: {type(mixer).__name__} reads its weight past LoRA{when}"
            fix = f"Name others, such as 'in_proj', or use {Key('target_modules', 'all-linear')}, which leaves it out."
            raise ModelError(problem, where="adapter.target_modules", fix=fix)


def _save_for_base(model: PeftModel, dtype: torch.dtype) -> None:
    """Make `save_pretrained` write an adapter for the unchanged base; PiSSA and OLoRA take a part out of the base.

    W - B0 A0 + B A is W + [B, -B0] [A; A0]: twice the rank, and the same scale. PEFT 0.21 loads the first A0 and B0 as
    a second adapter for this, which does not work with ZeRO-3's sharded weights.
    """
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(dtype)  # PEFT leaves its decompositions in fp32
    began = {name: weight.detach().clone() for name, weight in get_peft_model_state_dict(model).items()}
    # The rank of each layer as its config has it; a layer that is narrower than the rank has fewer values.
    ranks = {name: layer.r[_NAME] for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}

    def save(folder: str | Path, **options: object) -> None:
        type(model).save_pretrained(model, folder, **options)
        stored, saved = load_file(Path(folder) / paths.TENSORS), PeftConfig.from_pretrained(folder)
        for name, first in began.items():
            layer, is_adapter, half = name.partition(".lora_")
            if not is_adapter:
                continue
            axis = 0 if half.removeprefix("embedding_").startswith("A") else 1  # the one of the rank
            start = first.to("cpu", stored[name].dtype)
            joined = torch.cat([stored[name], start if axis == 0 else -start], dim=axis)
            num_added = 2 * (ranks[layer] - start.shape[axis])
            stored[name] = pad(joined, (0, 0, 0, num_added) if axis == 0 else (0, num_added))
        save_file(stored, Path(folder) / paths.TENSORS, metadata={"format": "pt"})
        factor = 2**0.5 if saved.use_rslora else 2
        saved.lora_alpha *= factor
        saved.alpha_pattern = {layers: factor * alpha for layers, alpha in saved.alpha_pattern.items()}
        saved.rank_pattern = {layers: 2 * rank for layers, rank in saved.rank_pattern.items()}
        saved.r, saved.init_lora_weights = 2 * saved.r, True
        saved.save_pretrained(folder)

    model.save_pretrained = save


def _continued(model: PreTrainedModel, folder: str, dropout: float) -> PeftModel:
    """Return the model with the trained adapter of a folder, to be trained further.

    Raises:
        ModelError: the adapter has a weight that the model does not have, or lacks one.
    """
    try:
        with explained(folder, paths.ADAPTED):
            saved = PeftConfig.from_pretrained(folder)
            saved.lora_dropout, saved.inference_mode = dropout, False
            adapted = PeftModel.from_pretrained(
                model, folder, is_trainable=True, config=saved, autocast_adapter_dtype=False, torch_device="cpu"
            )
    except RuntimeError as error:  # wrong shapes
        reason = " ".join(str(error).split())
        raise ModelError(f"the adapter in {folder!r} does not fit this model: {reason}", where=paths.ADAPTED) from error
    with tensors_of(paths.expanded(folder) / paths.TENSORS, paths.ADAPTED) as stored:
        stored_names = set(stored.keys())
    if lacking := sorted(get_peft_model_state_dict(adapted, save_embedding_layers=False).keys() - stored_names):
        message = f"the adapter in {folder!r} lacks {lacking[0]}, which this model needs"
        raise ModelError(
            message, where=paths.ADAPTED, fix=f"Give the model that it was trained on: {Option('model', 'BASE')}."
        )
    return adapted


def add_to_tower(model: PreTrainedModel, lora: VisionLora, seed: int) -> None:
    """Add LoRA to the tower's linear layers and freeze the tower's own weights; the other parts stay as they are.

    The model stays the class of transformers that it is, so it is trained and saved like one that is trained whole.
    """
    tower, dtype = vision.tower_of(model), model.dtype
    settings = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=vision.linear_layers_of(model),
        bias="none",
    )
    torch.manual_seed(seed)
    inject_adapter_in_model(settings, tower, _NAME)
    part_of = vision.parts_of(model)
    for name, weight in model.named_parameters():
        if part_of[name] == "vision" and "lora_" in name:
            weight.data = weight.data.to(dtype)
        # PEFT freezes a projector that is inside the tower too.
        weight.requires_grad_(part_of[name] != "vision" or "lora_" in name)


def merged(model: PreTrainedModel, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's whole weights as they were before `add_to_tower`, with its LoRA added to those of the tower."""
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}
    result = {name.replace(".base_layer.", "."): weight for name, weight in state.items() if ".lora_" not in name}
    for name, layer in layers.items():
        down, up = (state[f"{name}.lora_{half}.{_NAME}.weight"].float() for half in "AB")
        base_weight = result[f"{name}.weight"]
        result[f"{name}.weight"] = (base_weight.float() + layer.scaling[_NAME] * (up @ down)).to(base_weight.dtype)
    return result


def commit(model: Model, path: str) -> str | None:
    """Return the commit of the model that was just loaded from the hub, for the adapter's config; None for a folder."""
    if paths.local(path) is not None:
        return None
    cached = try_to_load_from_cache(path, "config.json", revision=model.revision)
    return Path(cached).parent.name if isinstance(cached, str) else model.revision
