"""Files that are not what they seem: a pipe that nobody writes to, a device without an end, gigabytes of nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.cli.command import Tuner
from tests.cli.conftest import tuner as tuner
from tests.hostile.test_trust import model_with_code
from tests.launch.plans import written_run
from tests.runs.made_records import run_json
from tuner import files
from tuner.data import images, sources
from tuner.data.sample import Image
from tuner.errors import DataError, DiskError, ModelError, RunDirectoryError
from tuner.models import projectors
from tuner.pretrained import explained, tensors_of
from tuner.runs import creation, lock

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


def test_a_file_of_a_run_that_is_no_regular_one_holds_up_no_listing(tmp_path: Path) -> None:
    for kind in ("a pipe", "a device"):
        for name in NAMES:
            put(written_run(tmp_path / "runs" / f"{kind} {name}".replace("/", " ")).path / name, kind)

    result = ended("runs", tmp_path / "runs", "--json")

    assert result.returncode == 0
    assert "Traceback" not in result.stderr
    assert len(json.loads(result.stdout)) == 2 * len(NAMES)


@pytest.mark.parametrize(
    ("name", "kind"), [("status.json", "a pipe"), ("samples.jsonl", "a device"), ("data.json", "eight gigabytes")]
)
def test_a_file_of_a_run_that_is_no_regular_one_holds_up_no_report(tmp_path: Path, name: str, kind: str) -> None:
    run = written_run(tmp_path / "run").path
    put(run / name, kind)

    result = ended("report", run)

    assert result.returncode == 0, result.stderr
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *product(("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"), KINDS),
        *product(("model.safetensors", "merges.txt", "additional_chat_templates/a.jinja"), ["a pipe"]),
    ],
)
def test_a_model_folder_with_no_regular_file_is_refused_before_a_library_reads_it(
    tmp_path: Path, name: str, kind: str
) -> None:
    model = model_with_code(tmp_path / "model")
    put(model / name, kind)

    with pytest.raises(ModelError, match=Path(name).name), explained(str(model)):
        raise AssertionError("a library would read it")


@pytest.mark.parametrize("named", ["x.bin", "x.pt", "../x.safetensors", "/x.safetensors", 7])
def test_an_index_of_weights_names_only_safetensors_of_its_folder(tmp_path: Path, tuner: Tuner, named: object) -> None:
    model = model_with_code(tmp_path / "model")
    index = {"weight_map": {"model.embed_tokens.weight": named}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))

    assert tuner("check", "tiny_full_sample_e1", "--model", model).code == 2
    with pytest.raises(ModelError), explained(str(model)):
        raise AssertionError("a library would read it")


@contextmanager
def soon() -> Iterator[None]:
    """Fail where code waits, as for the writer of a pipe."""

    def stop(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S / 3)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv.gz", "rows.parquet", "rows.arrow"])
def test_data_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    put(tmp_path / name, kind)

    with soon(), pytest.raises(DataError, match="regular file"):
        list(sources.find(str(tmp_path / name)).read())
    with soon(), pytest.raises(DataError, match="regular file"):
        sources.find(str(tmp_path / name)).fingerprint()


@pytest.mark.parametrize("kind", ["a pipe", "a device", "eight gigabytes"])
def test_an_image_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    put(tmp_path / "a.webp", kind)

    with soon(), pytest.raises(DataError):
        images.size_of(Image(path=str(tmp_path / "a.webp")))


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
@pytest.mark.parametrize("name", ["lock", "recipe.py", "run.json", "status.json", "metrics.jsonl"])
def test_a_run_with_no_regular_file_is_taken_up_or_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    run = written_run(tmp_path / "run").path
    put(run / name, kind)

    with soon(), suppress(DiskError, RunDirectoryError):
        creation.create(run, {"run.json": run_json(resume_step=1)}, resume=True)
    with soon(), suppress(DiskError):
        files.append_line(run / name, "{}")


def test_the_lock_of_a_foreign_run_leads_to_no_file_of_the_user(tmp_path: Path) -> None:
    run, mine = written_run(tmp_path / "run").path, tmp_path / "mine"
    mine.write_text("mine")
    (run / "lock").unlink(missing_ok=True)
    (run / "lock").symlink_to(mine)
    (run / "metrics.jsonl").unlink(missing_ok=True)
    (run / "metrics.jsonl").symlink_to(mine)

    with pytest.raises(DiskError, match="a link"):
        lock.take(run, {})
    with pytest.raises(DiskError, match="a link"):
        files.append_line(run / "metrics.jsonl", "{}")

    assert mine.read_text() == "mine"


def test_a_resume_keeps_the_bytes_of_metrics_that_are_no_text(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run").path
    early, torn, late = b'{"step": 1, "a": "\xff"}\n', b'\xfe{"step"\n', b'{"step": 9, "a": "\xe4"}\n'
    good = '{"step": 2, "a": "ä"}\n'.encode()
    (run / "metrics.jsonl").write_bytes(good + early + torn + late)

    creation.create(run, {"run.json": run_json(resume_step=5)}, resume=True)

    assert (run / "metrics.jsonl").read_bytes() == good
    assert (run / "attempts/1/metrics.jsonl").read_bytes() == early + torn + late


@pytest.mark.parametrize("kind", ["a pipe", "a device"])
def test_a_file_of_tensors_that_is_no_regular_one_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    put(tmp_path / "a.safetensors", kind)

    with soon(), pytest.raises(ModelError), tensors_of(tmp_path / "a.safetensors"):
        raise AssertionError("it is opened")


@pytest.mark.parametrize("name", ["mm_projector.bin", "projector.pth"])
def test_a_pickle_of_weights_is_read_only_where_the_user_trusts_it(tmp_path: Path, name: str) -> None:
    weights = {f"model.mm_projector.{number}.{key}": torch.ones(2) for number in (0, 2) for key in ("weight", "bias")}
    torch.save(weights, tmp_path / name)

    for place in (tmp_path / name, tmp_path):
        with pytest.raises(ModelError, match="--trust-remote-code"):
            projectors.read_projector(place, trusts_pickles=False)
        assert len(projectors.read_projector(place, trusts_pickles=True)) == 4


@pytest.mark.parametrize("file", ["processor_config.json", "preprocessor_config.json", "audio_tokenizer_config.json"])
def test_a_processor_that_names_another_model_is_refused_before_a_library_loads_that(tmp_path: Path, file: str) -> None:
    """transformers would load any class from any place for it, without a word on whether code may run."""
    model = model_with_code(tmp_path / "model")
    other = {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": str(tmp_path)}
    (model / file).write_text(json.dumps({"audio_tokenizer": other}))

    with pytest.raises(ModelError, match=file), explained(str(model)):
        raise AssertionError("a library would read it")
