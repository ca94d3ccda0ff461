from __future__ import annotations

import pytest

from tuner.fit.memory import LEVELS, Parameters, model_state_bytes
from tuner.recipes import catalog, recipe
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig

GB = 10**9
BILLIONS_7 = Parameters(trainable=7 * GB)


def _config(name: str, *sets: str) -> RecipeConfig:
    return recipe.load(name, Overrides(pairs=[("--set", text) for text in sets])).config


@pytest.mark.parametrize(("level", "gigabytes"), [("zero1", 38.5), ("zero2", 26.25), ("zero3", 14.0)])
def test_7b_on_8_gpus_needs_what_the_paper_says(level: str, gigabytes: float) -> None:
    assert model_state_bytes(f"deepspeed_{level}", BILLIONS_7, 8) == gigabytes * GB


@pytest.mark.parametrize("ranks", [1, 2, 3, 64, 1024])
@pytest.mark.parametrize("trainable", [1, 10**6, 7 * GB])
def test_model_states_follow_the_published_formulas(trainable: int, ranks: int) -> None:
    def needed(level: str) -> float:
        return model_state_bytes(level, Parameters(trainable), ranks)

    assert needed("none") == 16 * trainable
    assert needed("deepspeed_zero1") == pytest.approx(4 * trainable + 12 * trainable / ranks)
    assert needed("deepspeed_zero2") == pytest.approx(2 * trainable + 14 * trainable / ranks)
    assert needed("deepspeed_zero3") == pytest.approx(16 * trainable / ranks)
    assert needed("deepspeed_zero2_offload") == 2 * trainable
    assert needed("deepspeed_zero3_offload") == 0


def test_frozen_weights_are_whole_on_every_gpu_below_stage_3_and_shared_at_it() -> None:
    parameters = Parameters(trainable=0, frozen=8 * GB)

    assert model_state_bytes("deepspeed_zero2", parameters, 8) == 16 * GB
    assert model_state_bytes("deepspeed_zero3", parameters, 8) == 2 * GB


def test_4_bit_weights_take_half_a_byte_and_their_scales() -> None:
    assert Parameters(0, quantized=1000).frozen_bytes == pytest.approx(516)
    assert Parameters(0, quantized=1000, quantized_bits=8).frozen_bytes == 1000
    assert Parameters(0, frozen=1000).frozen_bytes == 2000


# The lowest level that fits


def test_every_level_is_a_preset_or_none() -> None:
    assert set(LEVELS) == {*catalog.presets(), "none"}
