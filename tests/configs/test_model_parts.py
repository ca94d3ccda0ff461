"""Every model part is data: a summary, a model, and facts of its architecture that agree with each other.

It builds no model: `tests/fit` does, at each part's facts.
"""

from __future__ import annotations

import ast
from typing import Any

from tests.configs.test_published_counts import PUBLISHED_PARAMETERS
from tests.each import each
from tuner.recipes import catalog
from tuner.recipes.recipe_file import read_file, read_part
from tuner.recipes.schema.architecture import Architecture

PARTS = catalog.names("models")


def values_of(part: str) -> dict[str, Any]:
    return read_part("models", part).values


FROM_FILES = [part for part in PARTS if values_of(part).keys() == {"model"}]
"""Parts with a name alone: what a plan needs is in the model's config.json."""
OWN_CODE = [part for part in PARTS if "remote_code" in values_of(part)["model"]]


@each(set(FROM_FILES) - set(OWN_CODE))
def test_a_part_without_facts_says_where_they_come_from(part: str) -> None:
    assert catalog.summary(catalog.part_file("models", part)).endswith("; planned from its config.json.")


@each(part for part in PARTS if part not in (*FROM_FILES, *OWN_CODE))
def test_model_part_states_each_fact_that_every_model_has(part: str) -> None:
    architecture = values_of(part)["architecture"]

    required = {key for key, field in Architecture.model_fields.items() if field.is_required()}
    assert required <= set(architecture)
    Architecture(**architecture)


@each(PARTS)
def test_model_part_begins_with_one_line_on_the_model(part: str) -> None:
    docstring = ast.get_docstring(ast.parse(catalog.part_file("models", part).path.read_text(encoding="utf-8")))

    assert docstring is not None
    assert "\n" not in docstring
    assert catalog.summary(catalog.part_file("models", part)) == docstring


@each(PARTS)
def test_model_part_names_a_chat_template_that_is_there(part: str) -> None:
    template = values_of(part)["model"].get("chat_template")

    assert template is None or catalog.chat_template(template)


def test_no_published_model_lost_its_part() -> None:
    assert set(PUBLISHED_PARAMETERS) <= set(PARTS)


def test_facts_stand_in_one_part_alone() -> None:
    """Parts of one architecture or tower name the part that holds it, and so do those with another context alone."""
    holders: dict[str, list[str]] = {}
    for part in PARTS:
        facts = read_file(catalog.part_file("models", part).path).values.get("architecture")
        if isinstance(facts, dict) and "_base_" not in facts:
            del facts["max_position_embeddings"]
            holders.setdefault(repr((part[:4], sorted(facts.items()))), []).append(part)
        if isinstance(facts, dict) and isinstance(tower := facts.get("vision_config"), dict):
            holders.setdefault(repr(sorted(tower.items())), []).append(part)

    assert [parts for parts in holders.values() if len(parts) > 1] == []


def test_a_part_that_builds_on_another_repeats_none_of_its_facts() -> None:
    repeated = []
    for part in PARTS:
        facts = read_file(catalog.part_file("models", part).path).values.get("architecture")
        if isinstance(facts, dict) and (base := facts.pop("_base_", None)):
            shared = values_of(base)["architecture"]
            repeated += [(part, key) for key, value in facts.items() if shared.get(key) == value]

    assert repeated == []
