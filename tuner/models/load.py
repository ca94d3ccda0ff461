"""Load the tokenizer, the weights in the compute type or in 4 bits, and the adapter of a recipe.

It does not train, and it runs a model's own code only if this command trusts it (`recipes.trust`).
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations import apply_liger_kernel
from transformers.modeling_layers import GradientCheckpointingLayer

from tuner import assets, model_folder, paths
from tuner import vocabulary as vocabularies
from tuner.errors import Key, ModelError
from tuner.files import read_bytes
from tuner.machine.libraries import FLASH
from tuner.models import adapters, attention, compat, compat_experts, fused_lora, integrity, llava, mixers, vision
from tuner.models.arguments import LoadOptions, at, load_options
from tuner.models.made import made_once
from tuner.pretrained import explained
from tuner.progress import shown, tqdm_class, tqdm_hook
from tuner.recipes.schema import TEACHERS, Model, Quantization, RecipeConfig, four_bit_experts
from tuner.recipes.schema.architecture import VARLEN
from tuner.recipes.schema.objectives import Teacher
from tuner.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

CACHE = paths.cache(os.environ)  # effect: where made models are kept

TINY_WEIGHTS = "model.safetensors"
_TINY_VERSION, _TINY_SEED = 1, 0
_CACHE_FIX = "Set TUNER_CACHE to a writable folder with free space."

_UNPACKED = {"mxfp4": transformers.Mxfp4Config, "fp8": transformers.FineGrainedFP8Config}
"""Stored formats that transformers turns into 16-bit weights while it loads a checkpoint."""

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""The types of weights and arithmetic, by their names in recipes and flags."""


def pretrained_path(model: Model, *, weights: bool = True) -> str:
    """Return the model's folder or its id on the hub, for `from_pretrained`.

    The package's tiny model is made first, and so is a LLaVA of an LLM and a tower.

    Args:
        weights: False: the config and the tokenizer or processor are enough.

    Raises:
        ModelError: there is no such LLM or tower, or they do not fit.
        MachineError: the hub cannot be reached.
    """
    assert model.path is not None, "checked before the ranks start"
    path = model.path
    if path.startswith(assets.ASSET):
        path = str(make_tiny(Path(assets.asset(path)), CACHE))
    elif folder := paths.local(path):
        path = str(folder)
    if model.vision is None or llava.is_joined(path):
        return path
    with explained(path):
        return str(llava.materialize(model, path, CACHE, weights=weights))


def tokenizer_of(config: RecipeConfig, path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer to train with: the model's own, or that of the adapter that is trained further.

    `path` is the result of `pretrained_path` for the model. Errors as `load_tokenizer`.
    """
    adapter = config.adapter.path if config.adapter else None
    if adapter and (paths.expanded(adapter) / "tokenizer_config.json").is_file():
        folder = str(paths.expanded(adapter))
        return load_tokenizer(at(config.model, folder), folder)
    return load_tokenizer(config.model, path)


def load_tokenizer(model: Model, path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer, with the recipe's chat template if it names one, and its values for that template.

    Raises:
        ModelError: there is no tokenizer, or it needs remote code.
        RecipeError: the template does not use a name that has a value.
        MachineError: the hub cannot be reached.
    """
    with explained(path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **load_options(model))
    if model.chat_template:
        tokenizer.chat_template = assets.chat_template(model.chat_template)
    template = tokenizer.chat_template
    assets.check_defaults(
        template.get("default") if isinstance(template, dict) else template, model.chat_template_kwargs
    )
    tokenizer.chat_template = _with_values(template, model.chat_template_kwargs)
    vocabularies.let_pad(tokenizer, path)
    return tokenizer


def _with_values(
    template: str | dict[str, str] | None, values: Mapping[str, bool | float | str | None] | None
) -> str | dict[str, str] | None:
    """Return a tokenizer's chat template, or those that it has by name, with values for its names."""
    if isinstance(template, dict):
        return {name: assets.with_defaults(text, values) for name, text in template.items()}
    return template if template is None else assets.with_defaults(template, values)


def processor_of(config: RecipeConfig, path: str) -> ProcessorMixin:
    """Load the processor of a vision-language model; arguments as `tokenizer_of`.

    Raises:
        ModelError: there is no processor of images.
        MachineError: the hub cannot be reached.
    """
    with explained(path):
        return vision.load_processor(config.model, path, **load_options(config.model))


def load_model(
    config: RecipeConfig,
    path: str,
    dtype: torch.dtype,
    device: str,
    *,
    shards: bool,
    vocabulary: Vocabulary | None = None,
) -> PreTrainedModel:
    """Load the weights to train: with the adapter, the frozen layers and the score head that the recipe asks for.

    Args:
        path: The result of `pretrained_path`.
        dtype: The compute type of the run, for the weights and for arithmetic on 4-bit weights.
        device: 'cpu', or this rank's 'cuda:N'.
        shards: ZeRO-3 partitions the weights while they are loaded, so they are not put on a device here.
        vocabulary: The embeddings are checked for a row for each of its tokens; None leaves out this check.

    Raises:
        ModelError: there is no such model, it needs remote code, or the recipe does not fit it.
        MachineError: the hub cannot be reached.
    """
    model = _load_base(config, path, dtype, device, shards, vocabulary)
    if compat_experts.packed_in(model):
        four_bit_experts.refuse(config)
    model.train()
    if config.reads_images:
        if lora := config.model.vision_lora:
            adapters.add_to_tower(model, lora, config.randomness.seed)
        vision.freeze(model, config.model.freeze)
    trained = model
    if config.adapter:
        trained = adapters.with_adapter(model, config, path)
        if config.fuses_lora(shards=shards):
            fused_lora.fuse(trained)
    elif config.train_cfg.trainable_layers:
        _freeze_all_but(model, config.train_cfg.trainable_layers)
    if shards and config.adapter and mixers.mixers(model):
        # ZeRO-3 notices by the gradient of its input that a mixer's backward pass is over. Without one, as of the first
        # layer above frozen embeddings, it took back the mixer's weights after the first of several samples.
        model.enable_input_require_grads()
    if not config.model.remote_code:
        is_reentrant_in_trl = config.recomputes_reentrantly(shards=shards, has_experts=False)
        is_reentrant = config.recomputes_reentrantly(shards=shards, has_experts=compat_experts.has_experts(model))
        if is_reentrant_in_trl and not is_reentrant:
            let_routers_learn(model)
        limit_input_gradients(model, reads_images=config.reads_images, is_reentrant=is_reentrant)
    if isinstance(number := config.train_cfg.recomputed_layers, int):
        recompute_first(model, number)
    return trained


def limit_input_gradients(model: PreTrainedModel, *, reads_images: bool, is_reentrant: bool) -> None:
    """Let recomputation send gradients no further down than to the lowest trained weight.

    transformers 5.24 and TRL 1.16 call `enable_input_require_grads` for recomputation: all embeddings then require a
    gradient, those of patches too, so frozen layers and a frozen tower are computed again and differentiated for
    nothing. Only reentrant checkpoints need that, of the LLM: TRL takes them for an adapter at ZeRO-3.
    """
    if not is_reentrant:
        model.enable_input_require_grads = lambda: None
    elif reads_images and not vision.trains_tower(model):
        llm = model.get_decoder()
        model.enable_input_require_grads = llm.enable_input_require_grads
        model.disable_input_require_grads = llm.disable_input_require_grads


def let_routers_learn(model: PreTrainedModel) -> None:
    """Let recomputation, whenever it is switched on, take checkpoints that are not reentrant.

    TRL 1.16 takes reentrant ones for an adapter at ZeRO-3. Their first pass has no gradients, so the loss that keeps a
    router balanced, which is computed from what the layers hand over beside their outputs, would have none either.
    """
    enable = model.activation_checkpointing_enable
    model.activation_checkpointing_enable = lambda *_, **__: enable({"use_reentrant": False})


def recompute_first(model: PreTrainedModel, number: int) -> None:
    """Let recomputation, whenever it is switched on, leave out the decoder layers behind the first `number` ones.

    Layers of a vision tower stay as they are.

    Raises:
        ModelError: the layers of this kind of model are recomputed all or not at all.
    """
    layers = _layers(model)
    if layers is None or not all(isinstance(layer, GradientCheckpointingLayer) for layer in layers):
        message = f"{type(model).__name__} recomputes all of its layers or none"
        raise ModelError(message, where="train_cfg.recomputed_layers", fix=f"Use {Key('recomputed_layers', None)}.")
    enable = model.activation_checkpointing_enable

    def enable_first(*args: object, **options: object) -> None:
        enable(*args, **options)
        for layer in layers[number:]:
            layer.gradient_checkpointing = False

    model.activation_checkpointing_enable = enable_first


def load_reference(
    config: RecipeConfig,
    path: str,
    dtype: torch.dtype,
    device: str,
    *,
    shards: bool,
    vocabulary: Vocabulary | None = None,
) -> PreTrainedModel | None:
    """Load the frozen model that the model is compared with, a copy or its teacher; None if it needs none.

    With a new adapter the reference is the base model with the adapter switched off; with an adapter that is trained
    further it is TRL's frozen copy of the adapter. Arguments and errors as `load_model`; a teacher with another
    vocabulary than it must have is a ModelError.
    """
    objective = config.objective
    if teacher := objective.taught_by:
        bits, model = TEACHERS if teacher.bits == 4 else None, _teachers_model(config, teacher)
        path = pretrained_path(model)
        if vocabulary is not None and teacher.shares_vocabulary:
            vocabularies.check_same(vocabulary.ids, load_tokenizer(model, path).get_vocab(), path)
        taught = config.model_copy(update={"model": model, "quantization": bits, "adapter": None})
        return _load_base(taught, path, dtype, device, shards, None).requires_grad_(False)
    if not objective.loads_reference or config.adapter:
        return None
    return _load_base(config, path, dtype, device, shards, vocabulary).requires_grad_(False)


def teachers_tokenizer(config: RecipeConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the objective's teacher, with its own chat template. Errors as `load_tokenizer`.

    The recipe's values for names of the student's template count in it too, as far as it has these names: a teacher
    that thinks would not expect the answers of a student that does not.
    """
    assert config.objective.taught_by is not None, "it has a teacher"
    model = _teachers_model(config, config.objective.taught_by)
    tokenizer = load_tokenizer(model, pretrained_path(model))
    tokenizer.chat_template = _with_values(tokenizer.chat_template, config.model.chat_template_kwargs)
    return tokenizer


def _teachers_model(config: RecipeConfig, teacher: Teacher) -> Model:
    of_teacher = {"path": teacher.path, "revision": teacher.revision, "trust_remote_code": False, "remote_code": False}
    of_text = {"images": False, "vision": None, "freeze": (), "vision_lora": None}
    of_text |= {"chat_template": None, "chat_template_kwargs": None, "resize_embeddings": False}
    return config.model.model_copy(update={**of_teacher, **of_text})


def _load_base(
    config: RecipeConfig, path: str, dtype: torch.dtype, device: str, shards: bool, vocabulary: Vocabulary | None
) -> PreTrainedModel:
    """Load the model of a recipe without its adapter: quantized if the recipe says so, with a row for each token."""
    arguments: LoadOptions = {}
    _, stored_as = _stored_config(config.model, path)
    quantizes, adapts = config.quantization is not None, config.adapter is not None
    if stored_as and (refusal := model_folder.refusal_of_stored(path, stored_as, quantizes=quantizes, adapts=adapts)):
        raise refusal
    if stored_as in _UNPACKED:  # in fewer bits, as gpt-oss and DeepSeek-V3 are
        arguments["quantization_config"] = _UNPACKED[stored_as](dequantize=True)
    if config.quantization:
        not_quantized = vision.OUTSIDE_LLM if config.reads_images else None
        arguments["quantization_config"] = quantized(config.quantization, dtype, not_quantized)
        if device != "cpu" and not shards:
            arguments["device_map"] = {"": device}
    model = load_weights(config.model, path, dtype, scores=config.objective.facts.scores, **arguments)
    if config.model.use_liger_kernel is True:
        # TRL's head and ours compute the loss (worker/loss.py); Liger's loss would replace the forward that they use.
        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    if vocabulary is not None:
        integrity.fit_rows(model, vocabulary, config, path)
    model.config.use_cache = False
    return model


def load_weights(model: Model, path: str, dtype: torch.dtype, *, scores: bool, **arguments: Any) -> PreTrainedModel:
    """Load the unchanged weights of a folder or an id on the hub in the compute type.

    Args:
        model: The commit, and how attention is computed.
        path: The result of `pretrained_path`.
        dtype: The type of weights that are not quantized. What torchao has quantized keeps the type in its config.json.
        scores: Load a reward model: its head gives one score instead of logits.

    Raises:
        ModelError: there is no such model, a weight is missing or has no place in it, or it needs remote code.
        MachineError: the hub cannot be reached, or a package is missing.
    """
    stored, stored_as = _stored_config(model, path)
    if stored_as == "torchao":
        dtype = stored.dtype or dtype  # its products have the type of the weights that were quantized, and no other
    arguments |= {"dtype": dtype, **load_options(model)}
    if os.path.isdir(path):  # noqa: PTH112 (a name that is too long is not a folder, and not an error)
        arguments["use_safetensors"] = True  # old repositories on the hub have only pickles, which may hold code
    name = model.attn_implementation
    # That of a run on GPUs may not exist on a CPU.
    if name not in (None, "auto") and (name not in FLASH or torch.cuda.is_available()):
        # A tower has no samples of several lengths: each patch attends to all of its image.
        parts = ("text_config",) if name == VARLEN else _WITH_ATTENTION
        arguments["attn_implementation"] = dict.fromkeys(parts, name) if model.images is True else name
        attention.register()
    compat.offer_kernels()
    if torch.cuda.is_available():
        compat.repeat_heads_on_old_gpus(torch.cuda.get_device_capability())
    auto = auto_class(reads_images=model.images is True, scores=scores)
    if scores:
        arguments["num_labels"] = 1
    checked = compat.checked_tensors(partial(integrity.check_tensors, path))
    with explained(path), checked, compat.unexpected_at_zero3() as unexpected, shown(f"loading {path}"):
        transformers.utils.logging.set_tqdm_hook(tqdm_hook)
        loaded, report = auto.from_pretrained(path, output_loading_info=True, tqdm_class=tqdm_class(), **arguments)
    if compat.has_adapter(loaded):
        raise model_folder.beside_adapter(path)
    report["unexpected_keys"] |= unexpected
    integrity.check(loaded, report, path, _layers(loaded), new_head=scores and not is_scorer(loaded.config))
    if stored_as == "bitsandbytes":
        integrity.check_quantized(loaded, path)
    compat.keep_4_bits_as_stored(loaded)
    compat.forget_unused_conversions(loaded)
    compat.name_parts(loaded)
    if generation := getattr(loaded, "generation_config", None):  # a reward model has none
        compat.save_as_published(generation)
    mixers.keep_samples_apart(loaded)
    return loaded


def auto_class(*, reads_images: bool, scores: bool = False) -> Any:
    """Return the auto class of transformers for a model that scores texts, reads images, or does neither."""
    if scores:
        return transformers.AutoModelForSequenceClassification
    return transformers.AutoModelForImageTextToText if reads_images else transformers.AutoModelForCausalLM


def is_scorer(config: PreTrainedConfig) -> bool:
    return bool(config.architectures) and config.architectures[0].endswith("ForSequenceClassification")


_WITH_ATTENTION = ("", "text_config", "vision_config")
"""The whole of a vision-language model and two of its parts: what reads sound has no SDPA in transformers 5.24."""


def _stored_config(model: Model, path: str) -> tuple[PreTrainedConfig, str | None]:
    """Return the config of a checkpoint, and the format of its weights if they have fewer than 16 bits."""
    with explained(path):
        stored = transformers.AutoConfig.from_pretrained(path, **load_options(model))
    return stored, model_folder.stored_as(getattr(stored, "quantization_config", None))


def _freeze_all_but(model: PreTrainedModel, count: int) -> None:
    """Freeze all weights except the last `count` decoder layers and a score head."""
    layers = decoder_layers(model)
    if count > len(layers):
        message = f"trainable_layers = {count}, but the model has {len(layers)} decoder layers"
        raise ModelError(message, where="train_cfg.trainable_layers", fix=f"Use at most {len(layers)}.")
    model.requires_grad_(False)
    for module in (*layers[-count:], getattr(model, integrity.HEAD, None)):
        if module is not None:
            module.requires_grad_(True)


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the LLM's layers: its module list with the length that the config states, whatever its name.

    Raises:
        ModelError: there is no such list.
    """
    layers = _layers(model)
    if layers is None:
        message = f"{type(model).__name__} has no list of decoder layers with the length that its config says"
        raise ModelError(message, where="train_cfg.trainable_layers", fix="Use another method.")
    return layers


def _layers(model: PreTrainedModel) -> torch.nn.ModuleList | None:
    text = model.config.get_text_config()
    number = getattr(text, "num_hidden_layers", None)
    llm = model if text is model.config else model.get_decoder()  # a vision tower may have the same number of layers
    lists = (module for module in llm.modules() if isinstance(module, torch.nn.ModuleList))
    return next((module for module in lists if len(module) == number), None)


def quantized(
    block: Quantization, dtype: torch.dtype, not_quantized: list[str] | None = None
) -> transformers.BitsAndBytesConfig:
    """Return the argument of `from_pretrained` for a recipe's `quantization`, with arithmetic in the compute type.

    Args:
        not_quantized: The full names of modules that keep 16 bits; None: the output embeddings, as in transformers.
    """
    if block.bits == 8:
        return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=not_quantized)
    kind = compat_experts.ExpertsToo if block.experts else transformers.BitsAndBytesConfig
    return kind(
        load_in_4bit=True,
        llm_int8_skip_modules=not_quantized,
        bnb_4bit_quant_type=block.quant_type,
        bnb_4bit_use_double_quant=block.double_quant,
        bnb_4bit_compute_dtype=dtype,
        # Another storage type, unless it is the compute type, is cast by value and silently trains wrong weights.
        bnb_4bit_quant_storage=torch.uint8,
    )


def make_tiny(shipped: Path, cache: Path) -> Path:
    """Return the folder of a small model of the package below `cache`, made from the `shipped` files if it is missing.

    The folder's name holds a hash of these files, so changed files get new weights.

    Raises:
        DiskError: `cache` cannot be written.
    """

    def write(draft: Path) -> None:
        for file in shipped.iterdir():  # not copytree: its error has no number
            shutil.copyfile(file, draft / file.name)
        with compat.os_errors():
            save_file(_tiny_weights(draft), draft / TINY_WEIGHTS, metadata={"format": "pt"})

    return made_once(cache / f"tiny-v{_TINY_VERSION}-{_hash_of_files(shipped)}", write, _CACHE_FIX)


def _hash_of_files(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode() + read_bytes(path))
    return digest.hexdigest()[:16]


def _tiny_weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return fp32 tensors by name for the config in `folder`: norms 1, biases 0, else uniform noise around 0.

    Uniform noise needs only exact arithmetic; the logarithms for normal noise depend on the vector width. The library's
    own initialization is not used, because its order of draws changes between versions.
    """
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):
        model = auto_class(reads_images=compat.reads_images(config)).from_config(config, trust_remote_code=False)
    generator = torch.Generator().manual_seed(_TINY_SEED)
    width = config.get_text_config().initializer_range * 12**0.5

    def values(name: str, weight: torch.Tensor) -> torch.Tensor:
        if name.endswith("bias"):
            return torch.zeros(weight.shape)
        if weight.ndim == 1:
            return torch.ones(weight.shape)
        return (torch.rand(weight.shape, generator=generator, dtype=torch.float32, device="cpu") - 0.5) * width

    return {name: values(name, weight) for name, weight in sorted(model.named_parameters())}
