"""Exports a run's result for publishing: weights, config, tokenizer, model card, and a manifest of every tensor.

The export is written next to its destination and renamed at the end, so a failure leaves the destination unchanged.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
import transformers
from huggingface_hub import ModelCard
from peft import PeftConfig
from transformers import CONFIG_MAPPING, LlamaConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from tuner import paths, remote_code
from tuner.assets import without_generation_marks
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DiskError, Option, TunerError, UsageError, did_you_mean
from tuner.files import (
    JsonObject,
    copy,
    disk_errors,
    read_json_object,
    read_text,
    scratch_folder,
    sized,
    write_json,
    write_text,
)
from tuner.machine.hardware import available_host_bytes
from tuner.models.arguments import at, load_options, written
from tuner.models.compat import reads_images, save_as_published
from tuner.models.load import DTYPES, is_scorer, load_weights, pretrained_path
from tuner.pretrained import explained
from tuner.recipes.schema import Model
from tuner.results import gguf, gguf_quants, llava_layouts, quantized
from tuner.results.base_model import base_of, check_facts, folder_of, hub_id, model_of, read_model_config
from tuner.results.card import Kind, card
from tuner.results.layout import Layout, empty_model
from tuner.results.loaded_model import NUM_TOKENS, ModelSpec, logits_of_some, with_adapter
from tuner.results.peft_adapter import STEM, Adapter, read_config
from tuner.results.saved import SavedModel, check_dest
from tuner.results.tensors import Piece, Stored, num_bytes, write
from tuner.runs import checkpoints
from tuner.runs.records import ManifestFacts
from tuner.worker.generation import stop_where_answers_end

_BESIDES_BYTES = 64 * 1024**2
"""Space for the tokenizer and small files; the largest published tokenizer.json has 33 MB."""
_ONE_FILE_BYTES = 2**62
"""PEFT reads an adapter from one file."""
_ROOM = "Free space or choose another DEST."


@dataclass(frozen=True)
class Options:
    merge: bool = False
    dtype: str | None = None
    max_shard_bytes: int = 5 * 10**9
    base: str | None = None
    layout: Literal["published", "llama", "gguf", "xtuner", "llava"] = "published"
    """`gguf` first writes a model that llama.cpp's converter can read, so InternLM as Llama."""
    quant: str | None = None
    """Fewer bits: a kind of `quantized.KINDS`, or of `gguf_quants.NAMES` with the layout `gguf`."""
    data: str | None = None
    """Rows to measure the perplexity on with `quantized.KINDS`. None: the validation rows of the run."""
    name: str | None = None
    """Hub id in the card's example code. None: the folder's name."""

    def as_llama(self, config: PreTrainedConfig) -> bool:
        """Return whether a model with this config is exported with Llama's names."""
        leaves_tuner = self.layout == "gguf" or self.quant is not None  # others' programs read it
        return self.layout == "llama" or (leaves_tuner and _known_to_tuner_alone(config.model_type))


@dataclass(frozen=True)
class Exported:
    kind: Kind
    num_tensors: int
    num_bytes: int
    num_files: int
    private_base: str | None
    """Folder of an adapter's base that is not on the hub."""
    needs_tuner: bool
    """transformers does not know its architecture, or its base's, without tuner."""
    compared: str | None = None
    """Result of the comparison of a merged model with its adapter, as a sentence."""
    modelfile: Path | None = None
    """The file for Ollama next to a GGUF."""
    losses: quantized.Losses | None = None
    """What fewer bits cost, by torchao."""


@dataclass(frozen=True)
class _Content:
    """Everything in an export except its card."""

    kind: Kind
    pieces: list[Piece]
    config: PreTrainedConfig | PeftConfig
    model_type: str | None
    """That of an adapter's base, if it is known."""
    base: Model | None
    scores: bool
    tokenizer: PreTrainedTokenizerBase | None
    folders: tuple[Path, ...]
    """Where the files beside the weights come from: the first that has one counts."""
    generates: bool

    @property
    def needs_tuner(self) -> bool:
        return _known_to_tuner_alone(self.model_type)


def _known_to_tuner_alone(model_type: str | None) -> bool:
    return model_type in CONFIG_MAPPING and model_type not in CONFIG_MAPPING_NAMES


def export(
    saved: SavedModel, dest: Path, options: Options, environ: Mapping[str, str] = MappingProxyType({})
) -> Exported:
    """Write `saved` to the folder `dest`, which must not exist or must be empty.

    Args:
        options: Layout and other options. `xtuner` and `llava` first write a whole LLaVA as transformers has it.
        environ: Environment variables that name llama.cpp (LLAMA_CPP, PATH), for the layout `gguf`.

    Raises:
        UsageError: the options do not fit the model, or `dest` is not empty.
        ModelError: weights are missing or damaged, or the adapter does not fit its base.
        MachineError: the hub with the base cannot be reached, or llama.cpp's converter is not installed.
        DiskError: `dest` cannot be written, or the disk is too full.
        TunerError: a merged model has other logits than the adapter on its base, or llama.cpp does not know the model.
    """
    check_dest(dest)
    _check_quant(options)
    if options.layout == "gguf":
        script = gguf.converter(environ)
        program = gguf_quants.program(options.quant, environ) if options.quant else None
        return _export_gguf(saved, dest, options, script, program)
    if options.quant:
        return _export_quantized(saved, dest, options)
    if options.layout in llava_layouts.NAMES:
        return _export_llava(saved, dest, options, options.layout)
    return _export(saved, dest, options)


@contextmanager
def drafted(dest: Path) -> Iterator[Path]:
    """Yield where to write what takes the place of `dest` at the end: in a hidden folder beside it.

    What killed exports left there is removed; a live one stays.
    """
    with disk_errors(dest, _ROOM):
        dest.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(dest.parent, f".{dest.name}.exporting-") as temporary:
            yield temporary / dest.name
            check_dest(dest)
            (temporary / dest.name).replace(dest)


def _export_llava(saved: SavedModel, dest: Path, options: Options, layout: llava_layouts.Name) -> Exported:
    """Write a whole model first, with an adapter merged into its base, and convert it."""
    recipe = saved.recipe()
    tower = recipe.model.vision.path if recipe and recipe.model.vision else None
    with drafted(dest) as draft:
        whole_folder = draft.parent / "whole" / dest.name
        done = _export(saved, whole_folder, replace(options, merge=saved.is_adapter, layout="published"))
        tensors = llava_layouts.convert(whole_folder, draft, layout, tower, options.max_shard_bytes)
        card_before, _, _ = read_text(whole_folder / "README.md").partition("## Use")
        write_text(draft / "README.md", f"{card_before}## Use\n\nThe weights have the layout of {layout}.\n")
        checkpoints.seal(draft, _facts(saved, tensors))
    return replace(done, num_tensors=len(tensors), num_files=len({entry["file"] for entry in tensors.values()}))


def _check_quant(options: Options) -> None:
    """Check that fewer bits are asked for in a layout that has them."""
    quant, where = options.quant, Option("quant", options.quant)
    if quant is None:
        if options.data is not None:
            problem = "rows are measured before and after a quantization, and none is asked for"
            raise UsageError(problem, where=Option("data"), fix=f"Add {Option('quant', 'fp8')}, or remove it.")
        return
    is_gguf = options.layout == "gguf"
    kinds, other_kinds = (gguf_quants.NAMES, quantized.KINDS) if is_gguf else (quantized.KINDS, gguf_quants.NAMES)
    if quant in other_kinds:
        fix = f"Remove {Option('format')}." if is_gguf else f"Add {Option('format', 'gguf')}."
        raise UsageError(f"{quant} is {'no ' if is_gguf else 'a '}kind of GGUF", where=where, fix=fix)
    if quant not in kinds:
        fix = f"{did_you_mean(quant, kinds)} Known: {', '.join(kinds)}.".strip()
        raise UsageError(f"there is no kind {quant!r} of weights", where=where, fix=fix)
    if options.layout not in ("gguf", "published"):
        raise UsageError(f"the layout {options.layout} has no weights in fewer bits", where=where, fix="Remove it.")
    if is_gguf and options.data is not None:
        problem = "a GGUF is not measured: llama.cpp's llama-perplexity does that"
        raise UsageError(problem, where=Option("data"), fix="Remove it.")


def _export_quantized(saved: SavedModel, dest: Path, options: Options) -> Exported:
    """Write a whole model first, with an adapter merged into its base, and quantize it."""
    kind = next(kind for kind in quantized.KINDS if kind == options.quant)
    quantized.check(kind)
    dtype = options.dtype or ("bf16" if kind == "int4" else None)
    with drafted(dest) as draft:
        whole_folder = draft.parent / "whole" / dest.name
        unquantized = replace(options, merge=saved.is_adapter, dtype=dtype, name=options.name or dest.name)
        done = _export(saved, whole_folder, unquantized)
        max_bytes, recipe = options.max_shard_bytes, saved.recipe()
        losses, tensors = quantized.quantize(whole_folder, draft, kind, max_bytes, recipe, options.data)
        write_text(draft / "README.md", f"{read_text(whole_folder / 'README.md')}\n## Quantization\n\n{losses}\n")
        manifest_facts = _facts(saved, tensors).model_copy(update={"quantized": losses.to_json()})
        checkpoints.seal(draft, manifest_facts)
        size = sum((draft / name).stat().st_size for name in {str(entry["file"]) for entry in tensors.values()})
    num_files = len({entry["file"] for entry in tensors.values()})
    return replace(done, num_tensors=len(tensors), num_files=num_files, num_bytes=size, losses=losses)


def _export_gguf(saved: SavedModel, dest: Path, options: Options, script: Path, program: Path | None) -> Exported:
    """Write a whole model first, with an adapter merged into its base, and convert it."""
    with drafted(dest) as draft:
        whole_folder = draft.parent / "whole" / dest.name
        done = _export(saved, whole_folder, replace(options, merge=saved.is_adapter))
        size = gguf.pack(script, whole_folder, draft, options.dtype, options.quant, program)
    return replace(done, num_bytes=size, num_files=1, modelfile=dest / gguf.MODELFILE)


def _export(saved: SavedModel, dest: Path, options: Options) -> Exported:
    content = _content(saved, options)
    dtype = DTYPES[options.dtype] if options.dtype else None
    needed = num_bytes(content.pieces, dtype)
    with drafted(dest) as draft:
        free = shutil.disk_usage(dest.parent).free
        if free < needed + _BESIDES_BYTES:
            problem = f"{sized(free)} are free, and the export needs {sized(needed + _BESIDES_BYTES)}"
            raise DiskError(problem, where=dest.parent, fix=_ROOM)
        draft.mkdir()
        stem, max_bytes = (STEM, _ONE_FILE_BYTES) if content.kind == "adapter" else ("model", options.max_shard_bytes)
        action = "merging" if content.kind == "merged" else "exporting"
        tensors = write(content.pieces, draft, stem, max_bytes, dtype, action)
        card_arguments = {"scores": content.scores, "needs_tuner": content.needs_tuner}
        _write_besides(
            content, draft, card(options.name or dest.name, content.kind, content.base, saved, **card_arguments)
        )
        compared = _compared(content, draft, saved.folder, tensors)
        checkpoints.seal(draft, _facts(saved, tensors))
    files = {entry["file"] for entry in tensors.values()}
    is_private = content.kind == "adapter" and content.base and not hub_id(content.base)
    private = pretrained_path(content.base) if content.base and is_private else None
    return Exported(content.kind, len(tensors), needed, len(files), private, content.needs_tuner, compared)


def _facts(saved: SavedModel, tensors: dict[str, JsonObject]) -> ManifestFacts:
    """Return the facts of the manifest; by the objective `tuner eval` says what it does not measure without the run."""
    recipe = saved.recipe()
    manifest_facts = ManifestFacts(num_tensors=len(tensors), tensors=tensors)
    return manifest_facts.model_copy(update={"objective": recipe.objective.type}) if recipe else manifest_facts


def _content(saved: SavedModel, options: Options) -> _Content:
    if not saved.is_adapter:
        if options.merge:
            raise UsageError(
                f"{saved.description} is a whole model: there is nothing to merge", where=Option("merge", True)
            )
        return _whole(saved, options)
    adapter = read_config(saved.folder)
    recipe = saved.recipe()
    base = base_of(adapter, recipe, options.base, trusted=saved.trust_remote_code)
    if options.merge:
        return _merged(saved, options, adapter, base)
    if options.layout == "llama":
        raise UsageError(
            "an adapter has no layout of its own", where=Option("format"), fix=f"Add {Option('merge', True)}."
        )
    place = paths.local(pretrained_path(base))
    adapter.base_model_name_or_path = str(place.absolute()) if place else pretrained_path(base)
    adapter.revision = None if place else base.revision
    # A base folder that the user names may be in Llama's layout.
    architecture = recipe.architecture if recipe and (options.base is None or hub_id(base)) else None
    stored, folders = Stored(saved.folder, STEM), (saved.folder,)
    pieces, model_type = [*map(stored.piece, stored.shapes)], architecture.model_type if architecture else None
    scores, generates = adapter.task_type == "SEQ_CLS", adapter.task_type == "CAUSAL_LM"
    tokenizer = _tokenizer(folders, base)
    return _Content("adapter", pieces, adapter, model_type, base, scores, tokenizer, folders, generates)


def _whole(saved: SavedModel, options: Options) -> _Content:
    recipe = saved.recipe()
    trusted = saved.trust_remote_code
    itself = model_of(str(saved.folder), recipe.model.revision if recipe else None, trusted)
    config = read_model_config(saved.folder, itself)
    scores = is_scorer(config)
    model = empty_model(config, scores=scores, trust_remote_code=trusted)
    layout = Layout(model, Stored(saved.folder), scores=scores)
    layout.check(set())
    pieces = list(layout.pieces(set(), _never, published=not options.as_llama(config)))
    config.use_cache = True  # switched off while training
    base, folders = recipe.model if recipe and recipe.model.path else None, (saved.folder,)
    config = _as_asked(config, model, options)
    tokenizer = _tokenizer(folders, itself)
    return _Content("whole", pieces, config, config.model_type, base, scores, tokenizer, folders, not scores)


def _merged(saved: SavedModel, options: Options, adapter: PeftConfig, base: Model) -> _Content:
    folder, scores = folder_of(base), adapter.task_type == "SEQ_CLS"
    trusted = base.trust_remote_code
    config = read_model_config(folder, at(base, str(folder)), **({"num_labels": 1} if scores else {}))
    check_facts(pretrained_path(base), config, saved.recipe())
    model = empty_model(config, scores=scores, trust_remote_code=trusted)
    layout = Layout(model, Stored(folder), scores=scores)
    fitted = Adapter(
        saved.folder, adapter, empty_model(config, scores=scores, trust_remote_code=trusted), pretrained_path(base)
    )
    config.get_text_config().vocab_size = fitted.num_rows
    layout.check(fitted.replaced)
    pieces = list(layout.pieces(fitted.changed, fitted.change, published=not options.as_llama(config)))
    if not layout.ties(fitted.changed):
        config.get_text_config().tie_word_embeddings = config.tie_word_embeddings = False
    config.architectures = [type(model).__name__]
    folders = (saved.folder, folder)
    tokenizer = _tokenizer(folders, base)
    if scores and config.pad_token_id is None and tokenizer:
        config.pad_token_id = tokenizer.pad_token_id
    config = _as_asked(config, model, options)
    return _Content("merged", pieces, config, config.model_type, base, scores, tokenizer, folders, not scores)


def _never(name: str, _: torch.Tensor | None) -> torch.Tensor:
    raise AssertionError(f"nothing changes {name}")


def _as_asked(config: PreTrainedConfig, model: PreTrainedModel, options: Options) -> PreTrainedConfig:
    """Return the config of the export, with the type and the layout that the options ask for."""
    if options.dtype:
        config.dtype = DTYPES[options.dtype]
    return _llama(config, type(model).__name__) if options.as_llama(config) else config


def _llama(config: PreTrainedConfig, architecture: str) -> LlamaConfig:
    """Return the config of a model with Llama's architecture as a `LlamaConfig`."""
    if not isinstance(config, LlamaConfig):
        problem = f"a model of model_type {config.model_type!r} cannot be exported as Llama"
        raise UsageError(problem, where=Option("format"), fix=f"Remove {Option('format')}.")
    values = LlamaConfig.to_dict(config)  # its own to_dict would add the publisher's keys
    values.pop("model_type")
    llama: LlamaConfig = LlamaConfig.from_dict(values)
    llama.architectures = [f"Llama{architecture[architecture.index('For') :]}"]
    return llama


def _write_besides(content: _Content, folder: Path, readme: ModelCard) -> None:
    content.config.save_pretrained(folder)
    if content.tokenizer:
        content.tokenizer.save_pretrained(folder)
        if type(content.config) is LlamaConfig:
            # tokenizer.json is complete; InternLM's tokenizer class exists only in tuner.
            values = json.loads(read_text(folder / "tokenizer_config.json"))
            if values["tokenizer_class"].startswith("InternLM"):
                values["tokenizer_class"] = "PreTrainedTokenizerFast"
                write_json(folder / "tokenizer_config.json", values)
    for file in _processor(content.folders):
        copy(file, folder / file.name)
    if content.generates and (generation := _generation(content.folders, content.tokenizer)):
        generation.save_pretrained(folder)
    readme.save(folder / "README.md")
    if not any(folder.glob("*.py")):
        # llama.cpp's converter trusts what a tokenizer names, also in another repository.
        for file in (folder / name for name in remote_code.WITH_CLASSES):
            values = read_json_object(file)
            if values.pop("auto_map", None) is not None:
                write_json(file, values)


def _tokenizer(folders: Iterable[Path], model: Model) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the first folder that has one, with a chat template without training marks."""
    file = _first(folders, "tokenizer_config.json")
    if file is None:
        return None
    folder = file.parent
    with explained(str(folder)):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **load_options(at(model, str(folder))))
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = without_generation_marks(tokenizer.chat_template)
    return tokenizer


def _processor(folders: Iterable[Path]) -> tuple[Path, ...]:
    """Return the files of the processor in the first folder that has one: they say how images become pixels."""
    by_folder = ([folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()] for folder in folders)
    return tuple(next(filter(None, by_folder), ()))


def _first(folders: Iterable[Path], name: str) -> Path | None:
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _generation(
    folders: Iterable[Path], tokenizer: PreTrainedTokenizerBase | None
) -> transformers.GenerationConfig | None:
    """Return the generation config of the first folder that has one, with the stop tokens of the answers."""
    if file := _first(folders, "generation_config.json"):
        with explained(str(file.parent)):
            generation = transformers.GenerationConfig.from_pretrained(file.parent)
        save_as_published(generation)
    elif tokenizer:
        ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        generation = transformers.GenerationConfig(**ids)
    else:
        return None
    if tokenizer:
        stop_where_answers_end(generation, TextEncoder(tokenizer))
    return generation


_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_BYTES = 4
_BESIDES = 1.25
"""Factor on the bytes of the weights, for activations and one layer that is loaded besides the model."""
_MOST, _MOST_ROUNDED = 1e-3, 0.1
"""Limit of the difference of the logits, relative to their root mean square; 16 bits round each weight."""


def _compared(content: _Content, draft: Path, adapter: Path, tensors: dict[str, JsonObject]) -> str | None:
    """Compare the logits of a merged model with those of the adapter on its base, in fp32 on the host.

    Returns:
        The result as one sentence. Nothing is compared if the host has too little free memory.

    Raises:
        TunerError: the logits differ.
    """
    if content.kind != "merged" or content.base is None:
        return None
    base, scores = content.base, content.scores
    num_parameters = sum(math.prod(entry["shape"]) for entry in tensors.values())
    is_rounded = bool({entry["dtype"] for entry in tensors.values()} - {"float32", "float64"})
    needed, free = int(_BYTES * _BESIDES * num_parameters), available_host_bytes()
    if free is not None and needed > free:
        why = f"in fp32 that needs {sized(needed)}, and {sized(free)} are free"
        return f"The merged logits were not compared with the adapter's: {why}."
    path = str(folder_of(base))
    of_draft = written(base.model_copy(update={"vision": None}), draft)
    config = read_model_config(draft, of_draft)
    images = reads_images(config)
    of_base = at(base, path).model_copy(update={"images": images, "vision": None})
    spec = ModelSpec(f"the adapter {adapter}", of_base, path, scores, None, adapter)
    with_adapter_on = logits_of_some(with_adapter(load_weights(of_base, path, torch.float32, scores=scores), spec))
    of_draft = of_draft.model_copy(update={"images": images})
    merged = logits_of_some(load_weights(of_draft, str(draft), torch.float32, scores=scores))
    apart = float((merged - with_adapter_on).square().mean().sqrt() / with_adapter_on.square().mean().sqrt())
    if not apart <= (_MOST_ROUNDED if is_rounded else _MOST):
        problem = f"the merged model's logits differ from those of the adapter on its base by {apart:.1%}"
        raise TunerError(
            problem, where=Option("merge", True), fix=f"Export only the adapter: without {Option('merge', True)}."
        )
    return (
        f"Verified on {NUM_TOKENS} tokens: its logits equal those of the adapter on its base, "
        f"within {apart:.1g} of their size."
    )
