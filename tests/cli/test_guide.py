"""`tuner train` alone in a terminal, as a person uses it: through a pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.cli.made_runs import make_run
from tests.launch.processes import wait_until
from tuner import assets
from tuner.cli import guide
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus

pytestmark = pytest.mark.e2e
_LIMIT_S = 120
_ROW = '{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'


class Terminal:
    """A command in a pseudo-terminal."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.end, theirs = pty.openpty()
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_CACHE": str(folder / "no cache"), "COLUMNS": "200"}
        argv = [sys.executable, "-m", "tuner", "train", *arguments]
        self.process = subprocess.Popen(
            argv, cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.text = ""

    def wait_for(self, text: str) -> str:
        """Return what was printed up to `text`, from where the last wait ended."""
        deadline = time.monotonic() + _LIMIT_S
        while text not in self.text:
            assert self.read(deadline), f"{text!r} did not come: {self.text}"
        before, _, self.text = self.text.partition(text)
        return before

    def read(self, deadline: float) -> bool:
        """Read on; False at the end of the command or of the time."""
        ready, _, _ = select.select([self.end], [], [], max(0, deadline - time.monotonic()))
        try:
            part = os.read(self.end, 65_536) if ready else b""
        except OSError:  # Linux says so that the other end is closed
            part = b""
        self.text += part.decode(errors="replace").replace("\r\n", "\n")
        return bool(part)

    def type(self, text: str) -> None:
        os.write(self.end, text.encode())

    def code(self) -> int:
        deadline = time.monotonic() + _LIMIT_S
        while self.read(deadline):
            pass
        return self.process.wait(_LIMIT_S)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(assets.asset("package:tiny"), tmp_path / "models" / "tiny")
    (tmp_path / "my.jsonl").write_text(_ROW * 4)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "other.csv").write_text("instruction,output\nhi,hello\n")
    (tmp_path / "settings.json").write_text('{"a": 1}')
    return tmp_path


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_models_of_folders_the_hubs_cache_and_runs_are_offered(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "cache"))
    snapshot = folder / "cache/models--Qwen--Qwen3-0.6B/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    for number, state in ((1, "done"), (2, "failed")):
        run = RunDirectory(make_run(Path(f"work_dirs/mine/{number}"), "tiny_full_sample_e1", "none"))
        run.write_status(RunStatus(state=state))  # type: ignore[arg-type]
        (run.final / "config.json").parent.mkdir()
        (run.final / "config.json").write_text("{}")

    assert [model.value for model in guide.models()] == ["./models/tiny", "Qwen/Qwen3-0.6B", "work_dirs/mine/1"]


def test_three_questions_show_the_plan_and_q_leaves_with_nothing_made(folder: Path) -> None:
    before = _files(folder)
    terminal = Terminal(folder)

    offered = terminal.wait_for("[1]: ")
    terminal.type("\n")
    rows = terminal.wait_for("[1]: ")
    terminal.type("2\n")
    methods = terminal.wait_for("[1]: ")
    terminal.type("full\n")
    plan = terminal.wait_for("q leaves: ")
    terminal.type("q\n")

    assert terminal.code() == 0, terminal.text
    assert "1  ./models/tiny" in offered
    assert re.findall(r"\d  (\S+)", rows) == ["my.jsonl", "data/other.csv"]
    assert re.findall(r"\d  (\S+)", methods) == ["lora", "qlora", "full"]
    assert "steps: " in plan and "run directory: " in plan
    assert "tuner train --model ./models/tiny --data data/other.csv --method full\n" in plan
    assert _files(folder) == before


def test_ctrl_c_leaves_with_130_and_nothing_made(folder: Path) -> None:
    before = _files(folder)
    terminal = Terminal(folder)

    terminal.wait_for("[1]: ")
    while psutil.Process(terminal.process.pid).status() != psutil.STATUS_SLEEPING:
        time.sleep(0.05)
    time.sleep(0.5)  # readline notices a signal that comes before it waits only at the next key
    terminal.process.send_signal(2)

    assert terminal.code() == 130
    assert "Traceback" not in terminal.text
    assert _files(folder) == before


def test_a_wrong_answer_is_asked_again_and_what_was_typed_is_not_asked(folder: Path) -> None:
    terminal = Terminal(folder, "--data", "my.jsonl", "--method", "lora")

    terminal.wait_for("[1]: ")
    terminal.type("./nothere\n")
    wrong = terminal.wait_for("[1]: ")
    terminal.type("qwen3-0.6b\n")
    plan = terminal.wait_for("q leaves: ")
    terminal.type("q\n")

    assert terminal.code() == 0
    assert "'./nothere' does not exist." in wrong
    assert "tuner train --data my.jsonl --method lora --model Qwen/Qwen3-0.6B\n" in plan


def test_enter_starts_the_run_that_the_command_names(folder: Path) -> None:
    terminal = Terminal(folder, "--max-steps", "1")

    for answer in ("package:tiny", "", "1"):
        terminal.wait_for("[1]: ")
        terminal.type(f"{answer}\n")
    terminal.wait_for("tuner train --max-steps 1 --model package:tiny --data my.jsonl\n")
    terminal.wait_for("q leaves: ")
    terminal.type("\n")
    # From here on it is as if the command had been typed: its rank is not waited for.
    wait_until(lambda: bool([*folder.glob("work_dirs/*/*/ranks/0.log")]))
    terminal.process.kill()
    terminal.code()

    (started,) = folder.glob("work_dirs/*/*/recipe.json")
    values = json.loads(started.read_text())["recipe"]
    assert (values["model"]["path"], values["train_cfg"]["max_steps"]) == ("package:tiny", 1)
