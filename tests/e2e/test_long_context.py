"""Two real ranks that share samples learn what two learn that do not, at the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import Finished, distance, ok, quick, train

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SHARED = ("--set", "sequence_parallel_size=2")


def recipe(folder: Path, method: str = "full") -> Path:
    """Write one of four steps of eight packed rows, without dropout."""
    path = quick(folder, method)
    text = path.read_text().replace("accumulative_counts=2", 'accumulative_counts="auto"')
    text = text.replace("max_steps=4", "max_steps=4, global_batch_size=8")
    path.write_text(text + ("adapter = dict(lora_dropout=0.0)\n" if method == "lora" else ""))
    return path


def run(path: Path, folder: Path, level: str, *more: str) -> Finished:
    return ok(train(path, folder, "--deepspeed", level, *more))


def is_same(one: Finished, other: Finished, weights: str = "model") -> None:
    assert len(one.losses) == 4
    assert one.losses == pytest.approx(other.losses, abs=2e-5)
    name = f"final/{weights}.safetensors"
    assert distance(load_file(one.path / name), load_file(other.path / name)) < 1e-5


def test_two_ranks_that_share_samples_learn_what_two_learn_that_do_not(tmp_path: Path) -> None:
    path = recipe(tmp_path)

    apart = run(path, tmp_path / "apart", "zero2")
    shared = run(path, tmp_path / "shared", "zero2", *SHARED)

    is_same(shared, apart)
    batches = [one.json("run.json")["batch"] for one in (apart, shared)]
    assert [(one["accumulation"], one["ranks"], one["global_batch"]) for one in batches] == [(2, 2, 8), (4, 1, 8)]
    assert shared.json("deepspeed.json")["train_batch_size"] == 8
    assert [line["num_tokens"] for line in shared.metrics] == [line["num_tokens"] for line in apart.metrics]


def test_so_they_do_at_every_level_with_lora_and_with_tiled_mlps(tmp_path: Path) -> None:
    path, adapted = recipe(tmp_path), recipe(tmp_path, "lora")
    apart, adapter = run(path, tmp_path / "apart", "zero2"), run(adapted, tmp_path / "adapter", "zero2")

    for level in ("none", "zero1", "zero3"):
        is_same(run(path, tmp_path / level, level, *SHARED), apart)
    is_same(run(adapted, tmp_path / "lora", "zero3", *SHARED), adapter, "adapter_model")
    is_same(run(path, tmp_path / "tiled", "zero3", "--set", "tiled_mlp=True"), apart)
    is_same(run(adapted, tmp_path / "tiles", "zero2", "--set", "tiled_mlp=True"), adapter, "adapter_model")


def test_the_last_step_of_an_epoch_has_fewer_samples_than_groups_take(tmp_path: Path) -> None:
    path, few = recipe(tmp_path), ("--set", "train_dataloader.dataset.packing=False", "--set", "max_rows=27")

    is_same(run(path, tmp_path / "shared", "zero2", *few, *SHARED), run(path, tmp_path / "apart", "zero2", *few))


@pytest.mark.parametrize("level", ["zero2", "zero3"])
def test_a_run_goes_on_with_samples_shared_or_not(tmp_path: Path, level: str) -> None:
    path = recipe(tmp_path)
    whole = run(path, tmp_path / "whole", level)

    for name, first, then in (("joined", (), SHARED), ("parted", SHARED, ("--set", "sequence_parallel_size=1"))):
        run(path, tmp_path / name, level, *first, "--set", "max_steps=2")
        is_same(run(path, tmp_path / name, level, *then, "--resume", "auto"), whole)
