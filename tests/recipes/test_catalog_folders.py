"""Own parts compose with the package's, the first folder wins and says so, and they are trusted as a user's file is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.recipes.loaded import loaded
from tests.refused import refused
from tuner.errors import RecipeError, TunerError, UsageError
from tuner.recipes import catalog, loading, trust
from tuner.recipes.merging import Kind
from tuner.recipes.overrides import Overrides

LORA = "adapter = dict(r=4, lora_alpha=8, lora_dropout=0.0, target_modules='all-linear')\n"
ROWS = 'train_dataloader = dict(dataset=dict(path="{path}", format="messages"))\n'


@pytest.fixture(autouse=True)
def without_the_users_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv(catalog.VARIABLE, raising=False)


def part(kind: str, name: str, text: str, folder: Path | str = catalog.HERE, suffix: str = ".py") -> Path:
    """Write a part; its own first line is for `tuner list`."""
    file = Path(folder, kind, f"{name}{suffix}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def test_own_parts_of_every_kind_compose_with_each_other_and_with_the_packages() -> None:
    part("models", "acme_1b", 'model = dict(path="acme/acme-1b", chat_template="acme")\narchitecture = "tiny"\n')
    part("methods", "small", LORA)
    part("datasets", "tickets", ROWS.format(path="tickets.jsonl"))
    part("chat_templates", "acme", "{% for m in messages %}{{ m.content }}{% endfor %}", suffix=".jinja")
    part("recipes", "nightly", '_base_ = "acme_1b_small_tickets_e2"\nrandomness = dict(seed=7)\n')

    mine, mixed = loading.load("nightly"), loading.load("tiny_dpo_lora_tickets_e1").config

    assert (mine.config.model.path, mine.config.adapter and mine.config.adapter.r) == ("acme/acme-1b", 4)
    assert (mine.config.train_cfg.max_epochs, mine.config.randomness.seed) == (2, 7)
    assert mine.config.architecture is not None and mine.config.architecture.hidden_size == 128
    assert mine.origins["adapter.r"].text == "tuner_configs/methods/small.py:1"
    assert (mixed.objective.type, mixed.train_dataloader.dataset.path) == ("dpo", "tickets.jsonl")
    assert loading.load("acme_1b_qlora_alpaca_e1").config.quantization is not None


def test_the_first_folder_wins_and_says_once_whom_it_shadows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, variable = tmp_path / "given", tmp_path / "variable"
    for folder in (given, variable, catalog.HERE):
        part("datasets", "alpaca", ROWS.format(path=f"{folder}.jsonl"), folder)
    part("datasets", "other", ROWS.format(path="other.jsonl"), variable)
    monkeypatch.setenv(catalog.VARIABLE, f"{variable}{os.pathsep}{catalog.HERE}{os.pathsep}{variable}")

    def path() -> str | None:
        return loading.load("tiny_full_alpaca_e1").config.train_dataloader.dataset.path

    with catalog.using(given):
        first = loading.load("tiny_full_alpaca_e1")
        assert loading.load("tiny_full_other_e1").warnings == ()
    assert first.config.train_dataloader.dataset.path == f"{given}.jsonl"
    told = f"{given}/datasets/alpaca.py shadows the dataset 'alpaca' of {variable} and tuner_configs and tuner."
    assert first.warnings == (told,)
    assert path() == f"{variable}.jsonl"
    monkeypatch.delenv(catalog.VARIABLE)
    assert path() == "tuner_configs.jsonl"
    (Path(catalog.HERE) / "datasets" / "alpaca.py").unlink()
    assert path() == "tatsu-lab/alpaca"


def test_a_catalog_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(catalog.VARIABLE, "nowhere")

    with refused(UsageError, catalog.VARIABLE):
        loading.load("tiny_full_sample_e1")


def installed(site: Path, module: str = "acme_parts.configs") -> Path:
    """Lay out an installed package whose entry point names `module`, and whose code must not run."""
    info = site / "acme_parts-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-parts\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tuner.catalog]\nacme = {module}\n")
    package = site / "acme_parts"
    (package / "configs").mkdir(parents=True)
    for folder in (package, package / "configs"):
        (folder / "__init__.py").write_text("raise SystemExit('imported')\n")
    return package / "configs"


def test_parts_of_an_installed_package_are_found_without_running_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = installed(tmp_path / "site")
    part("datasets", "alpaca", ROWS.format(path="acme.jsonl"), folder)
    monkeypatch.syspath_prepend(tmp_path / "site")

    found = loading.load("tiny_full_alpaca_e1")

    assert found.config.train_dataloader.dataset.path == "acme.jsonl"
    assert found.warnings == (f"{folder}/datasets/alpaca.py shadows the dataset 'alpaca' of tuner.",)
    assert catalog.part_file("datasets", "alpaca").folder.origin == "package acme-parts"
    assert "acme_parts" not in sys.modules


def test_a_package_without_the_folder_that_it_names_is_told_and_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(tmp_path / "site", "acme_parts.no_configs")
    monkeypatch.syspath_prepend(tmp_path / "site")

    assert loading.load("tiny_full_sample_e1").warnings == ()
    assert [error.what for error in catalog.misplaced()] == [
        "the entry point 'acme' of tuner.catalog points to 'acme_parts.no_configs', and that folder does not exist"
    ]


def test_a_part_of_the_package_has_the_facts_of_the_package() -> None:
    facts = "model_type='llama', num_hidden_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=8"
    text = f"architecture = dict({facts}, tie_word_embeddings=True, max_position_embeddings=8)\n"
    part("models", "llama3_8b", text)

    found = loading.load("llama3_8b_instruct_full_alpaca_e1").config.architecture

    assert found is not None and found.hidden_size == 4096


def test_a_mixture_says_which_of_its_data_sets_shadows_another() -> None:
    part("datasets", "alpaca", ROWS.format(path="mine.jsonl"))

    found = loading.load("tiny_full_alpaca_enzh_e1")

    assert found.warnings == ("tuner_configs/datasets/alpaca.py shadows the dataset 'alpaca' of tuner.",)


# Names


def test_a_name_that_own_parts_make_ambiguous_is_refused_with_both_readings() -> None:
    part("methods", "dpo", LORA)
    part("datasets", "lora_alpaca", ROWS.format(path="x.jsonl"))

    with pytest.raises(RecipeError) as caught:
        loading.load("tiny_dpo_lora_alpaca_e1")

    readings = ("tiny + sft dpo + lora_alpaca", "tiny + dpo lora + alpaca")
    assert all(reading in caught.value.what for reading in readings)


def test_recipes_in_a_circle_are_refused() -> None:
    part("recipes", "one", '_base_ = "two"\n')
    part("recipes", "two", '_base_ = "one"\n')

    with refused(RecipeError, "two.py", 8) as caught:
        loading.load("one")

    assert caught.value.fix == "Check for a cycle."


def test_an_own_recipe_of_a_packages_name_builds_on_what_that_name_is_composed_of() -> None:
    part("recipes", "tiny_full_sample", '_base_ = "tiny_full_sample_e1"\nrandomness = dict(seed=7)\n')

    found = loading.load("tiny_full_sample")

    assert (found.config.randomness.seed, found.config.train_cfg.max_epochs) == (7, 1)
    assert found.warnings[0].startswith("tuner_configs/recipes/tiny_full_sample.py shadows the recipe")


# Trust


FUNCTION = 'train_dataloader = dict(dataset=dict(path="x.jsonl", format="subprocess:Popen"))\n'


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("tiny_full_evil_e1", ()),
        ("tiny_full_alpaca_e1", ("train_dataloader.dataset.mixture=[dict(part='evil')]",)),
        ("tiny_full_alpaca_e1", ("train_dataloader.dataset.mixture=[dict(part='outer')]",)),
    ],
)
def test_an_own_part_names_no_function_of_an_installed_package_unasked(name: str, sets: tuple[str, ...]) -> None:
    evil = part("datasets", "evil", FUNCTION)
    part("datasets", "outer", "train_dataloader = dict(dataset=dict(mixture=[dict(part='evil')]))\n")
    found = loaded(name, *sets)

    with refused(RecipeError, "evil.py:1") as caught:
        trust.refuse(found)

    assert str(caught.value.where).startswith(str(evil))


def test_own_parts_are_files_of_the_users_wherever_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in (("one", installed(tmp_path / "site")), ("two", tmp_path / "two"), ("three", "tuner_configs")):
        part("methods", name, LORA, folder)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv(catalog.VARIABLE, str(tmp_path / "two"))

    for name in ("one", "two", "three"):
        assert loading.load(f"tiny_{name}_sample_e1").origins["adapter.r"].place.kind is Kind.FILE


def test_a_part_that_stands_for_one_of_the_package_by_its_path_is_named() -> None:
    path = "Qwen/Qwen3-8B"
    assert loaded(None, model=path).warnings == ()
    part("models", "mine", f'model = dict(path="{path}")\narchitecture = "tiny"\n')

    (warning,) = loaded(None, model=path).warnings

    assert "tuner_configs/models/mine.py shadows configs/models/qwen3_8b.py" in warning


def test_a_part_does_not_bring_trust_in_the_models_code() -> None:
    asks = f'model = dict(path="acme/acme-1b", revision="{"a" * 40}", trust_remote_code=True)\narchitecture = "tiny"\n'
    part("models", "acme_1b", asks)

    assert loaded(None, model="acme/acme-1b").config.model.trust_remote_code is False
    assert loading.load("acme_1b_lora_sample_e1").config.model.trust_remote_code is False
    assert loading.load("acme_1b_lora_sample_e1", allow_code=True).config.model.trust_remote_code is True
    assert loading.load(None, Overrides(model="acme/acme-1b"), allow_code=True).config.model.trust_remote_code is False


def test_a_part_that_holds_code_is_refused_with_its_line_and_not_run() -> None:
    part("datasets", "code", "import os\nos.mkdir('ran')\n")

    with refused(RecipeError, "tuner_configs/datasets/code.py:1"):
        loading.load("tiny_full_code_e1", allow_code=True)

    assert not Path("ran").exists()


# A recipe that lasts


def test_what_a_recipe_is_written_as_needs_no_catalog() -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    part("models", "acme_1b", 'model = dict(path="package:tiny", chat_template="acme")\narchitecture = "tiny"\n')
    template = part("chat_templates", "acme", text, suffix=".jinja")
    found = loading.load("acme_1b_lora_sample_e1")

    Path("copy.py").write_text(found.standalone())
    as_run = loading.anchored(found, "none").config.model.chat_template
    template.unlink()

    assert as_run == text
    copied = loading.load("./copy.py").config.model
    assert (copied.chat_template, catalog.chat_template(str(copied.chat_template))) == (text, text)


@pytest.mark.parametrize("kind", catalog.FOLDERS)
def test_any_bytes_in_an_own_part_are_one_message_and_hide_no_other(kind: str) -> None:
    suffix = {"chat_templates": ".jinja", "deepspeed_presets": ".json"}.get(kind, ".py")
    part(kind, "torn", "", suffix=suffix).write_bytes(b'\xff\xfe"""\x00')

    with pytest.raises(TunerError):
        loading.check_part(kind, "torn")
    assert catalog.summary(catalog.part_file(kind, "torn")) == ""
    assert catalog.part_named("Qwen/Qwen3-8B") == "qwen3_8b"
    assert loading.load("tiny_full_sample_e1").name == "tiny_full_sample_e1"
