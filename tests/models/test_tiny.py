"""The tiny model's folder: the same bytes always, whole or not there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.configs.make_sample import CONFIGS
from tuner.files import sha256
from tuner.models import tiny
from tuner.models.tiny import WEIGHTS, materialize

ASSETS = CONFIGS / "assets" / "tiny"
IN_A_PROCESS = """
import sys
from pathlib import Path
import torch
from transformers import LlamaForCausalLM
from tuner.models.tiny import materialize
torch.set_num_threads(int(sys.argv[3]))
torch.manual_seed(int(sys.argv[3]))
print("ready", flush=True)
sys.stdin.readline()
print(materialize(Path(sys.argv[1]), Path(sys.argv[2])))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return materialize(ASSETS, tmp_path_factory.mktemp("cache"))


def _bytes(folder: Path) -> dict[str, str]:
    return {path.name: sha256(path) for path in folder.iterdir()}


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
    children = [
        subprocess.Popen(
            [sys.executable, "-c", IN_A_PROCESS, str(ASSETS), str(tmp_path), number],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in ("1", "2")
    ]
    for child in children:
        assert child.stdout and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin
        child.stdin.write("go\n")
        child.stdin.flush()
    answers = [child.communicate(timeout=60)[0].strip() for child in children]

    assert [child.returncode for child in children] == [0, 0]
    assert answers == [str(tmp_path / folder.name)] * 2
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]
    assert _bytes(tmp_path / folder.name) == _bytes(folder)


def test_the_global_random_state_is_left_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()

    materialize(ASSETS, tmp_path)

    assert torch.equal(torch.get_rng_state(), before)


def test_a_second_call_makes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "_write_weights", _refuse)

    assert materialize(ASSETS, folder.parent) == folder


def test_the_loser_of_a_race_keeps_the_winners_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = tiny._write_weights

    def lose(draft: Path) -> None:
        write(draft)
        shutil.copytree(draft, tmp_path / draft.name)
        (tmp_path / draft.name / "winner").touch()

    monkeypatch.setattr(tiny, "_write_weights", lose)
    folder = materialize(ASSETS, tmp_path)

    assert (folder / "winner").exists()
    assert list(tmp_path.iterdir()) == [folder]


def test_an_interrupted_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(draft: Path) -> None:
        (draft / WEIGHTS).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "_write_weights", interrupt)
    with pytest.raises(KeyboardInterrupt):
        materialize(ASSETS, tmp_path)

    assert list(tmp_path.iterdir()) == []


def test_other_assets_get_another_folder(folder: Path, tmp_path: Path) -> None:
    assets = shutil.copytree(ASSETS, tmp_path / "assets")
    config = (assets / "config.json").read_text(encoding="utf-8")
    (assets / "config.json").write_text(config.replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06'), "utf-8")

    assert materialize(assets, folder.parent) != folder
