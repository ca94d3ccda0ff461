"""The losses of preferences are those of their papers: the trainers' on one batch, and plain formulas on its rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.reference import formulas
from tests.reference.formulas import Side
from tuner.data.prepare import prepare
from tuner.data.text_encoder import TextEncoder
from tuner.models.load import load_model, load_tokenizer, source
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.worker.trainer_setup import evaluator

NUM_ROWS = 6
METHODS = ("full", "lora")


class Case:
    """An objective's recipe, rows and models, and the loss that its trainer finds on those rows as one batch."""

    def __init__(self, objective: str, method: str, folder: Path, *sets: str) -> None:
        pairs = [("--set", text) for text in (f"train_dataloader.dataset.max_rows={NUM_ROWS}", *sets)]
        config = load(f"tiny_{objective}_{method}_sample_preferences_e1", Overrides(pairs=pairs)).config
        path = source(config.model)
        transformers.set_seed(1)
        self.policy = load_model(config, path, torch.float32, "cpu", shards=False)
        # What training began with, which an adapter's trainer finds below the adapter.
        start = load(f"tiny_{objective}_full_sample_preferences_e1").config
        self.reference = load_model(start, path, torch.float32, "cpu", shards=False).eval()
        transformers.set_seed({"full": 1, "lora": 3}[method])  # draws of which KTO's distance, cut at 0, is above it
        for name, weight in self.policy.named_parameters():
            if weight.requires_grad and ("lora_B" in name or "layers.1.mlp" in name or "score" in name):
                torch.nn.init.normal_(weight, std=0.02 if "lora_B" in name else 0.1)
        tokenizer = load_tokenizer(config.model, path)
        dataset = prepare(config.train_dataloader.dataset, TextEncoder(tokenizer), objective=objective).dataset
        compared = self.reference if method == "full" and objective in ("dpo", "kto") else None
        trainer = evaluator(config, (self.policy, compared), TextEncoder(tokenizer), dataset, len(dataset), str(folder))
        self.rows = list(dataset)
        self.policy.train()
        self.loss = float(trainer.compute_loss(self.policy, trainer.data_collator(self.rows)).detach())
        self.policy.eval()

    def side(self, name: str) -> list[Side]:
        return [(row[f"{name}_ids"], row[f"{name}_labels"]) for row in self.rows]

    @property
    def pairs(self) -> list[tuple[Side, Side]]:
        return list(zip(self.side("chosen"), self.side("rejected"), strict=True))


def answered(asked: Side, said: Side) -> Side:
    """Return the prompt of one answer with another answer."""
    starts = [next(at for at, label in enumerate(labels) if label != -100) for _, labels in (asked, said)]
    prompt, answer = asked[0][: starts[0]], said[0][starts[1] :]
    return [*prompt, *answer], [-100] * len(prompt) + list(said[1][starts[1] :])


def dpo(case: Case) -> float:
    loss = formulas.dpo(case.policy, case.reference, case.pairs, beta=0.3)
    assert abs(loss - 0.6931) > 0.01, "the policy is another than the reference"
    return loss


def simpo(case: Case) -> float:
    lengths = {(len(chosen[0]), len(rejected[0])) for chosen, rejected in case.pairs}
    assert any(chosen != rejected for chosen, rejected in lengths), "a mean over tokens is no sum"
    return formulas.simpo(case.policy, case.pairs, beta=2.5, gamma=1.4)


def cpo(case: Case, **more: Any) -> float:
    return formulas.cpo(case.policy, case.pairs, beta=0.3, alpha=0.7, **more)


def kto(case: Case) -> float:
    sides = case.side("answer")
    mixed = [answered(sides[at], sides[at - 1]) for at in range(len(sides))]
    judged = [(side, row["is_good"]) for side, row in zip(sides, case.rows, strict=True)]
    distance = formulas.distance(case.policy, case.reference, mixed)
    assert {is_good for _, is_good in judged} == {True, False} and distance > 0.01
    return formulas.kto(case.policy, case.reference, judged, beta=0.3, distance=distance, weights=(1.5, 0.5))


LOSSES: list[tuple[str, tuple[str, ...], str, Callable[[Case], float]]] = [
    ("dpo", METHODS, "beta=0.3", dpo),
    ("orpo", METHODS, "beta=0.3", lambda case: formulas.orpo(case.policy, case.pairs, beta=0.3)),
    ("simpo", METHODS, "beta=2.5 simpo_gamma=1.4", simpo),
    (
        "simpo",
        ("full",),
        "beta=2.5 simpo_gamma=1.4 cpo_alpha=0.7",
        lambda case: simpo(case) + 0.7 * formulas.likelihood(case.policy, case.pairs),
    ),
    ("cpo", METHODS, "beta=0.3 cpo_alpha=0.7 label_smoothing=0.1", lambda case: cpo(case, smoothing=0.1)),
    ("cpo", ("lora",), "beta=0.3 cpo_alpha=0.7 loss_type=hinge", lambda case: cpo(case, loss="hinge")),
    ("cpo", ("lora",), "beta=0.3 cpo_alpha=0.7 loss_type=ipo", lambda case: cpo(case, loss="ipo")),
    ("kto", METHODS, "beta=0.3 desirable_weight=1.5 undesirable_weight=0.5", kto),
    ("reward", METHODS, "center_rewards_coefficient=None", lambda case: formulas.reward(case.policy, case.pairs, 0.0)),
    ("reward", METHODS, "center_rewards_coefficient=0.1", lambda case: formulas.reward(case.policy, case.pairs, 0.1)),
]
"""An objective, methods, settings, and its paper's loss."""


@pytest.mark.parametrize(
    ("objective", "method", "sets", "of_paper"),
    [(objective, method, sets, loss) for objective, methods, sets, loss in LOSSES for method in methods],
    ids=[f"{objective} {method} {sets}" for objective, methods, sets, _ in LOSSES for method in methods],
)
def test_the_loss_is_that_of_the_paper(
    objective: str, method: str, sets: str, of_paper: Callable[[Case], float], tmp_path: Path
) -> None:
    case = Case(objective, method, tmp_path, *sets.split())

    assert case.loss == pytest.approx(of_paper(case), rel=1e-5)
