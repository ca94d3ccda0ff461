"""A part is read with the facts it names, and a name that leads nowhere is refused where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from tuner.errors import RecipeError
from tuner.recipes import catalog, loading
from tuner.recipes.recipe_file import read_part


def test_a_model_part_has_the_facts_of_the_part_it_names() -> None:
    shared, own = read_part("models", "llama3_8b_instruct"), read_part("models", "llama3_8b")

    assert shared.values["architecture"] == own.values["architecture"]
    assert shared.values["model"] != own.values["model"]


def test_a_model_part_changes_single_facts_of_the_part_it_builds_on(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name, base, length in (("mine", "llama3_8b", 99), ("longer", "mine", 100)):
        facts = f'architecture = dict(\n    _base_="{base}",\n    max_position_embeddings={length},\n)\n'
        (tmp_path / "models" / f"{name}.py").write_text(f'model = dict(path="x")\n{facts}')

    with catalog.using(tmp_path):
        longer = read_part("models", "longer")

    llama = read_part("models", "llama3_8b").values["architecture"]
    assert longer.values["architecture"] == llama | {"max_position_embeddings": 100}
    assert longer.where(("architecture", "max_position_embeddings")) == f"{tmp_path}/models/longer.py:4"
    assert longer.where(("architecture", "hidden_size")) == f"{tmp_path}/models/longer.py:2"


def test_a_model_part_has_the_tower_of_the_part_that_it_names() -> None:
    small, large = (read_part("models", f"internvl3_5_{size}").values["architecture"] for size in ("1b", "8b"))

    assert small["vision_config"] == large["vision_config"]
    assert small["vision_config"]["model_type"] == "internvl"
    assert small["hidden_size"] != large["hidden_size"]


def test_shared_facts_come_from_the_line_that_names_them() -> None:
    found = loading.load("llama3_8b_instruct_full_alpaca_e1")

    assert found.config.architecture is not None
    assert found.config.architecture.hidden_size == 4096
    assert found.origins["architecture.hidden_size"].text == "configs/models/llama3_8b_instruct.py:4"


@pytest.mark.parametrize(
    ("architecture", "refused"),
    [
        ('"llama3_8c"', "mine"),  # there is no such model
        ('dict(_base_="llama3_8c")', "mine"),
        ('"llama3_8b"', "llama3_8b"),  # it names itself
        ('dict(_base_="llama3_8b", vocab_size=9)', "llama3_8b"),
        ('dict(model_type="llava", vision_config="llama3_8c")', "mine"),
    ],
)
def test_a_name_without_facts_is_refused_with_its_line(architecture: str, refused: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    for name in ("llama3_8b", "mine"):
        (tmp_path / "models" / f"{name}.py").write_text(f'model = dict(path="x")\narchitecture = {architecture}\n')

    with catalog.using(tmp_path), pytest.raises(RecipeError) as caught:
        read_part("models", "mine")

    assert caught.value.where == f"{tmp_path}/models/{refused}.py:2"
