"""A model that cannot be loaded, and one that is shorter than the samples, are told before a rank starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.launch.plans import made
from tests.machine.gpus import A100, CPU, machine
from tests.refused import refused
from tuner import remote_code
from tuner.errors import Key, ModelError, TunerError
from tuner.launch import preflight
from tuner.launch.checks import model_files
from tuner.launch.resolved_run import ResolvedRun

LLAMA = {
    **{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512, "tie_word_embeddings": True},
}


def folder(path: Path, config: Any = LLAMA, *, weights: bool = True) -> Path:
    """Write a model's folder, with one small file of weights."""
    path.mkdir()
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights:
        save_file({"weight": torch.ones(64, 64)}, path / "model.safetensors")
    return path


def plan(path: Path, *sets: str) -> ResolvedRun:
    return made(*sets, model=str(path))


def refusals(path: Path, *sets: str) -> str:
    """Return what is wrong with a model, one text for all of it."""
    with pytest.raises(TunerError) as caught:
        preflight.check(plan(path, *sets))
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_a_whole_model_of_a_known_type_passes(tmp_path: Path) -> None:
    assert preflight.check(plan(folder(tmp_path / "good"))) == ()


def test_layers_that_the_model_does_not_have_get_no_adapter_without_a_message(tmp_path: Path) -> None:
    path = folder(tmp_path / "good")

    def findings(value: str) -> list[Any]:
        return list(
            model_files.adapted_layers(made(f"target_modules={value}", model=str(path), recipe="tiny_lora_sample_e1"))
        )

    assert findings("[q_proj, v_proj]") == findings("all-linear") == findings(".*q_prj") == []
    (refusal,) = findings("q_prj")
    assert isinstance(refusal, ModelError)
    assert str(refusal) == "bad-model: adapter.target_modules: the model has no layer 'q_prj'. Did you mean 'q_proj'?"
    (warning,) = findings("[self_attn.q_proj, v_prj]")
    assert warning.endswith("has no layer 'v_prj', which gets no adapter. Did you mean 'v_proj'?")


@pytest.mark.parametrize(
    ("targets", "others"),
    [
        ("['norm']", ["norm"]),
        ("['q_proj', 'input_layernorm']", ["input_layernorm"]),
        ("['model.layers.0', 'mlp']", ["model.layers.0", "mlp"]),
        (".*norm", [".*norm"]),
        (".*", [".*"]),
        ("['q_proj', 'embed_tokens']", []),
        (".*(q_proj|embed_tokens)", []),
    ],
)
def test_modules_that_peft_cannot_adapt_are_refused_before_the_model_is_loaded(
    targets: str, others: list[str], tmp_path: Path
) -> None:
    run = made(
        f"adapter.target_modules={targets}",
        model=str(folder(tmp_path / "model", LLAMA)),
        recipe="tiny_orpo_lora_sample_preferences_e1",
    )

    refusals = [found for found in model_files.adapted_layers(run) if isinstance(found, ModelError)]

    assert [error.where for error in refusals] == ["adapter.target_modules"] * bool(others)
    assert all(repr(name) in refusals[0].what for name in others)


@pytest.mark.parametrize("targets", ["['lm_head']", "['q_proj', 'lm_head']", "(.*q_proj|lm_head)"])
@pytest.mark.parametrize("objective", ["", "dpo_", "kto_", "grpo_", "orpo_"])
def test_an_adapter_on_the_head_is_refused_where_the_loss_would_read_past_it(
    objective: str, targets: str, tmp_path: Path
) -> None:
    path = folder(tmp_path / "model", LLAMA)
    of_objective = {"grpo_": ("objective.rewards=['length']",), "kto_": ("objective.loss_type=apo_zero_unpaired",)}
    sets = (f"target_modules={targets}", *of_objective.get(objective, ()))
    run = made(*sets, model=str(path), recipe=f"tiny_{objective}lora_sample_e1")

    refusals = [found for found in model_files.adapted_layers(run) if isinstance(found, ModelError)]

    assert [error.where for error in refusals] == ([] if objective == "orpo_" else ["adapter.target_modules"])


def test_a_reward_model_is_trained_on_scores_alone(tmp_path: Path) -> None:
    path = folder(tmp_path / "rm", {**LLAMA, "architectures": ["LlamaForSequenceClassification"]})

    (refusal,) = model_files.architecture(plan(path))

    assert str(refusal).endswith(
        "is a reward model: it scores answers and cannot write any. Give the model that it was trained from."
    )
    assert list(model_files.architecture(made(model=str(path), recipe="tiny_reward_full_sample_e1"))) == []


def test_the_known_types_are_those_that_transformers_trains_and_ours() -> None:
    import transformers
    from transformers.models.auto import modeling_auto

    import tuner.models  # noqa: F401 (registers ours)

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert model_files.known_types(scores=False) == causal | model_files.OWN
    assert model_files.known_types(scores=True) == (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.keys() | model_files.OWN
    )
    registered = transformers.CONFIG_MAPPING._extra_content
    assert {
        name for name, model_class in registered.items() if model_class.__module__.startswith("tuner.")
    } == model_files.OWN


def test_an_unknown_type_is_refused_with_the_nearest(tmp_path: Path) -> None:
    text = refusals(folder(tmp_path / "new", {**LLAMA, "model_type": "qwen33"}))

    assert "'qwen33'" in text
    assert "Did you mean 'qwen3'?" in text


def test_a_type_that_only_answers_is_refused_for_a_reward_model(tmp_path: Path) -> None:
    assert "granite" in model_files.known_types(scores=False) - model_files.known_types(scores=True)
    place = folder(tmp_path / "granite", {**LLAMA, "model_type": "granite"})

    found = list(model_files.architecture(made(recipe="tiny_reward_full_sample_preferences_e1", model=str(place))))

    assert [type(finding) for finding in found] == [ModelError]
    hints = ("newer transformers", "Did you mean")
    assert not any(hint in str(found[0]) for hint in hints), "it knows the type, as one that writes texts"
    assert list(model_files.architecture(plan(place))) == []


def test_a_model_with_its_own_code_needs_trust(tmp_path: Path) -> None:
    place = folder(tmp_path / "own", {**LLAMA, "model_type": "mine", "auto_map": {"AutoModel": "m.M"}})
    (place / "m.py").write_text("")

    assert "(m.py), then add --trust-remote-code" in refusals(place)
    (line,) = preflight.check(plan(place, "model.trust_remote_code=True"))
    assert "m.py" in line and remote_code.code_in(place).hash in line


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": ', "\x00"])
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    assert "is not a JSON object" in refusals(folder(tmp_path / "bad", text))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("adapter_config.json", "{}", "holds an adapter"),
        ("model.safetensors.index.json", "{}", "is not an index of shards"),
        ("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
    ],
    ids=["an adapter", "an index without shards", "a pointer of Git LFS"],
)
def test_a_file_that_is_no_weights_is_refused_as_what_it_is(tmp_path: Path, name: str, text: str, told: str) -> None:
    place = folder(tmp_path / "model", weights=False)
    (place / name).write_text(text)

    assert told in refusals(place)


def test_an_index_that_was_left_over_beside_whole_weights_counts_no_more(tmp_path: Path) -> None:
    """transformers loads model.safetensors, if it is there, and looks at nothing else."""
    place = folder(tmp_path / "both")
    for left_over in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        weight_map = {"weight": left_over.replace(".index.json", "").replace("model.", "model-00001-of-00002.")}
        (place / left_over).write_text(json.dumps({"weight_map": weight_map}))

    assert preflight.check(plan(place)) == ()


def test_an_adapter_config_that_was_left_in_a_merged_model_is_refused(tmp_path: Path) -> None:
    place = folder(tmp_path / "merged")
    (place / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "some/base"}')

    text = refusals(place)

    assert "for which libraries load another model" in text and "Remove adapter_config.json" in text


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    place = folder(tmp_path / "shards", weights=False)
    names = {"a": "one.safetensors", "b": "two.safetensors", "c": "three.safetensors"}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    for name in ("one.safetensors", "two.safetensors"):
        save_file({"weight": torch.ones(4)}, place / name)

    text = refusals(place)

    assert "three.safetensors is missing" in text
    assert "one.safetensors" not in text


def test_a_tensor_that_one_expert_lacks_is_named(tmp_path: Path) -> None:
    place = folder(tmp_path / "experts", weights=False)
    experts = [f"model.layers.{layer}.mlp.experts.{number}" for layer in range(2) for number in range(3)]
    names = {f"{expert}.{matrix}_proj.weight": torch.ones(4) for expert in experts for matrix in ("up", "down")}
    save_file(names, place / "model.safetensors")
    assert not list(model_files.missing_layers(place, 2))

    del names["model.layers.1.mlp.experts.2.up_proj.weight"]
    save_file(names, place / "model.safetensors")

    assert "lacks model.layers.1.mlp.experts.2.up_proj.weight" in refusals(place)


def test_a_tensor_that_the_index_places_where_it_is_not_is_named(tmp_path: Path) -> None:
    place = folder(tmp_path / "index", weights=False)
    names = {"model.layers.0.up.weight": "one.safetensors", "model.layers.1.up.weight": "one.safetensors"}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"model.layers.0.up.weight": torch.ones(4)}, place / "one.safetensors")

    assert "one.safetensors lacks model.layers.1.up.weight" in refusals(place)


def test_a_layer_without_weights_is_told_with_the_number_that_the_config_counts(tmp_path: Path) -> None:
    place = folder(tmp_path / "layers", LLAMA | {"num_hidden_layers": 4}, weights=False)
    tensors = {f"model.layers.{number}.up.weight": torch.ones(4) for number in (0, 1, 3)}
    save_file(tensors, place / "model.safetensors")

    assert "no weights for layer 2, and its config.json has 4 layers" in refusals(place)


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1])
def test_weights_that_are_cut_off_are_refused_wherever_they_end(tmp_path: Path, kept: int) -> None:
    place = folder(tmp_path / "cut")
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])

    assert "truncated" in refusals(place)


def test_samples_longer_than_the_context_are_told(tmp_path: Path) -> None:
    place = folder(tmp_path / "short")

    (warning,) = preflight.check(plan(place, "train_dataloader.dataset.max_length=1024"))

    assert "train_dataloader.dataset.max_length = 1024" in warning
    assert "512 tokens" in warning
    assert preflight.foresee(plan(place, "train_dataloader.dataset.max_length=1024")) == (warning,)
    assert preflight.check(plan(place, "train_dataloader.dataset.max_length=512")) == ()


def test_a_stretched_context_is_not_told(tmp_path: Path) -> None:
    place = folder(tmp_path / "yarn", {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}})

    assert preflight.check(plan(place, "train_dataloader.dataset.max_length=2048")) == ()
    assert preflight.check(plan(place, "train_dataloader.dataset.max_length=2049")) != ()


def test_learned_positions_end_the_run_at_a_longer_sample(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 256}
    place = folder(tmp_path / "gpt2", gpt2)
    too_long, short = (("val_dataloader=None", f"train_dataloader.dataset.max_length={size}") for size in (129, 128))

    (warning,) = model_files.context(plan(place, *too_long))

    assert "A longer sample ends the run" in str(warning)
    assert "--set train_dataloader.dataset.max_length=128" in str(warning)
    assert list(model_files.context(plan(place, *short))) == []


@pytest.mark.parametrize("index", [False, True])
def test_weights_that_are_pickles_are_refused(tmp_path: Path, index: bool) -> None:
    place = folder(tmp_path / "old", weights=False)
    (place / "pytorch_model.bin").write_bytes(b"pickle")
    if index:
        (place / "pytorch_model.bin.index.json").write_text('{"weight_map": {"weight": "pytorch_model.bin"}}')

    assert "run code; tuner loads only safetensors" in refusals(place)


def with_tokens(path: Path, count: int) -> Path:
    """Write a model whose embedding has 256 rows, with a tokenizer of `count` tokens."""
    place = folder(path)
    vocab = {f"word{number}": number for number in range(count)}
    (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    return place


def test_a_tokenizer_with_more_tokens_than_the_embedding_has_rows_is_refused(tmp_path: Path) -> None:
    text = refusals(with_tokens(tmp_path / "many", 300))

    assert "has ids up to 299 ('word299'), and the embedding has 256 rows" in text
    assert Key("model.resize_embeddings", True) in text
    assert preflight.check(plan(with_tokens(tmp_path / "all", 256))) == ()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_tokenizer_that_git_lfs_has_not_downloaded_is_named(name: str, tmp_path: Path) -> None:
    place = folder(tmp_path / "cloned")
    (place / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")

    assert f"{name} is a Git LFS pointer" in refusals(place)


def test_rows_that_an_adapter_would_not_train_are_refused_by_name(tmp_path: Path) -> None:
    place, resized = str(with_tokens(tmp_path / "many", 300)), "model.resize_embeddings=true"
    both = "adapter.modules_to_save=['embed_tokens', 'lm_head']"

    (found,) = model_files.tokens(made(resized, recipe="tiny_lora_sample_e1", model=place))

    assert "new rows of embed_tokens and lm_head would not be trained" in str(found)
    assert list(model_files.tokens(made(resized, both, recipe="tiny_lora_sample_e1", model=place))) == []
    assert preflight.check(plan(Path(place), resized)) == ()


def test_missing_kernels_of_linear_attention_are_told_where_gpus_are() -> None:
    recipe = "qwen3_5_0_8b_lora_alpaca_e1"

    (told,) = model_files.kernels(made(recipe=recipe, hardware=machine(A100)))

    assert "pip install 'tuner-deepspeed[gpu]'" in str(told)
    assert list(model_files.kernels(made(recipe=recipe, hardware=CPU))) == []
    assert list(model_files.kernels(made(hardware=machine(A100)))) == []


def test_packed_rows_of_a_model_with_code_of_its_own_are_refused_before_a_rank_would() -> None:
    trusted = ("model.trust_remote_code=True", f"model.revision={'a' * 40}")
    plans = [made(*trusted, *more, recipe="qwen_7b_full_alpaca_e1") for more in ((), ("packing=False",))]

    (error,) = model_files.packed(plans[0])

    assert "--set train_dataloader.dataset.packing=False" in str(error)
    assert list(model_files.packed(plans[1])) == []


def test_a_tokenizer_without_a_chat_template_is_refused_with_the_flag_that_names_one(tmp_path: Path) -> None:
    place = folder(tmp_path / "base")
    (place / "tokenizer_config.json").write_text("{}")

    assert "has no chat template" in refusals(place)
    assert "--set model.chat_template=chatml" in refusals(place)
    for elsewhere in (False, True):
        found = preflight.inspect(plan(place), elsewhere=elsewhere)
        assert ["has no chat template" in str(finding) for finding in found] == [True]
    assert preflight.check(plan(place, "model.chat_template=chatml")) == ()
    (place / "chat_template.jinja").write_text("{{ messages }}")
    assert preflight.check(plan(place)) == ()


def test_a_value_for_a_name_that_the_models_template_does_not_use_is_refused(tmp_path: Path) -> None:
    place = folder(tmp_path / "base")
    (place / "tokenizer_config.json").write_text("{}")
    (place / "chat_template.jinja").write_text("{{ messages }}{{ thinking }}")

    assert "'thinkng'" in refusals(place, "model.chat_template_kwargs.thinkng=False")
    assert preflight.check(plan(place, "model.chat_template_kwargs.thinking=False")) == ()


DISTILL = {"recipe": "tiny_distill_full_sample_e1"}


def taught(student: Path, teacher: Path, *sets: str) -> str:
    """Return what is wrong with a teacher, one text for all of it."""
    with pytest.raises(TunerError) as caught:
        preflight.check(made(f"teacher={teacher}", *sets, model=str(student), **DISTILL))
    assert caught.value.exit_code == 2 and str(caught.value.where).startswith("objective.teacher")
    return str(caught.value)


def test_a_whole_teacher_with_the_students_vocabulary_passes(tmp_path: Path) -> None:
    student, teacher = with_tokens(tmp_path / "student", 256), with_tokens(tmp_path / "teacher", 250)

    assert preflight.check(made(f"teacher={teacher}", model=str(student), **DISTILL)) == ()


def test_a_teacher_that_the_loss_cannot_compare_with_is_refused(tmp_path: Path) -> None:
    student, wider = with_tokens(tmp_path / "student", 256), folder(tmp_path / "wider", {**LLAMA, "vocab_size": 320})
    other = folder(tmp_path / "other")
    (other / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"word0": 0, "token1": 1}}}))
    gone = folder(tmp_path / "gone", weights=False)

    assert "a vocabulary of 320 tokens, and the model one of 256" in taught(student, wider)
    assert "id 1 is 'token1' there and 'word1' here" in taught(student, other)
    assert "holds no weights" in taught(student, gone)


def test_a_teacher_with_another_vocabulary_passes_where_it_is_known_which_text_tokens_are(tmp_path: Path) -> None:
    sets, spelled = ("vocabulary_matching=hybrid",), {"decoder": {"type": "ByteLevel"}}
    student, teacher = (
        folder(tmp_path / name, {**LLAMA, "vocab_size": size}) for name, size in (("s", 256), ("t", 320))
    )
    for place, word in ((student, "a"), (teacher, "b")):
        (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {word: 0}}, **spelled}))

    assert preflight.check(made(f"teacher={teacher}", *sets, model=str(student), **DISTILL)) == ()

    (teacher / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"b": 0}, "type": "WordPiece"}}))
    assert "which text the tokens of" in taught(student, teacher, *sets)


def test_a_teacher_is_a_model_or_the_result_of_a_run(tmp_path: Path) -> None:
    student, adapter, run = folder(tmp_path / "student"), tmp_path / "adapter", tmp_path / "run"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    run.mkdir()
    folder(run / "final")

    assert "no teacher is given" in str(refusal_of_load(student))
    assert "tuner export" in str(refusal_of_load(student, f"teacher={adapter}"))
    config = made(f"teacher={run}", model=str(student), **DISTILL).recipe.config
    assert config.objective.taught_by and config.teacher_architecture
    assert (config.objective.taught_by.path, config.teacher_architecture.vocab_size) == (str(run / "final"), 256)


def refusal_of_load(student: Path, *sets: str) -> TunerError:
    with pytest.raises(ModelError) as caught:
        made(*sets, model=str(student), **DISTILL)
    return caught.value


def test_distillation_on_given_answers_is_refused_by_name(tmp_path: Path) -> None:
    with refused(TunerError, "--set lmbda=0"):
        made("lmbda=0", model=str(folder(tmp_path / "student")), **DISTILL)


@pytest.mark.parametrize(("kind", "found"), [("llama", []), ("deepseek_v4", [ModelError]), ("of_tomorrow", [str])])
def test_a_teacher_that_computes_prompts_otherwise_behind_padding_or_may_is_found(
    tmp_path: Path, kind: str, found: list[type]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "model_type": kind}))

    def findings(recipe: str) -> list[type]:
        sets = (f"objective.teacher={tmp_path}",) if "distill" in recipe else ()
        model = None if sets else str(tmp_path)
        return [type(finding) for finding in model_files.prompts(made(*sets, recipe=recipe, model=model))]

    assert findings("tiny_distill_full_sample_e1") == findings("tiny_grpo_full_sample_e1") == found
    assert findings("tiny_dpo_full_sample_preferences_e1") == []


def test_prompts_behind_padding_are_told_of_a_model_whose_facts_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "recurrent_gemma", "vocab_size": 256}))

    run = made(recipe="tiny_grpo_full_sample_e1", model=str(tmp_path))

    assert run.recipe.config.architecture is None
    assert [type(finding) for finding in model_files.prompts(run)] == [ModelError]
