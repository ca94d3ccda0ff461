"""InternLM2's published files load without remote code, compute the published formula and are written back unchanged.

The formula is written out below from its definition; no part of it is shared with the model under test.
"""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from bitsandbytes.functional import dequantize_4bit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)

from tests.e2e.warm import warm
from tests.models import published
from tests.models.published import GROUPS, HEAD_DIM, HEADS, LAYERS, POSITIONS, SPECIALS, VOCAB
from tuner.errors import ModelError
from tuner.models.internlm import InternLM2Tokenizer

TEXTS = (
    "The capital of a country",
    " one space before, two  between, three after   ",
    "\n\nlines\n  indented\r\n\ttabs",
    "书生·浦语 日本語 naïve 🙂‍↔️ \u200b \x00",
    "▁ is sentencepiece's own space",
    "<|im_start|>user\nhi<|im_end|>\n",
    "a [UNUSED_TOKEN_140] b",
    "1234567890",
    "",
    " ",
)
# peft 0.21 still uses the names that transformers deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
NF4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("internlm2")
    published.write_checkpoint(folder)
    return folder


@pytest.fixture
def model(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.fixture
def quantized(checkpoint: Path) -> PreTrainedModel:
    # Not in eval mode: bitsandbytes repacks the weights there on some CPUs, and results differ by the repacking.
    return AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=NF4).train()


@pytest.fixture(scope="module")
def tokenizer(checkpoint: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(checkpoint)


def tokens(length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def saved_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in right)


def formula(weights: dict[str, Tensor], tokens_T: Tensor) -> Tensor:
    """Return logits of shape [T, vocabulary] in fp32."""
    x_TH = weights["model.tok_embeddings.weight"][tokens_T]
    for layer in range(LAYERS):
        own = {name.removeprefix(f"model.layers.{layer}."): tensor for name, tensor in weights.items()}
        x_TH = x_TH + attention(own, rms_norm(x_TH, own["attention_norm.weight"]))
        h_TH = rms_norm(x_TH, own["ffn_norm.weight"])
        gate, up, down = (own[f"feed_forward.{name}.weight"] for name in ("w1", "w3", "w2"))
        x_TH = x_TH + ((h_TH @ gate.T) * torch.sigmoid(h_TH @ gate.T) * (h_TH @ up.T)) @ down.T
    return rms_norm(x_TH, weights["model.norm.weight"]) @ weights["output.weight"].T


def attention(own: dict[str, Tensor], h_TH: Tensor) -> Tensor:
    length, queries = len(h_TH), HEADS // GROUPS
    qkv = (h_TH @ own["attention.wqkv.weight"].T).view(length, GROUPS, queries + 2, HEAD_DIM)
    heads = []
    for head in range(HEADS):
        group = qkv[:, head // queries]
        query, key, value = rotate(group[:, head % queries]), rotate(group[:, queries]), group[:, queries + 1]
        scores = query @ key.T / HEAD_DIM**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        heads.append(scores.masked_fill(future, float("-inf")).softmax(-1) @ value)
    return torch.cat(heads, -1) @ own["attention.wo.weight"].T


def rotate(x_TD: Tensor, theta: float = 1e6, factor: float = 2.0) -> Tensor:
    """Rotary embedding in half-split order, with the dynamic NTK base beyond the trained length."""
    length, dim = x_TD.shape
    if length > POSITIONS:
        theta *= (factor * length / POSITIONS - (factor - 1)) ** (dim / (dim - 2))
    angles = torch.arange(length)[:, None] / theta ** (torch.arange(0, dim, 2) / dim)
    left, right = x_TD[:, : dim // 2], x_TD[:, dim // 2 :]
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def rms_norm(x_TH: Tensor, weight: Tensor) -> Tensor:
    return x_TH / (x_TH.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@pytest.mark.parametrize("length", [1, 60, POSITIONS + 70])
def test_logits_equal_the_published_formula(model: PreTrainedModel, length: int) -> None:
    tokens_BT = tokens(length)

    with torch.no_grad():
        logits = model(tokens_BT).logits[0]

    torch.testing.assert_close(logits, formula(published.weights(), tokens_BT[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("binary", "shards"), [(False, 1), (False, 3), (True, 1), (True, 3)])
def test_safetensors_and_bin_shards_load_alike(
    model: PreTrainedModel, tmp_path: Path, binary: bool, shards: int
) -> None:
    published.write_checkpoint(tmp_path, binary=binary, shards=shards)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)

    assert same(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_save_writes_the_published_names_and_bytes(tmp_path: Path, dtype: torch.dtype, shard_size: str) -> None:
    original = published.write_checkpoint(tmp_path / "published", dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published")

    model.save_pretrained(tmp_path / "saved", max_shard_size=shard_size)

    assert same(saved_tensors(tmp_path / "saved"), original)


def test_a_model_that_was_not_loaded_is_saved_under_the_published_names(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint))

    model.save_pretrained(tmp_path)

    saved = saved_tensors(tmp_path)
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in published.weights().items()
    }
    assert same(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), model.state_dict())


def test_saved_config_keeps_the_publishers_facts_and_points_at_no_code(model: PreTrainedModel, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path)

    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    facts = published.published_config()
    for_their_code = ("auto_map", "attn_implementation", "torch_dtype", "transformers_version")
    assert "auto_map" not in saved
    assert {key: saved.get(key) for key in facts if key not in for_their_code} == {
        key: value for key, value in facts.items() if key not in for_their_code
    }
    assert AutoConfig.from_pretrained(tmp_path).to_diff_dict() == model.config.to_diff_dict()


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"type": "dynamic", "factor": 3.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
    ],
)
def test_saving_keeps_any_rope_scaling(tmp_path: Path, scaling: dict[str, Any] | None) -> None:
    published.write_checkpoint(tmp_path / "published", rope_scaling=scaling)
    config = AutoConfig.from_pretrained(tmp_path / "published")

    config.save_pretrained(tmp_path / "saved")

    assert AutoConfig.from_pretrained(tmp_path / "saved").rope_parameters == config.rope_parameters
    assert json.loads((tmp_path / "saved/config.json").read_text(encoding="utf-8"))["rope_scaling"] == scaling


def test_the_files_attention_is_for_their_code_and_the_callers_counts(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    asked = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")

    assert model.config._attn_implementation == "sdpa"
    assert asked.config._attn_implementation == "eager"


def test_a_model_with_biases_is_refused(tmp_path: Path) -> None:
    published.write_checkpoint(tmp_path, bias=True)

    with pytest.raises(ModelError, match="bias = true"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def lora(model: PreTrainedModel) -> PeftModel:
    torch.manual_seed(0)
    # Weights that are drawn: the default B is zero and would hide an adapter that is lost.
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def logits(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(tokens(20)).logits
    return result


@pytest.mark.parametrize("base", ["model", "quantized"])
def test_adapter_is_saved_alone_and_reloads(request: pytest.FixtureRequest, checkpoint: Path, base: str) -> None:
    adapted = lora(request.getfixturevalue(base))
    folder = checkpoint.parent / f"adapter-{base}"
    adapted.save_pretrained(folder)

    config = NF4 if base == "quantized" else None
    fresh = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=config).train()
    reloaded = PeftModel.from_pretrained(fresh, folder, is_trainable=True)

    assert not list(folder.glob("model*.safetensors"))
    torch.testing.assert_close(logits(reloaded), logits(adapted))


def test_merged_adapter_is_saved_in_the_published_layout(model: PreTrainedModel, tmp_path: Path) -> None:
    adapted = lora(model)
    expected = logits(adapted)

    adapted.merge_and_unload().save_pretrained(tmp_path)

    assert saved_tensors(tmp_path).keys() == published.weights().keys()
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), expected, rtol=1e-4, atol=1e-4)


def test_4_bit_loading_quantizes_the_split_projections(model: PreTrainedModel, quantized: PreTrainedModel) -> None:
    for mine, theirs in zip(quantized.model.layers, model.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            packed = getattr(mine.self_attn, name).weight
            weight = getattr(theirs.self_attn, name).weight
            restored = dequantize_4bit(packed.data, packed.quant_state)
            # NF4 of normally distributed weights: about 9 % relative error.
            assert (restored - weight).norm() / weight.norm() < 0.12


def test_4_bit_model_refuses_the_published_layout_and_can_be_saved_without(
    quantized: PreTrainedModel, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="no published layout"):
        quantized.save_pretrained(tmp_path)

    quantized.save_pretrained(tmp_path, save_original_format=False)

    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path).train()), logits(quantized))


ZERO3 = """
import os, sys
from pathlib import Path
import deepspeed, deepspeed.ops, torch
import transformers.models.llama.modeling_llama
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig
from tests.models import published
from tests.models.test_internlm2 import same, saved_tensors
import tuner.models

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
checkpoint, saved = Path(sys.argv[1]), Path(sys.argv[2])
zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
config = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero})
model = AutoModelForCausalLM.from_pretrained(checkpoint)
partitioned = all(hasattr(parameter, "ds_id") and parameter.numel() == 0 for parameter in model.parameters())
with deepspeed.zero.GatheredParameters(list(model.parameters())):
    state = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
model.save_pretrained(saved, state_dict=state)
print("partitioned", partitioned, "same", same(saved_tensors(saved), published.weights()), flush=True)
os._exit(0)
"""


def test_zero_3_loads_partitioned_and_saves_the_published_layout(checkpoint: Path, tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}

    done = warm().run([checkpoint, tmp_path], code=ZERO3, env=os.environ | rank)

    assert "partitioned True same True" in done.stdout, done.stderr


def reference_ids(folder: Path, text: str) -> list[int]:
    """Cut the text at the special tokens, as the publisher's class does; sentencepiece encodes what is between them."""
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    named = {token: published.FIRST_SPECIAL + index for index, token in enumerate(SPECIALS)}
    parts = re.split(f"({'|'.join(map(re.escape, named))})", text)
    return [1, *(token for part in parts for token in ([named[part]] if part in named else processor.encode(part)))]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(
    text=st.sampled_from(TEXTS)
    | st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \n\teants书<>|▁"))
)
def test_tokens_of_any_text_equal_sentencepieces(
    checkpoint: Path, tokenizer: PreTrainedTokenizerBase, text: str
) -> None:
    assert tokenizer(text).input_ids == reference_ids(checkpoint, text)


@pytest.mark.parametrize("text", [text for text in TEXTS if "▁" not in text])
def test_decoding_gives_the_text_back(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize("text", [text for text in TEXTS if "UNUSED" not in text and "▁" not in text])
def test_a_model_that_puts_a_space_before_the_text_is_followed(tmp_path: Path, text: str) -> None:
    published.write_checkpoint(tmp_path, dummy_prefix=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    ids = tokenizer(text).input_ids

    assert ids == reference_ids(tmp_path, text)
    if "<|" not in text:
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_take_their_placeholders_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer.convert_tokens_to_ids(list(SPECIALS))

    assert ids == list(range(published.FIRST_SPECIAL, VOCAB))
    assert len(tokenizer) == VOCAB
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)


@pytest.mark.parametrize(
    "missing", [("additional_special_tokens",), ("additional_special_tokens", "added_tokens_decoder")]
)
def test_no_token_gets_an_id_past_the_embedding(tmp_path: Path, missing: tuple[str, ...]) -> None:
    published.write_checkpoint(tmp_path)
    config = {key: value for key, value in published.tokenizer_config().items() if key not in missing}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    assert len(AutoTokenizer.from_pretrained(tmp_path)) == VOCAB


@pytest.mark.parametrize("add", [True, False])
def test_add_bos_token_of_the_config_counts(tmp_path: Path, add: bool) -> None:
    published.write_checkpoint(tmp_path)
    config = published.tokenizer_config() | {"add_bos_token": add}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")

    assert (AutoTokenizer.from_pretrained(tmp_path)("a").input_ids[0] == 1) is add


def test_saved_tokenizer_reloads_to_the_same_tokens_with_and_without_tuner(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)

    config = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert "auto_map" not in config
    for reloaded in (AutoTokenizer.from_pretrained(tmp_path), TokenizersBackend.from_pretrained(tmp_path)):
        for text in TEXTS:
            assert reloaded(text).input_ids == tokenizer(text).input_ids
        assert reloaded.chat_template == tokenizer.chat_template


def test_tokenizer_json_wins_over_tokenizer_model(tmp_path: Path) -> None:
    published.write_checkpoint(tmp_path)
    InternLM2Tokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    state["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state), encoding="utf-8")

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)

    assert tokenizer("ABC").input_ids == tokenizer("abc").input_ids


def test_a_reward_model_starts_from_the_published_weights_and_saves_their_layout(
    checkpoint: Path, model: PreTrainedModel, tmp_path: Path
) -> None:
    reward = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1)
    reward.save_pretrained(tmp_path)

    saved = saved_tensors(tmp_path)
    assert same(reward.model.state_dict(), model.model.state_dict())
    assert saved.pop("score.weight").shape == (1, published.HIDDEN)
    assert same(saved, {name: weight for name, weight in published.weights().items() if name != "output.weight"})
    assert same(AutoModelForSequenceClassification.from_pretrained(tmp_path).state_dict(), reward.state_dict())
