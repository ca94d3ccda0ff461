"""The recipe's settings mean to TRL what they say: losses, defaults, references, and rows left as they are."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, get_args

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, KTOConfig, RewardConfig, SFTConfig, SFTTrainer
from trl.experimental.orpo import ORPOConfig

from tests.data.conftest import make_tokenizer
from tests.models.brought import brought
from tests.refused import refused
from tuner.data import batches
from tuner.errors import ModelError
from tuner.models.compat import name_parts
from tuner.models.mixers import keep_samples_apart
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import LOADERS
from tuner.recipes.schema.architecture import KEEPS_APART
from tuner.recipes.schema.objectives.dpo import Dpo, DpoLoss
from tuner.recipes.schema.objectives.kto import Kto
from tuner.recipes.schema.objectives.orpo import Orpo
from tuner.recipes.schema.objectives.reward import Reward
from tuner.worker import trainer_setup
from tuner.worker.objectives import dpo_training, orpo_training, training_of

PAIRS = [
    {
        "chosen_ids": [5, 6, 7, answer],
        "chosen_labels": [-100, -100, 7, answer],
        "rejected_ids": [5, 6, 9],
        "rejected_labels": [-100, -100, 9],
    }
    for answer in (8, 11)
]
QUIET = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}


def model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def dpo(tmp_path: Path, policy: Any, reference: Any = None, **settings: Any) -> Any:
    objective = Dpo(type="dpo", **settings).model_dump(mode="json", exclude={"type"})
    arguments = DPOConfig(tmp_path, remove_unused_columns=False, max_length=None, **QUIET, **objective)
    return dpo_training.Dpo(
        model=policy,
        ref_model=reference,
        args=arguments,
        train_dataset=datasets.Dataset.from_list(PAIRS),
        processing_class=make_tokenizer(pads=True),
        data_collator=lambda rows: batches.pairs(rows, pad_id=0),
    )


def test_the_losses_of_the_schema_are_those_that_trl_documents() -> None:
    fields = {field.name: field.metadata for field in dataclasses.fields(DPOConfig)}
    told = re.findall(r"'(\w+)'", fields["loss_type"]["help"])
    kto = {field.name: field.metadata for field in dataclasses.fields(KTOConfig)}["loss_type"]["choices"]

    assert get_args(DpoLoss) == tuple(told)
    assert list(get_args(Kto.model_fields["loss_type"].annotation)) == kto


def test_every_loss_of_the_schema_is_computed_by_trl(tmp_path: Path) -> None:
    trainer = dpo(tmp_path, model(), model(), label_smoothing=0.1)
    batch = batches.pairs(PAIRS, pad_id=0)

    for loss in get_args(DpoLoss):
        trainer.loss_types = [loss]
        assert torch.isfinite(trainer.compute_loss(trainer.model, batch)), loss
    trainer.loss_types = ["ipoo"]
    with pytest.raises(ValueError):
        trainer.compute_loss(trainer.model, batch)


@pytest.mark.parametrize("loss", ["sigmoid", "sigmoid_norm"])
def test_label_smoothing_makes_the_loss_conservative_dpo(loss: str, tmp_path: Path) -> None:
    policy, reference, smoothing, beta = model(), model(), 0.3, 2.0
    with torch.no_grad():
        reference.lm_head.weight.mul_(1.5)
    trainer = dpo(tmp_path, policy, reference, loss_type=loss, label_smoothing=smoothing, beta=beta)
    rows, margins = datasets.Dataset.from_list(PAIRS), []
    for row in rows:
        scores = []
        for side in ("chosen", "rejected"):
            ids, labels = torch.tensor([row[f"{side}_ids"]]), torch.tensor(row[f"{side}_labels"])
            trained = labels[1:] != -100
            log_probs = [
                scored_by(input_ids=ids)
                .logits[0, :-1]
                .double()
                .log_softmax(-1)
                .gather(1, ids[0, 1:, None])[:, 0][trained]
                for scored_by in (policy, reference)
            ]
            ratio = (log_probs[0] - log_probs[1]).sum()
            scores.append(ratio / trained.sum() if loss == "sigmoid_norm" else ratio)
        margins.append(beta * (scores[0] - scores[1]))
    margin = torch.stack(margins)
    wanted = -(1 - smoothing) * margin.sigmoid().log().mean() - smoothing * (-margin).sigmoid().log().mean()
    wanted.backward()
    gradient, policy.lm_head.weight.grad = policy.lm_head.weight.grad, None

    got = trainer.compute_loss(policy, batches.pairs(PAIRS, pad_id=0))
    got.backward()

    assert got.item() == pytest.approx(wanted.item(), rel=1e-5) and margin.abs().min() > 1e-3
    torch.testing.assert_close(policy.lm_head.weight.grad, gradient, rtol=1e-4, atol=1e-7)


def test_several_losses_are_weighed_and_label_smoothing_of_one_leaves_the_others_as_trl_has_them(
    tmp_path: Path,
) -> None:
    def of(*losses: Any, **more: Any) -> float:
        policy, reference = model(), model()
        with torch.no_grad():
            reference.lm_head.weight.mul_(1.5)
        made = dpo(tmp_path, policy, reference, loss_type=losses, **more)
        return float(made.compute_loss(made.model, batches.pairs(PAIRS, pad_id=0)).detach())

    assert of("hinge", "sft", loss_weights=(0.5, 2.0)) == pytest.approx(0.5 * of("hinge") + 2.0 * of("sft"))
    smoothed = {"label_smoothing": 0.2, "f_divergence_type": "js_divergence"}  # its scores are log-sigmoids too
    assert of("sigmoid", "robust", **smoothed) == pytest.approx(of("sigmoid", **smoothed) + of("robust", **smoothed))
    smoothed["f_divergence_type"] = "reverse_kl"
    beside = of("sigmoid", "bco_pair", "robust", **smoothed) - of("bco_pair", "robust", **smoothed)
    assert beside == pytest.approx(of("sigmoid", **smoothed), rel=1e-4)


@pytest.mark.parametrize(
    ("block", "config"), [(Dpo, DPOConfig), (Orpo, ORPOConfig), (Kto, KTOConfig), (Reward, RewardConfig)]
)
def test_the_defaults_of_the_schema_are_trls(block: Any, config: Any) -> None:
    theirs = {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(config)
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
    }
    ours = block(type=block.__name__.lower()).model_dump(mode="json", exclude={"type"})

    assert ours == {name: theirs[name] for name in ours}


def test_rows_reach_the_trainer_as_they_were_prepared(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_list(PAIRS)
    orpo = orpo_training.Orpo(
        model=model(),
        args=ORPOConfig(tmp_path, remove_unused_columns=False, eval_strategy="epoch", **QUIET),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=make_tokenizer(pads=True),
        data_collator=lambda some: batches.odds(some, pad_id=0),
    )

    assert orpo.train_dataset is rows and orpo.eval_dataset is rows
    assert dpo(tmp_path, model(), model()).train_dataset.to_list() == rows.to_list()
    assert torch.isfinite(orpo.compute_loss(orpo.model, batches.odds(PAIRS, pad_id=0)))


def test_dropout_is_off_and_an_adapters_reference_is_the_base_without_a_second_adapter(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, lora_dropout=0.5, target_modules="all-linear", task_type="CAUSAL_LM")
    adapted = get_peft_model(model(), lora)
    trainer = dpo(tmp_path, adapted)

    trainer_setup.reset_reference_adapter(adapted, load("tiny_dpo_lora_custom_e1").config)
    adapted.train()
    trainer.compute_loss(adapted, batches.pairs(PAIRS, pad_id=0))

    assert list(adapted.peft_config) == ["default"]
    assert trainer._metrics["train"]["rewards/margins"] == [0.0], "nothing is trained yet, and nothing is dropped"
    assert not [name for name, _ in adapted.named_parameters() if ".ref." in name]


def test_kto_goes_through_its_rows_in_one_shuffled_order() -> None:
    rows = datasets.Dataset.from_dict({"at": range(100)})
    config = load("tiny_kto_full_sample_preferences_e1").config

    ordered = training_of("kto").ordered(config, rows)["at"]

    assert sorted(ordered) == list(range(100)) != list(ordered)
    assert list(training_of("kto").ordered(config, rows)["at"]) == list(ordered)
    assert training_of("dpo").ordered(load("tiny_dpo_full_sample_preferences_e1").config, rows) is rows


def test_log_probabilities_of_one_launch_are_never_taken_for_another() -> None:
    rows = datasets.Dataset.from_dict({"at": range(3)})
    pairs = [("--set", "objective.precompute_ref_log_probs=true")]
    config = load("tiny_dpo_full_sample_preferences_e1", Overrides(pairs=pairs)).config

    first, again, other = (trainer_setup._to_judge(config, rows, 1, launch) for launch in ("a", "a", "b"))

    assert first._fingerprint == again._fingerprint != other._fingerprint
    assert first.to_list() == other.to_list() == rows.to_list()


ROWS = [
    {"input_ids": [5, 6, 7, 8, 9, 10, 11], "labels": [-100, -100, 7, 8, 9, 10, 11]},
    {"input_ids": [12, 13, 14], "labels": [-100, 13, 14]},
]


@pytest.mark.parametrize("kind", ["bamba", "jamba", "lfm2", "mamba2", "mpt", "olmo_hybrid", "gptj"])
def test_the_loss_of_a_batch_is_that_of_its_samples_alone(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(brought(kind, vocab_size=64, router_aux_loss_coef=0.0)).eval()
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.15)  # large enough that a sample that sees another differs plainly
        alone = [made(**{name: torch.tensor([ids]) for name, ids in row.items()}, use_cache=False).loss for row in ROWS]
    keep_samples_apart(made)
    config = load(
        "tiny_full_sample_e1", Overrides(pairs=[("--set", f"{key}.dataset.packing=False") for key in LOADERS])
    )
    sft = training_of("sft")
    settings = SFTConfig(tmp_path, per_device_eval_batch_size=2, **QUIET, **sft.fixed_arguments)

    sft.before(settings, config.config, made)
    trainer = SFTTrainer(
        made, settings, train_dataset=datasets.Dataset.from_list(ROWS), processing_class=make_tokenizer(pads=True)
    )
    loss = trainer.evaluate(datasets.Dataset.from_list(ROWS))["eval_loss"]

    assert settings.padding_free == (kind in KEEPS_APART)
    assert loss == pytest.approx((5 * alone[0].item() + 2 * alone[1].item()) / 7, rel=1e-4)


def test_packed_rows_of_a_model_that_turns_out_not_to_keep_samples_apart_are_refused(tmp_path: Path) -> None:
    config, made = load("tiny_full_sample_e1").config, AutoModelForCausalLM.from_config(brought("mamba2"))
    settings = SFTConfig(tmp_path, **QUIET)

    with refused(ModelError, "train_dataloader.dataset.packing") as caught:
        training_of("sft").before(settings, config, made)

    assert "--set train_dataloader.dataset.packing=False" in str(caught.value)


@pytest.mark.parametrize("kind", ["granitemoe", "granitemoehybrid", "llama4_text", "mixtral", "phimoe"])
def test_trls_loss_finds_the_layers_and_the_number_of_experts(kind: str) -> None:
    config = AutoConfig.for_model(kind, num_hidden_layers=2, num_local_experts=4)
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config)

    name_parts(made)

    assert made.base_model is not made
    assert config.num_experts == 4
    assert "num_experts" not in config.to_dict()


def test_an_adapter_that_goes_on_is_compared_with_what_it_was_and_saved_alone(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    before = get_peft_model(model(), lora)
    for name, weight in before.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.5, generator=torch.Generator().manual_seed(0))
    before.save_pretrained(tmp_path / "sft")
    adapted = PeftModel.from_pretrained(model(), tmp_path / "sft", is_trainable=True)
    config = load("tiny_dpo_lora_custom_e1", Overrides(pairs=[("--set", f"adapter.path={tmp_path / 'sft'}")])).config
    trainer = dpo(tmp_path, adapted)

    trainer_setup.reset_reference_adapter(adapted, config)
    loss = trainer.compute_loss(adapted, batches.pairs(PAIRS, pad_id=0))
    adapted.save_pretrained(tmp_path / "result")

    assert float(loss.detach()) == pytest.approx(math.log(2), abs=1e-6)
    assert {name: weight.requires_grad for name, weight in adapted.named_parameters() if "lora_" in name} == {
        name: ".default." in name for name, _ in adapted.named_parameters() if "lora_" in name
    }
    assert not (tmp_path / "result" / "ref").exists()
    with adapted.disable_adapter():
        base = adapted(torch.tensor([[1, 2, 3]])).logits
    assert not torch.allclose(adapted(torch.tensor([[1, 2, 3]])).logits, base)


@pytest.mark.parametrize(("name", "is_fused"), [("AdamW", True), ("Adam", True), ("SGD", True), ("NAdam", False)])
def test_an_optimizer_of_torch_takes_one_kernel_for_all_parameters_where_it_has_one(name: str, is_fused: bool) -> None:
    config = load("tiny_full_sample_e1", Overrides(pairs=[("--set", f"optimizer.type={name}")])).config
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)

    cls, settings = trainer_setup._optimizer(config)
    made = cls([weight], **settings)
    made.step()

    assert bool(made.defaults.get("fused")) == is_fused
    assert float(weight.max().detach()) < 1


@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
def test_lora_plus_gives_each_b_a_rate_of_its_own(kind: str) -> None:
    sets = ("lr=1e-4", "loraplus_lr_ratio=16", f"optimizer.type={kind}", "weight_decay=0.1")
    config = load("tiny_lora_sample_e1", Overrides(pairs=[("--set", text) for text in sets])).config
    adapted = get_peft_model(model(), LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    make, settings = trainer_setup._optimizer(config)

    made = make()(adapted, **settings)

    names = {weight: name for name, weight in adapted.named_parameters()}
    groups = [(group, names[weight]) for group in made.param_groups for weight in group["params"]]
    assert len(groups) == sum(weight.requires_grad for weight in adapted.parameters())
    for group, name in groups:
        assert group["lr"] == pytest.approx(1.6e-3 if "lora_B" in name else 1e-4), name
        assert group["weight_decay"] == 0.1
