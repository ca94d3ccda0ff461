"""What a smoke test needs from heavy libraries: small random models, also of images, rows, and comparisons of results.

It starts no ranks; `lab.smoke` does.
"""

from __future__ import annotations

import re
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import peft
import PIL.Image
import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from tuner import assets, paths
from tuner.data.prepare import describe, prepare
from tuner.data.sample import Image
from tuner.data.sources import find
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, MachineError, ModelError, TunerError
from tuner.files import JsonObject
from tuner.lab.shrink import config_of, shrink
from tuner.models import compat
from tuner.models.arguments import load_options
from tuner.models.load import auto_class, load_tokenizer, pretrained_path
from tuner.models.vision import load_processor
from tuner.pretrained import explained
from tuner.recipes.model_facts import read_architecture
from tuner.recipes.schema import Dataset, Model, Rows
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.objectives import RowKind, facts_of

_TEXT = "Say what the capital of Denmark is, and what 2 + 4 makes."
_TINY = f"{assets.ASSET}tiny"
_SAMPLE, _PAIRS = f"{assets.ASSET}sample/train.jsonl", f"{assets.ASSET}sample_preferences/train.jsonl"
_STAND_INS: dict[RowKind, JsonObject] = {
    "conversations": {"path": _SAMPLE, "format": "messages"},
    "texts": {"path": _PAIRS, "format": "text", "columns": {"text": "{prompt}\n{chosen}"}},
    "pairs": {"path": _PAIRS, "format": "preference"},
    "prompts": {"path": _SAMPLE, "format": "messages"},
    "judged": {"path": _PAIRS, "format": "preference"},
}
_IMAGES: JsonObject = {"path": f"{assets.ASSET}sample_images/train.jsonl", "format": "messages"}
_CONTROL = re.compile(r"<[^<>\s{}'\"]+>")
_TINY_VISION = f"{assets.ASSET}tiny_vision"
_TOWER_LAYERS = 2
_DEPTHS = ("num_hidden_layers", "depth")
_SOME_LAYERS = ("fullatt_block_indexes", "deepstack_visual_indexes")
"""Keys of a tower's config that list some of its layers."""
_BY_LAYER, _SOUND = "per_layer_config", "audio_config"
_OF_THE_WHOLE = ("model_type", "vision_config")
_SHORT = 256
"""Tokens per sample, unless samples only fit at the recipe's own length."""


def tokenizer_of(model: Model) -> tuple[PreTrainedTokenizerBase, bool]:
    """Return the recipe's tokenizer and True, or the package's small one with the recipe's template and False.

    The small one stands in for a tokenizer on the hub that is not in the cache; call it offline.

    Raises:
        ModelError: a local model's tokenizer cannot be loaded.
    """
    assert model.path is not None, "checked before"
    try:
        return load_tokenizer(model, pretrained_path(model)), True
    except (MachineError, ModelError):
        if paths.local(model.path):
            raise
    tokenizer = load_tokenizer(_of_package(model, _TINY), assets.asset(_TINY))
    # Each control word is one token, as in the template's own tokenizer.
    tokenizer.add_tokens(sorted(set(_CONTROL.findall(tokenizer.chat_template))), special_tokens=True)
    return tokenizer, False


def make_model(
    architecture: Architecture, tokenizer: PreTrainedTokenizerBase, folder: Path, seed: int
) -> tuple[Architecture, int]:
    """Write a small random model of the same architecture with this tokenizer; return both sizes.

    Raises:
        ModelError: transformers cannot build this architecture.
    """
    try:
        small = shrink(architecture, -(-len(tokenizer) // 64) * 64)
        config = config_of(small)
    except ValueError as error:
        problem = f"cannot build a small model of model_type {architecture.model_type!r}: {error}"
        raise ModelError(problem, where="architecture", fix="Train it without a smoke test.") from error
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    transformers.set_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    with compat.os_errors():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return small, model.num_parameters()


class SmallModel(NamedTuple):
    """A small model in a folder. `is_own`: its processor and its layers are those of the recipe's model."""

    architecture: Architecture
    num_parameters: int
    processor: ProcessorMixin
    is_own: bool


def make_vision_model(model: Model, architecture: Architecture, folder: Path, seed: int) -> SmallModel:
    """Write a small random model with the recipe's processor, or a small LLaVA if the model is not on this machine.

    Call it offline.

    Raises:
        ModelError: a local model has no processor, or transformers cannot build such a small model.
    """
    is_own = model.vision is None  # else it is joined of two models, which are large
    try:
        processor, config = _processor_and_config(model if is_own else _of_package(model, _TINY_VISION))
    except (MachineError, ModelError):
        if paths.local(str(model.path)):
            raise
        is_own = False
        processor, config = _processor_and_config(_of_package(model, _TINY_VISION))
    if not is_own:
        architecture_values = read_architecture(Path(assets.asset(_TINY_VISION)))
        assert architecture_values is not None, "the package's own model"
        architecture = Architecture.model_validate(architecture_values)
    try:
        _shrink_with_tower(config, architecture, processor)
        transformers.set_seed(seed)
        small = transformers.AutoModelForImageTextToText.from_config(config, trust_remote_code=False)
    except (ValueError, TypeError, RuntimeError) as error:
        problem = f"cannot build a small model of model_type {config.model_type!r}: {error}"
        raise ModelError(problem, where="model.path", fix="Train it without a smoke test.") from error
    small.save_pretrained(folder)
    processor.save_pretrained(folder)
    written = read_architecture(folder)
    if written is None:
        problem = f"a small model of model_type {config.model_type!r} has not the facts that a plan needs"
        raise ModelError(problem, where="model.path", fix="Train it without a smoke test.")
    return SmallModel(Architecture.model_validate(written), small.num_parameters(), processor, is_own)


def _of_package(model: Model, path: str) -> Model:
    return model.model_copy(update={"path": path, "revision": None, "trust_remote_code": False, "vision": None})


def _processor_and_config(model: Model) -> tuple[ProcessorMixin, PreTrainedConfig]:
    path = pretrained_path(model)
    with explained(path):
        options = load_options(model)
        return load_processor(model, path, **options), transformers.AutoConfig.from_pretrained(path, **options)


def _shrink_with_tower(config: PreTrainedConfig, architecture: Architecture, processor: ProcessorMixin) -> None:
    """Make the LLM of a config small, and give its tower two layers: other sizes of a tower depend on each other."""
    tokenizer = processor.tokenizer
    text = config.get_text_config()
    small = shrink(architecture, -(-len(tokenizer) // 64) * 64)
    values = {key: value for key, value in small.model_dump().items() if key not in _OF_THE_WHOLE}
    if _BY_LAYER in (text_values := text.to_dict()):  # its class works the sizes of each layer out
        config.text_config = text = type(text)(
            **{key: value for key, value in text_values.items() if key != _BY_LAYER} | values
        )
    else:
        for key, value in values.items():
            if hasattr(text, key):
                setattr(text, key, value)
    _set_sections(text, small.head_dim)
    for holder in (config, text):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if hasattr(holder, name):
                setattr(holder, name, getattr(tokenizer, name))
    if hasattr(config, _SOUND):  # it is never trained
        setattr(config, _SOUND, None)
    tower = config.vision_config
    for key in _DEPTHS:
        if hasattr(tower, key):
            setattr(tower, key, min(_TOWER_LAYERS, getattr(tower, key)))
    for key in _SOME_LAYERS:
        if getattr(tower, key, None):
            setattr(tower, key, [_TOWER_LAYERS - 1])
    if hasattr(tower, "out_hidden_size"):
        tower.out_hidden_size = small.hidden_size


def _set_sections(text: PreTrainedConfig, head_dim: int) -> None:
    """Divide the positions of a Qwen-VL in the same ratio: its three sections are half a head together."""
    rope: JsonObject = getattr(text, "rope_parameters", None) or {}
    if sections := rope.get("mrope_section"):
        scale = head_dim / 2 / sum(sections)
        first, second = (max(1, round(size * scale)) for size in sections[:2])
        text.rope_parameters = {**rope, "mrope_section": [first, second, head_dim // 2 - first - second]}


def stand_in(rows: Rows, objective: str, *, has_images: bool = False) -> JsonObject | None:
    """Return what to train on instead of rows that are on the hub and not in the cache; None where they are here.

    Raises:
        DataError: they are here, and no data set.
    """
    assert rows.path is not None, "checked before"
    if paths.local(rows.path) is None:
        try:
            find(rows.path, rows.name, rows.split)
        except MachineError:
            other = _IMAGES if has_images else _STAND_INS[facts_of(objective).rows]
            return {"name": None, "split": "train", "columns": None, "image_folder": None, **other}
    return None


def prepared(dataset: Dataset, encoder: TextEncoder, objective: str) -> tuple[Dataset, str]:
    """Prepare the rows as the ranks will; return the block, cut to short samples where that keeps any, and a summary.

    Raises:
        DataError: a row, the chat template or the recipe's length is wrong.
    """
    short = dataset.model_copy(update={"max_length": min(dataset.max_length, _SHORT)})
    try:
        prepared_rows = prepare(short, encoder, objective=objective)
    except DataError:
        # Prompts may be longer than that; whatever else is wrong, is so at the recipe's own length too.
        short, prepared_rows = dataset, prepare(dataset, encoder, objective=objective)
    return short, describe(prepared_rows)


def difference(left: Path, right: Path, *, scores: bool = False, encoder: TextEncoder | None = None) -> float:
    """Return how far two saved results are apart: the largest difference of their outputs over the largest output.

    Both are loaded with plain transformers and peft, in fp32 on a base that is not quantized. `encoder`: that of models
    that read images, which are shown one.

    Raises:
        TunerError: an output is not finite.
    """
    return apart(*(outputs(folder, scores=scores, encoder=encoder) for folder in (left, right)))


def apart(first: torch.Tensor, second: torch.Tensor) -> float:
    """Return the largest difference of two outputs over the largest of the first."""
    return float((first - second).abs().max() / first.abs().max().clamp(min=1e-30))


def outputs(folder: Path, *, scores: bool = False, encoder: TextEncoder | None = None) -> torch.Tensor:
    """Return what a saved result computes of one text; the arguments and errors are those of `difference`."""
    if encoder:
        inputs = _with_a_picture(encoder)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        inputs = dict(tokenizer(_TEXT, return_tensors="pt"))
    model = _load(folder, scores, reads_images=encoder is not None)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**inputs).logits
    if not logits.isfinite().all():
        raise TunerError(f"{folder.name} reloads with non-finite outputs")
    return logits


def _with_a_picture(encoder: TextEncoder) -> dict[str, torch.Tensor]:
    file = BytesIO()
    PIL.Image.radial_gradient("L").convert("RGB").save(file, "PNG")
    parts = [{"type": "image", "image": Image(data=file.getvalue())}, {"type": "text", "text": _TEXT}]
    question = [{"role": "user", "content": parts}]
    ids = encoder.prompt(question)
    return {"input_ids": ids, **encoder.pixels_in(question, ids)}


def _load(folder: Path, scores: bool, *, reads_images: bool) -> PreTrainedModel | peft.PeftModel:
    """Load a result in fp32: a whole model, or an adapter on its base.

    Raises:
        TunerError: the weights of a whole model are not exactly those of its class.
    """
    auto = auto_class(reads_images=reads_images, scores=scores)
    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False}
    if (folder / "adapter_config.json").is_file():
        if reads_images:  # PEFT has no class of its own for them
            base = peft.PeftConfig.from_pretrained(folder).base_model_name_or_path
            return peft.PeftModel.from_pretrained(auto.from_pretrained(base, **options), folder)
        adapted = peft.AutoPeftModelForSequenceClassification if scores else peft.AutoPeftModelForCausalLM
        return adapted.from_pretrained(folder, **options, **({"num_labels": 1} if scores else {}))
    model: PreTrainedModel
    model, report = auto.from_pretrained(folder, output_loading_info=True, **options)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if report[kind]:
            raise TunerError(f"{folder.name} reloads with {kind.replace('_', ' ')}: {sorted(map(str, report[kind]))}")
    return model
