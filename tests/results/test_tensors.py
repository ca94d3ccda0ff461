"""Files of weights are written a shard at a time, as safetensors itself reads them, and read back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.refused import refused
from tuner.errors import DiskError, ModelError, TunerError
from tuner.results.tensors import Piece, Stored, write

MOST = 10**9
TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8)


def piece(**tensors: torch.Tensor) -> Piece:
    return Piece({name: tensor.to("meta") for name, tensor in tensors.items()}, lambda: dict(tensors))


@pytest.mark.parametrize("dtype", (*TYPES, torch.bool), ids=str)
def test_every_type_and_shape_reads_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.arange(15).reshape(3, 5).to(dtype),
        "turned": torch.arange(6).reshape(2, 3).T.to(dtype),
        "scalar": torch.tensor(1).to(dtype),
        "empty": torch.empty(0, 4).to(dtype),
    }

    written = write([piece(**tensors)], tmp_path, "model", MOST, None)

    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name].float(), tensor.float())
        data = found[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert written[name]["sha256"] == hashlib.sha256(data).hexdigest()
        assert written[name]["shape"] == list(tensor.shape)


def test_whole_weights_count_and_not_an_index_that_was_left_over(tmp_path: Path) -> None:
    """transformers loads the whole file if there are both, so the run was trained on it."""
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"weight": torch.zeros(2)}, tmp_path / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    assert torch.equal(Stored(tmp_path).load("weight"), torch.ones(2))


def test_another_type_is_asked_of_floating_point_numbers_alone(tmp_path: Path) -> None:
    numbers = piece(weight=torch.full((3,), 1 / 3), steps=torch.arange(3))

    write([numbers], tmp_path, "model", MOST, torch.bfloat16)

    found = load_file(tmp_path / "model.safetensors")
    assert (found["weight"].dtype, found["steps"].dtype) == (torch.bfloat16, torch.int64)
    assert torch.equal(found["weight"], torch.full((3,), 1 / 3).bfloat16())


def test_a_number_that_is_too_large_for_the_type_that_is_asked_for_is_no_infinity(tmp_path: Path) -> None:
    large = piece(weight=torch.tensor([1.0, 70000.0]))

    with refused(TunerError, "--dtype"):
        write([large], tmp_path, "model", MOST, torch.float16)


def test_shards_are_as_large_as_asked_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((100,), float(i)) for i in range(10)} | {"large": torch.ones(1000)}

    write([piece(**tensors)], tmp_path, "model", 1000, None)

    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == tensors.keys()
    held = {name: sorted(key for key, file in index.items() if file == name) for name in index.values()}
    assert max(len(names) for names in held.values()) == 2
    assert all(torch.equal(Stored(tmp_path).load(name), tensor) for name, tensor in tensors.items())


def test_bytes_that_read_back_as_others_are_the_disks_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands for a disk that returns other bytes than it took.
    load = Stored.load
    monkeypatch.setattr(Stored, "load", lambda stored, name: load(stored, name) + (name == "b"))

    with refused(DiskError, tmp_path.name):
        write([piece(a=torch.ones(2), b=torch.ones(2))], tmp_path, "model", MOST, None)


def test_a_folder_without_weights_and_an_index_that_is_none_are_told(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no model.safetensors"):
        Stored(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match=r"index.json cannot be read"):
        Stored(tmp_path)


def test_a_tensor_that_is_read_leaves_the_others_on_the_disk(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3), "b": torch.zeros(2)}, tmp_path / "model.safetensors")

    stored = Stored(tmp_path)

    assert {name: (shape.device.type, tuple(shape.shape)) for name, shape in stored.shapes.items()} == {
        "a": ("meta", (3,)),
        "b": ("meta", (2,)),
    }
    assert torch.equal(stored.load("a"), torch.ones(3))


def test_a_file_that_goes_away_while_it_is_read_is_told(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model.safetensors")
    stored = Stored(tmp_path)
    (tmp_path / "model.safetensors").unlink()

    with refused(ModelError, tmp_path.name):
        stored.load("weight")
