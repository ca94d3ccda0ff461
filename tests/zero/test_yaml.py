"""`--deepspeed FILE` with ROLL's presets, and other YAML: what it ends in, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.refused import refused
from tuner.errors import DeepSpeedConfigError
from tuner.zero import choice
from tuner.zero.config import Document
from tuner.zero.lint import check

PRESET = """deepspeed_zero3:
  bf16:
    enabled: true
  zero_optimization:
    stage: 3
    sub_group_size: 1.0e9
    reduce_bucket_size: 5e8
"""
PIPELINE = """defaults:
  - ../config/deepspeed_zero3@_here_
  - ../config/not_there@_here_
scale: 2
actor_train:
  model_args: {dtype: bf16}
  strategy_args:
    strategy_name: deepspeed_train
    strategy_config: ${deepspeed_zero3}
"""


def _opened(path: Path, text: str) -> Document:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return choice.open_config(str(path), "--deepspeed")


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    config = tmp_path / "project" / "config"
    config.mkdir(parents=True)
    (config / "deepspeed_zero3.yaml").write_text(PRESET)
    (tmp_path / "outside.yaml").write_text(PRESET)
    return tmp_path / "project" / "mine" / "pipeline.yaml"


def test_a_preset_of_roll_is_the_config_below_its_one_key(tmp_path: Path) -> None:
    document = _opened(tmp_path / "deepspeed_zero3.yaml", PRESET)

    zero = check(document).value["zero_optimization"]
    assert (zero["stage"], zero["sub_group_size"], zero["reduce_bucket_size"]) == (3, 1_000_000_000, 500_000_000)
    assert document.where(("zero_optimization", "stage")).endswith("deepspeed_zero3.yaml:5")


def test_a_preset_builds_on_another_by_defaults(pipeline: Path) -> None:
    text = "defaults: [../config/deepspeed_zero3@_here_]\ndeepspeed_zero3:\n  zero_optimization: {stage: 2}\n"

    document = _opened(pipeline, text)

    assert document.value["zero_optimization"]["stage"] == 2
    assert document.value["bf16"] == {"enabled": True}
    assert document.where(("bf16", "enabled")).endswith("deepspeed_zero3.yaml:3")


def test_a_pipeline_gives_the_config_of_the_role_that_trains(pipeline: Path) -> None:
    document = _opened(pipeline, PIPELINE)

    assert document.value["zero_optimization"]["stage"] == 3
    assert document.where(("zero_optimization", "stage")).endswith("deepspeed_zero3.yaml:5")


def test_deepspeeds_own_keys_may_stand_in_yaml(tmp_path: Path) -> None:
    document = _opened(tmp_path / "mine.yaml", "zero_optimization:\n  stage: 2\n  allgather_bucket_size: 2e8\n")

    assert check(document).value["zero_optimization"]["allgather_bucket_size"] == 200_000_000
    assert document.where(("zero_optimization", "stage")).endswith("mine.yaml:2")


REFUSED = {
    "a typo": (PRESET.replace("sub_group_size", "sub_grup_size"), "Did you mean 'sub_group_size'", 6),
    "an object": ("deepspeed_zero3: !!python/object/apply:os.system [ls]\n", "builds an object", 1),
    "an alias of itself": ("deepspeed_zero3: &a {zero_optimization: *a}\n", "nested deeper than 32", 1),
    "a circle": (PRESET.replace("stage: 3", "stage: ${a}") + "a: ${b}\nb: ${a}\n", "in a cycle:", None),
    "a name of nothing": (PIPELINE.replace("${deepspeed_zero3}", "${deepspeed_zero9}"), "is not defined", 9),
    "a file outside": ("defaults: [../../outside@_here_]\n", "outside", 1),
    "no package": ("defaults: [../config/deepspeed_zero3]\n", "@_here_", 1),
    "a list of defaults that is none": ("defaults: mine\n", "not a list", 1),
    "several presets": (PRESET + PRESET.replace("zero3", "zero2"), "several", None),
    "another strategy": (PIPELINE.replace("deepspeed_train", "megatron_train"), "megatron_train", 8),
    "a config of another tool": ("base_model: x\nsequence_len: 3\nmicro_batch_size: 1\n", "tuner train", None),
    "nothing": ("", "empty", None),
    "no mapping": ("- a\n", "no `key: value`", 1),
    "no YAML": ("a: [\n", "not valid YAML", 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_one_error_with_file_and_line(pipeline: Path, name: str) -> None:
    text, said, line = REFUSED[name]

    with pytest.raises(DeepSpeedConfigError) as caught:
        check(_opened(pipeline, text))

    assert said in str(caught.value)
    assert f"pipeline.yaml:{line}" in str(caught.value) if line else "pipeline.yaml" in str(caught.value)


def test_files_that_build_on_each_other_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("defaults: [mine@_here_]\n")

    with refused(DeepSpeedConfigError, "mine.yaml:1"):
        _opened(tmp_path / "mine.yaml", "defaults: [other@_here_]\n")
