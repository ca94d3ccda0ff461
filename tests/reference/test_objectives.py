"""The losses of preferences are those of their papers: the trainers' on one batch, and plain formulas on its rows.

The formulas compute from the logits of one sequence at a time: a side, which is its ids and, for each, its label or
-100. A new objective is its paper's formula here, and a row of `LOSSES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tuner.data.prepare import prepare
from tuner.data.text_encoder import TextEncoder
from tuner.models.load import load_model, load_tokenizer, pretrained_path
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.worker.trainer_setup import evaluator

Side = tuple[Sequence[int], Sequence[int]]
NUM_ROWS = 6
METHODS = ("full", "lora")


class Case:
    """An objective's recipe, rows and models, and the loss that its trainer finds on those rows as one batch."""

    def __init__(self, objective: str, method: str, folder: Path, *sets: str) -> None:
        pairs = [("--set", text) for text in (f"train_dataloader.dataset.max_rows={NUM_ROWS}", *sets)]
        config = load(f"tiny_{objective}_{method}_sample_preferences_e1", Overrides(pairs=pairs)).config
        path = pretrained_path(config.model)
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
        has_own = method == "full" and config.objective.facts.has_reference
        compared = self.reference if has_own else None
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


@torch.no_grad()
def log_probs(model: Any, side: Side) -> list[float]:
    """Return the log-probability of each trained token."""
    ids, labels = side
    logits_TV = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()
    told_TV = logits_TV - logits_TV.exp().sum(-1, keepdim=True).log()
    return [float(told_TV[at, label]) for at, label in enumerate(labels[1:]) if label != -100]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def log_ratio(case: Case, side: Side) -> float:
    """Return log P(y|x) / R(y|x), where P is the policy and R the reference."""
    return sum(log_probs(case.policy, side)) - sum(log_probs(case.reference, side))


def dpo(case: Case, beta: float) -> float:
    """Rafailov et al., 2023 (arXiv:2305.18290), equation 7."""
    margins = [beta * (log_ratio(case, chosen) - log_ratio(case, rejected)) for chosen, rejected in case.pairs]
    loss = -mean([log_sigmoid(margin) for margin in margins])
    assert abs(loss - math.log(2)) > 0.01, "the policy is another than the reference"
    return loss


def orpo(case: Case, beta: float) -> float:
    """Hong et al., 2024 (arXiv:2403.07691), equations 3 to 7.

    Its probability of an answer is the geometric mean over tokens. The likelihood term is that of the authors' program
    and TRL's: the mean over all tokens of the chosen conversations, the prompt's too.
    """

    def log_odds(side: Side) -> float:
        probability = math.exp(mean(log_probs(case.policy, side)))
        return math.log(probability / (1 - probability))

    whole = [told for (ids, _), _ in case.pairs for told in log_probs(case.policy, (ids, ids))]
    ratios = [log_odds(chosen) - log_odds(rejected) for chosen, rejected in case.pairs]
    return -mean(whole) - beta * mean([log_sigmoid(ratio) for ratio in ratios])


def simpo(case: Case, beta: float, gamma: float, alpha: float = 0.0) -> float:
    """Meng et al., 2024 (arXiv:2405.14734), equation 6; `alpha` is the weight of the likelihood that TRL can add."""
    lengths = {(len(chosen[0]), len(rejected[0])) for chosen, rejected in case.pairs}
    assert any(chosen != rejected for chosen, rejected in lengths), "a mean over tokens is no sum"
    rewards = [[beta * mean(log_probs(case.policy, side)) for side in pair] for pair in case.pairs]
    return -mean([log_sigmoid(chosen - rejected - gamma) for chosen, rejected in rewards]) + alpha * likelihood(case)


def cpo(case: Case, beta: float, alpha: float, smoothing: float = 0.0, loss: str = "sigmoid") -> float:
    """Xu et al., 2024 (arXiv:2401.08417), equation 5, with the loss of equation 3 or another one.

    'hinge' is that of SLiC (arXiv:2305.10425), 'ipo' equation 17 of arXiv:2310.12036; smoothed labels are those of
    conservative DPO.
    """

    def of_pair(chosen: Side, rejected: Side) -> float:
        each = [log_probs(case.policy, side) for side in (chosen, rejected)]
        if loss == "ipo":
            return (mean(each[0]) - mean(each[1]) - 1 / (2 * beta)) ** 2
        margin = beta * (sum(each[0]) - sum(each[1]))
        if loss == "hinge":
            return max(0.0, 1 - margin)
        return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)

    return mean([of_pair(*pair) for pair in case.pairs]) + alpha * likelihood(case)


def likelihood(case: Case) -> float:
    """Return the negative log-likelihood of the chosen answers, as CPO's authors' program and TRL: a mean over tokens.

    The paper's own is a sum over the tokens of an answer.
    """
    return -mean([told for chosen, _ in case.pairs for told in log_probs(case.policy, chosen)])


def kto(case: Case, beta: float, weights: tuple[float, float]) -> float:
    """Ethayarajh et al., 2024 (arXiv:2402.01306), equations 7 and 8; the weights are of good answers and of bad.

    The distance to the reference, KL(P || R), is that of section 4.1, from prompts with the answers of others.
    """
    sides = case.side("answer")
    mixed = [answered(sides[at], sides[at - 1]) for at in range(len(sides))]
    distance = max(0.0, mean([log_ratio(case, side) for side in mixed]))
    judged = [(side, row["is_good"]) for side, row in zip(sides, case.rows, strict=True)]
    assert {is_good for _, is_good in judged} == {True, False} and distance > 0.01
    losses = []
    for side, is_good in judged:
        reward = log_ratio(case, side)
        value = sigmoid(beta * (reward - distance) if is_good else beta * (distance - reward))
        losses.append(weights[0 if is_good else 1] * (1 - value))
    return mean(losses)


def answered(asked: Side, said: Side) -> Side:
    """Return the prompt of one answer with another answer."""
    starts = [next(at for at, label in enumerate(labels) if label != -100) for _, labels in (asked, said)]
    prompt, answer = asked[0][: starts[0]], said[0][starts[1] :]
    return [*prompt, *answer], [-100] * len(prompt) + list(said[1][starts[1] :])


@torch.no_grad()
def reward(case: Case, coefficient: float) -> float:
    """Bradley and Terry, 1952; the scores are pulled to 0 as in Eisenstein et al., 2023 (arXiv:2312.09244)."""
    losses = []
    for sides in case.pairs:
        good, bad = (
            float(case.policy(input_ids=torch.tensor([list(ids)]), use_cache=False).logits) for ids, _ in sides
        )
        losses.append(-log_sigmoid(good - bad) + coefficient * (good + bad) ** 2)
    return mean(losses)


LOSSES: list[tuple[str, tuple[str, ...], str, Callable[[Case], float]]] = [
    ("dpo", METHODS, "beta=0.3", partial(dpo, beta=0.3)),
    ("orpo", METHODS, "beta=0.3", partial(orpo, beta=0.3)),
    ("simpo", METHODS, "beta=2.5 simpo_gamma=1.4", partial(simpo, beta=2.5, gamma=1.4)),
    ("simpo", ("full",), "beta=2.5 simpo_gamma=1.4 cpo_alpha=0.7", partial(simpo, beta=2.5, gamma=1.4, alpha=0.7)),
    ("cpo", METHODS, "beta=0.3 cpo_alpha=0.7 label_smoothing=0.1", partial(cpo, beta=0.3, alpha=0.7, smoothing=0.1)),
    ("cpo", ("lora",), "beta=0.3 cpo_alpha=0.7 loss_type=hinge", partial(cpo, beta=0.3, alpha=0.7, loss="hinge")),
    ("cpo", ("lora",), "beta=0.3 cpo_alpha=0.7 loss_type=ipo", partial(cpo, beta=0.3, alpha=0.7, loss="ipo")),
    (
        "kto",
        METHODS,
        "beta=0.3 desirable_weight=1.5 undesirable_weight=0.5",
        partial(kto, beta=0.3, weights=(1.5, 0.5)),
    ),
    ("reward", METHODS, "center_rewards_coefficient=None", partial(reward, coefficient=0.0)),
    ("reward", METHODS, "center_rewards_coefficient=0.1", partial(reward, coefficient=0.1)),
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
