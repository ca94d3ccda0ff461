"""Files that are not what they seem: a pipe that nobody writes to, a device without an end, gigabytes of nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.command import Tuner
from tests.cli.conftest import tuner as tuner
from tests.hostile.test_trust import model_with_code
from tests.launch.plans import written_run
from tuner.errors import ModelError
from tuner.models.load import explained

_PATIENCE_S = 30
KINDS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "eight gigabytes": lambda path: (path.touch(), os.truncate(path, 8 * 2**30)),
}
NAMES = (
    "status.json",
    "run.json",
    "recipe.json",
    "lock",
    "data.json",
    "metrics.jsonl",
    "samples.jsonl",
    "ranks/0.beat",
)


def put(path: Path, kind: str) -> None:
    """Put a file of a kind in the place of another."""
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    KINDS[kind](path)


def ended(*words: object, limit_bytes: int = 4 * 2**30) -> subprocess.CompletedProcess[str]:
    """Run a command of tuner that must end soon, in little memory."""
    script = f'ulimit -v {limit_bytes // 1024}; exec "$@"'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "tuner", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_of_a_run_that_is_no_regular_one_holds_up_no_listing(tmp_path: Path, name: str, kind: str) -> None:
    run = written_run(tmp_path / "runs" / "run").path
    put(run / name, kind)

    result = ended("runs", tmp_path / "runs")

    assert result.returncode == 0
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("name", "kind"), [("status.json", "a pipe"), ("samples.jsonl", "a device"), ("data.json", "eight gigabytes")]
)
def test_a_file_of_a_run_that_is_no_regular_one_holds_up_no_report(tmp_path: Path, name: str, kind: str) -> None:
    run = written_run(tmp_path / "run").path
    put(run / name, kind)

    result = ended("report", run)

    assert result.returncode == 0, result.stderr
    assert (run / "report.html").is_file()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_model_folder_with_no_regular_file_is_refused_before_a_library_reads_it(
    tmp_path: Path, name: str, kind: str
) -> None:
    model = model_with_code(tmp_path / "model")
    put(model / name, kind)

    with pytest.raises(ModelError, match=name), explained(str(model)):
        raise AssertionError("a library would read it")


@pytest.mark.parametrize("named", ["x.bin", "x.pt", "../x.safetensors", "/x.safetensors", 7])
def test_an_index_of_weights_names_only_safetensors_of_its_folder(tmp_path: Path, tuner: Tuner, named: object) -> None:
    model = model_with_code(tmp_path / "model")
    index = {"weight_map": {"model.embed_tokens.weight": named}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))

    assert tuner("check", "tiny_full_sample_e1", "--model", model).code == 2
    with pytest.raises(ModelError), explained(str(model)):
        raise AssertionError("a library would read it")
