"""Reads safetensors one tensor at a time, and writes them one shard at a time, with a hash of every tensor.

It knows names, shapes and bytes, but no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor

from tuner.errors import DiskError, ModelError, Option, TunerError
from tuner.files import JsonObject, read_text, write_json
from tuner.models import compat
from tuner.pretrained import tensors_of
from tuner.progress import shown

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Piece:
    """Tensors that are computed together, when they are needed."""

    shapes: Tensors
    """The tensors that `make` returns, on the device 'meta'."""
    make: Callable[[], Tensors]


class Stored:
    """The tensors in a folder of safetensors, by name."""

    def __init__(self, folder: Path, stem: str = "model") -> None:
        """Read the names, shapes and types; `stem` is what the file names begin with.

        Raises:
            ModelError: the folder has no such files, or a file is missing or damaged.
        """
        self.shapes: Tensors = {}
        self._files: dict[str, Path] = {}
        for file in _files(folder, stem):
            with tensors_of(file) as opened:
                for name in opened.keys():  # noqa: SIM118 (not a mapping)
                    # The tensor is a view of the file: nothing of it is read for its shape and type.
                    self._files[name], self.shapes[name] = file, opened.get_tensor(name).to("meta")

    def load(self, name: str) -> Tensor:
        """Return one tensor. The file is opened for it only, so that no other tensor stays in memory.

        Raises:
            ModelError: the file is gone: a run that is still training removes its older checkpoints.
        """
        with tensors_of(self._files[name]) as opened:
            tensor: Tensor = opened.get_tensor(name)
        return tensor

    def piece(self, name: str) -> Piece:
        return Piece({name: self.shapes[name]}, lambda: {name: self.load(name)})


def _files(folder: Path, stem: str) -> list[Path]:
    weights_file, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if index.is_file() and not weights_file.is_file():  # transformers loads the whole file, if there are both
        try:
            names = set(json.loads(read_text(index))["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{index} cannot be read", fix="Download or copy the model again.") from error
        return [folder / name for name in sorted(names)]
    if not weights_file.is_file():
        pickles = any(folder.glob("*.bin"))
        problem = f"{folder} has no {stem}.safetensors" + (
            ", only pickles, which tuner does not load" if pickles else ""
        )
        raise ModelError(problem, fix="Use a model that is published as safetensors." if pickles else None)
    return [weights_file]


def typed(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a tensor converted to `dtype`, if it holds floating-point numbers and `dtype` is set.

    Raises:
        TunerError: a number is too large for that type.
    """
    if dtype is None or not tensor.is_floating_point():
        return tensor
    converted = tensor.to(dtype)
    if dtype == torch.float16 and not converted.is_meta and converted.isinf().sum() > tensor.isinf().sum():
        problem = f"a weight of {float(tensor.abs().max()):g} is too large for fp16, whose largest number is 65,504"
        raise TunerError(problem, where=Option("dtype"), fix="Use bf16 or fp32.")
    return converted


def write(
    pieces: Iterable[Piece],
    folder: Path,
    stem: str,
    max_shard_bytes: int,
    dtype: torch.dtype | None,
    action: str = "exporting",
) -> dict[str, JsonObject]:
    """Write every tensor, in shards; only one shard and one piece are in memory at a time.

    Args:
        max_shard_bytes: Limit of a shard; a larger tensor has a shard of its own.
        dtype: The type of the floating-point tensors. None: unchanged.

    Returns:
        File, shape, type and SHA-256 of each tensor, checked against the written file.

    Raises:
        DiskError: a file cannot be written, or differs from what was written.
    """
    pieces = list(pieces)
    of_name = {name: piece for piece in pieces for name in piece.shapes}
    shapes = {name: typed(tensor, dtype) for piece in pieces for name, tensor in piece.shapes.items()}
    split = split_torch_state_dict_into_shards(
        shapes, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=max_shard_bytes
    )
    ready: Tensors = {}

    def tensor(name: str) -> Tensor:
        if name not in ready:
            ready.update(of_name[name].make())
        return typed(ready.pop(name), dtype).contiguous()

    written: dict[str, JsonObject] = {}
    with shown(action, "tensors", len(shapes)) as work:
        for file, names in split.filename_to_tensors.items():
            shard = {name: tensor(name) for name in work.counted(names)}
            hashes = {name: _sha256(value) for name, value in shard.items()}
            with compat.os_errors():
                save_file(shard, folder / file, metadata={"format": "pt"})
            del shard
            entries = hashes_of(folder, file.removesuffix(".safetensors"))
            if other := next((name for name in hashes if entries[name]["sha256"] != hashes[name]), None):
                raise DiskError(f"{other} in {file} differs from what was written", where=folder, fix="Check the disk.")
            written |= entries
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / f"{stem}.safetensors.index.json", index)
    return written


def hashes_of(folder: Path, stem: str = "model") -> dict[str, JsonObject]:
    """Return file, shape, type and SHA-256 of each tensor in a folder, as `write` does.

    Raises:
        ModelError: a file is missing or damaged.
    """
    stored, entries = Stored(folder, stem), dict[str, JsonObject]()
    for name, shape in stored.shapes.items():
        kind, digest = str(shape.dtype).removeprefix("torch."), _sha256(stored.load(name))
        file = stored._files[name].name
        entries[name] = {"file": file, "shape": list(shape.shape), "dtype": kind, "sha256": digest}
    return entries


def num_bytes(pieces: Iterable[Piece], dtype: torch.dtype | None) -> int:
    """Return how many bytes `write` will write, without the files' headers."""
    return sum(typed(tensor, dtype).nbytes for piece in pieces for tensor in piece.shapes.values())


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(memoryview(tensor.reshape(-1).view(torch.uint8).numpy())).hexdigest()
