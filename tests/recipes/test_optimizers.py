"""Which optimizers are refused, and why: ZeRO updates a flat shard of many tensors, and no shard has their means."""

from __future__ import annotations

import pytest
import torch
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
    assert {name.partition("_")[0] for name in neither} <= {
        "adamw",
        "lion",
        "ademamix",
        "rmsprop",
        "grokadamw",
        "paged",
    }


def stable_adamw(tensors: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The first step of StableAdamW at a rate of 1: each tensor's is divided by max(1, RMS(g / sqrt(v))).

    Its second moments are those of an earlier, smaller gradient (Wortsman et al., 2023, arXiv:2304.13013, 3.4).
    """
    stepped = []
    for tensor, gradient in zip(tensors, gradients, strict=True):
        moments = torch.full_like(gradient, 0.25)
        rms = (gradient**2 / moments).mean().sqrt()
        stepped.append(tensor - gradient / moments.sqrt() / max(1.0, float(rms)))
    return stepped


def test_a_flat_shard_of_two_tensors_is_updated_otherwise_than_each_by_stable_adamw() -> None:
    weights, gradients = [torch.zeros(4), torch.zeros(4)], [torch.full((4,), 2.0), torch.full((4,), 0.5)]

    apart = torch.cat(stable_adamw(weights, gradients))
    [flat] = stable_adamw([torch.cat(weights)], [torch.cat(gradients)])

    assert apart.tolist() == [-1.0] * 8
    assert flat[:4].tolist() == pytest.approx([-4 / 8.5**0.5] * 4)
