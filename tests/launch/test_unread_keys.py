"""A key that the user has set and nothing reads is named before the start; defaults and parts are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch.plans import made
from tuner.launch import preflight

FULL, LORA, DPO = "tiny_full_sample_e1", "tiny_lora_sample_e1", "tiny_dpo_lora_sample_preferences_e1"


@pytest.mark.parametrize(
    ("recipe", "sets", "key"),
    [
        (FULL, ["image_max_pixels=1000"], "train_dataloader.dataset.image_max_pixels"),
        (FULL, ["optimizer.type=SGD", "betas=(0.5, 0.9)"], "optim_wrapper.optimizer.betas"),
        (FULL, ["optimizer.type=SGD", "optimizer.eps=1e-3"], "optim_wrapper.optimizer.eps"),
        (FULL, ["train_dataloader.dataset.packing=False", "pack_length=64"], "train_dataloader.dataset.pack_length"),
        (FULL, ["max_new_tokens=10"], "log.max_new_tokens"),
        (FULL, ["checkpoint.private=True"], "checkpoint.private"),
        (DPO, ["train_dataloader.dataset.packing=True"], "train_dataloader.dataset.packing"),
        (LORA, ["adapter.r=64", "betas=(0.5, 0.9)", "max_new_tokens=10", "log.generate=2"], None),
        (FULL, ["optimizer.type=SGD"], None),
        (DPO, [], None),
    ],
)
def test_a_key_that_nothing_reads_is_named(recipe: str, sets: list[str], key: str | None) -> None:
    told = [finding for finding in preflight.foresee(made(*sets, recipe=recipe)) if "has no effect" in finding]

    assert [finding.split(" = ")[0] for finding in told] == [key] * bool(key)


def test_a_split_of_a_local_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"instruction": "a", "output": "b"}\n' * 3)
    keys = (f"train_dataloader.dataset.path={path}", "train_dataloader.dataset.format=None")

    def told(*sets: str) -> list[str]:
        run = made(*keys, *sets, recipe="tiny_full_custom_sft_e1")
        return [finding.split(" = ")[0] for finding in preflight.foresee(run) if "has no effect" in finding]

    assert told("train_dataloader.dataset.split=test") == ["train_dataloader.dataset.split"]
    assert told("train_dataloader.dataset.name=main") == ["train_dataloader.dataset.name"]
    assert told("train_dataloader.dataset.split=train[:2]") == []


def test_the_recipe_of_a_run_which_holds_every_key_has_none_to_name(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text(made(recipe=DPO).recipe.standalone())

    told = preflight.foresee(made(recipe=str(tmp_path / "recipe.py")))

    assert not [finding for finding in told if "has no effect" in finding]
