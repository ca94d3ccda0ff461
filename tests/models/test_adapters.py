"""However an adapter begins, what is saved of it applies to the base that was loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, set_seed

from tests.configs.test_packing import small_config
from tests.each import each
from tests.models.brought import BROUGHT
from tests.models.test_load import recipe
from tests.refused import refused
from tests.tiny_model import tiny
from tuner.errors import ModelError
from tuner.models import adapters
from tuner.models.load import load_model, pretrained_path
from tuner.recipes.loading import load
from tuner.recipes.model_facts import ODD_LINEARS
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import unlearned_layers

TOKENS = torch.arange(5, 25)[None]
BEGINNINGS = ("gaussian", "orthogonal", "olora", "pissa", "pissa_niter_2")


def begun(init: str, dtype: torch.dtype, *pairs: str) -> Any:
    config = recipe("lora", f"init_lora_weights={init}", "lora_dropout=0.0", "r=8", *pairs)
    return load_model(config, str(tiny()), dtype, "cpu", shards=False)


def base(dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny(), dtype=dtype)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits.float()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize(
    ("init", "more"),
    [
        *((init, more) for init in BEGINNINGS for more in ((), ("use_rslora=True",))),
        ("pissa", ("target_modules=['q_proj', 'embed_tokens']",)),
    ],
)
def test_a_trained_adapter_gives_the_same_on_the_base_that_was_loaded(
    init: str, more: tuple[str, ...], tmp_path: Path
) -> None:
    model = begun(init, torch.float32, *more)
    before = logits(model)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.02 * torch.randn_like(weight)
    trained = logits(model)

    model.save_pretrained(tmp_path, state_dict=None)

    torch.testing.assert_close(before, logits(base(torch.float32)), atol=1e-4, rtol=0)
    assert (trained - before).abs().max() > 0.1, "it was not trained"
    reloaded = PeftModel.from_pretrained(base(torch.float32), tmp_path)
    torch.testing.assert_close(logits(reloaded), trained, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA")  # of PEFT's own conversion, which is not used
@pytest.mark.parametrize("more", [{"vision_r": 4, "vision_lora_alpha": 32}, {"vision_r": 12, "use_rslora": True}])
def test_another_rank_and_scale_of_the_tower_are_saved_for_the_base_too(more: dict[str, Any], tmp_path: Path) -> None:
    values = {"r": 8, "lora_dropout": 0.0, "vision": True, "init_lora_weights": "pissa", **more}
    pairs = [("--set", f"adapter.{key}={value}") for key, value in values.items()]
    config = load("tiny_vision_lora_sample_images_e1", Overrides(pairs=pairs)).config
    folder = pretrained_path(config.model)
    model = load_model(config, folder, torch.float32, "cpu", shards=False)
    for weight in model.parameters():
        if weight.requires_grad:
            weight.data += 0.02 * torch.randn_like(weight)

    model.save_pretrained(tmp_path, state_dict=None)

    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    merged = PeftModel.from_pretrained(whole, tmp_path).merge_and_unload().state_dict()
    for name, weight in model.merge_and_unload().state_dict().items():
        torch.testing.assert_close(merged[name], weight, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("init", ["olora", "pissa"])
def test_an_adapter_that_begins_in_the_base_has_the_compute_type(init: str) -> None:
    assert {weight.dtype for weight in begun(init, torch.bfloat16).parameters()} == {torch.bfloat16}


def test_a_beginning_by_chance_is_the_same_when_a_run_goes_on() -> None:
    first = begun("pissa_niter_2", torch.float32)
    torch.manual_seed(7)

    again = begun("pissa_niter_2", torch.float32).state_dict()

    assert all(torch.equal(weight, again[name]) for name, weight in first.state_dict().items())


def test_an_adapter_that_trains_tokens_of_a_tied_head_is_refused(tmp_path: Path) -> None:
    tokens = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], trainable_token_indices=[3, 4])
    get_peft_model(base(torch.float32), tokens).save_pretrained(tmp_path)

    with pytest.raises(ModelError, match="single tokens of tied embeddings"):
        load_model(recipe("lora", f"adapter.path={tmp_path}"), str(tiny()), torch.float32, "cpu", shards=False)


@pytest.mark.parametrize(("method", "name"), [("lora", "embed_token"), ("qlora", "mlp")])
def test_a_module_that_cannot_be_trained_whole_is_refused(method: str, name: str) -> None:
    """It is not there, or holds weights in 4 bits."""
    config = recipe(method, f"adapter.modules_to_save=['{name}']")

    with refused(ModelError, "adapter.modules_to_save", name):
        load_model(config, str(tiny()), torch.float32, "cpu", shards=False)


@pytest.mark.parametrize(("kind", "name"), [("jamba", "dt_proj"), ("bamba", "out_proj"), ("lfm2", "conv")])
def test_lora_on_a_layer_whose_weight_is_read_past_it_is_refused(kind: str, name: str) -> None:
    model = AutoModelForCausalLM.from_config(small_config(kind))

    with refused(ModelError, "adapter.target_modules", name):
        adapters.with_adapter(model, recipe("lora", f"target_modules=['in_proj', '{name}']"), "")


CHOOSING = ("deepseek_v32", "deepseek_v4", "glm_moe_dsa")
"""Kinds with an indexer."""


def with_lora_on_all_layers(kind: str) -> PeftModel:
    """Return a small model of a kind with the adapter that a recipe puts on all of its linear layers."""
    set_seed(0)
    config = small_config(kind)
    if kind == "deepseek_v4":  # windows that the row of `without_gradient_in` fills
        config.compress_rates = dict.fromkeys(config.compress_rates, 4)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()
    with torch.no_grad():
        for weight in model.parameters():  # norms too: what begins with 0 would hide gradients
            weight += 0.15 * torch.randn_like(weight)
    named = [f"target_modules={[*ODD_LINEARS[kind]]}"] if kind in ODD_LINEARS else []
    adapted = adapters.with_adapter(model, recipe("lora", "r=2", "lora_dropout=0.0", *named), "")
    for weight in adapted.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight, std=0.1)  # B begins with 0, and A would have no gradient
    return adapted


def without_gradient_in(model: PeftModel) -> list[str]:
    """Return the trained weights whose gradient is 0, or that have none."""
    ids = torch.randint(3, model.config.get_text_config().vocab_size, (1, 30))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    weights = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    return [name for name, weight in weights if weight.grad is None or not weight.grad.any()]


@each(sorted({*BROUGHT, "gemma3n_text"} - {*CHOOSING, "gemma3n_text"}), every=10)
@pytest.mark.filterwarnings("ignore")  # PEFT's, of tied embeddings and the rank of fused experts
def test_every_adapter_on_all_linear_layers_learns(kind: str) -> None:
    assert without_gradient_in(with_lora_on_all_layers(kind)) == []


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # PEFT's of the rank of fused experts
@pytest.mark.parametrize("kind", [*CHOOSING, "gemma3n_text"])
def test_lora_is_left_out_of_layers_that_no_gradient_reaches(kind: str) -> None:
    model = with_lora_on_all_layers(kind)

    assert without_gradient_in(model) == []
    linears = [name for name, module in model.get_base_model().named_modules() if isinstance(module, nn.Linear)]
    assert adapters.left_out(model, recipe("lora")) == unlearned_layers.without_gradient(linears) != []


@pytest.mark.parametrize(
    ("kind", "targets"),
    [("deepseek_v32", "['q_proj', 'wk']"), ("deepseek_v4", ".*indexer.*"), ("gemma3n_text", "['correction_coefs']")],
)
def test_lora_on_a_layer_that_no_gradient_reaches_is_refused(kind: str, targets: str) -> None:
    model = AutoModelForCausalLM.from_config(small_config(kind))

    with refused(ModelError, "adapter.target_modules"):
        adapters.with_adapter(model, recipe("lora", f"target_modules={targets}"), "")
