"""The projector of a LLaVA in the layouts of transformers, LLaVA and XTuner, which have the same weights.

    transformers   multi_modal_projector.linear_1, multi_modal_projector.linear_2
    LLaVA          mm_projector.0, mm_projector.2
    XTuner         model.0, model.2 in a folder of its own; projector.model.0, projector.model.2 in a checkpoint

It reads safetensors, and pickles that hold tensors alone.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from tuner import paths
from tuner.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor

WHERE = "model.vision.projector"
NAMES = ("linear_1.weight", "linear_1.bias", "linear_2.weight", "linear_2.bias")
_SUFFIXES = (".safetensors", ".bin", ".pth", ".pt")
_OF_TRANSFORMERS = re.compile(
    r"(?:.*\.)?multi_modal_projector\.(?:modules_to_save\.default\.)?(linear_[12]\.(?:weight|bias))"
)
_NUMBERED = re.compile(r"(?:(?:.*\.)?mm_projector\.|(?:.*\.)?projector\.model\.|model\.)([02])\.(weight|bias)")
LAYERS = {"0": "linear_1", "2": "linear_2"}
"""The number of a layer in LLaVA and XTuner: its name in transformers."""
_FIX = "Give the run of a first stage, a LLaVA, or a file such as mm_projector.bin."


def file_of(path: str) -> Path:
    """Return the file or the folder that a user names as a projector; for a run, the folder of its result.

    Raises:
        ModelError: there is no projector.
    """
    place = paths.expanded(path)
    result = place / "final"
    if paths.is_folder(place) and not any(place.glob("*.safetensors")) and paths.is_folder(result):
        return result
    if not paths.exists(place):
        raise ModelError(f"there is no projector at {path!r}", where=WHERE, fix=_FIX)
    return place


def read(place: Path) -> dict[str, Tensor]:
    """Return the weights of a projector by their names in transformers: `NAMES`.

    Raises:
        ModelError: a file is damaged, or holds no projector of two layers.
    """
    files = [place] if place.is_file() else sorted(file for file in place.iterdir() if file.suffix in _SUFFIXES)
    weights: dict[str, Tensor] = {}
    try:
        for file in files:
            weights |= {own: weight for name, weight in _stored(file) if (own := name_of(name))}
    except (SafetensorError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{file} cannot be read: {reason}", where=WHERE, fix="Copy it again.") from error
    lacking = [name for name in NAMES if name not in weights]
    if lacking:
        raise ModelError(f"{str(place)!r} holds no {lacking[0]} of a projector", where=WHERE, fix=_FIX)
    return weights


def name_of(stored: str) -> str | None:
    """Return the name in transformers of a stored weight of a projector; None for other weights."""
    if match := _OF_TRANSFORMERS.fullmatch(stored):
        return match[1]
    match = _NUMBERED.fullmatch(stored)
    return f"{LAYERS[match[1]]}.{match[2]}" if match else None


def _stored(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                if name_of(name):
                    yield name, stored.get_tensor(name)
        return
    values = torch.load(file, map_location="cpu", weights_only=True)
    values = values.get("state_dict", values) if isinstance(values, dict) else {}
    yield from ((str(name), value) for name, value in values.items() if isinstance(value, torch.Tensor))
