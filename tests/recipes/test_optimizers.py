"""The table of optimizers is true, and what ZeRO does not suit is refused: no flat shard has the means of a tensor."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers.training_args import OptimizerNames

from tuner.importers import aliases
from tuner.optimizers import OPTIMIZERS, unsuited
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.worker import trainer_setup

FACTORED = ("Adafactor", "galore_adamw", "apollo_adamw_layerwise", "adam_mini", "SOAP", "shampoo")
ALIKE = {
    "factored": FACTORED,
    "of each tensor": ("StableAdamW", "stable_adamw"),
    "hooks the backward pass": ("lomo", "AdaLomo"),
    "swaps weights": ("schedule_free_adamw", "RAdamScheduleFree"),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_optimizers_are_refused_for_what_they_have_in_common(kind: str) -> None:
    [reason] = {unsuited(name) for name in ALIKE[kind]}
    others = {unsuited(names[0]) for other, names in ALIKE.items() if other != kind}

    assert reason and reason not in others


def test_no_optimizer_of_a_recipe_is_refused_and_every_name_of_transformers_is_one_or_refused_or_unknown() -> None:
    known = {name.value: aliases.table()["optim"].value(name.value) for name in OptimizerNames}

    assert [name for name in OPTIMIZERS if unsuited(name)] == []
    neither = {name for name, ours_name in known.items() if not (ours_name in OPTIMIZERS or unsuited(name))}
    # Elementwise ones that would be right, of packages that are not here or in forms that nobody asked for.
    elementwise = {"adamw", "lion", "ademamix", "rmsprop", "grokadamw", "paged"}
    assert {name.partition("_")[0] for name in neither} <= elementwise


def test_an_optimizer_is_known_by_its_own_name_in_any_case() -> None:
    of_other_tools = aliases.table()["optim"]

    for write in (str, str.lower, str.upper):
        assert [of_other_tools.value(write(name)) for name in OPTIMIZERS] == [*OPTIMIZERS]


def made(name: str, decay: float = 0.0) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """Return an optimizer that has taken one step, as training makes it, and what it has trained."""
    config = load(
        "tiny_full_sample_e1",
        Overrides(pairs=[("--set", f"optimizer.type={name}")]),
    ).config
    cls, settings = trainer_setup._optimizer(config)
    weight = torch.nn.Parameter(torch.ones(128, 128))
    weight.grad = torch.ones_like(weight)
    optimizer = cls([{"params": [weight], "weight_decay": decay}], **settings)
    optimizer.step()
    return optimizer, weight


def states_of(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> list[torch.Tensor]:
    return [value for value in optimizer.state[weight].values() if isinstance(value, torch.Tensor)]


def on_cpu(name: str) -> str:
    """Return the optimizer without pages, which are a GPU's."""
    pages = name.startswith("Paged") and not torch.cuda.is_available()
    return name.removeprefix("Paged").removesuffix("32bit") if pages else name


@pytest.mark.parametrize("name", [name for name, facts in OPTIMIZERS.items() if facts.library != "DeepSpeed"])
def test_an_optimizer_reads_the_settings_and_keeps_the_states_that_its_row_says(name: str) -> None:
    facts = OPTIMIZERS[name]

    optimizer, weight = made(on_cpu(name))

    states = states_of(optimizer, weight)
    assert sum(value.nbytes for value in states) / weight.numel() == pytest.approx(facts.state_bytes, abs=0.3)
    settings = inspect.signature(type(optimizer)).parameters
    assert (facts.has_betas, facts.has_eps) == ("betas" in settings, "eps" in settings)


WITH_STATES = [name for name, facts in OPTIMIZERS.items() if facts.library != "DeepSpeed" and facts.state_bytes]


@pytest.mark.parametrize("name", WITH_STATES)
def test_weight_decay_touches_the_states_of_an_optimizer_where_its_row_says_that_the_gradient_has_it(name: str) -> None:
    without, decayed = (made(on_cpu(name), decay) for decay in (0.0, 0.5))

    pairs = zip(states_of(*without), states_of(*decayed), strict=True)
    assert any(not torch.equal(state, other) for state, other in pairs) == OPTIMIZERS[name].decays_gradient
    assert not torch.equal(without[1], decayed[1]) or OPTIMIZERS[name].decays_gradient, "the decay is read"
