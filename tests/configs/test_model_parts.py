"""Every model part is data whose architecture builds with transformers and has the published number of parameters.

It builds on the meta device: no weights, no hub.
"""

from __future__ import annotations

import ast
import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tuner.worker.models  # noqa: F401  registers internlm2
from tuner.recipes import catalog, source
from tuner.recipes.schema import Architecture

PUBLISHED_PARAMETERS = {
    "gemma2_2b_it": 2_614_341_888,
    "gemma2_9b_it": 9_241_705_984,
    "gemma_2b_it": 2_506_172_416,
    "gemma_7b_it": 8_537_680_896,
    "internlm2_1_8b": 1_889_110_016,
    "internlm2_20b": 19_861_149_696,
    "internlm2_5_7b": 7_737_708_544,
    "internlm2_5_chat_7b": 7_737_708_544,
    "internlm2_7b": 7_737_708_544,
    "internlm2_chat_1_8b": 1_889_110_016,
    "internlm2_chat_1_8b_sft": 1_889_110_016,
    "internlm2_chat_20b": 19_861_149_696,
    "internlm2_chat_7b": 7_737_708_544,
    "llama3_1_8b_instruct": 8_030_261_248,
    "llama3_2_1b_instruct": 1_235_814_400,
    "llama3_2_3b_instruct": 3_212_749_824,
    "llama3_8b_instruct": 8_030_261_248,
    "mistral_7b_instruct": 7_248_023_552,
    "qwen2_5_0_5b_instruct": 494_032_768,
    "qwen2_5_14b_instruct": 14_770_033_664,
    "qwen2_5_1_5b_instruct": 1_543_714_304,
    "qwen2_5_32b_instruct": 32_763_876_352,
    "qwen2_5_3b_instruct": 3_085_938_688,
    "qwen2_5_72b_instruct": 72_706_203_648,
    "qwen2_5_7b_instruct": 7_615_616_512,
    "qwen3_0_6b": 596_049_920,
    "qwen3_14b": 14_768_307_200,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_32b": 32_762_123_264,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
}
PARTS = catalog.names("models")


def values_of(part: str) -> dict[str, Any]:
    return source.read_file(catalog.part_path("models", part)).values


def num_parameters(architecture: dict[str, Any]) -> int:
    config = AutoConfig.for_model(**architecture)
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())


@pytest.mark.parametrize("part", PARTS)
def test_model_part_builds_with_the_published_number_of_parameters(part: str) -> None:
    count = num_parameters(values_of(part)["architecture"])

    size = re.search(r"_(\d+(?:_\d)?)b(?:_|$)", part)
    if part in PUBLISHED_PARAMETERS:
        assert count == PUBLISHED_PARAMETERS[part]
    elif size:
        assert count == pytest.approx(float(size[1].replace("_", ".")) * 1e9, rel=0.15)


@pytest.mark.parametrize("part", PARTS)
def test_model_part_states_each_fact_of_the_schema_and_no_other(part: str) -> None:
    architecture = values_of(part)["architecture"]

    assert set(architecture) == set(Architecture.model_fields)
    Architecture(**architecture)


@pytest.mark.parametrize("part", PARTS)
def test_model_part_begins_with_one_line_on_the_model(part: str) -> None:
    docstring = ast.get_docstring(ast.parse(catalog.part_path("models", part).read_text(encoding="utf-8")))

    assert docstring is not None
    assert "\n" not in docstring
    assert catalog.summary("models", part) == docstring


@pytest.mark.parametrize("part", PARTS)
def test_model_part_names_a_chat_template_that_is_there(part: str) -> None:
    template = values_of(part)["model"].get("chat_template")

    assert template is None or catalog.chat_template(template).is_file()


def test_no_published_model_lost_its_part() -> None:
    assert set(PUBLISHED_PARAMETERS) <= set(PARTS)
