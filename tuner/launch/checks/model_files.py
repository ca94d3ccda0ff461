"""The model of a run: an architecture that transformers has, complete weights, a context that is long enough.

It reads small files and the first bytes of large files; it loads no model and asks no hub.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from tuner import assets, model_folder, paths, vocabulary
from tuner import remote_code as codes
from tuner.errors import Key, ModelError, did_you_mean
from tuner.files import open_regular, read_json_object, read_text
from tuner.fit.families import FAMILIES
from tuner.fit.parameters import adaptable_layers, built, has_formula
from tuner.launch.checks import Finding
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import libraries
from tuner.recipes import catalog, starting_weights, trust
from tuner.recipes.model_facts import folder_of, read_type, runs_own_code
from tuner.recipes.schema import Model, RecipeConfig, unlearned_layers
from tuner.recipes.schema.architecture import NOT_BEHIND_PADDING, NOT_ON_IMAGES, Architecture, is_untried
from tuner.recipes.schema.expert_parallel import DIVIDED_BY
from tuner.recipes.schema.long_context import SHARED_BY
from tuner.recipes.schema.objectives import OBJECTIVES, facts_of, takes_images
from tuner.recipes.schema.tensor_parallel import SPLIT_BY
from tuner.vocabulary import TEACHER
from tuner.zero.config import expert_ranks

OWN = frozenset({"internlm", "internlm2", "internlm3"})
"""Types that tuner.models registers itself."""
_WHERE = "model.path"
_CLIPS = ("clip", "clip_vision_model")
_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = ("model.safetensors", _INDEXES[0], "pytorch_model.bin", _INDEXES[1])
"""In the order in which transformers looks for them."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LFS, _POINTS = b"version https://git-lfs", "is a Git LFS pointer, not the file itself (git lfs pull)"
_MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file, by its format: https://github.com/huggingface/safetensors, "Format"."""


def local_folder(path: str | None) -> Path | None:
    """Return the folder that holds a model, or None for an id on the hub and for the package's own model."""
    return None if path is None or path.startswith(assets.ASSET) else paths.local(path)


def architecture(run: ResolvedRun) -> Iterator[Finding]:
    """Find a config.json that is not a JSON object, and a model_type without a class in the installed transformers."""
    model_path = local_folder(run.recipe.config.model.path)
    if model_path is None:
        yield from _stored_in_fewer_bits(run.recipe.config, _config_of_hub(run.recipe.config.model))
        return
    if paths.is_folder(model_path) and (problem := model_folder.problem_of(model_path)):
        yield ModelError(problem, where=_WHERE, fix="Use a folder written by save_pretrained.")
        return
    config = read_json_object(model_path / "config.json")
    if not config:
        problem = f"{str(model_path / 'config.json')!r} is not a JSON object, or is empty"
        yield ModelError(problem, where=_WHERE, fix="Download it again.")
        return
    recipe = run.recipe.config
    if not recipe.objective.facts.scores and (error := only_scores(model_path, _WHERE)):
        yield error
        return
    yield from _stored_in_fewer_bits(recipe, config)
    kind = read_type(model_path) if recipe.model.vision else config.get("model_type")
    # A LLaVA made of two folders has the LLM's type here.
    known = known_types(scores=recipe.objective.facts.scores, images=recipe.reads_images and not recipe.model.vision)
    if kind in known or not known or recipe.model.trust_remote_code:
        return
    if "auto_map" in config:
        fix = codes.advice(recipe.model.path)
        yield ModelError(f"model_type {kind!r} needs remote code", where=_WHERE, fix=fix)
    elif not recipe.reads_images and kind in known_types(scores=False, images=True):
        yield _of_images_alone(recipe, str(kind))
    elif recipe.objective.facts.scores and kind in known_types(scores=False, images=False):
        problem = f"transformers has no model of model_type {kind!r} that scores texts, but one that writes them"
        yield ModelError(problem, where=_WHERE, fix="Choose a model of another type for the rewards.")
    else:
        hint = did_you_mean(str(kind), known) or "A newer transformers may support it."
        task = "vision-language" if recipe.reads_images else "language"
        yield ModelError(f"transformers has no {task} model of model_type {kind!r}", where=_WHERE, fix=hint)


def _config_of_hub(model: Model) -> Mapping[str, Any]:
    """Return the config.json of a model on the hub, as far as it is known: from the hub's cache, or as published."""
    cached_folder = folder_of(model.path, model.revision) if model.path else None
    if cached_folder:
        return model_folder.config_of(cached_folder)
    return {"quantization_config": {"quant_method": model_folder.PUBLISHED_IN.get(str(model.path))}}


def _stored_in_fewer_bits(recipe: RecipeConfig, config: Mapping[str, Any]) -> Iterator[ModelError]:
    """Yield an error about weights in fewer than 16 bits that cannot be trained, or that transformers does not know."""
    method = model_folder.stored_as(config.get("quantization_config"))
    quantizes, adapts = recipe.quantization is not None, recipe.adapter is not None
    path = str(recipe.model.path)
    if refusal := model_folder.refusal_of_stored(path, method, quantizes=quantizes, adapts=adapts):
        yield refusal
    elif method and (known := _transformers_quantizers()) and method not in known:
        message = f"transformers has no format of weights called {method!r}"
        fix = did_you_mean(method, known) or "A newer transformers may have it, or use a 16-bit copy of the model."
        yield ModelError(message, where=_WHERE, fix=fix)


def _of_images_alone(recipe: RecipeConfig, kind: str) -> ModelError:
    """Return the error of a vision-language model that is trained on text, if its LLM has no class of its own."""
    problem = f"transformers has no class for the LLM alone of model_type {kind!r}"
    if takes_images(recipe.objective.type):
        return ModelError(problem, where=_WHERE, fix="Remove model.images=False, or use another model.")
    image_objectives = " or ".join(filter(takes_images, OBJECTIVES))
    message = f"{problem}, and objective {recipe.objective.type!r} trains on text alone"
    return ModelError(message, where=_WHERE, fix=f"Train it with objective {image_objectives}, or use a model of text.")


def remote_code(run: ResolvedRun) -> Iterator[Finding]:
    """Report the code of the model that this start trusts: its files and their hash."""
    if code := trust.check_bound(run.recipe.config):
        yield f"This runs {code}."


def only_scores(model_path: Path, where: str) -> ModelError | None:
    """Return an error if the model in a folder is a reward model, which has no head that writes tokens."""
    classes = read_json_object(model_path / "config.json").get("architectures")
    names = map(str, classes if isinstance(classes, list) else ())
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return None
    problem = f"{str(model_path)!r} is a reward model: it scores answers and cannot write any"
    return ModelError(problem, where=where, fix="Give the model that it was trained from.")


def weights(run: ResolvedRun) -> Iterator[Finding]:
    """Find weights that are missing or cut off: shards of an index, ends of files, pointers of Git LFS."""
    model_path = local_folder(run.recipe.config.model.path)
    if model_path is None:
        return
    config = run.recipe.config
    if _weight_files(model_path) and paths.exists(model_path / paths.ADAPTER):
        yield model_folder.beside_adapter(str(model_path))
        return
    if config.model.vision:
        yield from _pickles(_weight_files(model_path), config, _WHERE)
    lacking = list(missing_weights(model_path, pickled=config.model.vision is not None))
    architecture = config.architecture
    yield from lacking or (missing_layers(model_path, architecture.num_hidden_layers) if architecture else ())


def tower(run: ResolvedRun) -> Iterator[Finding]:
    """Find a tower, to be joined to the LLM, that is no CLIP or lacks files; a projector that is new; a vain rate."""
    config = run.recipe.config
    model, adapter = config.model, config.adapter
    vision = model.vision
    is_frozen = not (adapter.vision or adapter.modules_to_save) if adapter else "projector" in model.freeze
    if config.optim_wrapper.optimizer.projector_lr and is_frozen:
        trained = "With an adapter, adapter.vision=True trains it" if adapter else "Take it out of model.freeze"
        yield f"optim_wrapper.optimizer.projector_lr has no effect: the projector is frozen. {trained}."
    if vision and vision.projector is None and is_frozen:
        trained = "adapter.modules_to_save=['multi_modal_projector']" if adapter else "model.freeze without 'projector'"
        alternative = f"take the projector of a run: {Key('model.vision.projector', 'RUN')}"
        yield f"the projector is new and frozen, so its weights stay random. Train it with {trained}, or {alternative}."
    elif vision and vision.projector is None and "language" not in model.freeze:
        first = "LLaVA first trains the projector alone (docs/vision.md)"
        then = f"take the projector of such a run: {Key('model.vision.projector', 'RUN')}"
        yield f"the projector is new, and the LLM learns with it from the first step. {first}; {then}."
    if vision and vision.projector:
        yield from _pickles(_files_of_projector(paths.expanded(vision.projector)), config, "model.vision.projector")
    model_path = paths.local(vision.path) if vision else None
    if model_path is None:
        return
    where, kind = "model.vision.path", read_json_object(model_path / "config.json").get("model_type")
    if kind not in _CLIPS:
        message = f"{str(model_path)!r} is of model_type {kind!r}, and a LLaVA reads images with a CLIP"
        yield ModelError(message, where=where, fix="Use a CLIP model, such as openai/clip-vit-large-patch14-336.")
        return
    files = _weight_files(model_path)
    if not files:
        yield ModelError(f"{str(model_path)!r} holds no weights", where=where, fix="Copy it again with all its files.")
    yield from _pickles(files, config, where)
    for file in files:
        if problem := _cut_off(file):
            yield ModelError(f"{file} {problem}", where=where, fix="Copy it again.")
    if not any((model_path / name).is_file() for name in _PROCESSORS):
        message = f"{str(model_path)!r} has no preprocessor_config.json, which says how images become pixels"
        yield ModelError(message, where=where, fix="Copy it again with all its files.")


def _files_of_projector(model_path: Path) -> list[Path]:
    if not paths.is_folder(model_path):
        return [model_path]
    every = (*model_path.iterdir(), *model_path.glob("final/*"))
    files = sorted(file for file in every if file.suffix in codes.WEIGHTS)
    return [file for file in files if file.suffix == ".safetensors"] or files


def _pickles(files: Sequence[Path], config: RecipeConfig, where: str) -> Iterator[ModelError]:
    """Yield an error if files of a LLaVA to be made are pickles, and the user does not trust them."""
    pickle = next((file for file in files if file.suffix in codes.PICKLES or ".bin.index" in file.name), None)
    if pickle and not (config.model.trust_remote_code or codes.is_published(pickle)):
        yield codes.untrusted_pickles(str(pickle), where)


def missing_weights(model_path: Path, where: str = _WHERE, *, pickled: bool = False) -> Iterator[ModelError]:
    """Yield errors about missing or truncated weights in a model's folder, and unless they may be, pickled ones."""
    files = _weight_files(model_path)
    if not files:
        adapter = (model_path / "adapter_config.json").exists()
        message = f"{str(model_path)!r} holds {'an adapter and no base model' if adapter else 'no weights'}"
        fix = "Give a folder with model.safetensors, or with an index and its shards."
        yield ModelError(message, where=where, fix=fix)
    pickle = next((file for file in files if file.name.endswith((".bin", ".bin.index.json"))), None)
    if pickle and not pickled:
        pickles = f"{str(model_path)!r} holds its weights as pickles ({pickle.name})"
        message = f"{pickles}, which can run code; tuner loads only safetensors"
        fix = "Use a revision of the model with safetensors, or convert it: load and save it once with transformers."
        yield ModelError(message, where=where, fix=fix)
    for file in files:
        if problem := _cut_off(file):
            yield ModelError(f"{file} {problem}", where=where, fix="Download the model again.")


def are_here(model_path: Path) -> bool:
    """Return whether a folder of the hub's cache holds all weights; a start downloads those that are missing."""
    files = _weight_files(model_path)
    return bool(files) and not any(map(_cut_off, files))


def missing_layers(model_path: Path, num_layers: int) -> Iterator[ModelError]:
    """Yield an error for a tensor of the index, a decoder layer, or a tensor of one expert, that no file holds.

    A rank checks every name when it loads the weights, also where names have no layer numbers. But transformers merges
    the tensors of a layer's experts first, and does not say which one it lacks.
    """
    names = {file: set(_safetensors_header(file) or ()) for file in _weight_files(model_path)}
    for name, file in sorted(_index(model_path).items()):
        if name not in names.get(model_path / file, ()):
            message = f"{model_path / file} lacks {name}, which the index lists"
            yield ModelError(message, where=_WHERE, fix="Download the model again.")
            return
    numbers = {
        int(part) for in_file in names.values() for name in in_file for part in name.split(".") if part.isdecimal()
    }
    lacking = sorted(set(range(num_layers)) - numbers)
    if lacking and 0 in numbers:
        layers = f"layer {lacking[0]}, and its config.json has {num_layers} layers"
        message = f"{str(model_path)!r} has no weights for {layers}"
        yield ModelError(message, where=_WHERE, fix="Download the model again, with all its files.")
        return
    if of_expert := _lacking_expert(chain(*names.values())):
        yield ModelError(f"{str(model_path)!r} lacks {of_expert}", where=_WHERE, fix="Download the model again.")


def _lacking_expert(names: Iterable[str]) -> str | None:
    """Return the name of a weight of an expert that another expert of the same layer has."""
    numbers: dict[str, dict[str, set[int]]] = {}
    for match in filter(None, map(_OF_EXPERT.fullmatch, names)):
        numbers.setdefault(match[1], {}).setdefault(match[3], set()).add(int(match[2]))
    for experts, of_weights in sorted(numbers.items()):
        of_layer = set[int]().union(*of_weights.values())
        for weight, those in sorted(of_weights.items()):
            if of_layer - those:
                return f"{experts}{min(of_layer - those)}{weight}"
    return None


_OF_EXPERT = re.compile(r"(.+\.experts\.)(\d{1,6})(\..+\.weight)")
_OTHER_MODULE = re.compile(
    r"(?:\w+_)?(?:layer_?)?norm\d*|ln_\w+|act|act_fn|rotary_emb|self_attn|self_attention|attn|attention|mlp|layers|model"
    r"|transformer|\d+"
)
"""The names of norms, activations and modules that hold others."""
_OTHER_PATHS = ("model.norm", *(f"model.layers.0{module}" for module in ("", ".input_layernorm", ".mlp", ".self_attn")))
"""Such modules in most families, for regular expressions."""


def adapted_layers(run: ResolvedRun) -> Iterator[Finding]:
    """Find names in adapter.target_modules that are no layers of the model, or are its head, which no loss reaches.

    PEFT refuses unknown names only if it knows no name at all. It refuses modules that it cannot adapt once the model
    is loaded.
    """
    config, where = run.recipe.config, "adapter.target_modules"
    names = config.adapter.target_modules if config.adapter and not config.adapter.path else ""
    head = _head(config.architecture)
    if config.objective.facts.reads_head and _targets(names, head):
        yield vocabulary.untrained_head(config.objective.type, head)
        return
    if not_adaptable := _not_adaptable(names, config.architecture):
        listed = ", ".join(map(repr, not_adaptable))
        problem = f"an adapter is for linear layers and embeddings, and {listed} is another module"
        fix = "Name the layers in it, such as q_proj or up_proj; adapter.modules_to_save trains other modules whole."
        yield ModelError(problem, where=where, fix=fix)
        return
    if config.architecture is None or not has_formula(config.architecture):
        return
    model = built(config.architecture)
    layers = [linear.name for linear in (*model.kinds, model.head)]
    if refusal := unlearned_layers.refusal(names, layers):
        yield refusal
    if isinstance(names, str):
        return
    layer_names = sorted(adaptable_layers(config.architecture))
    unknown = [name for name in names if name.rpartition(".")[2] not in layer_names]
    if not unknown or config.reads_images:
        return
    listed = ", ".join(map(repr, unknown))
    fix = did_you_mean(unknown[0], layer_names) or f"Its layers: {', '.join(layer_names)}."
    if len(unknown) == len(names):
        yield ModelError(f"the model has no layer {listed}", where=where, fix=fix)
    else:
        yield f"{where}: the model has no layer {listed}, which gets no adapter. {fix}"


def _not_adaptable(names: str | Sequence[str], architecture: Architecture | None) -> list[str]:
    """Return the names of modules that PEFT cannot adapt, or the expression if it means one."""
    if isinstance(names, str):
        return [names] if names != "all-linear" and any(re.fullmatch(names, path) for path in _OTHER_PATHS) else []
    layer_names = adaptable_layers(architecture) if architecture and has_formula(architecture) else frozenset[str]()
    lasts = [(name, name.rpartition(".")[2]) for name in names]
    return [name for name, last in lasts if last not in layer_names and _OTHER_MODULE.fullmatch(last)]


def _head(architecture: Architecture | None) -> str:
    """Return the name of the output embeddings; most families have the one that is assumed of an unknown family."""
    return built(architecture).head.name if architecture and has_formula(architecture) else "lm_head"


def _targets(names: str | Sequence[str], layer: str) -> bool:
    """Return whether PEFT puts an adapter on a layer outside the decoder: by an expression, or by the end of a name."""
    if isinstance(names, str):
        try:
            return names != "all-linear" and re.fullmatch(names, layer) is not None
        except re.error:
            return False  # PEFT says what is wrong with it
    return any(f".{layer}".endswith(f".{name}") for name in names)


def tokens(run: ResolvedRun) -> Iterator[Finding]:
    """Find a tokenizer that was not downloaded, or that has more tokens than the embedding has rows.

    It reads tokenizer.json; ranks check others.
    """
    model_path, config = local_folder(run.recipe.config.model.path), run.recipe.config
    if model_path and (pointer := next(filter(_is_pointer, map(model_path.joinpath, _TOKENIZERS)), None)):
        yield ModelError(f"{pointer} {_POINTS}", where=_WHERE, fix="Download the model again.")
        return
    if model_path is None or config.architecture is None:
        return
    architecture, template = config.architecture, config.model.chat_template
    tokenizer = vocabulary.read_vocabulary(model_path, catalog.chat_template(template) if template else None)
    last = tokenizer.last if tokenizer else None
    if last is None or last[1] < architecture.vocab_size:
        return
    if not config.model.resize_embeddings:
        yield vocabulary.too_few_rows(*last, architecture.vocab_size, str(model_path))
    elif config.train_cfg.trainable_layers or config.adapter:
        trained = config.adapter.modules_to_save or () if config.adapter else ()
        lacking = tuple(name for name in _embeddings(architecture, config.objective.type) if name not in trained)
        if lacking:
            yield vocabulary.untrained_rows(lacking, adapter=config.adapter is not None)


def chat_template(run: ResolvedRun) -> Iterator[Finding]:
    """Find a tokenizer without a chat template, which conversations need, or with one that lacks a name of the recipe.

    Plain text needs none. Of a template that the recipe names, `recipes` knows.
    """
    config = run.recipe.config
    model_path = starting_weights.tokenizer_folder(config.model_dump()) if local_folder(config.model.path) else None
    if model_path is None or config.model.chat_template or config.objective.facts.rows == "texts":
        return
    template = starting_weights.chat_template_of(model_path)
    if template is not None:
        assets.check_defaults(template, config.model.chat_template_kwargs)
    elif paths.is_file(model_path / "tokenizer_config.json"):
        message = f"{str(model_path)!r} has no chat template, as is usual for base models"
        fix = f"Set one: {Key('model.chat_template', 'chatml')}, or a path to a .jinja file."
        yield ModelError(message, where="model.chat_template", fix=fix)


def _embeddings(architecture: Architecture, objective: str) -> tuple[str, ...]:
    """Return a family's names for the input and the output embeddings; a reward model has no output embedding."""
    if not has_formula(architecture):
        return ()
    model = built(architecture)
    return (model.family.embeddings, *(() if facts_of(objective).scores else (model.head.name,)))


def context(run: ResolvedRun) -> Iterator[Finding]:
    """Find a max_length beyond the model's context; a warning, because no sample may be that long."""
    architecture, model_path = run.recipe.config.architecture, local_folder(run.recipe.config.model.path)
    if architecture is None:
        return
    longest, where = max(
        (loader.dataset.max_length, f"{key}.dataset.max_length") for key, loader in run.recipe.config.loaders.items()
    )
    written = read_json_object(model_path / "config.json") if model_path else {}
    limit = int(architecture.max_position_embeddings * _rope_factor(written))
    if longest <= limit:
        return
    family = FAMILIES.get(architecture.model_type)
    if family and family.positions is not None:
        then = f"A longer sample ends the run, because the model has no more positions. Use {Key(where, limit)}."
    else:
        then = f"The model was not trained on positions beyond {limit}; lower max_length, or enable RoPE scaling."
    yield f"{where} = {longest} is more than the model's context of {limit} tokens. {then}"


def packed(run: ResolvedRun) -> Iterator[Finding]:
    """Find packed rows for a model with remote code, which may let samples attend to each other; ranks refuse them."""
    config = run.recipe.config
    if not config.model.remote_code or not config.objective.facts.packs:
        return
    for key, loader in config.loaders.items():
        if loader.dataset.packing:
            where = f"{key}.dataset.packing"
            message = "packed samples may attend to each other in a model with remote code"
            yield ModelError(message, where=where, fix=f"Pad them instead: {Key(where, False)}.")


def prompts(run: ResolvedRun) -> Iterator[Finding]:
    """Find a model or a teacher that computes prompts otherwise behind padding, or may: one of a type no test knows."""
    config = run.recipe.config
    if not config.objective.facts.generates:
        return
    taught_by = config.objective.taught_by
    models = [(_WHERE, config.model.path, config.model.revision, config.architecture)]
    models += [(TEACHER, taught_by.path, taught_by.revision, config.teacher_architecture)] if taught_by else []
    for where, path, revision, model_architecture in models:
        cached_folder = folder_of(path, revision) if path and model_architecture is None else None
        kind = (
            model_architecture.model_type if model_architecture else read_type(cached_folder) if cached_folder else None
        )
        if kind in NOT_BEHIND_PADDING:
            padding = "computes prompts otherwise behind padding, and prompts of several lengths have some"
            fix = "Use a model of another type, or train on answers of rows."
            yield ModelError(f"a {kind} model {padding}", where=where, fix=fix)
        elif kind and is_untried(kind):
            yield f"no test knows whether {path}, a {kind} model, computes prompts behind padding as it does alone."


def shared(run: ResolvedRun) -> Iterator[Finding]:
    """Find ranks that would share a model, or its samples, where code computes it that came with it."""
    config = run.recipe.config
    if not runs_own_code(vars(config.model), config.architecture.model_type if config.architecture else ""):
        return
    train_cfg, divided = config.train_cfg, expert_ranks(run.final.config)
    shares = ((SHARED_BY, train_cfg.sequence_parallel_size), (SPLIT_BY, train_cfg.autotp_size), (DIVIDED_BY, divided))
    for where, size in shares:
        if size > 1:
            problem = f"{where} = {size} is not tested with code that comes with a model"
            yield ModelError(problem, where=where, fix="Set it to 1.")


def images(run: ResolvedRun) -> Iterator[Finding]:
    """Find a model that is to read images without a vision tower, or without the settings of its processor."""
    model_path, config = local_folder(run.recipe.config.model.path), run.recipe.config
    if not config.reads_images or config.model.vision:
        return
    tower = config.architecture.vision_config if config.architecture else None
    has_tower, kind = config.architecture is None or tower is not None, tower.model_type if tower else None
    if model_path is not None:
        written = read_json_object(model_path / "config.json")
        has_tower, kind = isinstance(written.get("vision_config"), dict), written.get("model_type")
    where, on_text = "model.images", Key("model.images", False)
    if message := NOT_ON_IMAGES.get(str(kind)):
        yield ModelError(message, where=where, fix=f"Train its LLM alone on text: {on_text}.")
    elif not has_tower:
        message = f"{config.model.path!r} has no vision tower, so it reads no images"
        yield ModelError(message, where=where, fix=f"Use a vision-language model, or {on_text}.")
    elif model_path is not None and not any((model_path / name).is_file() for name in _PROCESSORS):
        message = f"{str(model_path)!r} has none of {' and '.join(_PROCESSORS)}, which say how images become pixels"
        yield ModelError(message, where=_WHERE, fix="Copy the model again with all its files.")


def kernels(run: ResolvedRun) -> Iterator[Finding]:
    """Find missing packages of GPU kernels: without them the model trains the same, but slower."""
    architecture, model_path = run.recipe.config.architecture, local_folder(run.recipe.config.model.path)
    kind = architecture.model_type if architecture else read_type(model_path) if model_path else None
    lacks = libraries.missing_kernels(libraries.KERNELS_OF.get(kind or "", ())) if run.hardware.gpus else ""
    if lacks:
        yield f"a {kind} model trains much faster with GPU kernels that are not installed: pip install {lacks}."


def known_types(*, scores: bool, images: bool = False) -> frozenset[str]:
    """Return the model types that the installed transformers and tuner can train; empty if that is not known.

    Args:
        scores: Those that can score texts, for reward models.
    """
    if images:
        return _transformers_types("IMAGE_TEXT_TO_TEXT")
    model_types = _transformers_types("SEQUENCE_CLASSIFICATION" if scores else "CAUSAL_LM")
    return model_types | OWN if model_types else model_types


@cache
def _transformers_types(task: str) -> frozenset[str]:
    text = _source_of_transformers("models/auto/modeling_auto.py")
    table = re.search(rf"^MODEL_FOR_{task}_MAPPING_NAMES = OrderedDict\((.*?)^\)", text, re.MULTILINE | re.DOTALL)
    return frozenset(re.findall(r'^\s*\("([^"]+)",', table[1], re.MULTILINE)) if table else frozenset()


@cache
def _transformers_quantizers() -> frozenset[str]:
    text = _source_of_transformers("quantizers/auto.py")
    table = re.search(r"^AUTO_QUANTIZER_MAPPING = \{(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    names = re.findall(r'^\s*"([^"]+)":', table[1], re.MULTILINE) if table else []
    # Of bitsandbytes, the number of bits is in a key of its own.
    return frozenset(name.removesuffix("_4bit").removesuffix("_8bit") for name in names)


def _source_of_transformers(name: str) -> str:
    """Return the text of a module of transformers, without its 3 s of import; empty if it is not there."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    try:
        return read_text(Path(spec.origin).parent / name)
    except OSError:
        return ""


def _rope_factor(config: Mapping[str, object]) -> float:
    """Return the factor by which YaRN extends max_position_embeddings; the config's number is without it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 1.0
    factor = rope.get("factor")
    return float(factor) if isinstance(factor, int | float) and factor > 1 else 1.0


def _weight_files(model_path: Path) -> list[Path]:
    """Return the files that should hold the weights, also missing ones; empty if the folder names no weights."""
    name = _loaded_first(model_path)
    if name not in _INDEXES:
        return [model_path / name] if name else []
    files = set(_index(model_path).values())
    return [model_path / file for file in sorted(files)] or [model_path / name]


def _loaded_first(model_path: Path) -> str | None:
    """Return the file, whole or an index, that transformers loads of those in a folder; others may be left over."""
    return next((name for name in _WEIGHTS if paths.exists(model_path / name)), None)


def _index(model_path: Path) -> dict[str, str]:
    """Return the file of each tensor by the folder's index; empty if the weights are one file, or it is not valid."""
    name = _loaded_first(model_path)
    files = read_json_object(model_path / name).get("weight_map") if name in _INDEXES else None
    return {str(tensor): str(file) for tensor, file in files.items()} if isinstance(files, dict) else {}


def _cut_off(file: Path) -> str | None:
    """Return what is wrong with a file of weights, or None."""
    try:
        size = file.stat().st_size
        with open_regular(file) as stream:
            start = stream.read(64)
            if start.startswith(_LFS):
                return _POINTS
            if file.suffix == ".json":
                return "is not an index of shards"
            return None if file.suffix != ".safetensors" else _cut_off_safetensors(start[:8], size, file)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"


def _is_pointer(file: Path) -> bool:
    try:
        with open_regular(file) as stream:
            return stream.read(len(_LFS)) == _LFS
    except OSError:  # it is missing, or model_folder has refused it
        return False


def _cut_off_safetensors(start: bytes, size: int, file: Path) -> str | None:
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size, _MAX_HEADER_BYTES):
        return f"is truncated: it ends after {size} bytes, inside its header"
    header = _safetensors_header(file)
    if header is None:
        return "has no safetensors header"
    full_bytes = 8 + length + max(header.values(), default=0)
    return f"is truncated: it has {size} of {full_bytes} bytes" if size < full_bytes else None


def _safetensors_header(file: Path) -> dict[str, int] | None:
    """Return the end of each tensor, in bytes after the header; None without a valid header, or without the file."""
    try:
        with open_regular(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(min(length, _MAX_HEADER_BYTES)))
        spans = {name: tuple(map(int, tensor["data_offsets"])) for name, tensor in header.items() if "dtype" in tensor}
        ends = [0, *(end for _, end in sorted(spans.values()))]
        if [begin for begin, _ in sorted(spans.values())] != ends[:-1]:  # the format has no holes and no overlaps
            return None
        return {name: end for name, (_, end) in spans.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
