"""Recipes in YAML and JSON: the same keys, the same result and the same errors as in Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.refused import refused
from tuner.errors import RecipeError, UsageError
from tuner.importers import tools
from tuner.recipes import loading, names, yaml_text
from tuner.recipes.names import NameKind
from tuner.recipes.recipe import Recipe
from tuner.recipes.yaml_text import MAX_DEPTH

PYTHON = """_base_ = 'tiny_lora_sample_e1'
train_dataloader = dict(dataset=dict(max_length=128))
optim_wrapper = dict(optimizer=dict(lr=1e-4, betas=(0.9, 0.95)))
adapter = dict(target_modules=['q_proj', 'v_proj'])
val_dataloader = None
log = dict(trackers=('tensorboard',))
train_cfg = dict(max_epochs=2)
"""
YAML = """# The same.
_base_: tiny_lora_sample_e1
train_dataloader:
  dataset: {max_length: 128}
optim_wrapper:
  optimizer: {lr: 1e-4, betas: [0.9, 0.95]}
adapter:
  target_modules: [q_proj, v_proj]
val_dataloader: null
log:
  trackers: [tensorboard]
train_cfg: {max_epochs: 2}
"""
JSON = """{
\t"_base_": "tiny_lora_sample_e1",
\t"train_dataloader": {"dataset": {"max_length": 128}},
\t"optim_wrapper": {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.95]}},
\t"adapter": {"target_modules": ["q_proj", "v_proj"]},
\t"val_dataloader": null,
\t"log": {"trackers": ["tensorboard"]},
\t"train_cfg": {"max_epochs": 2}
}
"""


def _loaded(name: str, text: str) -> Recipe:
    Path(name).write_text(text, encoding="utf-8")
    return loading.load(name)


def _refused(text: str, name: str = "my.yaml") -> str:
    with pytest.raises(RecipeError) as caught:
        _loaded(name, text)
    return str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("my.yaml", YAML), ("my.yml", YAML), ("my.json", JSON)])
def test_the_same_keys_are_the_same_recipe(name: str, text: str) -> None:
    in_python, here = _loaded("my.py", PYTHON), _loaded(name, text)

    assert here.values == in_python.values
    assert here.name == in_python.name == "my"
    assert here.origins["train_cfg.max_epochs"].text.startswith(f"{name}:")


def test_a_base_is_a_name_of_the_catalog_or_a_file_beside_it_in_any_of_the_forms() -> None:
    Path("bases").mkdir()
    Path("bases/a.py").write_text("_base_ = 'tiny_lora_sample_e1'\ntrain_cfg = dict(max_epochs=5)\n")
    Path("bases/b.json").write_text('{"_base_": "a.py", "randomness": {"seed": 7}}')
    Path("bases/c.yaml").write_text("_base_: b.json\nlog: {interval: 3}\n")

    config = _loaded("bases/d.py", "_base_ = ['c.yaml']\n").config

    assert (config.train_cfg.max_epochs, config.randomness.seed, config.log.interval) == (5, 7, 3)
    assert config.model.path == "package:tiny"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("_base_: tiny_lora_sample_e1\ntrain_cfg:\n  max_epoch: 2\n", "my.yaml:3: no key 'train_cfg.max_epoch'. Did"),
        ("_base_: tiny_lora_sample_e1\ntrain_confg: {max_epochs: 2}\n", "my.yaml:2: no key 'train_confg'. Did"),
        ("_base_: tiny_lora_sample_e1\ntrain_cfg: {max_epochs: two}\n", "my.yaml:2: train_cfg.max_epochs = 'two'"),
        ("_base_: tiny_lora_sample_e1\nmodel: {path: 3}\n", "my.yaml:2: model.path = 3: input should be a valid str"),
        ("_base_: tiny_lora_sample_e1\nmodel: {path: None}\n", "my.yaml:2: model.path: None is a text in YAML and JSO"),
        ("_base_: tiny_lora_sample_e1\nmodel: {path: a, path: b}\n", "my.yaml:2: the key 'path' appears twice"),
        ("_base_: tiny_lora_sample_e1\nlog: {interval: 1e30}\n", "my.yaml:2: log.interval: 1e+30 is out of range"),
        ('_base_: tiny_lora_sample_e1\nmodel: {path: "a\\0b"}\n', "my.yaml:2: model.path: a text with a NUL"),
        ("_base_: tiny_lora_sampel_e1\n", "no recipe 'tiny_lora_sampel_e1'. Did you mean 'tiny_lora_sample_e1'?"),
        ("_base_: tiny_lora_sample_e1\noptim_wrapper: {optimizer: {lr: .nan}}\n", "my.yaml:2: optim_wrapper.opti"),
        ("train_cfg: !!python/object/apply:os.system ['touch canary']\n", "my.yaml:1: the tag "),
        ("train_cfg: [\n", "my.yaml:2:1: not valid YAML"),
        ("modle: {path: x}\n", "my.yaml:1: no key 'modle'. Did you mean 'model'?"),
        ("model: {path: x}\nlearning_rate: 1e-4\n", "my.yaml:2: no key 'learning_rate'. It is called optim_wrapper"),
    ],
)
def test_a_mistake_is_told_with_its_line_and_the_nearest_key(text: str, says: str) -> None:
    assert says in _refused(text)
    assert not Path("canary").exists()


def test_aliases_that_grow_without_end_are_refused() -> None:
    bomb = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))

    assert "values, or nested deeper than" in _refused(f"_base_: tiny_lora_sample_e1\na0: &a0 [x, x]\n{bomb}")


@pytest.mark.parametrize(
    ("text", "last_line", "last_column"),
    [("a: " + "[" * 20_000, 1, 2 * MAX_DEPTH), ("a:\n" + "- x\n" * 20_000, 2 * 2_000, 8)],
    ids=["nested", "long"],
)
def test_more_than_a_config_holds_is_refused_before_all_of_it_is_read(
    text: str, last_line: int, last_column: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_text, "MAX_VALUES", 2_000)

    stopped_at = re.search(r"my\.yaml:(\d+):(\d+): not valid YAML", _refused(text))

    assert stopped_at
    assert (int(stopped_at[1]) <= last_line, int(stopped_at[2]) <= last_column) == (True, True)


def test_a_code_flag_runs_no_yaml() -> None:
    Path("my.yaml").write_text("_base_: tiny_lora_sample_e1\nmodel: {pth: 3}\n")

    with refused(RecipeError, "my.yaml:2"):
        loading.load("my.yaml", allow_code=True)


@pytest.mark.parametrize(
    ("text", "is_ours"),
    [
        ("model: {path: Qwen/Qwen3-8B}\n", True),
        ("_base_: qwen3_8b_lora_alpaca_e3\n", True),
        ("train_cfg: {max_epoch: 3}\noptim_wrapper: {optimizer: {lr: 1}}\n", True),
        ("model: {path: x\n", True),  # cannot be read: the error says where
        ("model: Qwen/Qwen3-8B\ntrain_type: lora\ndataset: [x]\n", False),
        ("model_name_or_path: x\nfinetuning_type: lora\ndeepspeed: ds.json\n", False),
        ("base_model: x\nadapter: lora\ndatasets: [{path: x}]\n", False),
        ("model: {_component_: torchtune.models.qwen3.qwen3_8b}\ntokenizer: {path: x}\n", False),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\n", False),
        ("zero_optimization: {stage: 2}\n", False),
    ],
)
def test_a_recipe_is_told_from_other_tools_files_by_its_keys(text: str, is_ours: bool) -> None:
    Path("my.yaml").write_text(text)

    assert (names.identify("my.yaml").kind is NameKind.RECIPE_FILE) is is_ours


def test_a_recipe_is_not_imported_as_another_tools_config() -> None:
    Path("my.yaml").write_text(YAML)

    with pytest.raises(
        UsageError, match=r"tuner import: my\.yaml is a recipe of tuner\. Train it: tuner train my\.yaml"
    ):
        tools.import_config(["my.yaml"])


def test_a_standalone_copy_in_yaml_is_the_same_recipe() -> None:
    whole = loading.load("qwen3_8b_qlora_alpaca_e1")

    assert _loaded("copy.yaml", whole.standalone_yaml()).values == whole.values
