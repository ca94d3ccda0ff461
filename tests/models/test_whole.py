"""A checkpoint that is not what its config.json describes is refused when it is loaded; other models' parts are not."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    GPTJConfig,
    Llama4Config,
    Llama4ForConditionalGeneration,
    PreTrainedConfig,
)

from tests.configs.test_packing import small_config
from tests.e2e.warm import warm
from tests.machine.gpus import CPU
from tests.models import published
from tests.refused import refused
from tests.tiny_model import tiny
from tuner.errors import ModelError
from tuner.models.load import load_model, load_weights
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.results import loaded_model as results_model

Tensors = dict[str, torch.Tensor]
SMALL = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def changed(folder: Path, change: Callable[[Tensors], Tensors], origin: Path | None = None, **config: Any) -> str:
    """Write the tiny model, or that of `origin`, with other weights and other values in its config.json."""
    shutil.copytree(origin or tiny(), folder)
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return str(folder)


def without(part: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if part not in name}


def plus(*names: str, shape: tuple[int, ...] = (8,)) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.ones(shape) for name in names}


def loaded(path: str, recipe: str = "tiny_full_sample_e1", *pairs: str) -> Any:
    config = load(recipe, Overrides(pairs=[("--set", pair) for pair in pairs])).config
    return load_model(config, path, torch.float32, "cpu", shards=False)


NOT_WHOLE = {
    "layer": (without(".layers.1."), {}, r"9 \(model.layers.1.input_layernorm.weight, \.\.\.\) of the weights"),
    "prefix": (
        lambda tensors: {f"module.{name}": tensor for name, tensor in tensors.items()},
        {},
        r"missing.*which holds \d+ \(module\.model\.embed_tokens\.weight, \.\.\.\) that the model does not have",
    ),
    "more layers": (dict, {"num_hidden_layers": 2}, r"9 \(model.layers.2.*are not part of the model"),
    "bias": (plus("model.layers.0.self_attn.q_proj.bias"), {}, r"1 \(model.layers.0.self_attn.q_proj.bias\)"),
    "bias of the head": (plus("lm_head.bias"), {}, r"1 \(lm_head.bias\)"),
    "scales": (plus("model.layers.0.mlp.up_proj.weight_scale_inv"), {}, r"up_proj.weight_scale_inv\) of the weights"),
    "scales of int8": (plus("model.layers.0.mlp.up_proj.SCB"), {}, r"up_proj.SCB\) of the weights"),
    "part of a layer": (plus("model.layers.0.self_attn.q_norm.weight"), {}, r"q_norm.weight\) of the weights"),
}


@pytest.mark.parametrize("case", NOT_WHOLE)
def test_weights_that_do_not_fit_their_config_are_refused_by_name(case: str, tmp_path: Path) -> None:
    change, config, told = NOT_WHOLE[case]

    with pytest.raises(ModelError, match=told):
        loaded(changed(tmp_path / "model", change, **config))


def test_a_layer_that_is_missing_is_refused_with_an_adapter_in_4_bits_and_for_a_reward_model(tmp_path: Path) -> None:
    path = changed(tmp_path / "model", without("layers.1.mlp.up_proj"))

    for recipe in ("tiny_lora_sample_e1", "tiny_qlora_sample_e1", "tiny_reward_full_sample_preferences_e1"):
        with pytest.raises(ModelError, match=r"1 \(model.layers.1.mlp.up_proj.weight\)"):
            loaded(path, recipe)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_a_tensor_of_another_shape_is_refused_by_name_with_weights_in_4_bits_too(method: str, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = changed(tmp_path / "model", lambda tensors: {**tensors, name: tensors[name][:, :-64].contiguous()})

    with refused(ModelError, "model.path", name):
        loaded(path, f"tiny_{method}_sample_e1")


def test_a_model_whose_layers_are_turned_round_is_loaded_in_4_bits(tmp_path: Path) -> None:
    """GPT-2's weights are stored [inputs, outputs]."""
    AutoModelForCausalLM.from_config(small_config("gpt2")).save_pretrained(tmp_path)

    assert loaded(str(tmp_path), "tiny_qlora_sample_e1").config.model_type == "gpt2"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # PEFT's of the rank of fused experts
@pytest.mark.parametrize("method", ["full", "qlora"])
@pytest.mark.parametrize("shape", [None, (32, 64)], ids=["missing", "smaller"])
def test_an_expert_that_does_not_fit_the_others_is_refused_by_name(
    method: str, shape: tuple[int, int] | None, tmp_path: Path
) -> None:
    shape_of_model = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model("mixtral", **shape_of_model, num_local_experts=4, vocab_size=128)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    tensors = without(name)(load_file(file)) | ({} if shape is None else {name: torch.zeros(shape)})
    save_file(tensors, file, {"format": "pt"})

    with refused(ModelError, "model.path", "model.layers.0.mlp.experts.gate_up_proj"):
        loaded(str(tmp_path), f"tiny_{method}_sample_e1")


def test_chat_and_eval_refuse_what_is_not_whole(tmp_path: Path) -> None:
    path = changed(tmp_path / "model", without(".layers.1."))

    with pytest.raises(ModelError, match="would be random"):
        results_model.load(results_model.spec_of(path, None), CPU)


def test_a_new_score_head_is_meant_and_a_lost_one_is_not(tmp_path: Path) -> None:
    scorer = loaded(str(tiny()), "tiny_reward_full_sample_preferences_e1")
    scorer.save_pretrained(tmp_path / "scorer")
    path = changed(tmp_path / "headless", without("score."), tmp_path / "scorer")

    with pytest.raises(ModelError, match=r"1 \(score.weight\)"):
        results_model.load(results_model.spec_of(path, None), CPU)


def deepseek(folder: Path) -> Callable[[Tensors], Tensors]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16}
    made(DeepseekV3Config(**sizes, n_group=1, topk_group=1, num_nextn_predict_layers=1, **SMALL), folder)
    return plus("model.layers.2.eh_proj.weight", "model.layers.2.self_attn.o_proj.weight")


def gpt2(folder: Path) -> Callable[[Tensors], Tensors]:
    made(GPT2Config(n_embd=32, n_layer=2, n_head=4, **SMALL), folder)

    def change(tensors: Tensors) -> Tensors:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return plus("h.0.attn.bias", "h.1.attn.masked_bias")(bare)

    return change


def gptj(folder: Path) -> Callable[[Tensors], Tensors]:
    made(GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, **SMALL), folder)
    return plus("transformer.h.0.attn.bias", "transformer.h.1.attn.masked_bias")


def llama4(folder: Path) -> Callable[[Tensors], Tensors]:
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"head_dim": 8, "intermediate_size": 48, "intermediate_size_mlp": 48, "num_local_experts": 2, **SMALL}
    sight = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    sight |= {"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=sight)).save_pretrained(folder)
    return dict


def plain(folder: Path) -> Callable[[Tensors], Tensors]:
    shutil.copytree(tiny(), folder)
    return plus(
        "v_head.summary.weight", "model.layers.0.self_attn.rotary_emb.inv_freq", "score.weight", "mtp.fc.weight"
    )


def made(config: PreTrainedConfig, folder: Path) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize("family", [deepseek, gpt2, gptj, llama4, plain])
def test_what_published_checkpoints_hold_beside_the_model_is_left_out(family: Any, tmp_path: Path) -> None:
    change = family(tmp_path / "made")
    path = changed(tmp_path / "published", change, tmp_path / "made")

    model = load_weights(load("tiny_full_sample_e1").config.model, path, torch.float32, scores=False)

    assert all(weight.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("scores", [False, True])
def test_weights_that_are_converted_are_whole(scores: bool, tmp_path: Path) -> None:
    published.write_checkpoint(tmp_path)

    model = load_weights(load("tiny_full_sample_e1").config.model, str(tmp_path), torch.float32, scores=scores)

    assert type(model).__name__.startswith("InternLM2")


ZERO3 = """
import os, sys
import deepspeed, deepspeed.ops, torch
from transformers.integrations import HfDeepSpeedConfig
from tuner.errors import ModelError
from tuner.recipes.loading import load
from tuner.models.load import load_model

deepspeed.ops.__compatible_ops__ = {}
deepspeed.init_distributed("gloo")
kept = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}})
for recipe, path in zip(sys.argv[1::2], sys.argv[2::2]):
    try:
        print(type(load_model(load(recipe).config, path, torch.float32, "cpu", shards=True)).__name__, flush=True)
    except ModelError as error:
        print(error, flush=True)
os._exit(0)
"""


def test_zero_3_refuses_what_is_not_whole_and_loads_what_is(tmp_path: Path) -> None:
    """Its loader in transformers reports no weight that has no place."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    published.write_checkpoint(tmp_path / "internlm2")
    full, reward = "tiny_full_sample_e1", "tiny_reward_full_sample_preferences_e1"
    asked = [full, changed(tmp_path / "layer", without(".layers.1."))]
    asked += [full, changed(tmp_path / "bias", plus("model.layers.0.self_attn.q_proj.bias"))]
    asked += [full, str(tiny()), reward, str(tiny()), full, str(tmp_path / "internlm2")]

    done = warm().run(asked, code=ZERO3, env=os.environ | rank)

    told = [line for line in done.stdout.splitlines() if line.startswith(("bad-model", "Llama", "InternLM"))]
    assert len(told) == 5, done.stderr
    assert "9 (model.layers.1.input_layernorm.weight, ...)" in told[0]
    assert "1 (model.layers.0.self_attn.q_proj.bias)" in told[1]
    assert told[2:] == ["LlamaForCausalLM", "LlamaForSequenceClassification", "InternLM2ForCausalLM"]
