"""What an objective's block takes, and how its mistakes are told."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tests.recipes.loaded import loaded
from tuner.errors import RecipeError
from tuner.recipes.schema.objectives import objectives_with
from tuner.recipes.schema.objectives.dpo import Dpo, DpoLoss
from tuner.recipes.schema.objectives.kto import Kto

DPO = "tiny_dpo_full_sample_preferences_e1"
GRPO = "tiny_grpo_full_sample_e1"
OWNERS_OF_LOSS_TYPE = f"objective.loss_type belongs to {', '.join(objectives_with('loss_type'))}"


@pytest.mark.parametrize(
    ("name", "pair", "told"),
    [
        (DPO, "objective.loss_type=ipoo", ("objective.loss_type = 'ipoo'", "Did you mean 'ipo'?")),
        (DPO, "objective.type=dop", ("objective.type = 'dop'", "Did you mean 'dpo'?", "'reward'")),
        (DPO, "objective.type=ppo", ("tuner has no objective 'ppo'", "Use grpo or rloo")),
        (DPO, "objective.type=orpo", (OWNERS_OF_LOSS_TYPE, "'orpo'", "tiny_orpo_full_sample_e3")),
        (
            DPO,
            "objective.type=reward",
            (f"belongs to {', '.join(objectives_with('beta'))}", "'reward'", "recipe's name"),
        ),
        (DPO, "objective.bta=1", ("no key 'objective.bta'", "Did you mean 'objective.beta'?")),
        (DPO, "beta=0", ("objective.beta = 0", "greater than 0")),
        (DPO, "loss_type=exo_pair", ("exo_pair needs a label_smoothing above 0",)),
        (DPO, "objective.loss_weights=(1,2)", ("2 weights for 1 losses",)),
        (DPO.replace("dpo", "cpo"), "objective.loss_type=simpo", ("objective.loss_type = 'simpo'",)),
        (GRPO.replace("grpo", "distill"), "objective.uld_hybrid_matched_weight=1.0", ("vocabulary_matching ids",)),
        (GRPO, "objective.loss_type=cispo", ("epsilon_high", "0.2", "5.0")),
        (GRPO, "objective.loss_type=luspo", ("importance_sampling_level", "'sequence'")),
        (GRPO, "objective.sapo_temperature_pos=2.0", ("nothing reads it with the loss dapo",)),
        (GRPO, "objective.top_entropy_quantile=0", ("objective.top_entropy_quantile = 0",)),
        (GRPO.replace("grpo", "rloo"), "objective.reward_clip_range=(1.0,-1.0)", ("the least reward first",)),
        (GRPO.replace("grpo", "gmpo"), "objective.use_bias_correction_kl=False", ("belongs to grpo", "'gmpo'")),
        ("tiny_orpo_full_sample_e1", "loss_type=ipo", (OWNERS_OF_LOSS_TYPE, "Remove loss_type")),
        (DPO.replace("dpo", "kto"), "train_dataloader.batch_size=1", ("train_dataloader.batch_size = 1",)),
        (GRPO.replace("grpo", "online_dpo"), "train_dataloader.batch_size=1", ("train_dataloader.batch_size = 1",)),
        ("tiny_full_sample_e1", "dtype=bf61", ("optim_wrapper.dtype = 'bf61'", "Did you mean 'bf16'?")),
    ],
)
def test_a_mistake_in_an_objective_is_told_with_the_way_out(name: str, pair: str, told: tuple[str, ...]) -> None:
    with pytest.raises(RecipeError) as caught:
        loaded(name, pair)

    assert [part for part in (*told, f"--set {pair}: ") if part not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("pair", "losses"),
    [
        ("loss_type=ipo", ("ipo",)),
        ("loss_type=['sigmoid', 'sft']", ("sigmoid", "sft")),
        ("loss_type=[sigmoid,sft]", ("sigmoid", "sft")),
        ("objective.loss_type=('hinge',)", ("hinge",)),
    ],
)
def test_one_loss_or_several_can_be_set(pair: str, losses: tuple[str, ...]) -> None:
    objective = loaded(DPO, pair).config.objective

    assert isinstance(objective, Dpo)
    assert objective.loss_type == losses


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": ()},
        {"loss_type": "aot", "use_weighting": True},
        {"loss_type": ("sigmoid", "sft"), "use_weighting": True},
        {"loss_type": ("sigmoid", "apo_zero"), "f_divergence_type": "js_divergence"},
        {"loss_type": "sigmoid", "loss_weights": (1.0, 1.0)},
        {"ld_alpha": 1.1},
        {"label_smoothing": 0.5},
    ],
    ids=str,
)
def test_settings_that_trl_would_refuse_after_loading_are_refused_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Dpo(type="dpo", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "exo_pair", "label_smoothing": 1e-3},
        {"loss_type": ("sigmoid", "bco_pair", "sft"), "loss_weights": (0.8, 0.2, 1.0)},
        {"loss_type": "hinge", "f_divergence_type": "js_divergence", "use_weighting": True},
    ],
    ids=str,
)
def test_settings_that_fit_each_other_are_taken(settings: dict[str, Any]) -> None:
    assert Dpo(type="dpo", **settings)


def test_a_validation_of_an_objective_that_generates_has_one_completion_of_each_prompt() -> None:
    assert loaded(GRPO.replace("grpo", "online_dpo"), "val_dataloader.batch_size=1").config.val_dataloader


LOSSES = {
    "sigmoid": {"label_smoothing": 0.2, "ld_alpha": 0.5, "f_divergence_type": "forward_kl", "beta": 0.2},
    "sigmoid_norm": {"label_smoothing": 0.2, "ld_alpha": 0.5, "f_divergence_type": "forward_kl", "beta": 0.2},
    "hinge": {"ld_alpha": 0.5, "f_divergence_type": "forward_kl", "beta": 0.2},
    "ipo": {"ld_alpha": 0.5, "f_divergence_type": "forward_kl", "beta": 0.2},
    "exo_pair": {"label_smoothing": 0.2, "ld_alpha": 0.5, "f_divergence_type": "forward_kl", "beta": 0.2},
    "nca_pair": {"ld_alpha": 0.5, "beta": 0.2},
    "robust": {"label_smoothing": 0.2, "ld_alpha": 0.5, "f_divergence_type": "forward_kl", "beta": 0.2},
    "bco_pair": {"ld_alpha": 0.5, "beta": 0.2},
    "sppo_hard": {"ld_alpha": 0.5, "beta": 0.2},
    "aot": {"label_smoothing": 0.2, "ld_alpha": 0.5, "beta": 0.2},
    "aot_unpaired": {"label_smoothing": 0.2, "ld_alpha": 0.5, "beta": 0.2},
    "apo_zero": {"ld_alpha": 0.5, "beta": 0.2},
    "apo_down": {"ld_alpha": 0.5, "beta": 0.2},
    "discopop": {"ld_alpha": 0.5, "f_divergence_type": "forward_kl", "beta": 0.2, "discopop_tau": 0.1},
    "sft": {},
}
"""The settings that each loss reads, with a value other than the default."""


@pytest.mark.parametrize("loss", get_args(DpoLoss))
def test_a_setting_that_no_chosen_loss_reads_is_refused_at_its_key_and_the_others_are_taken(loss: str) -> None:
    for key, value in {key: value for taken in LOSSES.values() for key, value in taken.items()}.items():
        smoothed = {"label_smoothing": 0.1} if loss == "exo_pair" else {}
        settings = {"loss_type": loss, **smoothed, key: value}
        if key in LOSSES[loss]:
            assert Dpo(type="dpo", **settings)
        else:
            with pytest.raises(ValidationError) as caught:
                Dpo(type="dpo", **settings)
            assert [error["loc"] for error in caught.value.errors()] == [(key,)]


def test_a_setting_that_one_of_several_losses_reads_is_taken() -> None:
    assert Dpo(type="dpo", loss_type=("hinge", "robust"), label_smoothing=0.1)
    assert Dpo(type="dpo", loss_type=("sigmoid", "discopop"), discopop_tau=0.1)


@pytest.mark.parametrize(
    ("block", "settings", "key"),
    [
        (Dpo, {"f_alpha_divergence_coef": 0.3}, "f_alpha_divergence_coef"),
        (Dpo, {"precompute_ref_batch_size": 2}, "precompute_ref_batch_size"),
        (Kto, {"precompute_ref_batch_size": 2}, "precompute_ref_batch_size"),
    ],
    ids=str,
)
def test_a_setting_of_a_setting_that_is_off_is_refused(block: Any, settings: dict[str, Any], key: str) -> None:
    with pytest.raises(ValidationError) as caught:
        block(type=block.__name__.lower(), **settings)

    assert [error["loc"] for error in caught.value.errors()] == [(key,)]
    assert Dpo(type="dpo", f_divergence_type="alpha_divergence", f_alpha_divergence_coef=0.3)
    assert Kto(type="kto", precompute_ref_log_probs=True, precompute_ref_batch_size=2)


@pytest.mark.parametrize(("objective", "rate"), [("cpo", 1e-6), ("dpo", 5e-7), ("kto", 5e-7), ("orpo", 5e-6)])
def test_the_objective_decides_the_learning_rate_and_an_adapter_takes_ten_times_it(objective: str, rate: float) -> None:
    full, adapter = DPO.replace("dpo", objective), DPO.replace("dpo_full", f"{objective}_qlora")
    own = loaded(None, model="package:tiny", method=f"{objective}_lora")

    assert [
        recipe.config.optim_wrapper.optimizer.lr for recipe in (loaded(full), loaded(adapter), own)
    ] == pytest.approx([rate, rate * 10, rate * 10])
    assert "for an adapter" in own.origins["optim_wrapper.optimizer.lr"].text
    assert loaded(adapter, "lr=1e-6").config.optim_wrapper.optimizer.lr == 1e-6


@pytest.mark.parametrize("share", [0.2, 1.0])
def test_the_micro_batch_is_not_chosen_where_tokens_are_chosen_in_it(share: float) -> None:
    objective = loaded(GRPO, f"objective.top_entropy_quantile={share}").config.objective

    assert objective.depends_on_micro_batch is objective.depends_on_ranks is (share < 1)
