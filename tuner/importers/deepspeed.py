"""Translates the DeepSpeed config of another tool's config: a file, a preset's name, or the config itself.

`zero` checks the config itself when a run reads it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tuner import paths
from tuner.errors import DeepSpeedConfigError
from tuner.files import JsonObject, read_named_text
from tuner.importers.document import ForeignConfig
from tuner.importers.translation import Setting, Translation
from tuner.recipes.recipe_file import YAML
from tuner.zero import jsonfile, presets
from tuner.zero.config import BASE

_STAGE = re.compile(r"(?:zero|z|stage)_?([0123])(?!\d)", re.IGNORECASE)


def chosen(t: Translation, setting: Setting) -> None:
    """Set the DeepSpeed config from `deepspeed:` or `--deepspeed`."""
    text = str(setting.value).strip()
    near = _file(t, text)
    if isinstance(setting.value, dict):
        t.set(setting, "deepspeed", setting.value)
    elif text.startswith("{"):
        t.set(setting, "deepspeed", _parsed(setting, text))
    elif near is not None:
        t.set(setting, "deepspeed", str(near))
    elif name := preset(text):
        why = "that file is missing; its name shows this preset" if Path(text).suffix else None
        t.set(setting, "deepspeed", name, why, changed=why is not None)
    else:
        t.leave(setting, "that file is missing and its name shows no level; 'auto' uses the fastest that fits")


def _file(t: Translation, text: str) -> Path | None:
    return next((path for path in (Path(text), t.document.folder / text) if paths.is_file(path)), None)


def of_accelerate(t: Translation, setting: Setting) -> None:
    """Set the DeepSpeed config from accelerate's file, or from its name, unless that trains without DeepSpeed."""
    text = str(setting.value).strip()
    path = _file(t, text)
    names_deepspeed = preset(text) if path is None else "deepspeed_config" in ForeignConfig.of_yaml(path).values
    if t.value("deepspeed") is not None:
        t.leave(setting, "deepspeed is set too")
    elif names_deepspeed:
        chosen(t, setting)
    else:
        t.leave(setting, "it names no ZeRO level; 'auto' uses the fastest that fits")


def preset(text: str) -> str | None:
    """Return the preset that a file name or another tool's word stands for; None if it names no ZeRO level."""
    name = Path(text).name.lower()
    level = _STAGE.search(name)
    return presets.of_stage(int(level[1]), offloads="offload" in name).name if level else None


def _parsed(setting: Setting, text: str) -> JsonObject:
    try:
        return jsonfile.parse(text, setting.where).value
    except DeepSpeedConfigError as error:
        raise setting.wrong(error.what, error.fix) from None


def text(value: object) -> str | None:
    """Return the text of a DeepSpeed config: a dict, or the path of a JSON; None for any other value.

    A dict of changes to a `base` belongs into a recipe, as a preset's name does: a JSON has no such key.
    """
    if isinstance(value, dict) and BASE not in value:
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if isinstance(value, str) and paths.is_file(Path(value)) and not value.endswith(YAML):
        fix = "Give a DeepSpeed JSON."
        return read_named_text(Path(value), DeepSpeedConfigError, max_bytes=jsonfile.MAX_BYTES, fix=fix, name=value)
    return None
