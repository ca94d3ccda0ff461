"""Training in plain PyTorch: no Trainer, no DeepSpeed, and nothing of tuner.

A row is a list of samples that never see each other; a sample is its ids and, for each, whether it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Sample = tuple[list[int], list[bool]]
Row = Sequence[Sample]
BETA_1, BETA_2, EPS = 0.9, 0.999, 1e-8


@dataclass(frozen=True)
class Settings:
    """What a recipe says. `global_batch`: rows of a whole step, of all ranks and micro-batches together."""

    lr: float
    weight_decay: float
    warmup_ratio: float
    max_norm: float
    global_batch: int
    num_epochs: int
    seed: int


@dataclass(frozen=True)
class Step:
    """The loss in nats a trained token, and the gradient's 2-norm before it is clipped."""

    loss: float
    grad_norm: float


def chatml(tokenizer: Any, messages: Sequence[Mapping[str, str]], max_length: int) -> Sample:
    """Return a conversation as ChatML writes it; trained are the assistant's words and the end of its turns."""
    text, answers = "", []
    for turn in messages:
        text += f"<|im_start|>{turn['role']}\n"
        start = len(text)
        text += f"{turn['content']}<|im_end|>"
        if turn["role"] == "assistant":
            answers.append((start, len(text)))
        text += "\n"
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    is_trained = [any(start <= first < end for start, end in answers) for first, _ in found["offset_mapping"]]
    return found["input_ids"][:max_length], is_trained[:max_length]


def train(model: nn.Module, rows: Sequence[Row], settings: Settings) -> list[Step]:
    """Train the model's parameters that take a gradient, in place, and return what every step was."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    moments = [(torch.zeros_like(parameter), torch.zeros_like(parameter)) for parameter in trained]
    batches = [batch for epoch in range(settings.num_epochs) for batch in _batches(rows, settings, epoch)]
    steps = []
    for number, batch in enumerate(batches):
        for parameter in trained:
            parameter.grad = None
        loss = _backward(model, [sample for row in batch for sample in row])
        norm = math.sqrt(sum(float(_grad(parameter).double().square().sum()) for parameter in trained))
        kept = min(1.0, settings.max_norm / (norm + 1e-6))
        lr = settings.lr * _cosine(number, len(batches), settings.warmup_ratio)
        for parameter, (first, second) in zip(trained, moments, strict=True):
            decay = settings.weight_decay if parameter.ndim > 1 else 0.0  # norms and biases are not decayed
            _adamw(parameter, _grad(parameter) * kept, first, second, number + 1, lr, decay)
        steps.append(Step(loss, norm))
    return steps


def _batches(rows: Sequence[Row], settings: Settings, epoch: int) -> Iterator[list[Row]]:
    """Yield the rows of each step of an epoch; the last step has those that are left."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(settings.seed + epoch)).tolist()
    for start in range(0, len(rows), settings.global_batch):
        yield [rows[at] for at in order[start : start + settings.global_batch]]


def _backward(model: nn.Module, samples: Sequence[Sample]) -> float:
    """Add the gradient of the mean over all trained tokens of a step, one sample after the other, and return it."""
    num_tokens = sum(sum(is_trained[1:]) for _, is_trained in samples)
    total = 0.0
    for ids, is_trained in samples:
        logits_TV = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        each_T = F.cross_entropy(logits_TV.float(), torch.tensor(ids[1:]), reduction="none")
        loss = each_T[torch.tensor(is_trained[1:])].sum() / num_tokens
        loss.backward()
        total += float(loss.detach())
    return total


def _grad(parameter: nn.Parameter) -> Tensor:
    """Return the gradient; zeros for a weight that the loss does not depend on, such as the norm behind a tower."""
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _cosine(step: int, num_steps: int, warmup_ratio: float) -> float:
    """Return the part of the learning rate at a step: linear, never 0, then half a cosine (SGDR, without restarts)."""
    num_warm = math.ceil(num_steps * warmup_ratio)
    if step < num_warm:
        return (step + 1) / num_warm
    return 0.5 * (1 + math.cos(math.pi * (step - num_warm) / (num_steps - num_warm)))


@torch.no_grad()
def _adamw(weight: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: int, lr: float, decay: float) -> None:
    """AdamW: Loshchilov and Hutter, 2019 (arXiv:1711.05101), algorithm 2."""
    first.copy_(BETA_1 * first + (1 - BETA_1) * grad)
    second.copy_(BETA_2 * second + (1 - BETA_2) * grad.square())
    mean, variance = first / (1 - BETA_1**step), second / (1 - BETA_2**step)
    weight.copy_(weight - lr * decay * weight - lr * mean / (variance.sqrt() + EPS))


class Lora(nn.Module):
    """W x + alpha / r B A x, with W frozen: Hu et al., 2021 (arXiv:2106.09685), section 4.1."""

    def __init__(self, base: nn.Linear, a_RI: Tensor, b_OR: Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.scale = base, scale
        self.a_RI, self.b_OR = nn.Parameter(a_RI), nn.Parameter(b_OR)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = F.linear(F.linear(x, self.a_RI), self.b_OR)
        return F.linear(x, self.base.weight, self.base.bias) + self.scale * update


def with_lora(model: nn.Module, adapter: Mapping[str, Tensor], scale: float) -> dict[str, nn.Parameter]:
    """Freeze a model and put an adapter, by PEFT's names, on it; return the adapter's parameters by those names."""
    model.requires_grad_(False)
    placed = {}
    for name in [key for key in adapter if key.endswith(".lora_A.weight")]:
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        parent, _, last = path.rpartition(".")
        other = name.replace("lora_A", "lora_B")
        made = Lora(model.get_submodule(path), adapter[name], adapter[other], scale)  # type: ignore[arg-type]
        setattr(model.get_submodule(parent), last, made)
        placed |= {name: made.a_RI, other: made.b_OR}
    assert placed.keys() == adapter.keys()
    return placed
