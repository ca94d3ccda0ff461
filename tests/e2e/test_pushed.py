"""A real run pushes its checkpoints while it trains and its result at the end, to a stand-in for the hub."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ok, quick, train
from tests.results.hub import NAME, TOKEN, Hub, serving

pytestmark = pytest.mark.e2e


@pytest.mark.long
def test_checkpoints_and_the_result_of_a_run_arrive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushing = ("--push", NAME, "--set", "checkpoint.push=True", "--set", "max_steps=2")
    with serving(Hub(), monkeypatch) as hub:
        run = ok(train(quick(tmp_path, "full"), tmp_path / "run", *pushing, ranks=1))

    assert hub.asked.count(f"POST /api/models/{NAME}/commit/main") == 2, "checkpoint-2, and the result"
    assert hub.files and {"model.safetensors", "README.md", "manifest.json"} <= hub.files.keys()
    assert hub.files["model.safetensors"] == (run.path / "final" / "model.safetensors").read_bytes()
    assert json.loads((run.path / "status.json").read_text())["pushed"]["repository"] == NAME
    assert run.text.splitlines()[-1].startswith("Pushed: http://127.0.0.1")
    assert TOKEN not in run.text
    assert not any(TOKEN.encode() in file.read_bytes() for file in run.path.rglob("*") if file.is_file())
