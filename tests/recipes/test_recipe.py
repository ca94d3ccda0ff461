"""Layers merge in their order, every value says where it came from, and a wrong one is refused where it stands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.each import each
from tests.recipes.loaded import loaded
from tests.recipes.test_config_json import LLAMA as FACTS
from tests.refused import refused
from tuner.errors import ModelError, RecipeError
from tuner.recipes import catalog, loading, path_checks, recipe_file
from tuner.recipes.merging import DEFAULT, Kind, Origin, Overridden, Place
from tuner.recipes.recipe import Overrides, Recipe
from tuner.recipes.recipe_file import read_file

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_a_part_of_the_package_is_read_once_and_no_recipe_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "internlm2_chat_7b_qlora_oasst1_e3"
    first = loading.load(name)
    loaded(name, "adapter.r=3", "packing=false")
    monkeypatch.setattr(recipe_file, "read_file", lambda *_, **__: pytest.fail("it is read again"))

    again = loading.load(name)

    assert (again.values, again.origins) == (first.values, first.origins)


def write(name: str, text: str) -> str:
    Path(name).write_text(text, encoding="utf-8")
    return f"./{name}"


def value_of(found: Recipe, key: str) -> Any:
    value: Any = found.values
    for name in key.split("."):
        value = value[name]
    return value


# Each level, and a value that only it can have set, over the level before.
LEVELS = (
    ("tiny_full_custom_e3", None, "model.path", "package:tiny", "configs/models/tiny.py:3", None),
    ("tiny_pretrain_full_custom_e3", None, "objective.type", "pretrain", "configs/objectives/pretrain.py:3", "sft"),
    ("tiny_lora_custom_e3", None, "optim_wrapper.optimizer.lr", 2e-4, "configs/methods/lora.py:4", 2e-5),
    ("tiny_full_alpaca_e3", None, "train_dataloader.dataset.format", "alpaca", "configs/datasets/alpaca.py:3", None),
    ("tiny_full_custom_e7", None, "train_cfg.max_epochs", 7, "name tiny_full_custom_e7", 3),
    ("tiny_full_sample_e3", None, "optim_wrapper.optimizer.lr", 3e-3, "configs/recipes/tiny_full_sample.py:6", 2e-5),
    ("./my.py", None, "optim_wrapper.optimizer.lr", 1e-3, "./my.py:2", 3e-3),
    ("./my.py", "lr=1", "optim_wrapper.optimizer.lr", 1.0, "--set lr=1", 1e-3),
)


@pytest.mark.parametrize(("name", "text", "key", "value", "source", "beaten"), LEVELS)
def test_each_level_wins_over_the_one_before(
    name: str, text: str | None, key: str, value: Any, source: str, beaten: Any
) -> None:
    write("my.py", '_base_ = "tiny_full_sample_e3"\noptim_wrapper = dict(optimizer=dict(lr=1e-3))\n')

    found = loaded(name, *[text] if text else [])

    assert value_of(found, key) == value
    assert found.origins[key].text == source
    assert found.origins[key].overridden[0][0] == beaten


def test_an_origin_names_all_that_was_beaten_latest_first() -> None:
    path = write("my.py", '_base_ = "tiny_lora_sample_e1"\noptim_wrapper = dict(optimizer=dict(lr=1e-3))\n')

    origin = loaded(path, "lr=5e-4").origins["optim_wrapper.optimizer.lr"]

    line = next(n for n, text in enumerate(catalog.BASE.read_text().splitlines(), 1) if "lr=2e-5" in text)
    assert origin == Origin(
        Place(Kind.FLAG, "--set lr=5e-4"),
        (
            Overridden(1e-3, Place(Kind.FILE, "./my.py", 2)),
            Overridden(2e-4, Place(Kind.PACKAGE, "configs/methods/lora.py", 4)),
            Overridden(2e-5, Place(Kind.PACKAGE, "configs/base.py", line)),
        ),
    )
    assert json.loads(json.dumps(origin.to_json()))["beat"][0] == {"value": 1e-3, "from": "./my.py:2"}


def test_the_same_value_again_beats_nothing() -> None:
    origin = loaded("tiny_full_sample_e1", "seed=42").origins["randomness.seed"]

    assert origin == Origin(Place(Kind.FLAG, "--set seed=42"))


def test_every_leaf_has_an_origin_and_nothing_else_has() -> None:
    found = loaded("tiny_qlora_sample_e1", "deepspeed={'zero_optimization': {'stage': 2}}")

    def leaves(values: dict[str, Any], prefix: str) -> list[str]:
        nested = ((f"{prefix}{key}", value) for key, value in values.items())
        return [
            leaf for key, value in nested for leaf in (leaves(value, f"{key}.") if isinstance(value, dict) else [key])
        ]

    assert list(found.origins) == leaves(found.values, "")
    assert found.origins["adapter.use_rslora"] == DEFAULT
    assert found.origins["deepspeed.zero_optimization.stage"].text.startswith("--set deepspeed=")


def test_a_block_over_none_and_none_over_a_block() -> None:
    over_none = loaded("tiny_full_sample_e1", "adapter=dict(r=8, lora_alpha=16)")
    none_over = loaded("tiny_lora_sample_e1", "adapter=none")

    assert value_of(over_none, "adapter.r") == 8
    assert value_of(none_over, "adapter") is None
    assert none_over.origins["adapter"].overridden[0][0]["r"] == 16
    assert not [key for key in none_over.origins if key.startswith("adapter.")]


def test_delete_replaces_a_block_and_tells_what_it_beat() -> None:
    path = write("my.py", '_base_ = "tiny_lora_sample_e1"\nadapter = dict(_delete_=True, r=8, lora_alpha=1)\n')

    found = loading.load(path)

    assert found.config.adapter is not None
    assert (found.config.adapter.r, found.config.adapter.lora_dropout) == (8, 0.0)
    assert found.origins["adapter.r"] == Origin(
        Place(Kind.FILE, "./my.py", 2), (Overridden(16, Place(Kind.PACKAGE, "configs/methods/lora.py", 3)),)
    )
    assert found.origins["adapter.lora_dropout"] == DEFAULT


def test_delete_reaches_the_blocks_inside() -> None:
    rates = (
        "lr=1.0, betas=(0.0, 0.0), eps=1.0, weight_decay=0.0, muon_lr=None, loraplus_lr_ratio=None, projector_lr=None"
    )
    whole = f"optimizer=dict(type='SGD', {rates})"
    rest = "clip_grad=dict(max_norm=2.0), accumulative_counts=1, dtype='auto'"
    path = write("my.py", f"_base_ = 'tiny_full_sample'\noptim_wrapper = dict(_delete_=True, {whole}, {rest})\n")
    part = write("part.py", "_base_ = 'tiny_full_sample'\noptim_wrapper = dict(_delete_=True, optimizer=dict(lr=1.0))")

    assert loading.load(path).config.optim_wrapper.optimizer.type == "SGD"
    with refused(RecipeError, "part.py:2", "optim_wrapper.optimizer.type"):
        loading.load(part)


def test_a_delete_that_is_false_merges() -> None:
    path = write("my.py", '_base_ = "tiny_lora_sample_e1"\nadapter = dict(_delete_=False, r=8)\n')

    assert value_of(loading.load(path), "adapter.lora_dropout") == 0.0


def test_a_base_is_a_name_a_file_or_several() -> None:
    Path("inner").mkdir()
    write("inner/first.py", "_base_ = '../second.py'\nlog = dict(interval=3)\n")
    write("second.py", "_base_ = 'tiny_lora_sample_e2'\nlog = dict(interval=2)\ncheckpoint = dict(interval=2)\n")
    path = write("my.py", "_base_ = ['inner/first.py', 'tiny_full_custom_e9']\nrandomness = dict(seed=1)\n")

    found = loading.load(path)

    assert value_of(found, "log.interval") == 3
    assert value_of(found, "checkpoint.interval") == 2
    assert value_of(found, "train_cfg.max_epochs") == 9
    assert value_of(found, "adapter.r") == 16
    assert found.origins["checkpoint.interval"].text == "inner/../second.py:3"
    assert found.name == "my"


def test_a_file_without_base_stands_on_the_defaults() -> None:
    found = loading.load(write("my.py", "model = dict(path='a/b')\n"))

    assert value_of(found, "optim_wrapper.optimizer.lr") == 2e-5
    assert value_of(found, "model.path") == "a/b"


@pytest.mark.parametrize("name", ["./my.py", "my.py"])
def test_files_in_a_circle_are_refused(name: str) -> None:
    write("my.py", "_base_ = './other.py'\n")
    write("other.py", "_base_ = './my.py'\n")

    with refused(RecipeError, "other.py", 8):
        loading.load(name)


def test_a_base_that_is_not_there_is_refused() -> None:
    with refused(RecipeError, None, "no.py"):
        loading.load(write("my.py", "_base_ = './no.py'"))
    with refused(RecipeError, None, "tiny_full_sample_e3"):
        loading.load(write("my.py", "_base_ = 'tiny_ful_sample_e3'"))


@pytest.mark.parametrize(
    ("key", "hint"),
    [("optim_wraper", "Did you mean 'optim_wrapper'?"), ("lr", "Known: adapter, "), ("deep_speed", "'deepspeed'")],
)
def test_a_top_level_name_that_nothing_uses_is_refused(key: str, hint: str) -> None:
    with refused(RecipeError, "./my.py:2") as caught:
        loading.load(write("my.py", f"_base_ = 'tiny_full_sample'\n{key} = 1e-4\n"))

    assert caught.value.what == f"no key {key!r}"
    assert hint in (caught.value.fix or "")


@pytest.mark.parametrize(
    ("text", "line", "values"),
    [
        ("optim_wrapper = dict(\n    optimizer=dict(\n        lrr=1e-4,\n    ),\n)\n", 3, ("'lr'",)),
        ("_base_ = 'tiny_full_sample'\nadapter = dict(r=8)\n", 2, ("adapter.lora_alpha",)),
        ("_base_ = 'tiny_full_sample'\nparam_scheduler = dict(warmup_ratio=0.1, warmup_steps=10)", 2, ()),
        *((f"log = dict(interval=1)\n_base_ = {base}\n", 2, ()) for base in ("None", "3", "[3]", "{'a': 'tiny'}")),
    ],
    ids=["a key that is not there", "a key that is missing", "two warm-ups", *("a base that is no name",) * 4],
)
def test_what_is_wrong_in_a_file_is_refused_with_its_line(text: str, line: int, values: tuple[str, ...]) -> None:
    with refused(RecipeError, f"my.py:{line}", *values):
        loading.load(write("my.py", text))


def test_model_takes_the_facts_of_a_local_folder() -> None:
    Path("model").mkdir()
    write("model/config.json", json.dumps(FACTS))

    found = loaded("qwen3_8b_full_custom_e1", model="./model")

    assert found.values["architecture"] == FACTS
    origin = found.origins["architecture.hidden_size"]
    assert origin == Origin(
        Place(Kind.DERIVED, "./model/config.json"),
        (Overridden(4096, Place(Kind.PACKAGE, "configs/models/qwen3_8b.py", 7)),),
    )


def test_model_finds_a_folder_below_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("model").mkdir()
    write("model/config.json", json.dumps(FACTS))

    assert loaded("tiny_full_custom_e1", model="~/model").values["architecture"] == FACTS


def test_model_takes_the_facts_of_a_hub_id_that_a_part_knows() -> None:
    found = loaded("tiny_full_custom_e1", model="Qwen/Qwen3-8B")

    assert found.config.architecture == loading.load("qwen3_8b_full_custom_e1").config.architecture
    assert found.origins["architecture.hidden_size"].text == "configs/models/qwen3_8b.py"


@pytest.mark.parametrize("path", ["nobody/knows", "./not_there", "~nobody-of-this-name/x"])
def test_model_that_nothing_is_known_of_leaves_no_facts(path: str) -> None:
    found = loaded("qwen3_8b_full_custom_e1", model=path)

    assert found.config.architecture is None
    assert found.origins["architecture"].text == "unknown model"


def test_model_resets_the_revision() -> None:
    path = write("my.py", "_base_ = 'tiny_full_custom_e1'\nmodel = dict(revision='v1', attn_implementation='eager')\n")

    found = loaded(path, model="a/b")

    assert (found.config.model.path, found.config.model.revision) == ("a/b", None)
    assert found.config.model.attn_implementation == "eager"


@pytest.mark.parametrize("as_file", [True, False])
def test_a_model_path_in_a_file_or_by_set_counts_like_the_flag(as_file: bool) -> None:
    path = write("my.py", "_base_ = 'tiny_full_custom_e1'\nmodel = dict(path='Qwen/Qwen3-8B')\n")

    found = loading.load(path) if as_file else loaded("tiny_full_custom_e1", "model.path=Qwen/Qwen3-8B")

    assert value_of(found, "architecture.hidden_size") == 4096


def test_facts_that_stand_beside_a_path_are_kept() -> None:
    text = f"_base_ = 'tiny_full_custom_e1'\nmodel = dict(path='a/b')\narchitecture = {FACTS}\n"

    assert loading.load(write("my.py", text)).values["architecture"] == FACTS


def test_one_fact_can_be_changed_after_the_model() -> None:
    found = loaded("tiny_full_custom_e1", "num_hidden_layers=2", model="Qwen/Qwen3-8B")

    assert value_of(found, "architecture.num_hidden_layers") == 2
    assert value_of(found, "architecture.hidden_size") == 4096


def test_facts_that_do_not_fit_name_the_config_they_come_from() -> None:
    Path("model").mkdir()
    write("model/config.json", json.dumps({**FACTS, "vocab_size": "many"}))

    with refused(ModelError, "config.json", "vocab_size"):
        loaded("tiny_full_custom_e1", model="./model")


def test_data_resets_what_belongs_to_the_old_data() -> None:
    found = loaded("tiny_full_sample_e1", data="my.jsonl")

    dataset = found.config.train_dataloader.dataset
    assert (dataset.path, dataset.format, dataset.split, dataset.name) == ("my.jsonl", None, "train", None)
    assert dataset.max_length == 256
    assert found.config.val_dataloader is None
    assert found.origins["train_dataloader.dataset.format"].text == "--data my.jsonl"
    assert found.origins["val_dataloader"].text == "--data my.jsonl"


def test_seed_is_the_one_seed() -> None:
    found = loaded("tiny_full_sample_e1", seed=0)

    assert found.config.randomness.seed == 0
    origin = found.origins["randomness.seed"]
    assert origin == Origin(Place(Kind.FLAG, "--seed 0"), (Overridden(42, origin.overridden[0].place),))


def test_set_wins_over_the_flags() -> None:
    found = loaded("tiny_full_sample_e1", "model.path=d", "seed=2", model="a/b", data="c.jsonl", seed=1)

    assert (found.config.model.path, found.config.randomness.seed) == ("d", 2)


@pytest.mark.parametrize("flag", ["model", "data"])
@pytest.mark.parametrize("path", ["\udcff", "a\0b"])
def test_a_path_that_is_no_text_is_refused(flag: str, path: str) -> None:
    with refused(RecipeError, f"--{flag}"):
        Overrides(**{flag: path})  # type: ignore[arg-type]


@each(catalog.names("datasets"), every=4)
def test_a_standalone_file_is_the_same_recipe_with_every_comment_of_the_defaults(dataset: str) -> None:
    comments = [line for line in catalog.BASE.read_text(encoding="utf-8").splitlines() if line.lstrip().startswith("#")]

    models, methods = catalog.names("models"), catalog.names("methods")
    index = catalog.names("datasets").index(dataset)
    whole = loading.load(f"{models[7 * index % len(models)]}_{methods[index % len(methods)]}_{dataset}_e{index + 1}")
    text = whole.standalone()

    again = loading.load(write("whole.py", text))
    assert again.config == whole.config
    assert again.values == whole.values
    assert [comment for comment in comments if comment not in text.splitlines()] == []
    assert "_base_ =" not in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_standalone_file_keeps_whatever_was_overridden() -> None:
    strange = "a \"b\" \\ 'c' {{x}}\n\t#é🙂"
    pairs = ["clip_grad=none", "val_dataloader=none", "deepspeed={'class': {'a b': [1, None, True]}}", "betas=[0, 0.5]"]
    pairs += [f"model.path={strange}", "trackers=wandb", "target_modules=[q_proj]", "lr=1e-300"]
    whole = loaded("tiny_lora_sample_e1", *pairs)

    again = loading.load(write("whole.py", whole.standalone(" Note.")))

    assert again.config == whole.config
    assert again.config.model.path == strange


def test_a_standalone_file_says_what_it_is() -> None:
    text = loading.load("tiny_full_sample_e1").standalone(" Train it.")

    assert text.splitlines()[0] == '"""tiny_full_sample_e1: one standalone recipe. Train it."""'


def test_anchored_makes_what_is_here_absolute_and_leaves_the_rest(tmp_path: Path) -> None:
    Path("model").mkdir()
    write("model/config.json", json.dumps(FACTS))
    write("my.jsonl", "{}\n")
    write("my.jinja", "")
    own = loaded("tiny_full_sample_e1", "chat_template=my.jinja", model="model", data="./my.jsonl")

    here = loading.anchored(own, "deepspeed_zero2").config
    hub = loading.anchored(loading.load("qwen3_8b_full_sample_e1"), {"zero_optimization": {"stage": 1}}).config

    assert here.model.path == str(tmp_path / "model")
    assert here.model.chat_template == str(tmp_path / "my.jinja")
    assert here.train_dataloader.dataset.path == str(tmp_path / "my.jsonl")
    assert here.deepspeed == "deepspeed_zero2"
    assert hub.model.path == "Qwen/Qwen3-8B"
    assert hub.train_dataloader.dataset.path == "package:sample/train.jsonl"
    assert hub.deepspeed == {"zero_optimization": {"stage": 1}}


def test_code_is_refused_with_its_line_and_run_only_when_it_is_allowed() -> None:
    path = write(
        "my.py", "import os\n\nPath = os.path\nrandomness = dict(seed=len(os.sep))\ntrain_cfg = dict(max_steps=7)"
    )

    with refused(RecipeError, "my.py:1", "import", "--allow-code"):
        loading.load(path)
    found = loading.load(path, allow_code=True)

    assert (found.config.randomness.seed, found.config.train_cfg.max_steps) == (1, 7)
    assert found.origins["randomness.seed"].text == "./my.py"


def test_allow_code_takes_the_bases_of_mmengine() -> None:
    write("first.py", "randomness = dict(seed=5)\nlog = dict(interval=3)\n")
    text = (
        "from mmengine.config import read_base\nwith read_base():\n    from .first import *\nlog.update(interval=4)\n"
    )

    found = loading.load(write("my.py", text), allow_code=True)

    assert (found.config.randomness.seed, found.config.log.interval) == (5, 4)


def test_allow_code_waits_where_another_process_has_not_yet_written_the_cache_of_a_library(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", "import yapf"], env=environment, check=True)
    (cache,) = tmp_path.glob("YAPF/*/PatternGrammar*")
    (tmp_path / "whole").write_bytes(cache.read_bytes())
    cache.write_bytes(b"")
    # The other process ends its writing while this one waits.
    code = """
import pathlib, sys, time
time.sleep = lambda _: pathlib.Path(sys.argv[1]).write_bytes(pathlib.Path(sys.argv[2]).read_bytes())
from tuner.recipes.code_file import mmengine_config
print(mmengine_config().__name__)
"""

    child = [sys.executable, "-c", code, str(cache), str(tmp_path / "whole")]
    done = subprocess.run(child, env=environment, capture_output=True, text=True, check=False)

    assert done.stdout == "Config\n", done.stderr


def test_allow_code_reads_data_as_data() -> None:
    path = write("my.py", "_base_ = 'tiny_lora_sample_e1'\nlog = dict(interval=3)\n")

    assert loading.load(path, allow_code=True).config == loading.load(path).config
    with refused(RecipeError, "my.py:1", "leg"):
        loading.load(write("my.py", "leg = 1"), allow_code=True)


def test_code_with_a_name_that_is_nearly_a_key_is_refused() -> None:
    with refused(RecipeError, "my.py", "optim_wraper", "optim_wrapper"):
        loading.load(write("my.py", "import os\noptim_wraper = dict(a=os.sep)\n"), allow_code=True)


@pytest.mark.parametrize(
    "code", ["import os\nx = (", "import os\n_base_ = 'tiny_full_sample'", "_base_ = './no.py'\nx = f()"]
)
def test_code_that_mmengine_cannot_read_is_one_message(code: str) -> None:
    with pytest.raises(RecipeError):
        loading.load(write("my.py", code), allow_code=True)


def test_a_mistake_of_the_code_itself_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        loading.load(write("my.py", "import os\nx = 1 / 0"), allow_code=True)


def test_the_code_of_a_model_on_the_hub_runs_at_one_commit_alone() -> None:
    def check(revision: str) -> None:
        pairs = ("trust_remote_code=True", f"revision={revision}", "model.path=acme/mine")
        path_checks.check_model(loaded("tiny_full_custom_e1", *pairs).config)

    check(COMMIT)
    for revision in ("main", "none", COMMIT[:-1], COMMIT[:-1] + "g", COMMIT.upper()):
        with refused(ModelError, "model.revision", 40):
            check(revision)


def test_quantized_weights_without_an_adapter_are_refused_where_it_was_taken_away() -> None:
    with refused(RecipeError, "--set adapter=none") as caught:
        loaded("tiny_qlora_sample_e1", "adapter=none")

    assert caught.value.what.startswith("adapter = None: quantized weights cannot be trained")


WRONG: tuple[tuple[str, str, str, int], ...] = (
    ("model = dict(path=3)", "model.path", "3", 2),
    ("optim_wrapper = dict(\n    optimizer=dict(lr='x'))", "optim_wrapper.optimizer.lr", "'x'", 3),
    ("optim_wrapper = dict(optimizer=dict(betas=(0.9, 2)))", "optim_wrapper.optimizer.betas", "2", 2),
    ("train_cfg = None", "train_cfg", "None", 2),
    ("adapter = dict(r=1, lora_alpha=1,\n    modules_to_save=[3])", "adapter.modules_to_save", "3", 3),
    ("deepspeed = []", "deepspeed", "[]", 2),
    ("model = 'tiny'", "model", "'tiny'", 2),
    ("quantization = dict()\nadapter = None", "adapter", "None", 3),
    ("architecture = dict(model_type='llama')\nrandomness = dict(seed=-1)", "randomness.seed", "-1", 3),
    ("model = dict(path='" + "x" * 200 + "', revision=1)", "model.revision", "1", 2),
)


@pytest.mark.parametrize(("text", "key", "value", "line"), WRONG, ids=lambda item: str(item)[:40])
def test_a_value_that_does_not_fit_is_refused_with_key_value_and_line(
    text: str, key: str, value: str, line: int
) -> None:
    with pytest.raises(RecipeError) as caught:
        loading.load(write("my.py", f"_base_ = 'tiny_full_sample'\n{text}\n"))

    said = str(caught.value)
    assert f"{key} = {value}: " in said
    assert f"./my.py:{line}: {key} = " in said


def test_several_mistakes_are_all_told_each_with_its_place() -> None:
    with pytest.raises(RecipeError) as caught:
        loaded("tiny_lora_sample_e1", "lr=x", "max_epochs=0", "adapter.r=0")

    lines = str(caught.value).splitlines()
    assert len(lines) == 3
    assert all(line.startswith("bad-recipe: ") for line in lines)
    assert {line.split(": ")[1] for line in lines} == {"--set lr=x", "--set max_epochs=0", "--set adapter.r=0"}


def test_a_long_value_is_cut_in_messages() -> None:
    with pytest.raises(RecipeError) as caught:
        loading.load(write("my.py", f"randomness = dict(seed='{'x' * 5000}')"))

    assert len(str(caught.value)) < 300


def test_shipped_recipes_are_small_deltas() -> None:
    for name in catalog.names("recipes"):
        path = catalog.part_file("recipes", name).path
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 25
        assert "_base_" in read_file(path).values
        loading.load(name)


WARM_UPS = [
    ((), (0.05, None)),
    (("warmup_steps=100",), (0.0, 100)),
    (("warmup_steps=100", "warmup_ratio=0.1"), (0.1, None)),
    (("warmup_ratio=0.1", "warmup_steps=100"), (0.0, 100)),
    (("warmup_steps=0",), (0.0, 0)),
]


@pytest.mark.parametrize(("changes", "warm_up"), WARM_UPS)
def test_the_later_of_two_warm_ups_counts(changes: tuple[str, ...], warm_up: tuple[float, int | None]) -> None:
    schedule = loaded("tiny_full_sample", *changes).config.param_scheduler

    assert (schedule.warmup_ratio, schedule.warmup_steps) == warm_up
    assert schedule.warmup == (warm_up[0] if warm_up[1] is None else warm_up[1])


SCHEDULES = [
    # The type, its options, and the key that is refused
    ("cosine", (), None),
    ("cosine", ("min_lr_ratio=0.1",), None),
    ("linear", ("min_lr_ratio=0.1",), "min_lr_ratio"),
    ("linear", ("num_cycles=3",), "num_cycles"),
    ("cosine", ("decay_ratio=0.1",), "decay_ratio"),
    ("cosine_with_restarts", (), "num_cycles"),
    ("cosine_with_restarts", ("num_cycles=1",), "num_cycles"),
    ("cosine_with_restarts", ("num_cycles=3",), None),
    ("cosine_with_restarts", ("num_cycles=3", "min_lr_ratio=0.1"), "min_lr_ratio"),
    ("warmup_stable_decay", (), "decay_ratio"),
    ("warmup_stable_decay", ("decay_ratio=0",), "decay_ratio"),
    ("warmup_stable_decay", ("decay_ratio=0.1", "min_lr_ratio=0.1"), None),
    ("warmup_stable_decay", ("decay_ratio=0.8", "warmup_ratio=0.3"), "decay_ratio"),
    ("warmup_stable_decay", ("decay_ratio=0.1", "decay_type=1-sqrt"), None),
    ("warmup_stable_decay", ("decay_ratio=0.1", "decay_type=steep"), "decay_type"),
    ("cosine", ("decay_type=linear",), "decay_type"),
    ("inverse_sqrt", ("warmup_steps=10",), None),
]


@pytest.mark.parametrize(("kind", "options", "key"), SCHEDULES)
def test_an_option_that_a_schedule_does_not_have_or_lacks_is_refused_with_its_key(
    kind: str, options: tuple[str, ...], key: str | None
) -> None:
    with nullcontext() if key is None else pytest.raises(RecipeError, match=rf"param_scheduler\.{key}"):
        loaded("tiny_full_sample", f"param_scheduler.type={kind}", *options)


@pytest.mark.parametrize(("interval", "steps", "expected"), [("0.1", 95, 10), ("0.5", 8, 4), ("7", 3, 7)])
def test_an_interval_is_a_number_of_steps_or_a_share_of_all_as_in_transformers(
    interval: str, steps: int, expected: int
) -> None:
    checkpoint = loaded("tiny_full_sample", f"checkpoint.interval={interval}").config.checkpoint

    assert (checkpoint.interval, checkpoint.interval_of(steps)) == (float(interval), expected)


@pytest.mark.parametrize("interval", ["0", "-1", "1.5"])
def test_an_interval_that_is_neither_is_refused(interval: str) -> None:
    with pytest.raises(RecipeError):
        loaded("tiny_full_sample", f"checkpoint.interval={interval}")
