"""Mixtures of experts: ranks that choose other experts train as one would, and routers are kept balanced."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import datasets
import pytest
import torch
from deepspeed.utils import get_z3_leaf_modules
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.data.conftest import make_tokenizer
from tests.e2e.runs import environment, ok, quick, train
from tests.e2e.warm import of_module, warm
from tests.models.brought import brought
from tests.refused import refused
from tests.worker.experts import Experts, make, write
from tests.worker.test_loss import JUDGED, PAIR, SFT
from tuner.data.text_encoder import TextEncoder
from tuner.errors import ModelError, RecipeError
from tuner.lab.stand_ins import tokenizer_of
from tuner.models.mixers import mixers
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.worker import trainer_setup
from tuner.worker.experts import balanced, let_ranks_choose

COEFFICIENT = 0.02


def mixtral(**more: Any) -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64, **shape, num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=COEFFICIENT, **more
    )
    return MixtralForCausalLM(config)


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["listed", "olmo_hybrid"])
def test_ranks_that_run_other_modules_train_as_without_zero_at_every_stage(kind: str) -> None:
    """They choose other experts; or a layer mixes the tokens of three samples on one rank and of one on the other."""
    stages, code = ["0", "1", "2", "3"], of_module("tests.worker.experts", ranks=2)
    # Without what is tried here stage 3 waits for ever.
    ended = warm().run([kind, *stages], code=code, env=environment(), timeout_s=240)

    assert ended.returncode == 0, ended.stderr[-4000:]
    found = json.loads(ended.stdout.strip().splitlines()[-1])
    for stage in stages[1:]:
        for step, (loss, norm) in enumerate(found[stage]):
            expected, its_norm = found["0"][step]
            assert loss == pytest.approx(expected, rel=1e-5), (stage, step)
            assert norm == pytest.approx(its_norm or norm, rel=1e-4), (stage, step)


@pytest.mark.e2e
@pytest.mark.long
def test_a_users_model_with_experts_of_its_own_trains_at_zero_3_beside_a_json_with_leaf_modules(tmp_path: Path) -> None:
    write(tmp_path / "model", tokenizer_of(load("tiny_full_sample_e1").config.model)[0])
    leaves = {"classes": ["LlamaRMSNorm"]}
    document = {"zero_optimization": {"stage": 3, "leaf_module": leaves}}
    (tmp_path / "zero.json").write_text(json.dumps(document))
    sets = ("trust_remote_code=True", "packing=False", "max_steps=2")
    pairs = [part for value in sets for part in ("--set", value)]

    run = ok(
        train(
            quick(tmp_path, "full"),
            tmp_path / "run",
            *("--model", tmp_path / "model", "--deepspeed", tmp_path / "zero.json", *pairs),
        )
    )

    assert run.json("deepspeed.json")["zero_optimization"]["leaf_module"] == leaves
    assert run.losses[1] < run.losses[0]


def test_modules_that_choose_among_others_are_gathered_whole_and_one_module_of_all_experts_is_left_alone() -> None:
    of_a_list, of_one_module = make(), mixtral()

    for model in (of_a_list, of_one_module):
        let_ranks_choose(model, 3)

    assert [type(module) for module in get_z3_leaf_modules(of_a_list)] == [Experts, Experts]
    assert get_z3_leaf_modules(of_one_module) == []


@pytest.mark.parametrize("kind", ["longcat_flash", "zamba2"])
def test_lists_in_a_layer_that_are_no_experts_are_left_alone(kind: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind))

    let_ranks_choose(model, 3)

    assert not [module for module in get_z3_leaf_modules(model) if module not in mixers(model)]


def test_a_layer_that_mixes_the_tokens_of_one_sample_after_the_other_is_gathered_whole() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(brought("olmo_hybrid"))

    let_ranks_choose(model, 3)

    assert get_z3_leaf_modules(model) == mixers(model) != []


def backward(chosen: int, prepared: bool) -> tuple[dict[str, torch.Tensor | None], list[str]]:
    """Return the gradients of a step in which the routers choose an expert, and the names in the order they came."""
    model, order = make(), []

    def note(name: str) -> Callable[[Any], None]:
        return lambda _: order.append(name)

    for module in model.modules():
        if isinstance(module, Experts):
            module.chosen = chosen
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(note(name))
    if prepared:
        let_ranks_choose(model, 2)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}, order


def test_experts_that_nobody_chose_have_gradients_of_zero_and_all_come_in_the_same_order() -> None:
    plain, _ = backward(2, prepared=False)

    gradients, order = backward(2, prepared=True)

    assert {name for name, gradient in plain.items() if gradient is None}, "some are not chosen"
    for name, gradient in gradients.items():
        expected = plain[name]
        torch.testing.assert_close(gradient, torch.zeros_like(gradient) if expected is None else expected)
    assert order == backward(3, prepared=True)[1]
    assert order != backward(2, prepared=False)[1]


def step(
    model: Any, objective: str, loss: str, rows: list[dict[str, Any]], folder: Path, weight: float | None = None
) -> Any:
    """Return the objective's trainer after the backward pass of one micro-batch, its loss, and the batch."""
    recipe = load(f"tiny_{objective}full_custom_e1", Overrides(data=__file__)).config
    weighed = recipe.model.model_copy(update={"router_aux_loss_coef": weight})
    recipe = recipe.model_copy(update={"model": weighed})
    reference = mixtral() if objective in ("dpo_", "kto_") else None
    made = trainer_setup.evaluator(
        recipe,
        (model, reference),
        TextEncoder(make_tokenizer(pads=True)),
        datasets.Dataset.from_list(rows),
        len(rows),
        str(folder),
    )
    if loss == "whole":
        trainer_setup.use_whole_logits(made, (model, reference), recipe)
    made.state.logging_steps = 1
    model.train()
    made.current_gradient_accumulation_steps = 1
    batch = made.data_collator(rows)
    found = made.compute_loss(model, batch, num_items_in_batch=torch.tensor(4))
    found.backward()
    return made, found.item(), batch


def router(model: Any) -> torch.Tensor:
    gradient: torch.Tensor = model.model.layers[0].mlp.gate.weight.grad
    return gradient


@pytest.mark.parametrize(
    ("objective", "loss"),
    [*((name, loss) for name in ("", "dpo_", "kto_") for loss in ("chunked", "whole")), ("orpo_", "chunked")],
)
def test_the_routers_loss_is_added_with_the_models_weight_and_reaches_the_router(
    objective: str, loss: str, tmp_path: Path
) -> None:
    rows = {"": SFT, "kto_": JUDGED}.get(objective, PAIR)

    without, its_loss, _ = step(mixtral(), objective, loss, rows, tmp_path, 0.0)
    made, found, _ = step(mixtral(), objective, loss, rows, tmp_path)
    doubled, its_double, _ = step(mixtral(), objective, loss, rows, tmp_path, 2 * COEFFICIENT)

    added = router(made.model) - router(without.model)
    assert float(added.norm()) > 1e-6
    torch.testing.assert_close(router(doubled.model) - router(without.model), 2 * added, rtol=1e-3, atol=1e-7)
    assert its_double - its_loss == pytest.approx(2 * (found - its_loss), rel=1e-3)
    assert (found - its_loss) / COEFFICIENT == pytest.approx(2, rel=0.2), "the experts that each token has"


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("loss", ["chunked", "whole"])
def test_the_routers_loss_that_is_logged_is_transformers_own(loss: str, recomputes: bool, tmp_path: Path) -> None:
    model, same = mixtral(), mixtral()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logged: dict[str, float] = {}

    made, found, batch = step(model, "", loss, SFT, tmp_path)
    made.accelerator.reduce = lambda tensor: tensor
    made.log(logged)
    outputs = same.train()(**{**batch, "labels": None}, output_router_logits=True)
    expected = load_balancing_loss_func(outputs.router_logits, 4, 2)
    full = torch.nn.functional.cross_entropy(outputs.logits[0, :-1], batch["labels"][0, 1:], reduction="sum") / 4
    (full + COEFFICIENT * expected).backward()

    assert logged["aux_loss"] == pytest.approx(outputs.aux_loss.item(), rel=1e-5)
    assert outputs.aux_loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert found == pytest.approx((full + COEFFICIENT * expected).item(), rel=1e-5)
    torch.testing.assert_close(router(model), router(same), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("rows", "share"), [(0, 0.0), (1, 1.0), (2, 2.0)])
def test_the_routers_loss_is_a_mean_over_the_rows_of_a_step_and_a_stand_in_has_no_part_in_it(
    rows: int, share: float, tmp_path: Path
) -> None:
    _, its_loss, _ = step(mixtral(), "", "whole", SFT, tmp_path, 0.0)
    made, whole, batch = step(mixtral(), "", "whole", SFT, tmp_path)
    made.rows_of_step, made.rows_of_batch = torch.tensor(2), rows

    made.model.zero_grad()
    made._sums.clear()
    with patch.object(type(made.args), "world_size", 2):
        loss = made.loss_of_objective(made.model, batch, num_items_in_batch=torch.tensor(4))
    of_tokens = 2 * its_loss  # of which ranks take the mean
    assert loss.item() - of_tokens == pytest.approx(share * (whole - its_loss), abs=1e-6)
    assert made._sums[0][-1] == rows


@pytest.mark.parametrize("objective", ["", "dpo_", "kto_", "orpo_"])
def test_a_validation_has_no_routers_loss(objective: str, tmp_path: Path) -> None:
    rows, losses = {"": SFT, "kto_": JUDGED}.get(objective, PAIR), []
    for weight in (0.0, 5.0):
        made, _, _ = step(mixtral(), objective, "chunked", rows, tmp_path, weight)
        metrics = made.evaluate()
        losses.append(metrics["eval_loss"])
        assert "eval_aux_loss" not in metrics

    assert losses[0] == losses[1]


@pytest.mark.parametrize("asks", [False, True])
def test_the_models_config_is_saved_as_it_was(asks: bool, tmp_path: Path) -> None:
    model = mixtral(output_router_logits=asks)

    made, _, _ = step(model, "", "chunked", SFT, tmp_path, 0.5)

    assert (made.aux_loss_enabled, made.router_aux_loss_coef) == (True, 0.5)
    assert (model.config.output_router_logits, model.config.router_aux_loss_coef) == (asks, COEFFICIENT)


def test_a_weight_for_a_router_that_is_not_there_is_refused() -> None:
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", num_hidden_layers=1, hidden_size=32))
    with refused(ModelError, "model.router_aux_loss_coef"), balanced(dense, 0.01):
        pass
    with balanced(dense, 0.0), balanced(dense, None):
        pass

    pairs = [("--set", "router_aux_loss_coef=0.01")]
    with refused(RecipeError, "--set router_aux_loss_coef=0.01", "experts"):
        load("qwen3_8b_full_alpaca_e1", Overrides(pairs=pairs))
    for objective in ("reward", "distill"):
        with refused(RecipeError, "--set router_aux_loss_coef=0.01", objective):
            load(f"mixtral_8x7b_{objective}_full_custom_e1", Overrides(data=__file__, pairs=pairs))
    assert load("mixtral_8x7b_full_alpaca_e1", Overrides(pairs=pairs)).config.model.router_aux_loss_coef == 0.01
