"""Which optimizers are refused, and why: ZeRO updates a flat shard of many tensors, and no shard has their means."""

from __future__ import annotations

import pytest
from transformers.training_args import OptimizerNames

from tuner.importers import aliases
from tuner.recipes.schema import OptimizerType, unsuited_optimizer

FACTORED = ("Adafactor", "galore_adamw", "apollo_adamw_layerwise", "adam_mini", "SOAP", "shampoo")
ALIKE = {
    "factored": FACTORED,
    "of each tensor": ("StableAdamW", "stable_adamw"),
    "hooks the backward pass": ("lomo", "AdaLomo"),
    "swaps weights": ("schedule_free_adamw", "RAdamScheduleFree"),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_optimizers_are_refused_for_what_they_have_in_common(kind: str) -> None:
    [reason] = {unsuited_optimizer(name) for name in ALIKE[kind]}
    others = {unsuited_optimizer(names[0]) for other, names in ALIKE.items() if other != kind}

    assert reason and reason not in others


def test_no_optimizer_of_a_recipe_is_refused_and_every_name_of_transformers_is_one_or_refused_or_unknown() -> None:
    ours = OptimizerType.__args__  # type: ignore[attr-defined]
    known = {name.value: aliases.table()["optim"].value(name.value) for name in OptimizerNames}

    assert [name for name in ours if unsuited_optimizer(name)] == []
    neither = {name for name, ours_name in known.items() if not (ours_name in ours or unsuited_optimizer(name))}
    # Elementwise ones that would be right, of packages that are not here or in forms that nobody asked for.
    elementwise = {"adamw", "lion", "ademamix", "rmsprop", "grokadamw", "paged"}
    assert {name.partition("_")[0] for name in neither} <= elementwise
