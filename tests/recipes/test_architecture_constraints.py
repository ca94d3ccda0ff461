"""What the catalog proposes and a model does not take: it gives way aloud, unless the user asked for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.fit.small import SMALL
from tests.models.brought import BROUGHT, brought
from tests.recipes.loaded import loaded
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.fit.families import FAMILIES
from tuner.lab.shrink import config_of
from tuner.recipes.loading import load
from tuner.recipes.model_facts import FUSED_EXPERTS, ODD_LINEARS

MOE, LINEAR = "qwen3_30b_a3b", "qwen3_next_80b_a3b_instruct"


NARROWED = {**FUSED_EXPERTS, **ODD_LINEARS}


def built(kind: str) -> PreTrainedModel:
    """Return a small model without memory for its weights."""
    config = brought(kind) if kind in BROUGHT else config_of(next(facts for facts in SMALL if facts.model_type == kind))
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def folder_of(kind: str, tmp_path: Path) -> str:
    """Return a model's folder as a user brings it, of which a recipe reads config.json alone."""
    brought(kind).save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_experts_that_peft_adapts_as_one_tensor_are_those_it_knows_by_their_old_names() -> None:
    assert {kind for kind, family in FAMILIES.items() if family.split_experts} == FUSED_EXPERTS.keys() & FAMILIES.keys()


@pytest.mark.parametrize("method", ["lora", "qlora", "rslora", "dora"])
def test_beside_fused_experts_attention_alone_is_adapted_and_it_is_said(method: str) -> None:
    found = loaded(f"{MOE}_{method}_alpaca_e3", "lora_dropout=0.1")

    assert found.config.adapter is not None
    assert found.config.adapter.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert found.config.adapter.lora_dropout == 0.1
    assert found.origins["adapter.target_modules"].text.startswith("derived: PEFT")
    assert any(note.startswith("adapter.target_modules=") and "PEFT" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of no shared experts
@pytest.mark.parametrize("kind", sorted(NARROWED))
def test_peft_takes_the_adapter_of_every_kind_with_dropout_and_dora(kind: str) -> None:
    model = built(kind)
    lora = LoraConfig(target_modules=list(NARROWED[kind]), lora_dropout=0.1, r=2, task_type="CAUSAL_LM")

    adapted = get_peft_model(model, lora)
    assert adapted.get_nb_trainable_parameters()[0] > 0
    assert not any(".experts" in name for name, weight in adapted.named_parameters() if weight.requires_grad)


def test_without_dropout_the_experts_are_adapted_too_and_dense_models_keep_all_linear() -> None:
    everything = loaded(f"{MOE}_lora_alpaca_e3", "lora_dropout=0")
    dense = loaded("qwen3_8b_lora_alpaca_e3")

    assert everything.config.adapter and dense.config.adapter
    assert everything.config.adapter.target_modules == dense.config.adapter.target_modules == "all-linear"
    assert not (everything.warnings or everything.notes or dense.warnings or dense.notes)


@pytest.mark.parametrize("init", ["orthogonal", "pissa"])
def test_a_beginning_for_linear_layers_leaves_out_the_experts(init: str) -> None:
    found = loaded(f"{MOE}_lora_alpaca_e3", f"init_lora_weights={init}")

    assert found.config.adapter and found.config.adapter.target_modules == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert found.origins["adapter.target_modules"].text.startswith("derived: PEFT")


def test_a_users_own_all_linear_is_refused_instead() -> None:
    with refused(RecipeError, "--set target_modules=all-linear"):
        loaded(f"{MOE}_lora_alpaca_e3", "lora_dropout=0.1", "target_modules=all-linear")


def test_a_value_of_the_users_own_folder_configs_is_the_users() -> None:
    Path("configs").mkdir()
    Path("configs/mine.py").write_text(
        f'_base_ = "{MOE}_lora_alpaca_e3"\nadapter = dict(target_modules="all-linear", lora_dropout=0.1)\n'
    )

    with refused(RecipeError, "configs/mine.py:2"):
        load("configs/mine.py")


def test_a_model_that_leaks_between_packed_samples_does_not_pack() -> None:
    found = loaded("opt_1_3b_full_alpaca_e3")

    assert found.config.train_dataloader.dataset.packing is False
    assert any(note.startswith("train_dataloader.dataset.packing=False: ") for note in found.notes)
    with refused(RecipeError, "--set packing=True"):
        loaded("opt_1_3b_full_alpaca_e3", "packing=True")


def test_a_hybrid_model_packs() -> None:
    assert loaded(f"{LINEAR}_full_alpaca_e3").config.train_dataloader.dataset.packing is True


def test_the_validation_does_not_pack_either() -> None:
    found = loaded("opt_1_3b_full_sample_e1")

    assert found.config.val_dataloader is not None
    assert found.config.val_dataloader.dataset.packing is False


def test_a_folder_says_its_model_type_where_its_facts_are_not_all_known(tmp_path: Path) -> None:
    kind = "mamba2"
    folder = folder_of(kind, tmp_path)

    found = loaded("tiny_lora_sample_e1", model=folder)

    assert found.config.train_dataloader.dataset.packing is False
    assert found.config.adapter is not None
    assert found.config.adapter.target_modules == ODD_LINEARS[kind]
    assert any(f"packed samples may attend to each other in a {kind} model" in note for note in found.notes)
    with refused(RecipeError, "--set train_dataloader.dataset.packing=True"):
        loaded("tiny_lora_sample_e1", "train_dataloader.dataset.packing=True", model=folder)


def test_a_model_that_is_known_when_it_is_loaded_keeps_what_the_catalog_proposes() -> None:
    found = loaded("tiny_lora_sample_e1", model="nobody/nothing")

    assert found.config.architecture is None
    assert found.config.train_dataloader.dataset.packing is True
