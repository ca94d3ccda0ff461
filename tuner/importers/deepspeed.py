"""The DeepSpeed config that another tool's config names: a file, a preset's name, or the config itself.

Whether the config is a right one, `zero` decides when it is read for a run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tuner import paths
from tuner.errors import DeepSpeedConfigError
from tuner.files import read_named_text
from tuner.importers.translation import Given, Translation
from tuner.recipes import catalog, document_file
from tuner.zero import jsonfile

_STAGE = re.compile(r"(?:zero|z|stage)_?([0123])(?!\d)", re.IGNORECASE)


def chosen(t: Translation, given: Given) -> None:
    """Take what `deepspeed:` or `--deepspeed` says."""
    value = given.value
    if isinstance(value, dict):
        t.set(given, "deepspeed", value)
        return
    text = str(value).strip()
    if text.startswith("{"):
        t.set(given, "deepspeed", _parsed(t, given, text))
        return
    near = next((one for one in (Path(text), t.document.folder / text) if paths.is_file(one)), None)
    if near is not None:
        t.set(given, "deepspeed", str(near))
        return
    name = preset(text)
    if name is None:
        t.leave(given, "that file is missing and its name shows no level; 'auto' uses the lowest that fits")
    elif Path(text).suffix:
        t.set(given, "deepspeed", name, "that file is missing; its name shows this preset", changed=True)
    else:
        t.set(given, "deepspeed", name)


def preset(text: str) -> str | None:
    """Return the preset that a file's name or another tool's word means, or None where it tells no level."""
    name = Path(text).name.lower()
    found = _STAGE.search(name)
    if found is None:
        return None
    if found[1] == "0":
        return "none"
    wanted = f"deepspeed_zero{found[1]}{'_offload' if 'offload' in name else ''}"
    return wanted if wanted in catalog.presets() else f"deepspeed_zero{found[1]}"


def _parsed(t: Translation, given: Given, text: str) -> dict[str, Any]:
    try:
        return jsonfile.parse(text, given.where).value
    except DeepSpeedConfigError as error:
        raise given.wrong(error.what, error.fix) from None


def text(value: Any) -> str | None:
    """Return the text of the config that a recipe holds or whose JSON it names; None where it names another."""
    if isinstance(value, dict):
        return json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    if isinstance(value, str) and paths.is_file(Path(value)) and not value.endswith(document_file.YAML):
        name = value
        fix = "Give a DeepSpeed JSON."
        return read_named_text(Path(value), DeepSpeedConfigError, max_bytes=jsonfile.MAX_BYTES, fix=fix, name=name)
    return None
