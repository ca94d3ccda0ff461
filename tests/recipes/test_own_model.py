"""A model without a recipe, a run's result as a model, an adapter to go on with, and validation rows by one flag."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.loaded import loaded
from tests.refused import refused
from tuner import assets, paths
from tuner.errors import ModelError, RecipeError
from tuner.recipes import catalog, loading, model_facts, path_checks
from tuner.recipes.recipe import Recipe

ASSETS = assets.CONFIGS / "assets" / "tiny"
CHATML = catalog.chat_template("chatml")
LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": 8,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "target_modules": ["q_proj", "v_proj"],
    "use_dora": False,
    "use_rslora": False,
    "modules_to_save": None,
    "revision": None,
}


def a_model(name: str = "my-qwen", template: str | None = "{{ messages }}", context: int = 4096) -> str:
    """Make a folder with a model's small files."""
    folder = Path(name)
    folder.mkdir(parents=True)
    facts = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "tie_word_embeddings": False,
        "max_position_embeddings": context,
    }
    (folder / "config.json").write_text(json.dumps(facts))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template} if template else {}))
    return f"./{name}"


def an_adapter(base: str, name: str = "runs/sft/final", **changes: Any) -> str:
    """Make a folder with an adapter as PEFT writes one."""
    folder = Path(name)
    folder.mkdir(parents=True)
    (folder / paths.ADAPTER).write_text(json.dumps({**LORA, "base_model_name_or_path": base, **changes}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return name


TRAIN_LENGTH, VAL_LENGTH = (f"{loader}.dataset.max_length" for loader in ("train_dataloader", "val_dataloader"))


def lengths(found: Recipe) -> tuple[int, ...]:
    """Return max_length of training and validation."""
    return tuple(loader.dataset.max_length for loader in found.config.loaders.values())


# --- A model without a recipe


@pytest.mark.parametrize(("name", "given"), [(None, {"model": "./my-qwen"}), ("./my-qwen", {}), ("my-qwen", {})])
def test_a_model_needs_no_recipe(name: str | None, given: dict[str, str]) -> None:
    a_model()

    found = loaded(name, **given, data="my.jsonl")

    assert found.name == "my-qwen_lora"
    assert found.config.objective.type == "sft"
    assert found.config.adapter
    assert found.config.train_dataloader.dataset.path == "my.jsonl"
    assert found.config.architecture
    assert found.config.architecture.hidden_size == 64
    assert found.warnings == found.notes == ()


def test_a_hub_id_of_the_catalog_brings_its_parts_facts_and_template() -> None:
    named = loaded("internlm2_chat_7b_qlora_custom_e4", data="my.jsonl", epochs=3).config

    own = loaded("internlm/internlm2-chat-7b", data="my.jsonl", val_split=0, method="qlora", epochs=3)

    assert own.name == "internlm2_chat_7b_qlora"
    assert own.config.train_cfg.global_batch_size == "auto"
    assert own.config.model_dump() == named.model_dump()


def test_a_hub_id_that_the_catalog_has_not_brings_the_facts_of_its_config_that_was_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    before = loaded(None, model="owner/name", data="x.jsonl").config.architecture
    folder = tmp_path / "models--owner--name"
    a_model(str(folder / "snapshots" / "1"))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("1")

    after = loaded(None, model="owner/name", data="x.jsonl").config.architecture

    assert before is None and after is not None and after.hidden_size == 64


def test_a_method_may_come_after_its_objective() -> None:
    found = loaded(None, model="Qwen/Qwen3-8B", data="my.jsonl", method="dpo_lora")

    assert found.config.objective.type == "dpo"
    assert found.notes == ()


def test_epochs_win_over_the_steps_of_a_recipe() -> None:
    found = loaded("tiny_full_sample_e1", "max_steps=7", epochs=5).config.train_cfg
    later = loaded("tiny_full_sample_e1", epochs=5).config.train_cfg

    assert (later.max_epochs, later.max_steps) == (5, None)
    assert (found.max_epochs, found.max_steps) == (5, 7)


@pytest.mark.parametrize(
    ("name", "given", "what"),
    [
        (None, {}, "neither a recipe nor a model is given"),
        ("./my-qwen", {"model": "./other"}, "set the model"),
        ("tiny_full_sample_e1", {"method": "lora"}, "already has a method"),
        ("./my-qwen", {"method": "lorra"}, "no method 'lorra'"),
        (
            "./my-qwen",
            {"method": "dpo"},
            "no method 'dpo'. Write an objective with its method: dpo_lora trains an adapt",
        ),
    ],
)
def test_what_names_no_training_is_refused(name: str | None, given: dict[str, str], what: str) -> None:
    a_model()

    with pytest.raises(RecipeError, match=what) as caught:
        loaded(name, **given)

    assert caught.value.fix


# --- The model's own template and length


def test_a_package_template_of_the_old_model_is_dropped_aloud() -> None:
    found = loaded("internlm2_chat_7b_lora_custom_e1", model=a_model(), data="my.jsonl")

    assert found.config.model.chat_template is None
    assert found.notes[0].startswith("chat template: ./my-qwen's own, not internlm/internlm2-chat-7b's 'internlm2' (")


def test_a_template_of_the_users_file_is_refused_over_another_models_own_and_kept_when_asked_for() -> None:
    Path("mine.py").write_text('_base_ = "tiny_lora_custom_e1"\nmodel = dict(path="a/b", chat_template="internlm2")\n')
    model = a_model()

    with refused(RecipeError, "mine.py:2") as caught:
        loaded("./mine.py", model=model)

    assert str(caught.value.where).startswith("./mine.py:2")
    kept = loaded("./mine.py", "model.chat_template=internlm2", model=model)
    dropped = loaded("./mine.py", "model.chat_template=None", model=model)
    assert kept.config.model.chat_template == "internlm2"
    assert dropped.config.model.chat_template is None


def test_a_template_that_renders_the_models_own_text_stays() -> None:
    found = loaded("qwen2_1_5b_lora_custom_e1", model=a_model(template=CHATML))

    assert found.config.model.chat_template == "chatml"
    assert found.warnings == found.notes == ()


def test_a_model_without_a_template_takes_the_recipes_with_a_note() -> None:
    found = loaded("qwen2_1_5b_lora_custom_e1", model=a_model(template=None))

    assert found.config.model.chat_template == "chatml"
    assert found.notes[0].startswith("chat template: the recipe's 'chatml', because ./my-qwen has none (")


def test_a_copy_of_the_recipes_own_model_keeps_its_template() -> None:
    found = loaded("internlm2_chat_7b_lora_custom_e1", model=a_model("models/internlm2-chat-7b"))

    assert found.config.model.chat_template == "internlm2"


def test_samples_are_no_longer_than_the_models_context_unless_the_user_says_so() -> None:
    model = a_model(context=512)

    found = loaded(model, data="my.jsonl")

    assert found.config.train_dataloader.dataset.max_length == 512
    assert found.warnings == ()
    assert found.notes[0].startswith("max_length: 512, the context length of ./my-qwen (instead of ")
    asked = loaded(model, "max_length=1024", data="my.jsonl")
    assert asked.config.train_dataloader.dataset.max_length == 1024


@pytest.mark.parametrize(
    "given", [{"val": "val.jsonl"}, {"val_split": 0.1}, {"pair": "val_dataloader.dataset.path=val.jsonl"}]
)
def test_validation_samples_are_no_longer_than_those_of_training(given: dict[str, Any]) -> None:
    model, flags = a_model(context=512), {"data": "my.jsonl", **given}
    sets = [flags.pop("pair")] if "pair" in flags else []

    found = loaded(model, *sets, **flags)
    asked = loaded(model, *sets, f"{TRAIN_LENGTH}=256", **flags)
    own = loaded(model, *sets, f"{VAL_LENGTH}=128", **flags)

    assert lengths(found) == (512, 512)
    assert len([note for note in found.notes if "the context length of" in note]) == 1
    assert found.origins[VAL_LENGTH].place == found.origins[TRAIN_LENGTH].place or "val_split" in given
    assert lengths(asked) == (256, 256)
    assert lengths(own) == (512, 128) or "val_split" in given


@pytest.mark.parametrize("validation", ["val.jsonl", None])
def test_validation_gives_way_to_the_model_as_training_does(
    validation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model()
    monkeypatch.setattr(model_facts, "kind_of", lambda merged: "mamba")

    found = loaded(model, data="my.jsonl", val=validation).config

    assert found.val_dataloader
    assert (found.train_dataloader.dataset.packing, found.val_dataloader.dataset.packing) == (False, False)


def test_a_new_format_of_the_training_rows_is_that_of_the_validation_rows_too() -> None:
    pairs = ("train_dataloader.dataset.format=alpaca", "train_dataloader.dataset.columns.output=answer")

    found = loaded("tiny_full_custom_e1", *pairs, data="my.jsonl", val="val.jsonl").config

    assert found.val_dataloader
    assert (found.val_dataloader.dataset.format, found.val_dataloader.dataset.columns) == (
        "alpaca",
        {"output": "answer"},
    )


# --- A run's result is a model; an adapter goes on


def test_a_runs_result_is_a_model_by_the_run_and_by_its_folder() -> None:
    a_model("runs/sft/final")

    for name in ("runs/sft", "runs/sft/final"):
        found = loaded(name, data="my.jsonl")
        assert found.config.model.path == "runs/sft/final"
        assert found.name == "sft_lora"


def test_a_run_without_a_result_is_refused_with_its_newest_checkpoint() -> None:
    Path("runs/sft/checkpoints/checkpoint-9").mkdir(parents=True)
    Path("runs/sft/checkpoints/checkpoint-10").mkdir()
    Path("runs/sft/recipe.py").write_text("")

    with refused(ModelError, "model.path") as caught:
        path_checks.check_model(loaded("runs/sft", data="my.jsonl").config)

    assert "--resume runs/sft, or give one of its checkpoints: runs/sft/checkpoints/checkpoint-10" in str(caught.value)


@pytest.mark.parametrize("given", [{"model": "runs/sft"}, {"adapter": "runs/sft"}, {"adapter": "runs/sft/final"}])
def test_an_adapter_goes_on_with_its_own_rank_and_base(given: dict[str, str]) -> None:
    an_adapter(a_model())

    found = loaded("qwen2_1_5b_dpo_lora_custom_e1", **given, data="prefs.jsonl").config

    assert found.model.path == "./my-qwen"
    assert found.adapter
    assert found.adapter.model_dump() == {
        "path": "runs/sft/final",
        **{key: LORA[key] for key in ("r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora")},
        "modules_to_save": None,
        "init_lora_weights": True,
        "vision": False,
        "vision_r": None,
        "vision_lora_alpha": None,
    }
    path_checks.check_model(found)


def test_an_adapter_may_stand_in_a_recipe_file_and_again_in_the_runs_own_recipe() -> None:
    an_adapter(a_model())
    Path("mine.py").write_text(
        '_base_ = "tiny_lora_custom_e1"\nmodel = dict(path="./my-qwen")\nadapter = dict(path="runs/sft")\n'
    )

    found = loading.load("./mine.py")
    Path("run.py").write_text(found.standalone())

    assert found.config.adapter
    assert (found.config.adapter.path, found.config.adapter.r) == ("runs/sft/final", 8)
    assert loading.load("./run.py").config == found.config
    shutil.rmtree("runs")
    gone = loading.load("./run.py").config
    assert gone == found.config
    with refused(ModelError, "adapter.path"):
        path_checks.check_model(gone)


@pytest.mark.parametrize(
    ("name", "sets", "changes", "what", "fix"),
    [
        ("tiny_full_custom_e1", (), {}, "trains every weight", "tuner export runs/sft/final DEST --merge"),
        ("tiny_lora_custom_e1", ("adapter.r=16",), {}, "has 8", "Remove it"),
        ("tiny_reward_lora_custom_e1", (), {}, "objective reward cannot train", "tuner export"),
        ("tiny_lora_custom_e1", (), {"peft_type": "IA3"}, "an adapter of IA3, not LoRA", "tuner export"),
        ("tiny_lora_custom_e1", (), {"base_model_name_or_path": None}, "does not name its base", "--model BASE"),
        ("tiny_lora_custom_e1", (), {"base_model_name_or_path": "/gone"}, "is missing: '/gone'", "--model BASE"),
    ],
)
def test_an_adapter_that_cannot_go_on_is_refused_with_what_can(
    name: str, sets: tuple[str, ...], changes: dict[str, Any], what: str, fix: str
) -> None:
    an_adapter(a_model(), **changes)

    with pytest.raises(RecipeError, match=what) as caught:
        loaded(name, *sets, model="runs/sft")

    assert fix in str(caught.value.fix)


def test_an_adapter_of_another_hub_model_is_refused() -> None:
    an_adapter("meta-llama/Llama-2-7b-hf")

    with refused(RecipeError, "qwen3_8b.py:3", "meta-llama/Llama-2-7b-hf", "Qwen/Qwen3-8B"):
        loaded("qwen3_8b_lora_custom_e1", adapter="runs/sft")


# --- Validation


def test_a_validation_file_is_read_as_the_training_rows_are() -> None:
    found = loaded("tiny_full_alpaca_e1", val="val.jsonl").config

    assert found.val_dataloader
    rows = found.train_dataloader.dataset
    assert found.val_dataloader.dataset == rows.model_copy(update={"path": "val.jsonl"})
    assert found.val_dataloader.batch_size == found.train_dataloader.batch_size


def test_a_key_of_the_validation_fills_in_a_block_that_is_none() -> None:
    found = loaded("tiny_full_custom_e1", "val_dataloader.dataset.path=val.jsonl", data="my.jsonl").config

    assert found.val_dataloader
    assert found.val_dataloader.dataset == found.train_dataloader.dataset.model_copy(update={"path": "val.jsonl"})


@pytest.mark.parametrize("name", ["tiny_full_custom_e1", "tiny_full_sample_e1"])
def test_a_part_of_the_rows_is_held_out_by_the_seed_and_told(name: str) -> None:
    found = loaded(name, data="my.jsonl", val_split=0.05, seed=7)

    train, val = found.config.train_dataloader.dataset, found.config.val_dataloader
    assert val
    assert (train.val_split, train.val_seed, train.held_out) == (0.05, 7, False)
    assert val.dataset == train.model_copy(update={"held_out": True})
    assert found.notes == ("validation: 5 % of the training rows are held out, by seed 7",)


def test_rows_of_the_users_own_data_are_held_out_only_without_a_recipe() -> None:
    own, named = (
        loaded(name, data="my.jsonl", model=model).config
        for name, model in ((None, "tiny"), ("tiny_full_custom_e1", None))
    )

    assert own.train_dataloader.dataset.val_split == "auto" and own.val_dataloader
    assert own.val_dataloader.dataset == own.train_dataloader.dataset.model_copy(update={"held_out": True})
    assert named.train_dataloader.dataset.val_split is None and named.val_dataloader is None


@pytest.mark.parametrize(
    ("sets", "given"),
    [
        ((), {"data": "my.jsonl", "val_split": 0}),
        ((), {"data": "my.jsonl", "val": "other.jsonl"}),
        (("val_dataloader.dataset.path=other.jsonl",), {"data": "my.jsonl"}),
        (("streaming=True", "max_steps=9"), {"data": "my.jsonl"}),
        ((), {}),
    ],
)
def test_nothing_is_held_out_where_the_user_says_otherwise_or_nothing_can_be(
    sets: tuple[str, ...], given: dict[str, Any]
) -> None:
    found = loaded(None, *sets, model="tiny", **given).config

    assert found.train_dataloader.dataset.val_split is None
    assert found.val_dataloader is None or found.val_dataloader.dataset.path == "other.jsonl"


def test_a_split_of_0_ends_that_of_a_runs_own_recipe() -> None:
    Path("run.py").write_text(loaded("tiny_full_custom_e1", data="m.jsonl", val_split=0.1).standalone())

    found = loaded("./run.py", val_split=0).config

    assert found.train_dataloader.dataset.val_split is None and found.val_dataloader is None


def test_of_a_split_and_a_validation_file_the_later_counts() -> None:
    Path("mine.py").write_text('_base_ = "tiny_full_custom_e1"\ntrain_dataloader = dict(dataset=dict(val_split=0.1))\n')

    split = loaded("./mine.py", data="my.jsonl").config
    file = loaded("./mine.py", data="my.jsonl", val="val.jsonl").config

    assert split.val_dataloader
    assert split.val_dataloader.dataset.held_out
    assert file.train_dataloader.dataset.val_split is None
    assert file.val_dataloader
    assert file.val_dataloader.dataset.path == "val.jsonl"


def test_a_runs_own_recipe_holds_the_same_rows_out_and_follows_a_change() -> None:
    made = loaded("tiny_full_custom_e1", data="my.jsonl", val_split=0.05)
    Path("run.py").write_text(made.standalone())

    again = loading.load("./run.py")
    more = loaded("./run.py", "train_dataloader.dataset.val_split=0.2", data="new.jsonl", seed=1).config

    assert again.config == made.config
    assert more.val_dataloader
    assert more.val_dataloader.dataset == more.train_dataloader.dataset.model_copy(update={"held_out": True})
    assert (more.train_dataloader.dataset.path, more.train_dataloader.dataset.val_split) == ("new.jsonl", 0.2)


def test_a_split_in_the_validation_itself_is_refused() -> None:
    with refused(RecipeError, "--set val_dataloader.dataset.val_split=0.5"):
        loaded("tiny_full_sample_e1", "val_dataloader.dataset.val_split=0.5")
