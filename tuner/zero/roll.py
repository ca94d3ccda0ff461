"""ROLL's DeepSpeed presets, and its pipelines' files that name one: the config that they end in.

ROLL trained with DeepSpeed up to 0.2. What a pipeline says besides is for `importers.roll`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tuner.errors import DeepSpeedConfigError
from tuner.recipes import document_file, yaml_text
from tuner.recipes.merging import Keys, Merged, Origin, leaves, lookup
from tuner.recipes.yaml_text import Yaml
from tuner.zero import jsonfile
from tuner.zero.jsonfile import Document

_ROLES = ("sft_train", "student", "actor_train")
_STRATEGY, _CONFIG = "strategy_args", "strategy_config"


def read(found: Yaml, path: Path, name: str) -> Document:
    """Return the config of a file called `name`: that of the role that trains, or its one preset.

    Raises:
        DeepSpeedConfigError: it holds no such config, or several; or `defaults` or `${...}` lead nowhere.
    """
    merged = yaml_text.with_defaults(found, path.parent, name, DeepSpeedConfigError)
    at = _role(merged) or _preset(merged, name)

    def wrong(what: str, keys: Keys, fix: str) -> DeepSpeedConfigError:
        return DeepSpeedConfigError(what, where=merged.place_of(keys), fix=fix)

    value, _ = yaml_text.with_references(merged.values, wrong, at=at)
    if not isinstance(value, dict):
        raise DeepSpeedConfigError(f"{'.'.join(at)} is not a DeepSpeed config", where=merged.place_of(at), fix=_FIX)
    named = lookup(merged.values, at)
    written = tuple(named[2:-1].split(".")) if isinstance(named, str) else at
    sources: dict[jsonfile.Keys, Origin] = {}
    for key, _ in leaves(value):
        keys = tuple(key.split("."))
        for inner in (keys[:end] for end in range(1, len(keys) + 1)):
            sources[inner] = Origin(merged.place_of((*written, *inner)))
    return Document(value, name, sources=sources)


_FIX = "Use a preset (zero3), a DeepSpeed JSON, an accelerate config, or a ROLL preset."


def _role(merged: Merged) -> Keys | None:
    for role in _ROLES:
        block = lookup(merged.values, (role, _STRATEGY))
        if isinstance(block, dict):
            strategy, at = block.get("strategy_name"), (role, _STRATEGY, _CONFIG)
            if strategy == "deepspeed_train":
                return at
            what = f"{role} is trained by {strategy}, so there is no DeepSpeed config"
            raise DeepSpeedConfigError(what, where=merged.place_of(at[:-1]), fix=_FIX)
    return None


def _preset(merged: Merged, name: str) -> Keys:
    presets = [key for key, value in merged.values.items() if _is_config(value)]
    if len(presets) == 1:
        return (presets[0],)
    if presets:
        what = f"{name} holds several DeepSpeed configs: {', '.join(presets)}"
        raise DeepSpeedConfigError(what, where=name, fix="Give the file of one of them.")
    fix = f"It is a training config: tuner train {name}." if document_file.says_what_to_train(Path(name)) else _FIX
    raise DeepSpeedConfigError(f"{name} has no DeepSpeed config", where=name, fix=fix)


def _is_config(value: Any) -> bool:
    return isinstance(value, dict) and "zero_optimization" in value
