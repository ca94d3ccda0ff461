"""Merging piece by piece gives what PEFT gives in one: PEFT is the oracle, for every method and layout of weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
)

from tests.models import test_internlm as internlm
from tests.models.published import write_checkpoint
from tests.refused import refused
from tests.results.models import GPT2, LLAMA, MIXTRAL, MIXTURE, SMALL, TIED, TOKENS, write_adapter, write_base
from tuner.errors import MachineError, ModelError, TunerError
from tuner.results import export as export_module
from tuner.results.export import Exported, Options, export
from tuner.results.saved import find

# PEFT warns of embeddings that it saves, and of adapters on tied weights, which it does not merge right. It also turns
# names of experts into those of fused ones once more when it loads what it has saved, which finds nothing to do.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning"),
]


def merge(adapter: Path, dest: Path, **options: Any) -> Exported:
    return export(find(adapter), dest, Options(merge=True, max_shard_bytes=20_000, **options))


def logits(folder: Path, *, scores: bool = False, adapter: Path | None = None) -> torch.Tensor:
    """Return what a model says, reloaded with plain transformers and PEFT, which must find every tensor it needs."""
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    more = {"num_labels": 1} if scores and adapter else {}
    model, report = auto.from_pretrained(folder, output_loading_info=True, dtype=torch.float32, **more)
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    else:
        assert not report["missing_keys"] and not report["unexpected_keys"], report
    with torch.no_grad():
        found: torch.Tensor = model.eval()(TOKENS).logits
    return found


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        (LLAMA, {}),
        (LLAMA, {"use_rslora": True, "r": 8}),
        (LLAMA, {"use_dora": True}),
        (LLAMA, {"target_modules": ["q_proj", "embed_tokens"]}),
        (LLAMA, {"target_modules": ["v_proj", "lm_head"], "use_dora": True}),
        (LLAMA, {"modules_to_save": ["lm_head", "embed_tokens"]}),
        (
            LLAMA,
            {"target_modules": ["q_proj", "up_proj"], "rank_pattern": {"up_proj": 2}, "alpha_pattern": {"q_proj": 3}},
        ),
        (TIED, {}),
        (TIED, {"modules_to_save": ["lm_head"]}),
        (TIED, {"target_modules": ["q_proj", "lm_head"]}),
        (TIED, {"target_modules": ["q_proj", "embed_tokens"]}),
        (GPT2, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
        (GPT2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "use_dora": True}),
        (MIXTURE, {"target_modules": ["q_proj", "o_proj"]}),
        (MIXTRAL, {}),
        (LLAMA, {"init_lora_weights": "pissa"}),
        (LLAMA, {"init_lora_weights": "olora"}),
    ],
    ids=lambda value: value.model_type if isinstance(value, PreTrainedConfig) else str(value),
)
def test_a_merged_model_says_what_the_adapter_on_its_base_said(
    config: PreTrainedConfig, settings: dict[str, Any], tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", config)
    adapter = write_adapter(tmp_path / "adapter", base, **settings)

    done = merge(adapter, tmp_path / "merged")

    assert done.num_files > 3
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(base, adapter=adapter), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(tmp_path / "merged"), logits(base), atol=1e-2), "the adapter does something"


@pytest.mark.parametrize(("target", "stays"), [("q_proj", True), ("lm_head", False), ("embed_tokens", False)])
def test_weights_that_were_tied_and_no_longer_are_the_same_are_both_written_and_said(
    target: str, stays: bool, tmp_path: Path
) -> None:
    base = write_base(tmp_path / "base", TIED)

    merge(write_adapter(tmp_path / "adapter", base, target_modules=["v_proj", target]), tmp_path / "merged")

    names = json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())["weight_map"]
    # Readers other than transformers take the config's word for it.
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is stays
    assert ("lm_head.weight" in names) is not stays


def test_what_was_compared_is_said_also_where_the_host_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapter = write_adapter(tmp_path / "adapter", base)

    first = merge(adapter, tmp_path / "merged").compared
    monkeypatch.setattr(export_module, "available_host_bytes", lambda: 1000)
    second = merge(adapter, tmp_path / "again").compared

    assert first is not None and second is not None
    assert first.startswith("Verified on 16 tokens: its logits equal those of the adapter on its base")
    assert second.startswith("The merged logits were not compared")


def test_a_merge_that_says_something_else_is_refused_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapter = write_adapter(tmp_path / "adapter", base, init_lora_weights="olora")
    monkeypatch.setattr("tuner.results.peft_adapter._KEEP_THE_BASE", ("olora",))
    monkeypatch.setattr("tuner.results.peft_adapter._CHANGE_THE_BASE", ())  # as if PEFT did not

    with refused(TunerError, "--merge"):
        merge(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


ODD: dict[str, PeftConfig] = {
    "LoRA with layer_replication": LoraConfig(layer_replication=[(0, 2), (1, 2)], target_modules=["q_proj"]),
    "LoRA with trainable_token_indices": LoraConfig(trainable_token_indices=[5], target_modules=["q_proj"]),
    "LoRA with init_lora_weights='pissa_niter_4'": LoraConfig(
        init_lora_weights="pissa_niter_4", target_modules=["q_proj"]
    ),
    "ADALORA": AdaLoraConfig(total_step=10, target_modules=["q_proj"]),
    "IA3": IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    "PROMPT_TUNING": PromptTuningConfig(num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", ODD)
def test_kinds_of_adapters_that_cannot_be_merged_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    base, config = write_base(tmp_path / "base", LLAMA), ODD[kind]
    config.task_type = "CAUSAL_LM"
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")

    with refused(ModelError, "adapter_config.json"):
        merge(tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_16_bit_base_is_merged_in_fp32_and_rounded_once(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA, torch.bfloat16)
    adapter = write_adapter(tmp_path / "adapter", base)

    merge(adapter, tmp_path / "merged")

    exact = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    for name, weight in exact.merge_and_unload().state_dict().items():
        assert merged[name].dtype == torch.bfloat16
        torch.testing.assert_close(merged[name], weight.to(torch.bfloat16), rtol=2**-8, atol=1e-6)


def test_a_model_that_scores_is_merged_with_its_head_and_without_the_language_models(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapter = write_adapter(tmp_path / "adapter", base, scores=True)

    merge(adapter, tmp_path / "merged")

    said = logits(tmp_path / "merged", scores=True)
    torch.testing.assert_close(said, logits(base, scores=True, adapter=adapter), rtol=1e-4, atol=1e-5)
    assert said.shape == (1, 1)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"] == [
        "LlamaForSequenceClassification"
    ]


@pytest.mark.parametrize("as_llama", [False, True])
def test_internlm2_is_merged_into_its_published_layout_or_into_llamas(as_llama: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    published = write_checkpoint(base)
    adapter = write_adapter(tmp_path / "adapter", base, use_dora=True)

    merge(adapter, tmp_path / "merged", layout="llama" if as_llama else "published")

    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    names = set(json.loads((tmp_path / "merged" / "model.safetensors.index.json").read_text())["weight_map"])
    if as_llama:
        assert (config["model_type"], config["architectures"]) == ("llama", ["LlamaForCausalLM"])
        assert "model.layers.0.self_attn.q_proj.weight" in names
        # Without tuner, which registers the type, and without torch, which a tokenizer does not need: 4 s of a start.
        code = "import sys; sys.modules['torch'] = None\nimport transformers as t\n"
        code += "t.AutoTokenizer.from_pretrained(sys.argv[1])('a b')"
        subprocess.run([sys.executable, "-W", "ignore", "-c", code, tmp_path / "merged"], check=True)
    else:
        assert (config["model_type"], config["architectures"]) == ("internlm2", ["InternLM2ForCausalLM"])
        assert config["rope_scaling"] == {"type": "dynamic", "factor": 2.0}
        assert names == set(published)
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(base, adapter=adapter), rtol=1e-4, atol=1e-5)
    words = AutoTokenizer.from_pretrained(tmp_path / "merged")
    asked = AutoTokenizer.from_pretrained(base)
    text = "<|im_start|>user\nWhat is  the name?<|im_end|>"
    assert words(text)["input_ids"] == asked(text)["input_ids"]
    assert words.chat_template == asked.chat_template


@pytest.mark.parametrize("config", internlm.CONFIGS.values(), ids=internlm.CONFIGS)
def test_internlm_1_and_3_go_out_as_llama(config: dict[str, Any], tmp_path: Path) -> None:
    base = internlm.write_checkpoint(tmp_path / "base", config)
    adapter = write_adapter(tmp_path / "adapter", base)

    merge(adapter, tmp_path / "merged", layout="llama")
    export(find(base), tmp_path / "whole", Options(layout="llama"))

    for folder in (tmp_path / "merged", tmp_path / "whole"):
        facts = json.loads((folder / "config.json").read_text())
        assert (facts["model_type"], facts["architectures"]) == ("llama", ["LlamaForCausalLM"])
        assert not facts.keys() & {"bias", "qkv_bias", "rotary", "auto_map"}
    torch.testing.assert_close(logits(tmp_path / "merged"), logits(base, adapter=adapter), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(logits(tmp_path / "whole"), logits(base), rtol=1e-4, atol=1e-4)


def test_an_adapter_for_another_base_is_refused_and_nothing_written(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapter = write_adapter(tmp_path / "adapter", base, target_modules=["q_proj", "down_proj"])
    wider = LLAMA.__class__(hidden_size=64, intermediate_size=48, num_key_value_heads=2, **SMALL)
    deeper = LLAMA.__class__(
        hidden_size=32, intermediate_size=48, num_key_value_heads=2, **SMALL | {"num_hidden_layers": 3}
    )

    for other, told in (
        (wider, r"is \(4, 32\), not \(4, 64\)"),
        (deeper, "it is missing in the adapter"),
        (GPT2, "Target modules"),
    ):
        elsewhere = str(write_base(tmp_path / str(other.model_type) / str(other.hidden_size), other))
        with pytest.raises(ModelError, match=told):
            merge(adapter, tmp_path / "merged", base=elsewhere)

    assert not (tmp_path / "merged").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "gpt2", "llama"]


def test_another_model_of_the_hub_than_the_adapters_is_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", write_base(tmp_path / "base", LLAMA))
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/model"}))

    with pytest.raises(ModelError, match="trained on 'org/model', not on 'org/other'"):
        merge(adapter, tmp_path / "merged", base="org/other")


def test_a_base_that_is_not_here_is_told_by_its_name(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapter = write_adapter(tmp_path / "adapter", base)
    base.rename(tmp_path / "moved")

    with pytest.raises(ModelError, match=r"no model with a config.json in the base's folder .*/base'.*--base"):
        merge(adapter, tmp_path / "merged")
    with pytest.raises(MachineError, match="cannot reach the hub for 'org/model'"):
        merge(adapter, tmp_path / "merged", base="org/model")
    merge(adapter, tmp_path / "merged", base=str(tmp_path / "moved"))


def test_a_base_of_pickles_and_one_with_a_missing_or_damaged_file_are_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapter = write_adapter(tmp_path / "adapter", base)
    files = sorted(base.glob("model-*.safetensors"))
    whole = files[0].read_bytes()

    files[0].write_bytes(whole[:-10])
    with pytest.raises(ModelError, match=f"{files[0].name} is damaged"):
        merge(adapter, tmp_path / "merged")
    files[0].unlink()
    with pytest.raises(ModelError, match=f"{files[0].name} is missing"):
        merge(adapter, tmp_path / "merged")
    (base / "model.safetensors.index.json").unlink()
    (base / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="only pickles, which tuner does not load"):
        merge(adapter, tmp_path / "merged")


def test_a_base_that_is_stored_in_fewer_bits_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapter = write_adapter(tmp_path / "adapter", base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))

    with pytest.raises(ModelError, match="stored in fp8"):
        merge(adapter, tmp_path / "merged")


def test_an_adapter_that_makes_no_numbers_is_refused(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", LLAMA)
    adapter = write_adapter(tmp_path / "adapter", base)
    weights = load_file(adapter / "adapter_model.safetensors")
    weights["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"][0, 0] = float("nan")
    save_file(weights, adapter / "adapter_model.safetensors")

    with pytest.raises(TunerError, match=r"model.layers.1.mlp.up_proj.weight becomes non-finite"):
        merge(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
