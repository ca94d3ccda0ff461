"""What published models have in their config.json is not refused as odd."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, GenerationConfig

from tuner import model_folder


@pytest.mark.long
def test_the_config_of_every_family_of_transformers_is_accepted(tmp_path: Path) -> None:
    refused, num_accepted = {}, 0
    for name, family in CONFIG_MAPPING.items():
        try:
            config = family()
        except Exception:  # noqa: S112  some have no defaults
            continue
        (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
        if problem := model_folder.problem_of(tmp_path):
            refused[name] = problem
        num_accepted += 1

    assert num_accepted > 300
    assert refused == {}


def test_the_defaults_of_a_generation_config_are_accepted(tmp_path: Path) -> None:
    GenerationConfig().save_pretrained(tmp_path)

    assert model_folder.problem_of(tmp_path) is None
