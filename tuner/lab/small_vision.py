"""Small random models that read images, with the processor and the kinds of layers of a large one."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import transformers
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, ProcessorMixin

from tuner import assets, paths
from tuner.errors import MachineError, ModelError
from tuner.files import JsonObject
from tuner.lab.shrink import shrink
from tuner.models.load import explained, pinned, source
from tuner.models.vision import load_processor
from tuner.recipes.model_facts import read_architecture
from tuner.recipes.schema import Model
from tuner.recipes.schema.architecture import Architecture

_TINY = f"{assets.ASSET}tiny_vision"
_TOWER_LAYERS = 2
_DEPTHS = ("num_hidden_layers", "depth")
_SOME_LAYERS = ("fullatt_block_indexes", "deepstack_visual_indexes")
"""Keys of a tower's config that list some of its layers."""
_BY_LAYER, _SOUND = "per_layer_config", "audio_config"
_OF_THE_WHOLE = ("model_type", "vision_config")


class SmallModel(NamedTuple):
    """A small model in a folder. `is_own`: its processor and its layers are those of the recipe's model."""

    facts: Architecture
    num_parameters: int
    processor: ProcessorMixin
    is_own: bool


def make(model: Model, facts: Architecture, folder: Path, seed: int) -> SmallModel:
    """Write a small random model with the recipe's processor, or a small LLaVA if the model is not on this machine.

    Call it offline.

    Raises:
        ModelError: a local model has no processor, or transformers cannot build such a small model.
    """
    is_own = model.vision is None  # else it is joined of two models, which are large
    try:
        processor, config = _processor_and_config(model if is_own else _stand_in(model))
    except (MachineError, ModelError):
        if paths.local(str(model.path)):
            raise
        is_own = False
        processor, config = _processor_and_config(_stand_in(model))
    if not is_own:
        known = read_architecture(Path(source(_stand_in(model))))
        assert known is not None, "the package's own model"
        facts = Architecture.model_validate(known)
    try:
        _shrink(config, facts, processor)
        transformers.set_seed(seed)
        small = AutoModelForImageTextToText.from_config(config)
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


def _stand_in(model: Model) -> Model:
    return model.model_copy(update={"path": _TINY, "revision": None, "trust_remote_code": False, "vision": None})


def _processor_and_config(model: Model) -> tuple[ProcessorMixin, PreTrainedConfig]:
    path = source(model)
    with explained(path):
        return load_processor(model, path), AutoConfig.from_pretrained(path, **pinned(model))


def _shrink(config: PreTrainedConfig, facts: Architecture, processor: ProcessorMixin) -> None:
    """Make the LLM of a config small, and give its tower two layers: other sizes of a tower depend on each other."""
    tokenizer = processor.tokenizer
    text = config.get_text_config()
    small = shrink(facts, -(-len(tokenizer) // 64) * 64)
    values = {key: value for key, value in small.model_dump().items() if key not in _OF_THE_WHOLE}
    if _BY_LAYER in (whole := text.to_dict()):  # its class works the sizes of each layer out
        config.text_config = text = type(text)(**{key: one for key, one in whole.items() if key != _BY_LAYER} | values)
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
