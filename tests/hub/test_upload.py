"""A run's weights on the hub: what arrives, and that no failure reaches the run; test_push.py has what is uploaded."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from tests.results.hub import NAME, TOKEN, Hub
from tests.results.hub import hub as hub
from tests.results.models import LLAMA, with_tokenizer, write_base
from tests.results.runs import finish, make_run
from tuner.hub import upload
from tuner.hub.upload import Target, Upload
from tuner.report import end
from tuner.runs.directory import RunDirectory
from tuner.worker.checkpointing import CheckpointUploads

TARGET = Target(NAME, private=False)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run that has trained a whole model, and is to push it."""
    base = with_tokenizer(write_base(tmp_path / "base", LLAMA))
    made = make_run(tmp_path / "run", "tiny_full_sample_e1", base, ("--push", NAME))
    finish(made, base)
    made.ranks.mkdir(exist_ok=True)
    return made


def files_of(run: RunDirectory) -> list[bytes]:
    return [file.read_bytes() for file in run.path.rglob("*") if file.is_file()]


@pytest.mark.long
def test_the_result_of_a_run_arrives_as_export_would_push_it_and_the_run_says_where(
    hub: Hub, run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    end.follow_up(run, 0)()

    assert hub.files and {"model.safetensors", "README.md", "manifest.json", "tokenizer.json"} <= hub.files.keys()
    told, status = capfd.readouterr(), run.read_json(run.status)
    assert told.out == "", "standard output may be a stream of JSON"
    address = f"{os.environ['HF_ENDPOINT']}/{NAME}"
    assert f"Pushing the result to {NAME}" in told.err and f"Pushed: {address}\n" in told.err
    assert status["state"] == "done"
    assert status["pushed"] == {"repository": NAME, "address": address, "problem": None}
    assert f"Pushed: <code>{address}</code>" in run.report.read_text()
    assert TOKEN not in told.err and not any(TOKEN.encode() in content for content in files_of(run))


def test_a_run_that_failed_or_names_no_repository_asks_the_hub_nothing(hub: Hub, run: RunDirectory) -> None:
    end.follow_up(run, 1)()
    text = run.resolved_recipe.read_text()
    run.resolved_recipe.write_text(text.replace(f'"repository": "{NAME}"', '"repository": null'))
    assert run.resolved_recipe.read_text() != text
    end.follow_up(run, 0)()

    assert hub.asked == []


@pytest.mark.long
def test_a_push_that_fails_is_a_warning_with_the_command_that_pushes_later(
    hub: Hub, run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    hub.refused["/api/repos/create"] = 403

    end.follow_up(run, 0)()

    warning, command = capfd.readouterr().err.splitlines()[-1], f"tuner export {run.path} --push {NAME}"
    assert warning.startswith(f"WARNING: the result was not pushed to {NAME}: ")
    assert "has no write access" in warning and warning.endswith(f"Push it later: {command}")
    status = run.read_json(run.status)
    assert status["state"] == "done" and status["pushed"]["address"] is None
    assert "has no write access" in run.report.read_text() and run.read_json(run.status)["exit_code"] == 0


def test_a_push_that_takes_too_long_is_ended(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upload, "LIMIT_S", 0.0)

    upload.push_result(run, TARGET)

    assert "it took more than 0 min. Push it later: tuner export" in capfd.readouterr().err


def test_the_process_that_uploads_is_no_rank_and_has_no_gpu(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    found = upload._environment()

    assert not [name for name in found if "RANK" in name or "WORLD" in name or name.startswith(("MASTER", "TORCHEL"))]
    assert found["CUDA_VISIBLE_DEVICES"] == "" and found["HF_TOKEN"] == TOKEN


def test_of_checkpoints_one_is_uploaded_at_a_time(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def start(run: RunDirectory, source: Path, name: str, target: Target) -> Upload:
        started.append(name)
        return Upload(run, source, name, target)

    monkeypatch.setattr("tuner.worker.checkpointing.Upload", start)
    pushes, sleeper = CheckpointUploads(run, TARGET), run.path / "sleeper"
    sleeper.write_text("#!/bin/sh\nsleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))

    pushes.push(run.checkpoints / "checkpoint-1")
    pushes.push(run.checkpoints / "checkpoint-2")
    pushes.stop()

    assert started == ["checkpoint-1"]
    source = shlex.quote(str(run.checkpoints / "checkpoint-1"))
    warning = f"checkpoint-1 was not pushed to {NAME}: the run ended before. Push it later: tuner export {source}"
    assert warning in capsys.readouterr().out
    assert warning in json.loads(run.warnings.read_text())["warning"]


def test_a_run_that_is_asked_to_stop_waits_for_no_upload(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper = run.path / "sleeper"
    sleeper.write_text("#!/bin/sh\nsleep 600\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    pushes = CheckpointUploads(run, TARGET)
    pushes.push(run.checkpoints / "checkpoint-1")

    pushes.finish(lambda: None, lambda: True)

    assert f"checkpoint-1 was not pushed to {NAME}: it was interrupted. Push it later" in capsys.readouterr().out


def test_a_failed_upload_of_a_checkpoint_is_a_warning_and_the_next_one_is_tried(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pushes = CheckpointUploads(run, TARGET)

    for step in (1, 2):
        pushes.push(run.checkpoints / f"checkpoint-{step}")
        pushes.finish(lambda: None)

    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WARNING")]
    assert [line.split()[1] for line in warnings] == ["checkpoint-1", "checkpoint-2"]
    assert all("it ended with exit code 1. Push it later: tuner export" in line for line in warnings)
