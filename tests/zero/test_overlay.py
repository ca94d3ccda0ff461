"""`--ds KEY=VALUE` and `deepspeed = dict(base=...)`: one value changed over a preset or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tests.machine.gpus import CPU
from tuner.errors import DeepSpeedConfigError
from tuner.launch.machines import RunMachines
from tuner.launch.resolve import decide
from tuner.launch.resolved_run import ResolvedRecipe
from tuner.machine.launchers import resolve
from tuner.machine.topology import LaunchFlags
from tuner.recipes import loading
from tuner.recipes.merging import Kind
from tuner.recipes.recipe import Overrides
from tuner.zero import choice, config_schema

TINY = "tiny_full_sample_e1"
ZERO = "zero_optimization"


def _resolved(recipe: str, deepspeed: str | None, *ds: str) -> ResolvedRecipe:
    loaded = loading.load(recipe, Overrides(ds=ds))
    return decide(loaded, deepspeed, RunMachines.of(CPU, resolve(LaunchFlags(), {}, 0)))


def _recipe(folder: Path, deepspeed: str) -> str:
    path = folder / "mine.py"
    path.write_text(f'_base_ = "{TINY}"\ndeepspeed = {deepspeed}\n')
    return str(path)


def test_one_value_changes_and_says_that_it_was_typed_and_what_it_beat() -> None:
    made = _resolved(TINY, "zero3", f"{ZERO}.overlap_comm=false")

    origin = made.final.origins[f"{ZERO}.overlap_comm"]
    assert made.final.config[ZERO]["overlap_comm"] is False
    assert (origin.place.kind, origin.text) == (Kind.FLAG, f"--ds {ZERO}.overlap_comm=false")
    assert origin.overridden[0].value is True
    assert made.final.config[ZERO]["sub_group_size"] == 1_000_000_000, "the rest is the preset's"
    assert made.level == "deepspeed_zero3"


def test_the_last_of_several_wins_and_auto_takes_them_too() -> None:
    assert _resolved(TINY, "zero2", "steps_per_print=5", "steps_per_print=6").final.config["steps_per_print"] == 6
    assert _resolved(TINY, None, "steps_per_print=5").final.config["steps_per_print"] == 5


@each(
    [
        ("overlap_comm=true", "overlap_comm", True),
        ("overlap_comm=True", "overlap_comm", True),
        ("prefetch_bucket_size=5e7", "stage3_prefetch_bucket_size", 50_000_000),
        ("stage3_prefetch_bucket_size=7", "stage3_prefetch_bucket_size", 7),
        (f"{ZERO}.leaf_module.names=['a', 'b']", "leaf_module", {"names": ["a", "b"]}),
        ('leaf_module={"names": ["a"]}', "leaf_module", {"names": ["a"]}),
    ]
)
def test_a_value_has_the_type_of_its_key_under_any_spelling(text: str, key: str, value: Any) -> None:
    assert _resolved(TINY, "zero3", text).final.config[ZERO][key] == value


@each(
    [
        ("overlap_com=true", "Did you mean 'overlap_comm'"),
        ("overlap_comm", "has no '='"),
        ("overlap_comm=maybe", "true or false"),
        ("stage=5", "0, 1, 2 or 3"),
        ("bucket_size=nan", "Did you mean"),
        ("reduce_bucket_size=nan", "an integer"),
        ("device=cpu", "could be zero_optimization.offload_optimizer.device"),
        ("sparse_attention=true", "was removed from DeepSpeed"),
        ("offload_optimizer.device=nvme", "without nvme_path"),
        ("stage=" + "[" * 100_000, "is not"),
    ]
)
def test_what_means_nothing_is_told_with_the_flag_and_the_nearest_key(text: str, said: str) -> None:
    with pytest.raises(DeepSpeedConfigError) as caught:
        _resolved(TINY, "zero3", text)

    assert said in str(caught.value)
    assert str(caught.value.where).startswith("--ds")


def test_a_recipe_changes_values_of_a_preset_by_line(tmp_path: Path) -> None:
    made = _resolved(_recipe(tmp_path, f'dict(base="zero3",\n    {ZERO}=dict(overlap_comm=False))'), None)

    assert made.final.config[ZERO]["overlap_comm"] is False
    assert made.final.config[ZERO]["stage"] == 3
    assert made.final.origins[f"{ZERO}.overlap_comm"].text.endswith("mine.py:3")
    assert "base" not in made.final.config


def test_a_recipe_changes_values_of_a_file_and_the_flag_changes_those(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{"zero_optimization": {"stage": 1}, "steps_per_print": 3}')
    recipe = _recipe(tmp_path, f'dict(base="{tmp_path}/my.json", steps_per_print=4)')

    assert _resolved(recipe, None).final.config["steps_per_print"] == 4
    assert _resolved(recipe, None, "steps_per_print=5").final.config["steps_per_print"] == 5
    assert "steps_per_print" not in _resolved(recipe, "zero1").final.config, "the flag names another config"


@pytest.mark.parametrize("base", ["'auto'", "3", "'zero9'", "'no/such.json'"])
def test_a_base_that_is_none_is_told_with_its_line(tmp_path: Path, base: str) -> None:
    with pytest.raises(DeepSpeedConfigError):
        _resolved(_recipe(tmp_path, f"dict(base={base}, steps_per_print=4)"), None)


def test_what_a_run_keeps_is_the_preset_with_the_changes(tmp_path: Path) -> None:
    made = _resolved(TINY, "zero3", "overlap_comm=false")
    as_run = loading.anchored(made.recipe, made.document.recipe_value)
    (tmp_path / "recipe.py").write_text(as_run.standalone())

    again = _resolved(str(tmp_path / "recipe.py"), None)

    assert as_run.config.deepspeed == {"base": "deepspeed_zero3", ZERO: {"overlap_comm": False}}
    assert again.final.config == made.final.config


def test_every_key_of_the_presets_can_be_typed() -> None:
    for preset in ("zero1", "zero2_offload", "zero3_offload"):
        document = choice.open_config(preset, "--deepspeed")
        for block, values in document.value.items():
            names = [f"{block}.{name}" for name in values] if isinstance(values, dict) else [block]
            assert {*names} <= config_schema.known_keys().keys()
