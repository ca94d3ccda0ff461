"""Two real ranks that share samples learn what two learn that do not, at the same global batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import Finished, Once, distance, ok, quick, train

pytestmark = [pytest.mark.e2e, pytest.mark.long]

APART = ("--deepspeed", "zero2")
SHARED = ("--set", "sequence_parallel_size=2")


def recipe(folder: Path, method: str = "full") -> Path:
    """Write one of four steps of eight packed rows, without dropout, that validates twice on rows of odd numbers."""
    path = quick(folder, method)
    text = path.read_text().replace("accumulative_counts=2", 'accumulative_counts="auto"')
    text = text.replace("max_steps=4", "max_steps=4, global_batch_size=8, val_interval=2")
    validation = "val_dataloader = dict(batch_size=3, dataset=dict(max_rows=7, packing=False))"
    text = text.replace("val_dataloader = None", validation)
    path.write_text(text + ("adapter = dict(lora_dropout=0.0)\n" if method != "full" else ""))
    return path


def run(path: Path, folder: Path, level: str, *more: str, ranks: int = 2) -> Finished:
    return ok(train(path, folder, "--deepspeed", level, *more, ranks=ranks))


def is_same(finished: Finished, other: Finished, weights: str = "model") -> None:
    assert len(finished.losses) == 4
    assert finished.losses == pytest.approx(other.losses, abs=2e-5)
    validations = [[line["eval_loss"] for line in each.metrics if "eval_loss" in line] for each in (finished, other)]
    assert len(validations[0]) == 3  # before the first step, after two and after four
    assert validations[0] == pytest.approx(validations[1], abs=2e-5)
    name = f"final/{weights}.safetensors"
    assert distance(load_file(finished.path / name), load_file(other.path / name)) < 1e-5


def test_two_ranks_that_share_samples_learn_what_two_learn_that_do_not(tmp_path: Path, once: Once) -> None:
    apart = once(recipe, "full", *APART)
    shared = run(recipe(tmp_path), tmp_path / "shared", "zero2", *SHARED)

    is_same(shared, apart)
    batches = [finished.json("run.json")["batch"] for finished in (apart, shared)]
    assert [(batch["accumulation"], batch["ranks"], batch["global_batch"]) for batch in batches] == [
        (2, 2, 8),
        (4, 1, 8),
    ]
    assert shared.json("deepspeed.json")["train_batch_size"] == 8
    tokens = [[line["num_tokens"] for line in each.metrics if "loss" in line] for each in (shared, apart)]
    assert tokens[0] == tokens[1]


def test_so_they_do_at_every_level_with_lora_and_with_tiled_mlps(tmp_path: Path, once: Once) -> None:
    path, adapted = recipe(tmp_path), recipe(tmp_path, "lora")
    apart, adapter = (once(recipe, method, *APART) for method in ("full", "lora"))

    for level in ("none", "zero1", "zero3"):
        is_same(run(path, tmp_path / level, level, *SHARED), apart)
    is_same(run(adapted, tmp_path / "lora", "zero3", *SHARED), adapter, "adapter_model")
    is_same(run(path, tmp_path / "tiled", "zero3", "--set", "tiled_mlp=True"), apart)
    is_same(run(adapted, tmp_path / "tiles", "zero2", "--set", "tiled_mlp=True"), adapter, "adapter_model")


def test_the_last_step_of_an_epoch_has_fewer_samples_than_groups_take_also_with_dft(tmp_path: Path) -> None:
    path, rows = recipe(tmp_path), "train_dataloader.dataset"
    few = ("--set", f"{rows}.packing=False", "--set", f"{rows}.max_rows=27", "--set", "objective.loss_type=dft")

    is_same(run(path, tmp_path / "shared", "zero2", *few, *SHARED), run(path, tmp_path / "apart", "zero2", *few))


def test_a_run_goes_on_with_samples_shared_or_not(tmp_path: Path) -> None:
    path, level = recipe(tmp_path), "zero3"
    whole = run(path, tmp_path / "whole", level)

    for name, first, then in (("joined", (), SHARED), ("parted", SHARED, ("--set", "sequence_parallel_size=1"))):
        run(path, tmp_path / name, level, *first, "--set", "max_steps=2")
        is_same(run(path, tmp_path / name, level, *then, "--resume", "auto"), whole)


@pytest.mark.parametrize(("method", "weights"), [("full", "model"), ("lora", "adapter_model")])
def test_four_ranks_learn_the_same_in_one_group_and_in_two(
    tmp_path: Path, once: Once, method: str, weights: str
) -> None:
    """Four ranks have a head each, and each of the two key-value heads is copied."""
    path, apart = recipe(tmp_path, method), once(recipe, method, *APART)

    is_same(run(path, tmp_path / "one", "zero3", "--set", "sequence_parallel_size=4", ranks=4), apart, weights)
    is_same(run(path, tmp_path / "two", "zero2", *SHARED, ranks=4), apart, weights)


def test_ranks_share_the_samples_of_a_model_in_four_bits(tmp_path: Path) -> None:
    path, level = recipe(tmp_path, "qlora"), "zero3"

    is_same(run(path, tmp_path / "shared", level, *SHARED), run(path, tmp_path / "apart", level), "adapter_model")
