"""What a user may name to ask or judge: results, models, adapters on a base; and what is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tests.machine.gpus import CPU
from tests.results.made import make_result
from tuner.errors import ModelError, RunDirectoryError, TunerError, UsageError
from tuner.models.load import pretrained_path
from tuner.results.loaded_model import LoadedModel, load, spec_of
from tuner.runs import checkpoints
from tuner.runs.records import ManifestFacts, RunStatus

TINY = "package:tiny"
IDS = torch.tensor([[5, 6, 7, 8]])


def loaded(name: Path | str, adapter: Path | None = None, bits: int | None = None) -> LoadedModel:
    return load(spec_of(str(name), str(adapter) if adapter else None), CPU, bits)


def outputs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=IDS).logits
    return found


def other_base(folder: Path, **sizes: int) -> Path:
    made = {"vocab_size": 1664, "hidden_size": 128, "intermediate_size": 384, "num_attention_heads": 4}
    made |= {"num_key_value_heads": 2, "num_hidden_layers": 3, "head_dim": 32}
    LlamaForCausalLM(LlamaConfig(**made | sizes)).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("recipe", ["tiny_full_sample_e1", "tiny_lora_sample_e1", "tiny_dora_sample_e1"])
def test_a_runs_result_is_loaded_as_it_was_trained(recipe: str, tmp_path: Path) -> None:
    run, model = make_result(tmp_path / "run", recipe)

    for name in (run.path, run.final):
        found = loaded(name)
        torch.testing.assert_close(outputs(found.model), outputs(model))
        assert found.spec.objective == "sft"


def test_a_result_computes_in_the_type_that_its_recipe_names_where_this_machine_has_it(tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1", "optim_wrapper.dtype=bf16")
    spec = spec_of(str(run.path), None)
    assert spec.recipe is not None
    optim = spec.recipe.optim_wrapper.model_copy(update={"dtype": "fp16"})
    fp16 = dataclasses.replace(spec, recipe=spec.recipe.model_copy(update={"optim_wrapper": optim}))

    assert load(spec, CPU).dtype == torch.bfloat16
    assert load(fp16, CPU).dtype == torch.float32, "a CPU computes no fp16"


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_model_that_scores_is_known_without_its_run(method: str, tmp_path: Path) -> None:
    run, model = make_result(tmp_path / "run", f"tiny_reward_{method}_sample_preferences_e1")

    found = loaded(shutil.copytree(run.final, tmp_path / "published"))

    torch.testing.assert_close(outputs(found.model), outputs(model))
    assert (found.spec.objective, found.spec.recipe) == ("reward", None)


def test_an_adapter_is_loaded_on_the_base_that_is_named(tmp_path: Path) -> None:
    run, model = make_result(tmp_path / "run", "tiny_lora_sample_e1")
    adapter = shutil.copytree(run.final, tmp_path / "adapter")
    facts = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": None}))

    torch.testing.assert_close(outputs(loaded(TINY, adapter).model), outputs(model))


def test_a_whole_checkpoint_is_loaded_where_a_run_is_not_done(tmp_path: Path) -> None:
    run, model = make_result(tmp_path / "run", "tiny_full_sample_e1")
    run.write_status(RunStatus(state="stopped", exit_code=75))
    run.checkpoints.mkdir(exist_ok=True)
    run.final.rename(run.checkpoints / "checkpoint-2")
    checkpoints.seal(run.checkpoints / "checkpoint-2", ManifestFacts(step=2))

    found = loaded(run.path)

    torch.testing.assert_close(outputs(found.model), outputs(model))
    assert "checkpoint 2" in found.description


def test_generation_stops_where_the_template_ends_answers_and_where_the_model_did(tmp_path: Path) -> None:
    folder = shutil.copytree(pretrained_path(spec_of(TINY, None).model), tmp_path / "model")
    (folder / "generation_config.json").write_text('{"eos_token_id": 7}')

    found = loaded(folder)

    end = found.encoder.library_object.convert_tokens_to_ids("<|im_end|>")
    assert found.model.generation_config.eos_token_id == [7, end]


def test_a_base_is_quantized_as_it_was_in_training_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_qlora_sample_e1")

    assert (loaded(run.path).bits, loaded(run.path, bits=16).bits) == (4, 16)
    assert loaded(run.path).model.is_loaded_in_4bit
    assert not getattr(loaded(run.path, bits=16).model, "is_loaded_in_4bit", False)


def refused(name: Path | str, adapter: Path | None, kind: type[TunerError], words: str) -> None:
    with pytest.raises(kind, match=words) as error:
        loaded(name, adapter)
    assert "\n" not in str(error.value)


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_lora_sample_e1")
    adapter = shutil.copytree(run.final, tmp_path / "adapter")

    refused(other_base(tmp_path / "wide", hidden_size=256), run.final, ModelError, "hidden_size 256")
    refused(other_base(tmp_path / "wide", hidden_size=256), adapter, ModelError, "does not fit")
    refused(other_base(tmp_path / "deep", num_hidden_layers=4), adapter, ModelError, "it lacks .*layers.3")
    refused(other_base(tmp_path / "flat", num_hidden_layers=2), adapter, ModelError, "the model has no .*layers.2")


def test_an_adapter_that_changes_the_prompt_and_no_weight_is_refused_by_name(tmp_path: Path) -> None:
    base = other_base(tmp_path / "base")
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    get_peft_model(LlamaForCausalLM.from_pretrained(base), prompt).save_pretrained(tmp_path / "adapter")

    refused(tmp_path / "adapter", None, ModelError, "are of PROMPT_TUNING, which adds tokens before the prompt")


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_lora_sample_e1")
    adapter = shutil.copytree(run.final, tmp_path / "adapter")
    facts = json.loads((adapter / "adapter_config.json").read_text())
    gone = str(tmp_path / "gone")
    (adapter / "adapter_config.json").write_text(json.dumps(facts | {"base_model_name_or_path": gone}))

    refused(adapter, None, ModelError, f"'{gone}' has no config.json.*BASE --adapter")


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_lora_sample_e1")
    torn = shutil.copytree(run.final, tmp_path / "torn")
    (torn / "adapter_config.json").write_text("{")

    refused(tmp_path / "rum", None, RunDirectoryError, "does not exist.*'run'")
    refused(run.path, run.final, UsageError, "is an adapter itself")
    refused(TINY, Path(pretrained_path(loaded(TINY).spec.model)), UsageError, "is a whole model, not an adapter")
    refused(torn, None, ModelError, "adapter_config.json")
    shutil.rmtree(run.final)
    refused(run.path, None, RunDirectoryError, "no result and no valid checkpoint.*--resume")
    (run.checkpoints / "checkpoint-3").mkdir(parents=True)
    refused(run.checkpoints / "checkpoint-3", None, RunDirectoryError, "not a valid checkpoint: it has no manifest")


DAMAGE = {
    "full": (
        ("model.safetensors", b"half", "cannot load .*header too small.*download or copy it again"),
        ("config.json", b'{"model_type": "llama", "hidden_size": "x"}', "hidden_size = 'x'"),
        ("tokenizer_config.json", b"[]", "tokenizer_config.json' is not a JSON object"),
        ("generation_config.json", b"[]", "generation_config.json' is not a JSON object"),
    ),
    "lora": (
        ("adapter_model.safetensors", b"half", "adapter_model.safetensors is damaged"),
        ("adapter_config.json", b'{"peft_type": "LORA", "r": "x"}', "r = 'x'"),
        ("adapter_config.json", b"[]", "adapter_config.json' is not a JSON object"),
        ("generation_config.json", b"{", "is not a JSON object"),  # last: none was there beside the adapter
    ),
}


@pytest.mark.parametrize("method", DAMAGE)
def test_a_damaged_file_is_told(method: str, tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "run", f"tiny_{method}_sample_e1")

    whole = shutil.copytree(run.final, tmp_path / "whole")

    for file, content, words in DAMAGE[method]:
        shutil.copytree(whole, run.final, dirs_exist_ok=True)
        (run.final / file).write_bytes(content)
        refused(run.path, None, ModelError, words)
