"""An adapter on the model that is trained: a new one, or a trained one to go on with.

It loads no base model; `load` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from tuner import paths
from tuner.errors import ModelError
from tuner.recipes.schema import Model, RecipeConfig


def with_adapter(model: Any, config: RecipeConfig, path: str) -> Any:
    """Return the model with the recipe's adapter on it: a new one, or the trained one that it names.

    Raises:
        ModelError: it does not fit the model.
    """
    adapter = config.adapter
    assert adapter is not None
    lora = LoraConfig(
        # PEFT trains the new head of a model that scores, and saves it with the adapter.
        task_type="SEQ_CLS" if config.objective.facts.scores else "CAUSAL_LM",
        r=adapter.r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=adapter.lora_dropout,
        target_modules=list(adapter.target_modules)
        if isinstance(adapter.target_modules, tuple)
        else adapter.target_modules,
        use_dora=adapter.use_dora,
        use_rslora=adapter.use_rslora,
        modules_to_save=adapter.modules_to_save,
        init_lora_weights=adapter.init_lora_weights,
        bias="none",
    )
    # Adapters in the compute type at every ZeRO level; PEFT's fp32 default breaks ZeRO-3 and doubles activations.
    try:
        if adapter.path:
            adapted = _continued(model, str(paths.expanded(adapter.path)), adapter.lora_dropout)
        else:
            torch.manual_seed(config.randomness.seed)  # pissa_niter_N begins with chance, and anew where a run goes on
            adapted = get_peft_model(model, lora, revision=commit(config.model, path), autocast_adapter_dtype=False)
    except ValueError as error:
        raise ModelError(f"the adapter does not fit this model: {error}", where="adapter.target_modules") from error
    if config.objective.facts.has_reference and isinstance(adapted.get_output_embeddings(), BaseTunerLayer):
        what = f"objective {config.objective.type} cannot train an adapter on the output embeddings"
        raise ModelError(what, where="adapter.target_modules", fix="Remove 'lm_head' from it.")
    if adapter.changes_base:
        _save_for_base(adapted, model.dtype)
    return adapted


def _save_for_base(model: Any, dtype: torch.dtype) -> None:
    """Save the adapter as one for the base that was loaded, of which PiSSA and OLoRA have taken a part out.

    W - B0 A0 + B A is W + [B, -B0] [A; A0]: twice the rank, and the same scale. PEFT 0.21 does this by loading the
    beginning as a second adapter, which ZeRO-3's sharded weights do not take.
    """
    for name, weight in model.named_parameters():
        if "lora_" in name:
            weight.data = weight.data.to(dtype)  # PEFT leaves its decompositions in fp32
    began = {name: weight.detach().clone() for name, weight in get_peft_model_state_dict(model).items()}

    def save(folder: Any, **named: Any) -> None:
        type(model).save_pretrained(model, folder, **named)
        stored, saved = load_file(Path(folder) / paths.TENSORS), PeftConfig.from_pretrained(folder)
        for name, first in began.items():
            half = first.to("cpu", stored[name].dtype)
            # A layer that is narrower than the rank begins with fewer: zeros make up for them.
            if ".lora_A." in name:
                stored[name] = pad(torch.cat([stored[name], half], dim=0), (0, 0, 0, 2 * saved.r - 2 * half.shape[0]))
            elif ".lora_B." in name:
                stored[name] = pad(torch.cat([stored[name], -half], dim=1), (0, 2 * saved.r - 2 * half.shape[1]))
        save_file(stored, Path(folder) / paths.TENSORS, metadata={"format": "pt"})
        saved.lora_alpha *= 2**0.5 if saved.use_rslora else 2
        saved.r, saved.init_lora_weights = 2 * saved.r, True
        saved.save_pretrained(folder)

    model.save_pretrained = save


def _continued(model: Any, folder: str, dropout: float) -> Any:
    """Return the model with the trained adapter in a folder on it, to be trained further.

    Raises:
        ModelError: a weight of it has no place in the model, or the other way round.
    """
    saved = PeftConfig.from_pretrained(folder)
    saved.lora_dropout, saved.inference_mode = dropout, False
    try:
        adapted = PeftModel.from_pretrained(
            model, folder, is_trainable=True, config=saved, autocast_adapter_dtype=False, torch_device="cpu"
        )
    except (RuntimeError, SafetensorError) as error:  # of shapes, and of files that are cut off
        told = " ".join(str(error).split())
        raise ModelError(f"the adapter in {folder!r} does not fit this model: {told}", where=paths.ADAPTED) from error
    with safe_open(paths.expanded(folder) / paths.TENSORS, "pt") as stored:
        held = set(stored.keys())
    if lacking := sorted(get_peft_model_state_dict(adapted, save_embedding_layers=False).keys() - held):
        what = f"the adapter in {folder!r} lacks {lacking[0]}, which this model needs"
        raise ModelError(what, where=paths.ADAPTED, fix="Give the model that it was trained on: --model BASE.")
    return adapted


def commit(model: Model, path: str) -> str | None:
    """Return the commit of what was just loaded from the hub, which an adapter records; None for a folder."""
    if paths.local(path) is not None:
        return None
    found = try_to_load_from_cache(path, "config.json", revision=model.revision)
    return Path(found).parent.name if isinstance(found, str) else model.revision
