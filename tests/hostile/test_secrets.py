"""One real run in a hostile place: nothing planted there is run, and no secret of the environment is written."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import quick
from tests.hostile.test_commands import PLANTED, clean, hostile_model

pytestmark = pytest.mark.e2e

SECRETS = {
    "HF_TOKEN": "hf_CANARYCANARYCANARY",
    "HUGGING_FACE_HUB_TOKEN": "hf_CANARYCANARYCANARY",
    "WANDB_API_KEY": "CANARY" * 6 + "0000",
    "AWS_SECRET_ACCESS_KEY": "CANARY",
    "MY_SECRET": "CANARY",
    "HTTPS_PROXY": "http://me:CANARY@127.0.0.1:9",
}


def hostile_folder(folder: Path) -> Path:
    """Return a folder of modules that leave a canary beside them when they are imported, and DeepSpeed's variables."""
    folder.mkdir()
    for name in (*PLANTED, "transformers", "accelerate", "tuner_rows"):
        (folder / f"{name}.py").write_text(f"open({str(folder.parent / 'canary')!r}, 'a').write(__name__)\n")
    (folder / ".deepspeed_env").write_text(f"LD_PRELOAD=/nonexistent.so\nMY_VARIABLE={folder}\n")
    return folder


def arguments_of(process: psutil.Process) -> str:
    try:
        return " ".join(word for each in (process, *process.children(recursive=True)) for word in each.cmdline())
    except psutil.NoSuchProcess:
        return ""


@pytest.mark.long  # tests/hostile/test_commands.py
def test_a_run_in_a_hostile_folder_runs_nothing_there_and_writes_no_secret(tmp_path: Path) -> None:
    place, run = hostile_folder(tmp_path / "place"), tmp_path / "run"
    model, recipe = hostile_model(tmp_path / "model"), quick(tmp_path, "full")
    row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]}
    (place / "rows.jsonl").write_text("null\n" + f"{json.dumps(row)}\n" * 40)
    command = [sys.executable, "-m", "tuner", "train", str(recipe), "--work-dir", str(run), "--model", str(model)]
    command += ["--data", "rows.jsonl", "--set", "train_dataloader.dataset.bad_rows=1", "--set", "max_steps=2"]
    env = clean(OMP_NUM_THREADS="1", PYTHONPATH=f"{clean()['PYTHONPATH']}", **SECRETS)
    before = {path for path in place.rglob("*")}

    started = subprocess.Popen(
        command, cwd=place, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    watched, seen = psutil.Process(started.pid), ""
    while started.poll() is None:
        seen += arguments_of(watched)
        time.sleep(0.2)
    text = started.communicate()[0]

    assert started.returncode == 0, text
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()
    assert "CANARY" not in text + seen
    assert "tuner.worker" in seen
    files = [path for path in run.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if b"CANARY" in path.read_bytes()] == []
    assert {path for path in place.rglob("*")} == before
    assert f"{place / '.deepspeed_env'} is ignored" in text
    assert "WARNING: PYTHONPATH is set" in text
    (bad,) = map(json.loads, (run / "data_report.jsonl").read_text().splitlines())
    assert (bad["split"], bad["what"], bad["reason"]) == ("train", "bad", "the row is null, not an object")
    assert bad["where"].endswith("rows.jsonl:1")
