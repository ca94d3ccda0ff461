"""A path is a file here, a file of the package or an id on the hub; what is not there is refused with what is near."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub.utils import validate_repo_id
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner import assets, paths
from tuner.errors import DataError, MachineError, ModelError, RecipeError, TunerError
from tuner.recipes import loading, path_checks
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig


def config_with(model: str | None = None, data: str | None = None) -> RecipeConfig:
    return loading.load("tiny_full_sample_e1", Overrides(model=model, data=data)).config


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "gpt2", "google/gemma-2b-it", "n" * 96])
def test_an_id_on_the_hub_is_not_local(path: str) -> None:
    assert paths.local(path) is None


@pytest.mark.parametrize(
    "path",
    [
        "./x",
        "../x",
        "/x",
        ".",
        "x.jsonl",
        "a/b.parquet",
        "a/b/c",
        "a b",
        "wörld/a b",
        "~nobody-of-this-name/x",
        "a//b",
        "n" * 300,
        "0.",
        "0..0",
        "a/b--c",
        "a-/b",
        "a/b.git",
    ],
)
def test_what_cannot_be_an_id_is_local(path: str) -> None:
    assert paths.local(path) == Path(path)


@settings(max_examples=200)
@given(st.text("aB0-._/", min_size=1, max_size=8))
def test_what_is_taken_for_an_id_is_one_to_the_hubs_own_library(path: str) -> None:
    if paths.is_hub_id(path):
        validate_repo_id(path)  # raises


def test_the_home_folder_is_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    assert paths.local("~/model") == tmp_path / "model"


def test_a_folder_that_is_there_wins_over_an_id_of_its_name(here: Path) -> None:
    (here / "org" / "name").mkdir(parents=True)

    assert paths.local("org/name") == Path("org/name")
    assert paths.local("org/other") is None


def test_a_path_of_the_package_is_its_file() -> None:
    found = paths.local("package:sample/train.jsonl")

    assert found is not None
    assert found.is_file()


@pytest.mark.parametrize("path", ["package:missing", "package:../base.py", "package:/etc/passwd", "package:a\0b"])
def test_the_package_has_nothing_outside_its_assets(path: str) -> None:
    with pytest.raises(RecipeError, match="not part of"):
        paths.local(path)


@given(st.text(max_size=300))
@settings(deadline=None)
def test_any_text_is_an_id_or_a_path_or_refused(text: str) -> None:
    try:
        assert isinstance(paths.local(text), Path | None)
    except RecipeError:
        assert text.startswith(assets.ASSET)


def test_a_model_of_the_package_and_one_of_the_hub_pass() -> None:
    path_checks.check_model(config_with())
    path_checks.check_model(config_with("Qwen/Qwen3-8B"))


def test_a_model_that_is_not_there_is_refused_with_the_nearest_folder(tmp_path: Path) -> None:
    (tmp_path / "my_model").mkdir()

    with pytest.raises(ModelError, match=r"model\.path: .*does not exist\. Did you mean '.*/my_model'"):
        path_checks.check_model(config_with(str(tmp_path / "my_modl")))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")

    with pytest.raises(ModelError, match="is not a folder"):
        path_checks.check_model(config_with(str(tmp_path / "model.safetensors")))


def test_a_folder_without_config_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        path_checks.check_model(config_with(str(tmp_path)))

    (tmp_path / "config.json").write_text("{}")
    path_checks.check_model(config_with(str(tmp_path)))


def test_a_model_must_be_named() -> None:
    pairs = [("--set", "model.path=none")]

    with pytest.raises(ModelError, match=r"no model is given.*--model"):
        path_checks.check_model(loading.load("tiny_full_sample_e1", Overrides(pairs=pairs)).config)


@pytest.mark.parametrize(
    ("path", "relative"),
    [("Qwen/Qwen-7B", " Or use a related model that needs none: qwen1_5_7b_chat."), ("baichuan-inc/Baichuan-7B", "")],
)
def test_a_model_that_is_only_code_is_refused_with_what_to_set(path: str, relative: str) -> None:
    config = config_with(path)
    only_code = config.model_copy(update={"model": config.model.model_copy(update={"remote_code": True})})

    with pytest.raises(ModelError) as refusal:
        path_checks.check_model(only_code)

    trust = "--trust-remote-code --set model.revision=COMMIT"
    assert f"transformers has no architecture for {path!r}" in str(refusal.value)
    assert str(refusal.value).endswith(f"huggingface.co/{path}/tree/main, then add {trust}.{relative}")


def test_data_of_the_package_and_of_the_hub_pass() -> None:
    path_checks.check_data(config_with())
    path_checks.check_data(config_with(data="tatsu-lab/alpaca"))


def test_data_must_be_named() -> None:
    with pytest.raises(DataError, match=r"train_dataloader\.dataset\.path: no data set is given\..*--data"):
        path_checks.check_data(loading.load("tiny_full_custom_e1").config)


def test_data_that_is_not_there_is_refused_with_the_nearest_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")

    with pytest.raises(DataError, match=r"Did you mean '.*/train\.jsonl'"):
        path_checks.check_data(config_with(data=str(tmp_path / "tran.jsonl")))


def test_an_empty_file_or_folder_is_no_data(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "folder").mkdir()

    with pytest.raises(DataError, match=r"the data file '.*' is empty"):
        path_checks.check_data(config_with(data=str(tmp_path / "train.jsonl")))
    with pytest.raises(DataError, match=r"the data folder '.*' is empty"):
        path_checks.check_data(config_with(data=str(tmp_path / "folder")))


def test_validation_data_is_checked_too(tmp_path: Path) -> None:
    pairs = [("--set", f"val_dataloader.dataset.path={tmp_path}/no.jsonl")]

    with pytest.raises(DataError, match=r"val_dataloader\.dataset\.path: "):
        path_checks.check_data(loading.load("tiny_full_sample_e1", Overrides(pairs=pairs)).config)


@pytest.mark.parametrize("path", ["/" + "n" * 300, "~nobody-of-this-name/x", "/dev/null/x", "./a b\n", ".", "//", " "])
def test_a_strange_path_is_refused_in_one_message(path: str) -> None:
    config = config_with(path, path)

    for check in (path_checks.check_model, path_checks.check_data):
        try:
            check(config)
        except TunerError as error:
            assert repr(path)[1:-1] in str(error)
        else:
            assert check is path_checks.check_data
            assert Path(path).is_dir()


@contextmanager
def ordinary_user() -> Iterator[None]:
    """Be nobody for a while where this is root, who reads everything."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Give a folder that everybody may enter."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield folder
        for path in folder.rglob("*"):
            path.chmod(0o755)


def closed(path: Path, content: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0)
    return path


def test_data_that_may_not_be_read_is_not_told_as_missing(shared: Path) -> None:
    file = closed(shared / "rows.jsonl")

    with ordinary_user(), pytest.raises(DataError) as caught:
        path_checks.check_data(config_with(data=str(file)))

    assert f"no permission to read '{file}' (mode 0000, owner {os.getuid()}" in caught.value.what


@pytest.mark.parametrize("name", ["", "rows.jsonl", "*.jsonl"])
def test_data_in_a_folder_that_may_not_be_entered_is_told_with_the_folder(name: str, shared: Path) -> None:
    closed(shared / "data" / "rows.jsonl")
    (shared / "data").chmod(0)

    with ordinary_user(), pytest.raises(DataError) as caught:
        path_checks.check_data(config_with(data=f"{shared}/data/{name}"))

    assert f"'{shared}/data' (mode 0000" in caught.value.what
    assert "no permission to" in caught.value.what


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_with_a_file_that_may_not_be_read_is_told_with_the_file(name: str, shared: Path) -> None:
    (shared / "config.json").write_text("{}")
    file = closed(shared / name)

    with ordinary_user(), pytest.raises(ModelError, match="no permission to read") as caught:
        path_checks.check_model(config_with(model=str(shared)))

    assert str(file) in caught.value.what


def test_a_link_to_nothing_is_told_with_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("gone.jsonl")

    with pytest.raises(DataError, match=r"is a link to 'gone.jsonl', which does not exist") as caught:
        path_checks.check_data(config_with(data=str(tmp_path / "rows.jsonl")))

    assert "Did you mean" not in str(caught.value)


def test_a_folder_that_holds_half_a_disk_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_checks, "_MAX_ENTRIES", 20)
    for number in range(21):
        (tmp_path / f"{number % 3}").mkdir(exist_ok=True)
        (tmp_path / f"{number % 3}" / f"{number}.jsonl").touch()

    with pytest.raises(DataError, match="has more than 20 files and folders"):
        path_checks.check_data(config_with(data=str(tmp_path)))
    monkeypatch.setattr(path_checks, "_MAX_ENTRIES", 24)
    path_checks.check_data(config_with(data=str(tmp_path)))


def test_the_whole_file_system_is_refused_at_once() -> None:
    with pytest.raises(DataError, match="has more than 10,000"):
        path_checks.check_data(config_with(data="/usr"))


@pytest.mark.parametrize("whole", [True, False], ids=["all facts", "half of them"])
def test_layers_without_end_are_refused_before_they_are_counted(whole: bool, tmp_path: Path) -> None:
    facts = {"model_type": "llama", "num_hidden_layers": 10**12, "hidden_size": 64, "num_attention_heads": 4}
    more = {"intermediate_size": 128, "vocab_size": 1_000, "max_position_embeddings": 2_048}
    (tmp_path / "config.json").write_text(json.dumps(facts | (more if whole else {})))

    with pytest.raises((ModelError, RecipeError), match=r"num_hidden_layers = 1000000000000"):
        path_checks.check_model(config_with(model=str(tmp_path)))


def test_no_home_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 54321)  # a user that is in no list

    with pytest.raises(MachineError, match="there is no home folder"):
        paths.home()
