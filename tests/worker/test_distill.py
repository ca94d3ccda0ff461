"""Distillation: the loss is the divergence of the student's probabilities from its teacher's on its own completions."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.refused import refused
from tests.worker.test_every_objective import SHAPE, recipe_of, trainer_of
from tests.worker.test_every_objective import cache as cache
from tuner.errors import ModelError
from tuner.worker.objectives.distill_training import Distill

Batch = dict[str, Tensor]


def trainer_with(folder: Path, *pairs: str, num_rows: int = 1) -> tuple[Any, Batch]:
    """Return a trainer, and the completions of its first step."""
    sets = ("objective.max_completion_length=6", *pairs)
    made = trainer_of(recipe_of("distill", folder, *sets), 3, folder)
    made.model.train()
    made.current_gradient_accumulation_steps, made.args.per_device_train_batch_size = 1, num_rows
    return made, made._prepare_inputs(next(iter(made.get_train_dataloader())))


def by_hand(student: Any, teacher: Any, inputs: Batch, beta: float, temperature: float) -> Tensor:
    """Return the divergence of equation 1 of Agarwal et al., 2023 (arXiv:2306.13649), a mean over the tokens."""
    prompt_BP, tokens_BC, mask_BC = (inputs[key] for key in ("prompt_ids", "completion_ids", "completion_mask"))
    ids_BT, seen_BT = torch.cat([prompt_BP, tokens_BC], 1), torch.cat([inputs["prompt_mask"], mask_BC], 1)

    def log_probs(of_model: Any) -> Tensor:
        logits_BCV = of_model(input_ids=ids_BT, attention_mask=seen_BT).logits[:, prompt_BP.shape[1] - 1 : -1]
        return torch.log_softmax(logits_BCV / temperature, -1)

    def divergence(left_BCV: Tensor, right_BCV: Tensor) -> Tensor:
        return (left_BCV.exp() * (left_BCV - right_BCV)).sum(-1)

    ours_BCV, theirs_BCV = log_probs(student), log_probs(teacher).detach()
    if beta == 0:
        each_BC = divergence(theirs_BCV, ours_BCV)
    elif beta == 1:
        each_BC = divergence(ours_BCV, theirs_BCV)
    else:
        mean_BCV = (beta * theirs_BCV.exp() + (1 - beta) * ours_BCV.exp()).log()
        each_BC = beta * divergence(theirs_BCV, mean_BCV) + (1 - beta) * divergence(ours_BCV, mean_BCV)
    return (each_BC * mask_BC).sum() / mask_BC.sum()


@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.3, 1.0), (0.3, 2.0), (1.0, 1.0)])
def test_a_step_is_that_of_the_papers_equation(beta: float, temperature: float, tmp_path: Path, cache: Path) -> None:
    made, inputs = trainer_with(tmp_path, f"objective.beta={beta}", f"objective.temperature={temperature}")
    expected = by_hand(made.model, made.teacher_model, inputs, beta, temperature)
    weights = [*made.model.parameters()]
    expected_grads = torch.autograd.grad(expected, weights)

    loss = made.compute_loss(made.model, inputs)
    grads = torch.autograd.grad(loss, weights)

    assert loss.item() == pytest.approx(expected.item(), abs=1e-5) and loss > 1e-4
    for grad, other in zip(grads, expected_grads, strict=True):
        assert torch.allclose(grad, other, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_that_is_its_teacher_has_no_loss(beta: float, tmp_path: Path, cache: Path) -> None:
    made, inputs = trainer_with(tmp_path, f"objective.beta={beta}")
    made.teacher_model = copy.deepcopy(made.model)

    loss = made.compute_loss(made.model, inputs)
    loss.backward()

    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert all(parameter.grad.abs().max() < 1e-6 for parameter in made.model.parameters() if parameter.grad is not None)


def test_a_rank_refuses_a_teacher_with_another_vocabulary() -> None:
    student, teacher = (LlamaForCausalLM(LlamaConfig(vocab_size=size, **SHAPE)) for size in (16, 32))

    with refused(ModelError, "objective.teacher", 32, 16):
        Distill(model=student, ref_model=teacher)


@pytest.mark.parametrize("num_batches", [1, 3])
def test_a_step_is_the_same_in_micro_batches_of_any_size(num_batches: int, tmp_path: Path, cache: Path) -> None:
    made, inputs = trainer_with(tmp_path, "objective.beta=0.3", num_rows=3)
    inputs["completion_mask"] *= torch.arange(6) < torch.tensor([1, 6, 3])[:, None]
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    expected = by_hand(made.model, made.teacher_model, inputs, 0.3, made.temperature)
    expected_grads = torch.autograd.grad(expected, [*made.model.parameters()])

    total, size = 0.0, 3 // num_batches
    for start in range(0, 3, size):
        rows = {name: value[start : start + size] if value.ndim else value for name, value in inputs.items()}
        loss = made.compute_loss(made.model, rows)
        loss.backward()
        total += loss.item()

    assert total == pytest.approx(expected.item(), abs=1e-6) and total > 1e-4
    for weight, gradient in zip(made.model.parameters(), expected_grads, strict=True):
        assert torch.allclose(weight.grad, gradient, atol=1e-6)
