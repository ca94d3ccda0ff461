"""Loads a model to chat with, evaluate or serve: a run's result or checkpoint, a model, or an adapter on a base.

It generates no text and measures nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from peft import PeftModel, get_peft_model
from transformers import PreTrainedConfig, PreTrainedModel

from tuner import assets, paths
from tuner.data.image_encoder import ImageEncoder
from tuner.data.text_encoder import TextEncoder
from tuner.errors import ModelError, Option, UsageError
from tuner.machine.hardware import Hardware, decide_precision
from tuner.models import compat, compat_experts
from tuner.models.arguments import at, load_options
from tuner.models.load import (
    DTYPES,
    is_scorer,
    load_tokenizer,
    load_weights,
    pretrained_path,
    quantized,
)
from tuner.models.vision import load_processor
from tuner.pretrained import explained
from tuner.recipes.schema import Model, Quantization, RecipeConfig
from tuner.recipes.schema.objectives import OBJECTIVES
from tuner.results.base_model import base_of, check_facts, model_of
from tuner.results.peft_adapter import AS_IT_WAS, MISFITS, STEM, fit_rows, kind_of, read_config
from tuner.results.saved import SOURCE, SavedModel, find
from tuner.results.tensors import Stored
from tuner.worker.generation import ask_for_one_answer, stop_where_answers_end

_CARD = "generation_config.json"
NUM_TOKENS = 16


@dataclass(frozen=True)
class ModelSpec:
    """Weights on this disk or the hub, the adapter on them, and the recipe that trained them, if there is one.

    `model`: the model, or the base of an adapter; `path`: its argument for `from_pretrained`. `scores`: it scores
    answers and generates none. `context_tokens`: the context length; None if it is unknown.
    """

    description: str
    model: Model
    path: str
    scores: bool
    context_tokens: int | None
    adapter: Path | None = None
    recipe: RecipeConfig | None = None

    @property
    def objective(self) -> str:
        """The objective of its training; a guess for a model without a run."""
        if self.recipe:
            return self.recipe.objective.type
        objectives = ((name, block.facts) for name, block in OBJECTIVES.items())
        return next(
            name
            for name, objective_facts in objectives
            if objective_facts.scores == self.scores and (objective_facts.scores or objective_facts.packs)
        )


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with its encoder, compute type and bits per weight."""

    spec: ModelSpec
    model: PreTrainedModel | PeftModel
    encoder: TextEncoder
    dtype: torch.dtype
    bits: int

    @property
    def description(self) -> str:
        form = str(self.dtype).removeprefix("torch.") if self.bits == 16 else f"{self.bits} bits"
        return f"{self.spec.description}, in {form} on {self.model.device}"


def spec_of(name: str, adapter: str | None, *, trust_remote_code: bool = False) -> ModelSpec:
    """Return the model that `name` stands for, with the adapter in `adapter`. A checkpoint is verified first.

    Args:
        name: A run, a checkpoint, a model's folder, or an id on the hub.
        trust_remote_code: This command may run the code that comes with the model.

    Raises:
        UsageError: there are no weights.
        RunDirectoryError: there is nothing, the run never saved, or the checkpoint is not valid.
        ModelError: the adapter belongs to another base, or its base is missing.
    """
    place = None if name.startswith(assets.ASSET) else paths.local(name)
    saved = find(place, trust_remote_code=trust_remote_code) if place else None
    if adapter is None:
        is_adapter = saved is not None and saved.is_adapter
        return _adapted(saved, None) if saved and is_adapter else _whole(name, saved, trusted=trust_remote_code)
    if saved and saved.is_adapter:
        problem = f"{saved.description} is an adapter itself"
        raise UsageError(
            problem, where=Option("adapter"), fix=f"Give the base as {SOURCE}, before {Option('adapter')}."
        )
    adapter_model = find(paths.expanded(adapter), trust_remote_code=trust_remote_code)
    if not adapter_model.is_adapter:
        problem = f"{adapter_model.description} is a whole model, not an adapter"
        raise UsageError(problem, where=Option("adapter"), fix=f"Remove {Option('adapter')} and give it as {SOURCE}.")
    return _adapted(adapter_model, str(saved.folder) if saved else name)


def _whole(name: str, saved: SavedModel | None, *, trusted: bool) -> ModelSpec:
    recipe = saved.recipe() if saved else None
    model = model_of(str(saved.folder) if saved else name, recipe.model.revision if recipe else None, trusted)
    model = at(model, str(saved.folder)) if saved else model
    path = pretrained_path(model)
    config = _config(model, path)
    model = _with_images(model, config, recipe)
    scores = is_scorer(config)
    description = saved.description if saved else f"the model {name}"
    return ModelSpec(description, model, path, scores, _context(config), recipe=recipe)


def _adapted(saved: SavedModel, named_base: str | None) -> ModelSpec:
    recipe = saved.recipe()
    adapter = read_config(saved.folder)
    if adapter.is_prompt_learning:
        kind = f"{kind_of(adapter)}, which adds tokens before the prompt instead of changing weights"
        fix = "Use it with PEFT itself: tuner chat and eval support adapters that change weights."
        raise ModelError(f"{saved.description} are of {kind}", fix=fix)
    model = base_of(adapter, recipe, named_base, trusted=saved.trust_remote_code, flag=SOURCE)
    path = pretrained_path(model)
    folder = paths.local(path)
    if folder and not (folder / "config.json").is_file():
        problem = f"the base of {saved.description} is missing: {path!r} has no config.json"
        raise ModelError(problem, fix=f"Give its current place: BASE {Option('adapter', str(saved.folder))}.")
    config = _config(model, path)
    model = _with_images(model, config, recipe)
    check_facts(path, config, recipe, SOURCE)
    return ModelSpec(
        saved.description, model, path, adapter.task_type == "SEQ_CLS", _context(config), saved.folder, recipe
    )


def _with_images(model: Model, config: PreTrainedConfig, recipe: RecipeConfig | None) -> Model:
    """Return the block with `images` as in training; without a recipe a model with a vision tower reads images."""
    reads_images = recipe.reads_images if recipe else compat.reads_images(config)
    return model.model_copy(update={"images": reads_images})


def _config(model: Model, path: str) -> PreTrainedConfig:
    with explained(path, SOURCE, SOURCE):
        return transformers.AutoConfig.from_pretrained(path, **load_options(model))


def _context(config: PreTrainedConfig) -> int | None:
    context_tokens = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(context_tokens) if context_tokens else None


def load(spec: ModelSpec, hardware: Hardware, bits: int | None = None) -> LoadedModel:
    """Load the weights onto the GPUs of this machine, or the CPU, in the type that training would choose.

    Args:
        bits: 16, 8 or 4. None: as in training if the base was quantized, else 16.

    Raises:
        ModelError: there is no such model, or the adapter does not fit the model.
        MachineError: the hub cannot be reached, or a package is missing.
    """
    dtype, block = dtype_of(spec, hardware), quantization_of(spec, bits)
    model = load_frozen(spec.model, spec.path, dtype, hardware, block, scores=spec.scores)
    dtype = model.get_input_embeddings().weight.dtype  # the weights may keep one of their own
    encoder = encoder_of(spec)
    if spec.adapter:
        with unchanged_random_state():  # PEFT first draws random weights for the adapter
            model = with_adapter(model, spec)
    model.eval()
    model.config.use_cache = True  # training switches it off
    if not spec.scores:
        if spec.adapter and (spec.adapter / _CARD).is_file():
            with explained(str(spec.adapter), SOURCE):
                model.generation_config = transformers.GenerationConfig.from_pretrained(spec.adapter)
        ask_for_one_answer(model.generation_config)
        stop_where_answers_end(model.generation_config, encoder)
    return LoadedModel(spec, model, encoder, dtype, block.bits if block else 16)


def dtype_of(spec: ModelSpec, hardware: Hardware) -> torch.dtype:
    """Return the recipe's compute type if this machine has it, so that the loss equals that of the validation."""
    recipe_dtype = spec.recipe.optim_wrapper.dtype if spec.recipe else "auto"
    return DTYPES[
        decide_precision("auto" if recipe_dtype == "fp16" and not hardware.gpus else recipe_dtype, hardware).dtype
    ]


def load_frozen(
    model: Model, path: str, dtype: torch.dtype, hardware: Hardware, block: Quantization | None, *, scores: bool
) -> PreTrainedModel:
    """Load weights that are not trained. Arguments and errors as for `load` and `load_weights`."""
    arguments: dict[str, object] = {"quantization_config": quantized(block, dtype)} if block else {}
    if hardware.gpus:
        arguments["device_map"] = "auto"
    return load_weights(model, path, dtype, scores=scores, **arguments).requires_grad_(False)


def encoder_of(spec: ModelSpec) -> TextEncoder:
    """Return the encoder of the tokenizer that was saved with the adapter, else of the model's tokenizer or processor.

    Raises:
        ModelError: there is no tokenizer.
        MachineError: the hub cannot be reached.
    """
    if spec.model.images is True:
        with explained(spec.path, SOURCE):
            processor = load_processor(spec.model, spec.path, **load_options(spec.model))
        return ImageEncoder.of(processor, spec.recipe.train_dataloader.dataset if spec.recipe else None)
    if spec.adapter and (spec.adapter / "tokenizer_config.json").is_file():
        folder = str(spec.adapter)
        return TextEncoder(load_tokenizer(at(spec.model, folder), folder))
    return TextEncoder(load_tokenizer(spec.model, spec.path))


def quantization_of(spec: ModelSpec, bits: int | None) -> Quantization | None:
    """Return how to quantize the base: with `bits`, else as in training. None: 16 bits.

    Raises:
        UsageError: `bits` is not 4, 8 or 16.
    """
    trained = spec.recipe.quantization if spec.recipe and spec.adapter else None
    if bits is None or (trained and trained.bits == bits):
        return trained
    if bits not in (4, 8, 16):
        raise UsageError(f"bits = {bits!r}: weights have 4, 8 or 16", where="bits", fix="Take one of them.")
    return None if bits == 16 else Quantization.model_validate({"bits": bits, "experts": True})


def with_adapter(model: PreTrainedModel, spec: ModelSpec) -> PeftModel:
    """Return the base with the trained adapter, after checking that every tensor of the adapter has a place in it.

    Raises:
        ModelError: the adapter belongs to another base, or is damaged.
    """
    assert spec.adapter is not None
    stored = Stored(spec.adapter, STEM)  # reports damaged files
    config = read_config(spec.adapter)
    config.inference_mode, config.base_model_name_or_path = True, None  # its place may differ from that in training
    fit_rows(model, stored)
    try:
        with compat_experts.open_to_peft(model):
            adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
            report = adapted.load_adapter(str(spec.adapter), "default", autocast_adapter_dtype=False)
    except MISFITS as error:
        raise _misfit(spec, str(error).strip().splitlines()[-1].strip()) from error
    unexpected = [name for name in report.unexpected_keys if not name.endswith(AS_IT_WAS)]
    if unexpected:
        raise _misfit(spec, f"the model has no {unexpected[0]}")
    if report.missing_keys:
        raise _misfit(spec, f"it lacks {report.missing_keys[0]}")
    return adapted


def logits_of_some(model: PreTrainedModel | PeftModel) -> torch.Tensor:
    """Return the logits of `NUM_TOKENS` tokens of the vocabulary in fp32, to compare one model with another."""
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.linspace(0, rows - 1, NUM_TOKENS).long()[None].to(model.device)
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(input_ids=ids, use_cache=False).logits.float().cpu()
    return logits


def _misfit(spec: ModelSpec, problem: str) -> ModelError:
    fix = f"Give the base that it was trained on: BASE {Option('adapter', 'FOLDER')}."
    return ModelError(f"the adapter {spec.adapter} does not fit {spec.path!r}: {problem}", fix=fix)


def unchanged_random_state() -> AbstractContextManager[None]:
    """Restore the random state of the CPU and of every GPU at the end of a block."""
    restored: AbstractContextManager[None] = torch.random.fork_rng(range(torch.cuda.device_count()))
    return restored
