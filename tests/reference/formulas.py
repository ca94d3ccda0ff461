"""The losses of preferences as their papers write them, from the logits of one sequence at a time.

A side is its ids and, for each, its label or -100; P is the policy that is trained, R the reference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

Side = tuple[Sequence[int], Sequence[int]]


@torch.no_grad()
def log_probs(model: Any, side: Side) -> list[float]:
    """Return the log-probability of each trained token."""
    ids, labels = side
    logits_TV = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].double()
    told_TV = logits_TV - logits_TV.exp().sum(-1, keepdim=True).log()
    return [float(told_TV[at, label]) for at, label in enumerate(labels[1:]) if label != -100]


def log_sigmoid(value: float) -> float:
    return -math.log1p(math.exp(-value))


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def log_ratio(policy: Any, reference: Any, side: Side) -> float:
    """Return log P(y|x) / R(y|x)."""
    return sum(log_probs(policy, side)) - sum(log_probs(reference, side))


def dpo(policy: Any, reference: Any, pairs: Sequence[tuple[Side, Side]], beta: float) -> float:
    """Rafailov et al., 2023 (arXiv:2305.18290), equation 7."""
    margins = [
        beta * (log_ratio(policy, reference, chosen) - log_ratio(policy, reference, rejected))
        for chosen, rejected in pairs
    ]
    return -sum(map(log_sigmoid, margins)) / len(pairs)


def orpo(policy: Any, pairs: Sequence[tuple[Side, Side]], beta: float) -> float:
    """Hong et al., 2024 (arXiv:2403.07691), equations 3 to 7.

    Its probability of an answer is the geometric mean over tokens. The likelihood term is that of the authors' program
    and TRL's: the mean over all tokens of the chosen conversations, the prompt's too.
    """
    whole = [log_probs(policy, (ids, ids)) for (ids, _), _ in pairs]
    likelihood = -sum(map(sum, whole)) / sum(map(len, whole))
    ratios = [
        _log_odds(log_probs(policy, chosen)) - _log_odds(log_probs(policy, rejected)) for chosen, rejected in pairs
    ]
    return likelihood - beta * sum(map(log_sigmoid, ratios)) / len(pairs)


def _log_odds(each: Sequence[float]) -> float:
    probability = math.exp(sum(each) / len(each))
    return math.log(probability / (1 - probability))


def simpo(policy: Any, pairs: Sequence[tuple[Side, Side]], beta: float, gamma: float) -> float:
    """Meng et al., 2024 (arXiv:2405.14734), equation 6."""

    def reward(side: Side) -> float:
        each = log_probs(policy, side)
        return beta * sum(each) / len(each)

    margins = [reward(chosen) - reward(rejected) - gamma for chosen, rejected in pairs]
    return -sum(map(log_sigmoid, margins)) / len(pairs)


def cpo(
    policy: Any,
    pairs: Sequence[tuple[Side, Side]],
    beta: float,
    alpha: float,
    smoothing: float = 0.0,
    loss: str = "sigmoid",
) -> float:
    """Xu et al., 2024 (arXiv:2401.08417), equation 5, with the loss of equation 3 or another one.

    'hinge' is that of SLiC (arXiv:2305.10425), 'ipo' equation 17 of arXiv:2310.12036; smoothed labels are those of
    conservative DPO.
    """

    def of_pair(chosen: Side, rejected: Side) -> float:
        each = [log_probs(policy, side) for side in (chosen, rejected)]
        if loss == "ipo":
            good, bad = (sum(log_probs) / len(log_probs) for log_probs in each)
            return (good - bad - 1 / (2 * beta)) ** 2
        margin = beta * (sum(each[0]) - sum(each[1]))
        if loss == "hinge":
            return max(0.0, 1 - margin)
        return -(1 - smoothing) * log_sigmoid(margin) - smoothing * log_sigmoid(-margin)

    return sum(of_pair(*pair) for pair in pairs) / len(pairs) + alpha * likelihood(policy, pairs)


def likelihood(policy: Any, pairs: Sequence[tuple[Side, Side]]) -> float:
    """Return the negative log-likelihood of the chosen answers, as CPO's authors' program and TRL: a mean over tokens.

    The paper's own is a sum over the tokens of an answer.
    """
    told = [log_probs(policy, chosen) for chosen, _ in pairs]
    return -sum(map(sum, told)) / sum(map(len, told))


def distance(policy: Any, reference: Any, mixed: Sequence[Side]) -> float:
    """Return KTO's estimate of KL(P || R), section 4.1, from prompts with the answers of others."""
    return max(0.0, sum(log_ratio(policy, reference, side) for side in mixed) / len(mixed))


def kto(
    policy: Any,
    reference: Any,
    judged: Sequence[tuple[Side, bool]],
    beta: float,
    distance: float,
    weights: tuple[float, float],
) -> float:
    """Ethayarajh et al., 2024 (arXiv:2402.01306), equations 7 and 8; the weights are of good answers and of bad."""
    losses = []
    for side, is_good in judged:
        reward = log_ratio(policy, reference, side)
        value = sigmoid(beta * (reward - distance) if is_good else beta * (distance - reward))
        losses.append(weights[0 if is_good else 1] * (1 - value))
    return sum(losses) / len(losses)


@torch.no_grad()
def reward(model: Any, pairs: Sequence[tuple[Side, Side]], coefficient: float) -> float:
    """Bradley and Terry, 1952; the scores are pulled to 0 as in Eisenstein et al., 2023 (arXiv:2312.09244)."""
    losses = []
    for sides in pairs:
        good, bad = (float(model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits) for ids, _ in sides)
        losses.append(-log_sigmoid(good - bad) + coefficient * (good + bad) ** 2)
    return sum(losses) / len(losses)
