"""The tiny model's folder: the same bytes always, whole or not there."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tuner.files import sha256
from tuner.models import load
from tuner.models.load import make_tiny

ASSETS = Path(__file__).parents[2] / "tuner" / "configs" / "assets" / "tiny"


def _materialized(number: int, folder: Path, meeting: Any, answers: Any) -> None:
    torch.set_num_threads(number)
    torch.manual_seed(number)
    meeting.wait(60)
    answers.put(make_tiny(ASSETS, folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(ASSETS, tmp_path_factory.mktemp("cache"))


def _bytes(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


def _shown(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


def _refuse(*_: object) -> None:
    raise AssertionError("weights were made again")


def test_plain_transformers_loads_model_and_tokenizer(folder: Path) -> None:
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert not any(report.values()), report
    assert model.dtype == torch.float32
    assert len(tokenizer) <= model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id
    assert not model.generation_config.do_sample


def test_weights_have_the_spread_that_the_config_names(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)

    weights = {name: weight for name, weight in model.named_parameters() if weight.ndim == 2}
    spreads = [float(weight.detach().std()) for weight in weights.values()]
    assert spreads == pytest.approx([model.config.initializer_range] * len(spreads), rel=0.05)
    assert all(bool((weight == 1).all()) for weight in model.parameters() if weight.ndim == 1)


def test_processes_that_meet_agree_to_the_byte_whatever_their_seed_and_threads(folder: Path, tmp_path: Path) -> None:
    forked = multiprocessing.get_context("fork")  # which have imported the libraries, and so meet
    meeting, answers = forked.Barrier(2), forked.SimpleQueue()
    children = [
        forked.Process(target=_materialized, args=(number, tmp_path, meeting, answers), daemon=True)
        for number in (1, 2)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)

    assert [child.exitcode for child in children] == [0, 0]
    assert [answers.get() for _ in children] == [tmp_path / folder.name] * 2
    assert _shown(tmp_path) == [tmp_path / folder.name]
    assert _bytes(tmp_path / folder.name) == _bytes(folder)


def test_the_global_random_state_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()

    make_tiny(ASSETS, tmp_path)

    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_call_makes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "save_file", _refuse)

    assert make_tiny(ASSETS, folder.parent) == folder


def test_the_loser_of_a_race_keeps_the_winners_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = load.save_file

    def lose(weights: Any, file: Path, **options: Any) -> None:
        write(weights, file, **options)
        shutil.copytree(file.parent, tmp_path / file.parent.name)
        (tmp_path / file.parent.name / "winner").touch()

    monkeypatch.setattr(load, "save_file", lose)
    folder = make_tiny(ASSETS, tmp_path)

    assert (folder / "winner").exists()
    assert _shown(tmp_path) == [folder]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(weights: Any, file: Path, **_: Any) -> None:
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(load, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_tiny(ASSETS, tmp_path)

    assert _shown(tmp_path) == []


def test_other_assets_get_another_folder(folder: Path, tmp_path: Path) -> None:
    assets = shutil.copytree(ASSETS, tmp_path / "assets")
    config = (assets / "config.json").read_text(encoding="utf-8")
    (assets / "config.json").write_text(config.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'), "utf-8")

    assert make_tiny(assets, folder.parent) != folder
