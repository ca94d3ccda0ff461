"""What a recipe makes of a model: which weights are trained, and what it is compared with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, LlavaConfig, LlavaForConditionalGeneration

from tests.models.brought import brought
from tests.tiny_model import tiny
from tuner.errors import ModelError
from tuner.models.adapters import commit
from tuner.models.fused_lora import FusedLinear
from tuner.models.load import decoder_layers, load_model, load_reference, load_tokenizer
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig

ARCHITECTURES = {
    "llama": "num_hidden_layers",
    "gemma3_text": "num_hidden_layers",
    "qwen3_moe": "num_hidden_layers",
    "deepseek_v3": "num_hidden_layers",
    "gpt_oss": "num_hidden_layers",
    "falcon": "num_hidden_layers",
    "opt": "num_hidden_layers",
    "phi3": "num_hidden_layers",
    "gpt_neox": "num_hidden_layers",
    "gpt_bigcode": "n_layer",
    "bloom": "n_layer",
    "mpt": "n_layers",
}


def recipe(name: str, *pairs: str) -> RecipeConfig:
    overrides = Overrides(pairs=[("--set", pair) for pair in pairs])
    return load(f"tiny_{name}_sample_preferences_e1", overrides).config


def made(config: RecipeConfig) -> Any:
    return load_model(config, str(tiny()), torch.float32, "cpu", shards=False)


@pytest.mark.parametrize(
    ("name", "pairs", "is_fused"),
    [
        ("lora", (), True),
        ("lora", ("lora_dropout=0.1",), False),
        ("dpo_lora", ("lora_dropout=0.1",), True),  # DPO compares with a model that drops nothing
        ("lora", ("use_dora=True",), False),
        ("lora", ("train_cfg.torch_compile=True",), False),
        ("full", (), False),
    ],
)
def test_plain_lora_computes_as_one_function(name: str, pairs: tuple[str, ...], is_fused: bool) -> None:
    model = made(recipe(name, *pairs)).train()

    layers = [module for module in model.modules() if isinstance(module, Linear)]
    assert all(type(layer) is FusedLinear for layer in layers) is (is_fused or not layers)
    assert any(type(layer) is FusedLinear for layer in layers) is is_fused


def trained(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_decoder_layers_are_found_in_every_architecture(name: str) -> None:
    config = AutoConfig.for_model(name, **{ARCHITECTURES[name]: 3})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)

    layers = decoder_layers(model)

    assert len(layers) == 3
    assert {type(layer).__name__ for layer in layers} <= set(model._no_split_modules)


def test_the_decoder_layers_are_the_llms_where_a_vision_tower_has_as_many() -> None:
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower = {**small, "model_type": "clip_vision_model", "image_size": 8, "patch_size": 4}
    llm = {**small, "model_type": "llama", "vocab_size": 50}
    config = LlavaConfig(vision_config=tower, text_config=llm, image_token_index=3)
    with torch.device("meta"):
        model = LlavaForConditionalGeneration(config)

    assert decoder_layers(model) is model.model.language_model.layers


def test_the_last_layers_alone_are_trained() -> None:
    names = trained(made(recipe("freeze")))

    assert {name.split(".")[2] for name in names} == {"1", "2"}
    assert all(name.startswith("model.layers.") for name in names)


def test_recomputation_sends_no_gradient_into_frozen_layers() -> None:
    model = made(recipe("freeze"))
    have_gradients: list[bool] = []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _layer, _inputs, output: have_gradients.append(output.requires_grad))

    model.activation_checkpointing_enable()  # as transformers does
    model(input_ids=torch.tensor([[1, 2, 3, 4]]))

    assert have_gradients == [False, True, True]


def test_a_new_score_head_is_trained_beside_the_last_layer() -> None:
    names = trained(made(recipe("reward_freeze", "trainable_layers=1")))

    assert "score.weight" in names
    assert {name.split(".")[2] for name in names - {"score.weight"}} == {"2"}


def test_more_layers_than_the_model_has_are_refused() -> None:
    with pytest.raises(ModelError, match=r"trainable_layers = 4, but the model has 3 decoder layers.*at most 3"):
        made(recipe("freeze", "trainable_layers=4"))


def test_the_score_head_is_trained_whole_beside_adapters() -> None:
    model = made(recipe("reward_lora"))

    assert [name for name in trained(model) if "lora_" not in name] == [
        "base_model.model.score.modules_to_save.default.weight"
    ]
    assert model.config.num_labels == 1


@pytest.mark.parametrize("name", ["dpo_full", "kto_full", "dpo_freeze"])
def test_without_an_adapter_the_reference_is_a_frozen_copy(name: str) -> None:
    config = recipe(name)
    reference = load_reference(config, str(tiny()), torch.float32, "cpu", shards=False)

    assert reference is not None
    assert trained(reference) == set()
    for ours, theirs in zip(made(config).parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize(
    ("name", "beforehand"),
    [("dpo_lora", ""), ("kto_lora", ""), ("orpo_full", ""), ("reward_full", ""), ("dpo_full", "true")],
)
def test_nothing_is_loaded_twice_where_no_copy_is_needed(name: str, beforehand: str) -> None:
    more = [f"objective.precompute_ref_log_probs={beforehand}"] if beforehand else []

    assert load_reference(recipe(name, *more), str(tiny()), torch.float32, "cpu", shards=False) is None


@pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings")
def test_an_adapter_on_the_output_embeddings_is_refused_where_it_would_not_be_trained() -> None:
    targets = "adapter.target_modules=['q_proj', 'lm_head']"
    with pytest.raises(ModelError, match=r"output embeddings \(lm_head\).* by dpo"):
        made(recipe("dpo_lora", targets))

    assert made(recipe("orpo_lora", targets))


def stored(folder: Path, method: str) -> str:
    """Write the config of a checkpoint whose weights are stored in fewer bits; such weights need a GPU to be made."""
    config = AutoConfig.for_model("llama", hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("method", ["mxfp4", "fp8"])
def test_a_checkpoint_in_fewer_bits_is_asked_for_in_16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    asked: dict[str, Any] = {}

    def keep(path: str, **arguments: Any) -> Any:
        asked.update(arguments)
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny()))
        return model, {"missing_keys": set(), "unexpected_keys": set()}

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", keep)
    load_model(recipe("dpo_full"), stored(tmp_path, method), torch.float32, "cpu", shards=False)

    assert asked["quantization_config"].dequantize is True


@pytest.mark.parametrize(("name", "method"), [("dpo_qlora", "mxfp4"), ("dpo_full", "gptq")])
def test_weights_in_fewer_bits_are_not_quantized_again_nor_trained(tmp_path: Path, name: str, method: str) -> None:
    with pytest.raises(ModelError, match=method) as caught:
        load_model(recipe(name), stored(tmp_path, method), torch.float32, "cpu", shards=False)

    assert "Use the method lora" in str(caught.value)


@pytest.mark.parametrize("method", [{"quant_method": "bitsandbytes"}, {}], ids=["its name", "of old configs"])
def test_a_merged_model_that_still_says_it_is_in_4_bits_is_refused(method: dict[str, str], tmp_path: Path) -> None:
    folder = shutil.copytree(tiny(), tmp_path / "merged")
    written = json.loads((folder / "config.json").read_text())
    left_over = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", **method}
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": left_over}))

    with pytest.raises(ModelError, match="Remove quantization_config"):
        load_model(recipe("dpo_lora"), str(folder), torch.float32, "cpu", shards=False)
    with pytest.raises(ModelError, match="stored in bitsandbytes and cannot be trained"):
        load_model(recipe("dpo_full"), str(folder), torch.float32, "cpu", shards=False)


def test_a_model_with_an_adapter_in_its_folder_is_not_taken_for_the_adapters_base(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    model = AutoModelForCausalLM.from_pretrained(tiny())
    get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])).save_pretrained(folder)
    shutil.copytree(tiny(), folder, dirs_exist_ok=True)

    with pytest.raises(ModelError, match="for which libraries load another model"):
        load_model(recipe("dpo_full"), str(folder), torch.float32, "cpu", shards=False)


def test_a_tokenizer_without_an_end_and_a_padding_token_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny(), tmp_path / "unnamed")
    (folder / "tokenizer_config.json").unlink()

    with pytest.raises(ModelError, match="has no end token and no padding token") as caught:
        load_tokenizer(recipe("dpo_full").model, str(folder))

    assert "tokenizer_config.json" in str(caught.value)


def test_a_padding_token_past_the_embedding_is_one_message(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny(), tmp_path / "padded")
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "pad_token_id": 32_000}))

    with pytest.raises(ModelError, match="Padding_idx must be within num_embeddings"):
        load_model(recipe("dpo_full"), str(folder), torch.float32, "cpu", shards=False)


def test_a_folder_with_pickles_alone_is_no_model(tmp_path: Path) -> None:
    """`tuner train` refuses it earlier; a rank may see another folder."""
    folder = shutil.copytree(tiny(), tmp_path / "old")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()

    with pytest.raises(ModelError, match="safetensors"):
        load_model(recipe("dpo_full"), str(folder), torch.float32, "cpu", shards=False)


def test_settings_without_effect_of_a_published_generation_config_do_not_hinder_saving(tmp_path: Path) -> None:
    """transformers refuses to save a temperature of greedy choices once the tokens that end an answer have changed."""
    folder = shutil.copytree(tiny(), tmp_path / "published")
    published = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(published))

    model = load_model(recipe("dpo_full"), str(folder), torch.float32, "cpu", shards=False)
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(tmp_path / "saved")

    saved = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert saved.items() >= {**published, "eos_token_id": [1, 2]}.items()


def test_an_adapter_records_the_commit_of_a_base_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Stands for a download: the hub is not here.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached, sha = tmp_path / "models--org--model", "0123456789abcdef0123456789abcdef01234567"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(sha)
    (cached / "snapshots" / sha).mkdir(parents=True)
    (cached / "snapshots" / sha / "config.json").write_text("{}")
    model = load("tiny_lora_sample_e1").config.model

    assert commit(model, "org/model") == sha
    assert commit(model, str(tmp_path)) is None


_A_KERNEL_FOR_GPUS = """
def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, seq_idx=None):
    raise RuntimeError("Expected x.is_cuda() to be true")
"""
_LOADED_AND_RUN = """
import sys, torch
from tuner.recipes.loading import load
from tuner.models.load import load_weights
model = load_weights(load("tiny_full_sample_e1").config.model, sys.argv[1], torch.float32, scores=False)
model(input_ids=torch.tensor([[3, 4, 5]]))
"""


@pytest.mark.long
def test_an_installed_kernel_for_gpus_is_left_alone_on_a_cpu(tmp_path: Path) -> None:
    """The package stands for the real one, which cannot be built without CUDA."""
    AutoModelForCausalLM.from_config(brought("lfm2")).save_pretrained(tmp_path / "model")
    (tmp_path / "causal_conv1d.py").write_text(_A_KERNEL_FOR_GPUS)
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}

    done = subprocess.run(
        [sys.executable, "-c", _LOADED_AND_RUN, tmp_path / "model"], env=env, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr[-2000:]
