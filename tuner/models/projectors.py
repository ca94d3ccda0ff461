"""The projector of a LLaVA in the layouts of transformers, LLaVA and XTuner, which have the same weights.

    transformers   multi_modal_projector.linear_1, multi_modal_projector.linear_2
    LLaVA          mm_projector.0, mm_projector.2
    XTuner         model.0, model.2 in a folder of its own; projector.model.0, projector.model.2 in a checkpoint

It reads safetensors, and pickles that the user trusts.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING
from zipfile import is_zipfile

import torch

from tuner import paths
from tuner.errors import ModelError
from tuner.files import require_regular
from tuner.pretrained import tensors_of
from tuner.remote_code import WEIGHTS, is_published, untrusted_pickles

if TYPE_CHECKING:
    from torch import Tensor

WHERE = "model.vision.projector"
NAMES = ("linear_1.weight", "linear_1.bias", "linear_2.weight", "linear_2.bias")
_OF_TRANSFORMERS = re.compile(
    r"(?:.*\.)?multi_modal_projector\.(?:modules_to_save\.default\.)?(linear_[12]\.(?:weight|bias))"
)
_NUMBERED = re.compile(r"(?:(?:.*\.)?mm_projector\.|(?:.*\.)?projector\.model\.|model\.)([02])\.(weight|bias)")
LAYERS = {"0": "linear_1", "2": "linear_2"}
"""The number of a layer in LLaVA and XTuner: its name in transformers."""
_FIX = "Give the run of a first stage, a LLaVA, or a file such as mm_projector.safetensors."


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


def read_projector(place: Path, *, trusts_pickles: bool) -> dict[str, Tensor]:
    """Return the weights of a projector by their names in transformers: `NAMES`.

    Raises:
        ModelError: a file is damaged, or a pickle that is not trusted, or holds no projector of two layers.
    """
    weights: dict[str, Tensor] = {}
    for file in files_in(place):
        stored = _stored(file) if file.suffix == ".safetensors" else pickled(file, WHERE, trusts=trusts_pickles)
        weights |= {transformers_name: weight for name, weight in stored if (transformers_name := name_of(name))}
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


def files_in(place: Path) -> list[Path]:
    """Return the files of a projector: safetensors if there are any, else pickles."""
    if not place.is_dir():
        return [place]
    files = sorted(file for file in place.iterdir() if file.suffix in WEIGHTS)
    return [file for file in files if file.suffix == ".safetensors"] or files


def _stored(file: Path) -> Iterator[tuple[str, Tensor]]:
    with tensors_of(file, WHERE) as stored:
        for name in stored.keys():  # noqa: SIM118 (not a dict)
            if name_of(name):
                yield name, stored.get_tensor(name)


def pickled(file: Path, where: str, *, trusts: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a pickle, which torch reads without any other object in it.

    Args:
        where: The setting that names the file.
        trusts: Whether the user allows it; a file of `PUBLISHED_PICKLES` needs no word. A pickle is a program, and
            torch's limits on what it may do have failed before: CVE-2025-32434.

    Raises:
        ModelError: the user does not allow it, or it is damaged or holds more than tensors.
    """
    if not (trusts or is_published(file)):
        raise untrusted_pickles(str(file), where)
    try:
        require_regular(file)
        # Mapped, shards of gigabytes stay on the disk; torch maps no file in its format from before 1.6.
        values = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"{file} cannot be read: {reason}", where=where, fix="Copy it again.") from error
    values = values.get("state_dict", values) if isinstance(values, dict) else {}
    yield from ((str(name), value) for name, value in values.items() if isinstance(value, torch.Tensor))
