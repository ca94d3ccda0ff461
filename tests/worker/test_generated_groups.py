"""Completions of prompts: which rank generates them, and from which random numbers."""

from __future__ import annotations

import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from trl.trainer import grpo_trainer

from tests.each import each
from tests.worker.test_every_objective import cache as cache
from tests.worker.test_every_objective import check_step, micro_batches, recipe_of, trainer_of
from tuner.worker.objectives.completions import NUMBER, Numbered, PromptBatches, Prompts, Sampled, seed_of


def batches(num_rows: int, prompts: int, generations: int, ranks: int, epoch: int = 0) -> list[list[list[Numbered]]]:
    """Return the batches of each rank."""
    made = []
    for rank in range(ranks):
        of_rank = prompts * generations // ranks
        sampler = PromptBatches(
            num_rows, of_rank=of_rank, rank=rank, ranks=ranks, generations=generations, repeats=1, seed=1
        )
        sampler.set_epoch(epoch)
        made.append(list(sampler))
        assert len(made[-1]) == len(sampler)
    return made


def test_a_column_may_have_the_name_of_what_is_added_to_it() -> None:
    prompts = Prompts([{"row": json.dumps({"prompt": "p", "number": 7, "prompt_ids": "x"}), "prompt_ids": [1]}])

    row = prompts[Numbered(0, completion=3)]

    assert (row["number"], row["prompt_ids"], row[NUMBER]) == (7, "x", 3)


@given(some.integers(1, 30), some.integers(1, 6), some.integers(2, 8), some.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_every_prompt_of_an_epoch_has_all_its_completions_in_one_step_on_any_number_of_ranks(
    num_rows: int, prompts: int, generations: int, ranks: int
) -> None:
    prompts *= ranks
    of_ranks = batches(num_rows, prompts, generations, ranks)
    steps = [[prompt for part in parts for prompt in part] for parts in zip(*of_ranks, strict=True)]

    assert steps == batches(num_rows, prompts, generations, 1)[0]
    assert all(len(step) == prompts * generations for step in steps)
    assert {prompt.row for step in steps for prompt in step} == set(range(num_rows))
    for step in steps:
        assert all(count % generations == 0 for count in Counter(prompt.row for prompt in step).values())
    numbers = [prompt.completion for step in steps for prompt in step]
    assert len(set(numbers)) == len(numbers), "each completion has a seed of its own"


@given(some.integers(1, 30), some.integers(1, 3), some.integers(2, 5), some.integers(1, 3), some.integers(2, 3))
@settings(max_examples=100, deadline=None)
def test_steps_that_share_a_generation_train_on_the_same_prompts_on_any_number_of_ranks(
    num_rows: int, prompts: int, generations: int, ranks: int, steps: int
) -> None:
    of_rank = prompts * generations

    def steps_of(ranks: int, of_rank: int) -> list[list[list[Numbered]]]:
        """Return what all ranks train on, step by step."""
        how = {"generations": generations, "repeats": 1, "seed": 1, "steps": steps}
        made = [list(PromptBatches(num_rows, of_rank=of_rank, rank=rank, ranks=ranks, **how)) for rank in range(ranks)]
        return [
            [prompt for part in parts for prompt in part[step * of_rank : (step + 1) * of_rank]]
            for parts in zip(*made, strict=True)
            for step in range(steps)
        ]

    assert steps_of(ranks, of_rank) == steps_of(1, of_rank * ranks)


def test_each_epoch_has_another_order_and_the_same_seed_has_the_same() -> None:
    first, again, other = (batches(20, 2, 2, 1, epoch) for epoch in (0, 0, 1))

    assert first == again != other


def test_a_token_is_sampled_with_its_probability() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    draw = Sampled([seed_of(1, 0, number) for number in range(4000)], torch.device("cpu"))

    drawn = draw(torch.empty(0), probabilities.log().expand(4000, 4)).argmax(-1)

    assert torch.allclose(torch.bincount(drawn, minlength=4) / 4000, probabilities, atol=0.03)


def test_a_completion_draws_the_same_whichever_others_are_in_its_batch() -> None:
    scores = torch.zeros(3, 50)
    device = torch.device("cpu")
    whole, alone = Sampled([7, 8, 9], device), Sampled([8], device)

    for _ in range(3):
        assert torch.equal(whole(torch.empty(0), scores)[1:2], alone(torch.empty(0), scores[:1]))


def trainer_with(folder: Path, *pairs: str, objective: str = "grpo") -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a trainer, and the completions of its first step with their advantages."""
    sets = ("objective.num_generations=4", "objective.max_completion_length=6", *pairs)
    made = trainer_of(recipe_of(objective, folder, *sets), 2, folder)
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    made.args.gradient_accumulation_steps = 1
    return made, made._prepare_inputs(next(iter(made.get_train_dataloader())))


def by_hand(
    model: Any,
    reference: Any,
    inputs: dict[str, torch.Tensor],
    loss_type: str,
    beta: float,
    *,
    is_corrected: bool = True,
) -> torch.Tensor:
    """Return the loss of a first pass: equations 3 and 4 of DeepSeekMath (arXiv:2402.03300)."""
    prompt_BP, tokens_BC, mask_BC = (inputs[key] for key in ("prompt_ids", "completion_ids", "completion_mask"))
    ids_BT = torch.cat([prompt_BP, tokens_BC], 1)
    seen_BT = torch.cat([inputs["prompt_mask"], mask_BC], 1)

    def log_probs(of_model: Any) -> torch.Tensor:
        logits_BCV = of_model(input_ids=ids_BT, attention_mask=seen_BT).logits[:, prompt_BP.shape[1] - 1 : -1]
        return torch.log_softmax(logits_BCV, -1).gather(-1, tokens_BC[..., None])[..., 0]

    new_BC = log_probs(model)
    each_BC = -(new_BC - new_BC.detach()).exp() * inputs["advantages"][:, None]
    if beta:
        with torch.no_grad():
            old_BC = log_probs(reference)
        ratio_BC = (new_BC - new_BC.detach()).exp()  # TRL's correction of the estimate: its gradient is that of the KL
        ratio_BC = ratio_BC if is_corrected else torch.ones_like(ratio_BC)
        each_BC = each_BC + beta * ratio_BC * ((old_BC - new_BC).exp() - (old_BC - new_BC) - 1)
    total, num = (each_BC * mask_BC).sum(), mask_BC.sum()
    match loss_type:
        case "grpo":
            return ((each_BC * mask_BC).sum(1) / mask_BC.sum(1)).mean()
        case "dr_grpo":
            return total / (len(mask_BC) * 6)
    return total / num


@each([(loss_type, beta) for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo") for beta in (0.0, 0.5)])
def test_a_step_is_that_of_the_papers_equations(loss_type: str, beta: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sets = ("objective.rewards=['length']", f"objective.loss_type={loss_type}", f"objective.beta={beta}")
        made, inputs = trainer_with(Path(folder), *sets)
        texts, advantages = made._logs["completion"], torch.tensor(made._logs["advantages"])
        rewards = torch.tensor([-abs(len(text) - 200) / 200 for text in texts]).view(-1, 4)
        spread = rewards.std(1, keepdim=True) + 1e-4
        expected = by_hand(made.model, made.ref_model, inputs, loss_type, beta)
        expected_grads = torch.autograd.grad(expected, [*made.model.parameters()])

        loss = made.compute_loss(made.model, inputs)
        grads = torch.autograd.grad(loss, [*made.model.parameters()])

    assert torch.allclose(((rewards - rewards.mean(1, keepdim=True)) / spread).flatten(), advantages, atol=1e-4)
    assert torch.equal(inputs["advantages"].sort()[0], advantages.sort()[0])
    assert any(grad.abs().max() > 1e-3 for grad in grads)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo"])
@pytest.mark.parametrize("num_batches", [1, 2, 4])
def test_a_step_is_the_same_in_micro_batches_of_any_size(loss_type: str, num_batches: int, tmp_path: Path) -> None:
    coefficient = 0.3
    settings = (f"objective.loss_type={loss_type}", f"objective.entropy_coef={coefficient}", "objective.beta=0.5")
    made, inputs = trainer_with(tmp_path, "objective.rewards=['length']", *settings)
    inputs["completion_mask"] *= torch.arange(6) < torch.tensor([1, 6, 3, 2])[:, None]
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    log_probs_BCV = log_probs_of(made, inputs)
    entropy_BC = -(log_probs_BCV.exp() * log_probs_BCV).sum(-1)
    mean_entropy = (entropy_BC * inputs["completion_mask"]).sum() / inputs["completion_mask"].sum()
    expected = by_hand(made.model, made.ref_model, inputs, loss_type, 0.5) - coefficient * mean_entropy
    made._buffered_inputs = micro_batches(inputs, num_batches)
    made.args.steps_per_generation = made.current_gradient_accumulation_steps = num_batches

    check_step(made, inputs, num_batches, expected)

    assert {*made._metrics["train"]["entropy_coef"]} == {coefficient}
    assert made.loss_type == loss_type and made.entropy_coef == coefficient


@pytest.mark.parametrize("num_batches", [1, 2, 4])
def test_a_step_of_rloo_is_the_same_in_micro_batches_of_any_size(num_batches: int, tmp_path: Path) -> None:
    """Ahmadian et al., 2024 (arXiv:2402.14740): REINFORCE on whole completions, a mean over them."""
    made, inputs = trainer_with(tmp_path, "objective.rewards=['length']", objective="rloo")
    inputs["completion_mask"] *= torch.arange(6) < torch.tensor([1, 6, 3, 2])[:, None]
    log_probs_BC = log_probs_of(made, inputs).gather(-1, inputs["completion_ids"][..., None])[..., 0]
    log_probs_B = (log_probs_BC * inputs["completion_mask"]).sum(1)
    inputs["old_logps"] = log_probs_B.detach()
    expected = -((log_probs_B - log_probs_B.detach()).exp() * inputs["advantages"]).mean()

    check_step(made, inputs, num_batches, expected, weight=1 / num_batches)  # as the Trainer, for a mean over rows
    assert any(weight.grad.abs().max() > 1e-3 for weight in made.model.parameters())


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("bounds", [(0.4, 0.4), (0.2, 0.3)])
def test_a_step_of_gmpo_is_its_papers_in_micro_batches_of_any_size(
    bounds: tuple[float, float], num_batches: int, tmp_path: Path
) -> None:
    """Zhao et al., 2025 (arXiv:2507.20673): the geometric mean of a completion's ratios, each clipped by itself."""
    low, high = bounds
    own = () if low == high == 0.4 else (f"objective.epsilon={low}", f"objective.epsilon_high={high}")
    made, inputs = trainer_with(tmp_path, "objective.rewards=['length']", "objective.beta=0.5", *own, objective="gmpo")
    mask_BC, advantages_B = inputs["completion_mask"], inputs["advantages"]
    mask_BC *= torch.arange(6) < torch.tensor([1, 6, 3, 2])[:, None]
    new_BC = log_probs_of(made, inputs).gather(-1, inputs["completion_ids"][..., None])[..., 0]
    drift_BC = 0.6 * torch.randn(new_BC.shape, generator=torch.Generator().manual_seed(1))
    inputs["old_per_token_logps"] = new_BC.detach() - drift_BC  # as after a step on the same completions
    distance_BC = inputs["ref_per_token_logps"] - new_BC
    losses = []
    for at, advantage in enumerate(advantages_B):
        ratio_T = (new_BC - inputs["old_per_token_logps"])[at][mask_BC[at].bool()].exp()
        is_good = advantage > 0
        ratio_T = ratio_T.clamp(max=math.exp(high)) if is_good else ratio_T.clamp(min=math.exp(-low))
        estimates_T = (distance_BC.exp() - distance_BC - 1)[at][mask_BC[at].bool()]
        losses.append(-advantage * ratio_T.prod() ** (1 / len(ratio_T)) + 0.5 * estimates_T.mean())
    is_clipped_BC = torch.where(advantages_B[:, None] > 0, drift_BC > high, drift_BC < -low) * mask_BC
    assert 0 < is_clipped_BC.sum() < mask_BC.sum()
    made.args.steps_per_generation = made.current_gradient_accumulation_steps = num_batches

    check_step(made, inputs, num_batches, torch.stack(losses).mean(), of_gradients=1e-5)
    assert any(weight.grad.abs().max() > 1e-3 for weight in made.model.parameters())


@pytest.mark.parametrize("is_corrected", [True, False])
def test_the_distance_is_multiplied_by_the_ratio_where_it_is_corrected(is_corrected: bool, tmp_path: Path) -> None:
    sets = ("objective.rewards=[dict(type='format', pattern='.*')]", "objective.beta=0.5")
    made, inputs = trainer_with(tmp_path, *sets, f"objective.use_bias_correction_kl={is_corrected}")
    assert not inputs["advantages"].any(), "the distance alone has a gradient"
    expected = by_hand(made.model, made.ref_model, inputs, "dapo", 0.5, is_corrected=is_corrected)
    expected_grads = torch.autograd.grad(expected, [*made.model.parameters()])

    grads = torch.autograd.grad(made.compute_loss(made.model, inputs), [*made.model.parameters()])

    torch.testing.assert_close(grads, expected_grads, atol=1e-6, rtol=1e-5)


def test_equal_rewards_give_a_gradient_of_zero(tmp_path: Path) -> None:
    made, inputs = trainer_with(tmp_path, "objective.rewards=[dict(type='format', pattern='.*')]")

    made.compute_loss(made.model, inputs).backward()

    assert not inputs["advantages"].any()
    assert all(not parameter.grad.any() for parameter in made.model.parameters() if parameter.grad is not None)


class StandsInForVllm:
    """Takes the calls that TRL 1.16 makes to vLLM, which needs a GPU: each completion is the token 7 and the end."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.temperature = settings, settings["temperature"]
        self.generation_kwargs = settings["generation_kwargs"] or {}
        self.calls: list[tuple[list[list[int]], float]] = []

    def sync_weights(self) -> None:
        """The weights of a stand-in do not change."""

    def generate(self, prompts: list[list[int]], **_: Any) -> Any:
        self.calls.append((prompts, self.temperature))
        end = self.generation_kwargs["stop_token_ids"][0]
        return prompts, [[7, end] for _ in prompts], [[[-1.0], [-0.5]] for _ in prompts], None


def test_vllm_gets_the_prepared_prompts_and_answers_a_validation_greedily(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", StandsInForVllm)
    sets = ("objective.rewards=['length']", "objective.generation.engine=vllm", "generation.tensor_parallel_size=1")
    made, inputs = trainer_with(tmp_path, *sets, "objective.temperature=0.7")
    engine = made.vllm_generation

    assert engine.settings["mode"] == "colocate" and engine.settings["gpu_memory_utilization"] == 0.3
    assert engine.settings["max_model_length"] == 64 + 6
    assert [temperature for _, temperature in engine.calls] == [0.7]
    assert engine.calls[0][0] == [list(ids) for ids in made._ids]
    assert inputs["completion_ids"][:, 0].tolist() == [7] * len(inputs["completion_ids"])
    assert made.compute_loss(made.model, inputs).isfinite()

    assert made.evaluate()["eval_completion_length"] == 2
    assert {temperature for _, temperature in engine.calls[1:]} == {0.0}
    assert engine.temperature == 0.7


OFF_POLICY = {
    "cispo": ("objective.epsilon_high=1.1",),
    "sapo": ("objective.sapo_temperature_pos=1.5", "objective.sapo_temperature_neg=2.0"),
    "vespo": ("objective.vespo_k_pos=1.5", "objective.vespo_lambda_neg=2.5"),
    "luspo": ("objective.importance_sampling_level=sequence",),
}


def off_policy_by_hand(
    loss_type: str, new_BC: torch.Tensor, old_BC: torch.Tensor, advantages_B: torch.Tensor, mask_BC: torch.Tensor
) -> torch.Tensor:
    """Return the loss with the settings of `OFF_POLICY`: MiniMax-M1 (arXiv:2506.13585), equation 4 (cispo); SAPO
    (arXiv:2511.20347), equations 5 and 6; VESPO, its gamma weights; LUSPO, the sum over a completion's tokens.
    """
    ratio_BC, advantages_B1 = (new_BC - old_BC).exp(), advantages_B[:, None]
    is_good_B1, num = advantages_B1 > 0, mask_BC.sum()
    match loss_type:
        case "cispo":
            weight_BC = ratio_BC.clamp(max=1.1).detach()
            return -(weight_BC * advantages_B1 * new_BC * mask_BC).sum() / num
        case "sapo":
            heat_B1 = torch.where(is_good_B1, 1.5, 2.0)
            gate_BC = 4 / heat_B1 * torch.sigmoid(heat_B1 * (ratio_BC - 1))
            return -((gate_BC * advantages_B1 * mask_BC).sum(1) / mask_BC.sum(1)).mean()
        case "vespo":
            whole_B1 = ((new_BC - old_BC) * mask_BC).sum(1, keepdim=True).exp().detach()
            power_B1, decay_B1 = torch.where(is_good_B1, 1.5, 3.0), torch.where(is_good_B1, 3.0, 2.5)
            weight_B1 = decay_B1.exp() * whole_B1**power_B1 * (-decay_B1 * whole_B1).exp()
            return -(weight_B1 * advantages_B1 * new_BC * mask_BC).sum() / num
    mean_B1 = (((new_BC - old_BC) * mask_BC).sum(1) / mask_BC.sum(1))[:, None].exp()
    each_B1 = torch.minimum(mean_B1 * advantages_B1, mean_B1.clamp(0.8, 1.2) * advantages_B1)
    return -(each_B1 * mask_BC).sum(1).mean()


def log_probs_of(made: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the log-probability of every word at each place of the completions."""
    prompt_BP, tokens_BC = inputs["prompt_ids"], inputs["completion_ids"]
    seen_BT = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    logits_BTV = made.model(input_ids=torch.cat([prompt_BP, tokens_BC], 1), attention_mask=seen_BT).logits
    log_probs_BCV: torch.Tensor = logits_BTV[:, prompt_BP.shape[1] - 1 : -1].log_softmax(-1)
    return log_probs_BCV


@pytest.mark.parametrize("num_batches", [1, 2])
@pytest.mark.parametrize("loss_type", OFF_POLICY)
def test_the_losses_that_weigh_otherwise_are_their_papers_in_micro_batches_of_any_size(
    loss_type: str, num_batches: int, tmp_path: Path
) -> None:
    made, inputs = trainer_with(
        tmp_path, "objective.rewards=['length']", f"objective.loss_type={loss_type}", *OFF_POLICY[loss_type]
    )
    inputs["completion_mask"] *= torch.arange(6) < torch.tensor([1, 6, 3, 2])[:, None]
    inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    new_BC = log_probs_of(made, inputs).gather(-1, inputs["completion_ids"][..., None])[..., 0]
    drift_BC = 0.3 * torch.randn(new_BC.shape, generator=torch.Generator().manual_seed(1))
    inputs["old_per_token_logps"] = new_BC.detach() - drift_BC  # as after a step on the same completions
    advantages, mask = inputs["advantages"], inputs["completion_mask"]
    expected = off_policy_by_hand(loss_type, new_BC, inputs["old_per_token_logps"], advantages, mask)
    made.args.steps_per_generation = made.current_gradient_accumulation_steps = num_batches

    check_step(made, inputs, num_batches, expected, of_gradients=1e-5)
    assert any(weight.grad.abs().max() > 1e-3 for weight in made.model.parameters())


def test_only_the_tokens_that_are_hardest_to_predict_carry_the_loss(tmp_path: Path) -> None:
    """Wang et al., 2025 (arXiv:2506.01939): the policy gradient of the tokens of high entropy alone."""
    made, inputs = trainer_with(tmp_path, "objective.rewards=['length']", "objective.top_entropy_quantile=0.25")
    log_probs_BCV, mask_BC = log_probs_of(made, inputs), inputs["completion_mask"].bool()
    entropy_BC = -(log_probs_BCV.exp() * log_probs_BCV).sum(-1).detach()
    is_hard_BC = (entropy_BC >= torch.quantile(entropy_BC[mask_BC], 0.75)) & mask_BC
    new_BC = log_probs_BCV.gather(-1, inputs["completion_ids"][..., None])[..., 0]
    each_BC = -(new_BC - new_BC.detach()).exp() * inputs["advantages"][:, None]
    expected_grads = torch.autograd.grad((each_BC * is_hard_BC).sum() / mask_BC.sum(), [*made.model.parameters()])

    grads = torch.autograd.grad(made.compute_loss(made.model, inputs), [*made.model.parameters()])

    assert 0 < is_hard_BC.sum() < mask_BC.sum() and any(grad.abs().max() > 1e-3 for grad in grads)
    torch.testing.assert_close(grads, expected_grads, atol=1e-5, rtol=1e-5)


def test_each_reward_is_normalized_in_its_group_before_they_are_added_up(tmp_path: Path) -> None:
    """GDPO: advantages of each reward in its group, their weighted sum, and that normalized over the batch."""
    rewards = "objective.rewards=[dict(type='length', weight=2.0), dict(type='length', target=20)]"
    made, inputs = trainer_with(tmp_path, rewards, "objective.multi_objective_aggregation=normalize_then_sum")
    lengths = [len(text) for text in made._logs["completion"]]
    scores_BK = torch.tensor([[-min(1.0, abs(length - by) / by) for by in (200, 20)] for length in lengths])
    grouped_G4K = scores_BK.view(-1, 4, 2)
    each_G4K = (grouped_G4K - grouped_G4K.mean(1, keepdim=True)) / (grouped_G4K.std(1, keepdim=True) + 1e-4)
    summed = (each_G4K * torch.tensor([2.0, 1.0])).sum(-1).flatten()
    expected = (summed - summed.mean()) / (summed.std() + 1e-4)

    assert torch.allclose(expected, torch.tensor(made._logs["advantages"]), atol=1e-5)
    assert torch.allclose(expected.sort()[0], inputs["advantages"].sort()[0], atol=1e-5)


def test_rewards_of_rloo_are_clipped_before_they_are_compared(tmp_path: Path) -> None:
    clipped = "objective.reward_clip_range=(-0.9, -0.5)"
    made, _ = trainer_with(tmp_path, "objective.rewards=['length']", clipped, "objective.beta=0.0", objective="rloo")
    texts = made._logs["completion"]
    rewards_G4 = torch.tensor([-min(1.0, abs(len(text) - 200) / 200) for text in texts]).clamp(-0.9, -0.5).view(-1, 4)
    others_G4 = (rewards_G4.sum(1, keepdim=True) - rewards_G4) / 3

    assert torch.allclose((rewards_G4 - others_G4).flatten(), torch.tensor(made._logs["advantages"]), atol=1e-5)


def pairs_by_hand(made: Any, inputs: dict[str, torch.Tensor], beta: float, loss_type: str) -> torch.Tensor:
    """Return the loss of Guo et al., 2024 (arXiv:2402.04792), algorithm 1, pair by pair."""
    losses = []
    for first in range(0, len(inputs["prompt_ids"]), 2):
        ratios = []
        for at in (first, first + 1):
            prompt = inputs["prompt_ids"][at][inputs["prompt_mask"][at].bool()]
            answer = inputs["completion_ids"][at][inputs["completion_mask"][at].bool()]

            def log_prob(model: Any, prompt: torch.Tensor = prompt, answer: torch.Tensor = answer) -> torch.Tensor:
                logits_TV = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
                log_probs = logits_TV.log_softmax(-1).gather(1, answer[:, None])
                return log_probs.mean() if loss_type == "ipo" else log_probs.sum()

            with torch.no_grad():
                of_reference = log_prob(made.ref_model)
            ratios.append(log_prob(made.model) - of_reference)
        better = inputs["advantages"][first] - inputs["advantages"][first + 1]
        margin = ratios[0] - ratios[1] if better > 0 else ratios[1] - ratios[0]
        loss = (margin - 1 / (2 * beta)) ** 2 if loss_type == "ipo" else (1 + (-beta * margin).exp()).log()
        loss = beta * margin if loss_type == "margins" else loss
        losses.append(loss if better else 0 * loss)
    return torch.stack(losses).mean()


def test_steps_that_share_completions_count_an_equal_part_of_their_tokens(tmp_path: Path, cache: Path) -> None:
    sets = ("objective.rewards=['length']", "objective.num_generations=2")
    made, _ = trainer_with(tmp_path, *sets, objective="online_dpo")
    rows = next(iter(made.get_train_dataloader()))
    made.complete(rows)
    num_tokens = made.num_tokens
    made.num_parts = 2
    made.complete(rows)

    assert made.num_tokens == num_tokens // 2 > 0


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("loss_type", ["sigmoid", "ipo"])
def test_online_dpo_prefers_the_completion_with_the_higher_reward_in_micro_batches_of_any_size(
    loss_type: str, num_batches: int, tmp_path: Path, cache: Path
) -> None:
    sets = ("objective.rewards=['length']", "objective.beta=0.3", f"objective.loss_type={loss_type}")
    made, _ = trainer_with(tmp_path, *sets, "objective.num_generations=2", objective="online_dpo")
    made.args.gradient_accumulation_steps, made.args.per_device_train_batch_size = 3, 2
    inputs = made._generate_and_score_completions(next(iter(made.get_train_dataloader())))
    texts = made.processing_class.batch_decode(inputs["completion_ids"], skip_special_tokens=True)
    scores = torch.tensor([-min(1.0, abs(len(text) - 200) / 200) for text in texts]).view(-1, 2)
    assert torch.equal(scores.diff().sign().flatten(), inputs["advantages"].view(-1, 2).diff().sign().flatten())
    inputs["advantages"] = torch.tensor([0.5, -0.5, -0.2, 0.2, 0.0, 0.0])  # the last two have the same reward
    expected = pairs_by_hand(made, inputs, 0.3, loss_type)
    made.current_gradient_accumulation_steps = num_batches

    check_step(made, inputs, num_batches, expected, of_gradients=1e-5)
    assert expected > 1e-2
    metrics = made._metrics["train"]
    assert metrics["kl"] and metrics["entropy"]
    if num_batches == 1:
        sums = pairs_by_hand(made, inputs, 0.3, "margins")
        assert metrics["rewards/margins"] == [pytest.approx(sums.item() * 3 / 2, abs=1e-5)], "beta times sums"
