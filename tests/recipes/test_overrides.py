"""`--set KEY=VALUE`: any key by any unique tail, in the type of its field; what is wrong is one message."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.each import each
from tests.recipes.loaded import loaded
from tests.refused import refused
from tuner.errors import RecipeError
from tuner.recipes import loading
from tuner.recipes.overrides import parse_override
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Vision, VisionLora, schema_keys

PRESENT = loading.load("tiny_qlora_sample_e3").values
PRESENT["model"]["vision"] = Vision(path="a tower").model_dump()  # every block is there
PRESENT["model"]["vision_lora"] = VisionLora(r=8, lora_alpha=16).model_dump()
FULL = loading.load("tiny_full_custom_e3").values  # no adapter, no quantization, no validation
KEYS = sorted(schema_keys())


def parsed(text: str, present: dict[str, Any] = PRESENT) -> tuple[str, Any]:
    keys, value = parse_override(text, "--set", present)
    return ".".join(keys), value


def tails(keys: tuple[str, ...]) -> list[str]:
    return [".".join(keys[start:]) for start in range(len(keys))]


COUNTS = Counter(tail for keys in KEYS for tail in tails(keys))


@each([(keys,) for keys in KEYS])
def test_a_key_is_reached_by_its_path_and_by_every_unique_tail(keys: tuple[str, ...]) -> None:
    for tail in tails(keys):
        if tail == "bias":
            continue  # PEFT's word, refused with what to do; architecture.bias is Falcon's
        if COUNTS[tail] == 1 or tail == ".".join(keys):
            assert parse_override(f"{tail}=x", "--set", PRESENT)[0] == keys


@pytest.mark.parametrize("tail", sorted(tail for tail, count in COUNTS.items() if count > 1))
def test_an_ambiguous_tail_is_refused_with_every_key_it_could_be(tail: str) -> None:
    if tuple(tail.split(".")) in schema_keys():
        return  # a whole path, which always wins

    with refused(RecipeError, f"--set {tail}=1") as caught:
        parsed(f"{tail}=1")

    could = caught.value.what.split("could be ")[1].split(" or ")
    assert could == [".".join(keys) for keys in schema_keys() if tail in tails(keys)]


def test_a_tail_is_unique_when_this_recipe_has_one_such_key() -> None:
    assert parsed("batch_size=2", FULL)[0] == "train_dataloader.batch_size"
    assert parsed("max_length=2", FULL)[0] == "train_dataloader.dataset.max_length"
    with refused(RecipeError, "--set batch_size=2"):
        parsed("batch_size=2", PRESENT)


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("lrr", "lr"),
        ("zzz", None),
        ("loro_rank", "lora_rank"),
        ("learning_rat", "learning_rate"),
        ("optim_wrapper.optimizer.lrr", "optim_wrapper.optimizer.lr"),
        ("max_epoch", "max_epochs"),
        ("accumulative_count", "accumulative_counts"),
        ("SEED", "seed"),
        ("adapter.R", "adapter.r"),
        ("", None),
        (".", None),
        ("lr.", "lr"),
        (".lr", "lr"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, nearest: str | None) -> None:
    with pytest.raises(RecipeError) as caught:
        parsed(f"{key}=1")

    assert caught.value.what == f"no key {key!r}"
    assert (f"Did you mean {nearest!r}?" if nearest else "Known top-level keys: model,") in str(caught.value)
    assert "tuner show" in str(caught.value)


def test_a_text_without_equals_sign_is_refused() -> None:
    with refused(RecipeError, "--cfg-options"):
        parse_override("lr", "--cfg-options", PRESENT)


CONVERTED: tuple[tuple[str, Any], ...] = (
    # numbers
    ("lr=1e-5", 1e-5),
    (" lr =3e-4", 3e-4),
    ("lr=1", 1),
    ("lr=3 * 1e-4", 3 * 1e-4),
    ("max_epochs=1_000", 1000),
    ("max_epochs=-1", -1),
    ("max_epochs=1.0", 1.0),
    # truth and nothing
    ("gradient_checkpointing=False", False),
    ("use_dora=TRUE", True),
    ("gradient_checkpointing=no", "no"),
    ("max_steps=none", None),
    ("max_steps=null", None),
    ("adapter=none", None),
    ("train_dataloader.dataset.split=none", "none"),
    ("deepspeed=none", "none"),
    # any plain value
    ("model.chat_template_kwargs.enable_thinking=False", False),
    ("chat_template_kwargs.budget=512", 512),
    ("chat_template_kwargs.enable_thinking=None", None),
    ("chat_template_kwargs.reasoning_effort=high", "high"),
    ("init_lora_weights=true", True),
    # texts, as they were typed
    ("model.path=a b", "a b"),
    ("model.path= a ", " a "),
    ('model.path="a"', '"a"'),
    ("model.path=", ""),
    ("model.path=a=b=c", "a=b=c"),
    ("model.path=1", "1"),
    ("model.path=[a]", "[a]"),
    ("model.path=(1, 2)", "(1, 2)"),
    ("model.path=C:\\new", "C:\\new"),
    ("chat_template=wörld 🙂.jinja", "wörld 🙂.jinja"),
    # choices
    ("dtype=bf16", "bf16"),
    ("dtype=16", "16"),
    # lists, tuples
    ("betas=0.9,0.95", (0.9, 0.95)),
    ("betas=(0.9, 0.95)", (0.9, 0.95)),
    ("betas=[0.9, 0.95]", [0.9, 0.95]),
    ("trackers=wandb", ["wandb"]),
    ("trackers=wandb, mlflow", ["wandb", "mlflow"]),
    ("trackers=[wandb,mlflow]", ["wandb", "mlflow"]),
    ("trackers=('wandb',)", ("wandb",)),
    ("trackers='wandb'", ["wandb"]),
    ("trackers=", []),
    ("modules_to_save=lm_head,embed_tokens", ["lm_head", "embed_tokens"]),
    ("target_modules=all-linear", "all-linear"),
    ("target_modules=.*\\.q_proj", ".*\\.q_proj"),
    ("target_modules=[qk]_proj", "[qk]_proj"),
    ("target_modules=(q_proj|k_proj)", "(q_proj|k_proj)"),
    ("target_modules=['q_proj', 'v_proj']", ["q_proj", "v_proj"]),
    ("target_modules=('q_proj', 'v_proj')", ("q_proj", "v_proj")),
    ("target_modules=[q_proj,v_proj]", ["q_proj", "v_proj"]),
    # blocks
    ("adapter={'r': 8}", {"r": 8}),
    ("adapter=dict(r=8)", {"r": 8}),
    ("deepspeed={'zero_optimization': {'stage': 2}}", {"zero_optimization": {"stage": 2}}),
    ("deepspeed=zero2", "zero2"),
    ("deepspeed={broken", "{broken"),
)


@pytest.mark.parametrize(("text", "value"), CONVERTED, ids=lambda item: str(item)[:40])
def test_the_field_decides_the_type(text: str, value: Any) -> None:
    found = parsed(text)[1]

    assert (repr(found), type(found)) == (repr(value), type(value))


@pytest.mark.parametrize("text", ["none", "'none'", '"none"', " none "])
def test_none_is_a_word_where_the_field_has_that_word(text: str) -> None:
    grpo = {**FULL, "objective": {"type": "grpo", "scale_rewards": "group"}}

    assert parsed(f"scale_rewards={text}", grpo) == ("objective.scale_rewards", "none")


@pytest.mark.parametrize("value", ["nan", "NaN", "inf", "-inf", "Infinity", " nan "])
def test_a_number_that_is_not_finite_is_refused(value: str) -> None:
    with refused(RecipeError, f"--set lr={value}"):
        parsed(f"lr={value}")


@pytest.mark.parametrize("text", ["r=8", "adapter.r=8", "bits=4", "num_hidden_layers=2"])
def test_a_key_below_a_block_that_is_none_is_refused(text: str) -> None:
    with refused(RecipeError, f"--set {text}"):
        loaded("tiny_full_custom_e3", text, model="unknown/model")


def test_a_mapping_takes_a_new_key_by_a_tail_also_where_it_is_none() -> None:
    sets = ("columns.instruction=Question", "train_dataloader.dataset.columns.output={a}\\n{b}")

    made = loaded("tiny_full_custom_e3", *sets)

    assert made.config.train_dataloader.dataset.columns == {"instruction": "Question", "output": "{a}\\n{b}"}
    with refused(RecipeError, "--set colums.instruction=Question"):
        parsed("colums.instruction=Question")
    with refused(RecipeError, "--set lr.instruction=Question"):
        parsed("lr.instruction=Question")


def test_a_block_can_be_set_as_a_whole_and_then_reached() -> None:
    adapter = loaded("tiny_full_custom_e3", "adapter=dict(r=8, lora_alpha=16)", "r=4").config.adapter

    assert adapter is not None
    assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (4, 16, "all-linear")


@pytest.mark.parametrize(
    "text",
    [
        "lr=1)\nother = (2",
        "betas=",
        "betas=0.9",
        "adapter={",
        "model=none",
        "lr=__import__('os')",
        "lr=",
        "lr=1e999",
        "lr=0x" + "f" * 300,
        "max_epochs=0.0",
        "max_epochs=three",
        "use_dora=yes",
        "dtype=bf17",
        "adapter=3",
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_key_value_and_place(text: str) -> None:
    key, _, value = text.partition("=")

    with refused(RecipeError, f"--set {text}") as caught:
        loaded("tiny_lora_sample_e1", text)

    assert f"{key} = " in caught.value.what
    assert value[:20].lower() in str(caught.value).lower()


def test_overrides_apply_in_their_order() -> None:
    pairs = [("--set", "lr=1e-5"), ("--cfg-options", "lr=2e-5"), ("--set", "optim_wrapper.optimizer.lr=3e-5")]

    found = loading.load("tiny_full_sample_e1", Overrides(pairs=pairs))

    origin = found.origins["optim_wrapper.optimizer.lr"]
    assert found.config.optim_wrapper.optimizer.lr == 3e-5
    assert origin.text == "--set optim_wrapper.optimizer.lr=3e-5"
    assert [value for value, _ in origin.overridden][:2] == [2e-5, 1e-5]


@pytest.mark.parametrize("text", ["model.path=\udcff", "model.path=a\0b", "trackers=[\ud800]", "\udcff=1"])
def test_bytes_that_are_no_text_are_refused(text: str) -> None:
    with refused(RecipeError, "--set"):
        loaded("tiny_full_sample_e1", text)


def test_a_value_of_any_depth_is_taken_or_refused() -> None:
    deep = "[" * 99 + "]" * 99
    loaded("tiny_qlora_sample_e3", f"deepspeed={{'a': {deep}}}").standalone()
    with pytest.raises(RecipeError, match=r"^bad-recipe: --set lr=a\.b\.b"):
        loaded("tiny_qlora_sample_e3", "lr=a" + ".b" * 400)
