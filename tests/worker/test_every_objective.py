"""Every objective keeps the promises of a training, a new one too: the tests run over the table."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import pytest
import torch
import transformers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    MixtralForSequenceClassification,
)

from tests.data.conftest import cache as cache
from tests.data.conftest import make_tokenizer
from tests.each import each
from tuner.data.prepare import prepare
from tuner.data.text_encoder import TextEncoder
from tuner.recipes import catalog
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.objectives import OBJECTIVES, ObjectiveFacts, RowKind, objectives_with
from tuner.worker import compat, trainers
from tuner.worker.objectives import training_of
from tuner.worker.objectives.judged_rows import PairsTrainer
from tuner.worker.trainer_setup import evaluator
from tuner.worker.trainers import Collator, Counts, TunerTrainer

ANSWERS = ("One.", "A dog and a cat.", "Two", "Because it is red.", "No", "A colour", "It is so.")
ROWS: dict[RowKind, list[dict[str, Any]]] = {
    "conversations": [{"instruction": "Why?", "output": answer} for answer in ANSWERS],
    "texts": [{"text": f"Why? {answer}"} for answer in ANSWERS],
    "pairs": [{"prompt": "Why?", "chosen": answer, "rejected": f"{answer} Not."} for answer in ANSWERS],
    "prompts": [{"prompt": "Why?", "answer": answer} for answer in ANSWERS],
    "judged": [
        {"prompt": "Why?", "completion": answer, "label": number % 2 == 0} for number, answer in enumerate(ANSWERS)
    ],
}
PROMISES = (
    *("create_scheduler", "get_train_dataloader", "get_batch_samples", "compute_loss", "weighed_loss"),
    *("get_eval_dataloader", "prediction_step", "evaluation_loop", "save_model", "_save_checkpoint"),
)
"""Methods of TunerTrainer that decide which rows a rank gets, how a step is weighed and what a validation counts."""
SHAPE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}


def recipe_of(objective: str, folder: Path, *pairs: str) -> RecipeConfig:
    file = folder / "rows.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS[OBJECTIVES[objective].facts.rows]))
    method = catalog.training_name(objective, "full")
    values = ("train_dataloader.dataset.packing=False", "train_dataloader.dataset.max_length=64", *pairs)
    sets = tuple(("--set", value) for value in values)
    return load(f"tiny_{method}_custom_e1", Overrides(data=str(file), pairs=sets)).config


def trainer_of(config: RecipeConfig, batch_size: int, folder: Path, router_weight: float | None = None) -> Any:
    """Return a trainer of a small model; of a mixture of experts, if the loss of its router has a weight."""
    tokenizer = make_tokenizer(pads=True)
    encoder = TextEncoder(tokenizer)
    facts = config.objective.facts
    torch.manual_seed(0)
    more = {"vocab_size": 512, "pad_token_id": 0, "num_labels": 1 if facts.scores else 2}
    if router_weight is None:
        of_model, shape = (
            LlamaForSequenceClassification if facts.scores else LlamaForCausalLM,
            LlamaConfig(**SHAPE, **more),
        )
    else:
        of_model = MixtralForSequenceClassification if facts.scores else MixtralForCausalLM
        experts = {"num_local_experts": 4, "num_key_value_heads": 1, "router_aux_loss_coef": router_weight}
        shape = MixtralConfig(**SHAPE, **experts, **more)
    models = of_model(shape), of_model(shape) if facts.has_reference or facts.has_teacher else None
    rows = prepare(config.train_dataloader.dataset, encoder, objective=config.objective.type).dataset
    return evaluator(config, models, encoder, rows, batch_size, str(folder))


def read_by_second_model(trainer: Any) -> list[dict[str, Any]]:
    """Return the list that gets each batch of a trainer's reference or teacher."""
    batches: list[dict[str, Any]] = []
    second = getattr(trainer, "teacher_model", None) or getattr(trainer, "ref_model", None)
    if second is not None:
        hear = second.base_model  # TRL asks some models for their hidden states alone
        hear.register_forward_pre_hook(lambda _, __, batch: batches.append(batch), with_kwargs=True)
    return batches


def test_samples_share_rows_only_where_no_second_model_reads_them() -> None:
    """It may be of any kind, and only the trained one is tried at a run's start (`lab.isolation`)."""
    both = {name for name, block in OBJECTIVES.items() if block.facts.packs and reads_second(block.facts)}

    assert both == set()


def reads_second(facts: ObjectiveFacts) -> bool:
    return facts.has_reference or facts.has_teacher or facts.generates


def micro_batches(inputs: dict[str, Any], num_batches: int) -> list[dict[str, Any]]:
    """Return the completions of a step in so many parts."""
    num_rows = len(inputs["completion_ids"])
    starts, size = range(0, num_rows, num_rows // num_batches), num_rows // num_batches
    return [
        {name: value[start : start + size] if value.ndim else value for name, value in inputs.items()}
        for start in starts
    ]


def check_step(
    made: Any,
    inputs: dict[str, Any],
    num_batches: int,
    expected: torch.Tensor,
    *,
    most: float = 1e-5,
    of_gradients: float = 1e-6,
    weight: float = 1.0,
) -> None:
    """Check that the losses of micro-batches, each with a weight, add up to this one, and their gradients to its own.

    `most` and `of_gradients` are how far they may be apart.
    """
    weights = [*made.model.parameters()]
    gradients, total = torch.autograd.grad(expected, weights), 0.0
    for number, rows in enumerate(micro_batches(inputs, num_batches)):
        made._step = number
        loss = made.compute_loss(made.model, rows) * weight
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(expected.item(), abs=most)
    for trained, gradient in zip(weights, gradients, strict=True):
        assert torch.allclose(trained.grad, gradient, atol=of_gradients)


@each(OBJECTIVES)
def test_a_trainer_keeps_the_promises_of_all_trainers(objective: str) -> None:
    trainer, generates = training_of(objective).trainer, OBJECTIVES[objective].facts.generates

    assert issubclass(trainer, TunerTrainer) and issubclass(trainer, transformers.Trainer)
    own = [name for name in PROMISES if getattr(trainer, name) is not getattr(TunerTrainer, name)]
    assert own == (["get_train_dataloader", "get_batch_samples", "get_eval_dataloader"] if generates else [])


@each(OBJECTIVES)
def test_trl_takes_the_settings_of_a_block(objective: str) -> None:
    training = training_of(objective)
    known = {field.name for field in dataclasses.fields(training.arguments_type)}

    block = OBJECTIVES[objective]
    assert {*block.model_fields, *training.fixed_arguments} - block.own_keys <= known


def test_each_objective_has_a_part_of_the_catalog() -> None:
    assert tuple(sorted(OBJECTIVES)) == tuple(catalog.names("objectives"))


def test_one_of_the_objectives_with_the_same_rows_is_the_usual_one() -> None:
    usual = Counter(block.facts.rows for block in OBJECTIVES.values() if block.facts.is_usual)

    assert usual == Counter(get_args(RowKind))


def settings_of(objective: str) -> tuple[str, ...]:
    """Return what an objective that generates needs; short completions, and a reference model where it may have one."""
    block = OBJECTIVES[objective]
    if not block.facts.generates:
        return ()
    scored = ("objective.rewards=['length']",) if "rewards" in block.model_fields else ()
    with_reference = ("objective.beta=0.1",) if block.facts.has_reference else ()
    return *scored, *with_reference, "objective.max_completion_length=8"


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_loss_of_a_router_is_added_where_the_objective_says_so(
    objective: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL's trainers differ: one that ignores it trains a mixture of experts to use few of them."""
    monkeypatch.setattr(trainers.dist, "all_reduce", lambda _: None)
    recipe, losses = recipe_of(objective, tmp_path, *settings_of(objective)), []
    for weight in (0.0, 5.0):
        made = trainer_of(recipe, 2, tmp_path, weight)
        made.model.train()
        made.current_gradient_accumulation_steps = made.args.gradient_accumulation_steps = 1
        if recipe.objective.facts.generates:
            batch, num_items = made._prepare_inputs(next(iter(made.get_train_dataloader()))), None
        else:
            rows = [made.train_dataset[number] for number in range(2)]
            [batch], num_items = made.get_batch_samples(
                iter([Collator(made.data_collator, rows[0])(rows)]), 1, made.args.device
            )
        losses.append(made.compute_loss(made.model, batch, num_items_in_batch=num_items).item())

    added = (losses[1] - losses[0]) / 5.0
    assert added == pytest.approx(2.0 if recipe.objective.facts.balances_router else 0.0, abs=0.5), "experts of a token"


@pytest.mark.parametrize("objective", [name for name, block in OBJECTIVES.items() if not block.facts.generates])
def test_each_row_is_dealt_to_one_rank(objective: str, tmp_path: Path, cache: Path) -> None:
    made = trainer_of(recipe_of(objective, tmp_path), 2, tmp_path)
    made.args.per_device_train_batch_size = made._train_batch_size = 2
    made.accelerator.prepare = lambda loader: loader

    with patch.object(type(made.args), "world_size", 2):
        batches = list(made.get_train_dataloader())  # of all ranks in turns, before accelerate takes one rank's

    assert len(batches) == 4, "seven rows in batches of two, as many for each rank"
    assert sum(batch["counts"].rows for batch in batches) == len(ANSWERS)


def of_single_rows(recipe: RecipeConfig) -> RecipeConfig:
    """Return a recipe with a loss that does not depend on the other rows of a batch, if its objective has one."""
    kind = type(recipe.objective)
    losses = get_args(kind.model_fields["loss_type"].annotation) if "loss_type" in kind.model_fields else ()
    choices = (recipe, *(recipe.with_values({"objective.loss_type": loss}) for loss in losses))
    return next((choice for choice in choices if not choice.objective.depends_on_micro_batch), recipe)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_validation_counts_each_row_the_same_in_batches_of_any_size(
    objective: str, tmp_path: Path, cache: Path
) -> None:
    recipe = of_single_rows(recipe_of(objective, tmp_path, *settings_of(objective)))
    made = [trainer_of(recipe, batch_size, tmp_path) for batch_size in (2, 3, 7)]
    batches = [read_by_second_model(trainer) for trainer in made]
    losses = [trainer.evaluate()["eval_loss"] for trainer in made]

    facts = recipe.objective.facts
    assert all(batches) == (facts.has_reference or facts.has_teacher)
    for batch in (batch for of_trainer in batches for batch in of_trainer):
        assert batch["attention_mask"].shape == batch["input_ids"].shape, "each row is one sample"
        assert batch.get("position_ids") is None
    # The likelihood of CPO and ORPO is a mean over the tokens of a batch.
    has_likelihood = isinstance(made[0], PairsTrainer) and getattr(recipe.objective, "cpo_alpha", 1.0)
    within = 0.02 if has_likelihood or recipe.objective.depends_on_micro_batch else 1e-4
    assert losses == pytest.approx([losses[0]] * 3, rel=within)


PAIRS_OF_LOGITS = [
    name for name, block in OBJECTIVES.items() if block.facts.rows == "pairs" and block.facts.logit_copies
]


@pytest.mark.parametrize("objective", PAIRS_OF_LOGITS)
def test_a_step_with_the_likelihood_of_the_chosen_answers_is_the_same_in_micro_batches_of_any_size(
    objective: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainers.dist, "all_reduce", lambda _: None)
    sets = ("objective.cpo_alpha=1.0",) if "cpo_alpha" in OBJECTIVES[objective].model_fields else ()
    trainer = trainer_of(recipe_of(objective, tmp_path, *sets), 2, tmp_path)
    trainer.model.train()
    rows, steps = list(trainer.train_dataset), []

    for size in (7, 3, 2):
        collate = Collator(trainer.data_collator, rows[0])
        made = [collate(rows[start : start + size]) for start in range(0, len(rows), size)]
        trainer.args.per_device_train_batch_size, trainer.current_gradient_accumulation_steps = size, len(made)
        trainer.get_batch_samples(iter(made), len(made), torch.device("cpu"))
        loss = sum(trainer.compute_loss(trainer.model, batch) for batch in made) / len(made)
        steps.append((loss.item(), torch.autograd.grad(loss, [*trainer.model.parameters()])))

    assert len({len(row["chosen_ids"]) for row in rows}) > 2, "a mean of means is another one"
    (loss, grads), *others = steps
    for other, other_grads in others:
        assert other == pytest.approx(loss, rel=1e-5)
        assert all(torch.allclose(grad, two, atol=1e-6) for grad, two in zip(grads, other_grads, strict=True))


def test_a_stand_in_has_no_part_in_ktos_distance_to_the_reference_nor_in_its_metrics(
    tmp_path: Path, cache: Path
) -> None:
    trainer = trainer_of(recipe_of("kto", tmp_path), 2, tmp_path)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.3)
    batch = trainer.data_collator([trainer.train_dataset[number] for number in range(2)])
    trainer.model.train()
    wanted = trainer.loss_of_objective(trainer.model, dict(batch)).item()
    kl = compat.metrics_of(trainer, "train").pop("kl")[-1]
    assert kl > 0.0
    trainer.current_gradient_accumulation_steps, trainer.args.per_device_train_batch_size = 1, 2
    trainer.rows_of_step = torch.tensor(2)
    of_other = {"gather": torch.tensor([0]), "gather_for_metrics": torch.tensor(100.0)}  # the rank with a stand-in

    def gathered(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.reshape(-1), of_other[name].reshape(-1).to(tensor.dtype)])

    for name in of_other:
        setattr(trainer.accelerator, name, partial(gathered, name))
    with patch.object(type(trainer.args), "world_size", 2):
        loss = trainer.weighed_loss(trainer.model, {**batch, "counts": Counts(2, 9, 0)}).item()

    assert loss == pytest.approx(2 * wanted, rel=1e-6), "two rows of two, and ranks take the mean"
    assert compat.metrics_of(trainer, "train")["kl"] == [pytest.approx(kl, rel=1e-6)]


def test_the_reference_judges_ktos_mixed_pairs_in_batches_of_another_size_as_they_are_trained(
    tmp_path: Path, cache: Path
) -> None:
    recipe = recipe_of("kto", tmp_path)
    trainer = trainer_of(recipe, 3, tmp_path)
    wanted = trainer.evaluate()["eval_loss"]
    rows = training_of("kto").judged_before(recipe, trainer.eval_dataset, 3)
    trainer.precompute_ref_logps, trainer._precompute_model_hash = True, "of this test"
    trainer.eval_dataset = trainer._precompute_ref_logps(rows, "eval", 7)

    assert trainer.evaluate()["eval_loss"] == pytest.approx(wanted, rel=1e-5)
    assert trainer.evaluate(trainer.eval_dataset)["eval_loss"] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("objective", objectives_with("precompute_ref_log_probs"))
def test_rows_that_the_reference_judged_before_training_are_validated_with_that_judgement(
    objective: str, tmp_path: Path, cache: Path
) -> None:
    trainer = trainer_of(recipe_of(objective, tmp_path), 7, tmp_path)
    wanted = trainer.evaluate()["eval_loss"]
    trainer.precompute_ref_logps, trainer._precompute_model_hash = True, "of this test"
    trainer.eval_dataset = trainer._precompute_ref_logps(trainer.eval_dataset, "eval", 7)
    trainer.ref_model, trainer.state.global_step = None, 3  # the reference is gone, and the model has changed

    measured = trainer.evaluate(trainer.eval_dataset)["eval_loss"]

    assert measured == pytest.approx(wanted, rel=1e-5)
