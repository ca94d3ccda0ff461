"""`log.notify`: what the user's command is told, how often it runs, and that nothing it does reaches the run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.refused import refused
from tests.report import made
from tuner.errors import RecipeError
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides
from tuner.report import end
from tuner.report.end import Notice
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus

pytestmark = pytest.mark.usefixtures("here")

TELLS = """
import json, os, sys
told = {name: os.environ[name] for name in os.environ if name.startswith("TUNER_")}
with open("told", "a") as file:
    print(json.dumps([json.load(sys.stdin), told]), file=file)
"""


def a_run(path: Path, command: Sequence[str]) -> RunDirectory:
    run = made.trained(path, f"log.notify={command!r}", num_steps=1)
    run.ranks.mkdir()
    return run


@pytest.mark.parametrize("state", ["done", "failed", "running"])
def test_the_command_is_told_how_the_run_ended(state: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run(tmp_path / "run", [sys.executable, "-c", TELLS])
    code = 0 if state == "done" else 74
    if state != "done":  # running: a full disk kept the run from saying more
        run.write_status(RunStatus(state=state, message="disk: no space\0 left.\nNext: free some" * 9000))  # type: ignore[arg-type]

    Notice(run, code).wait()

    facts, variables = json.loads((tmp_path / "told").read_text())
    said = "done" if state == "done" else "failed"
    assert (facts["event"], facts["state"], facts["exit_code"], facts["run"]) == ("ended", said, code, str(run.path))
    assert variables["TUNER_STATE"] == said
    assert (variables["TUNER_EXIT_CODE"], variables["TUNER_RUN"]) == (str(code), str(run.path))
    assert len(variables["TUNER_MESSAGE"]) < 5000 and (code == 0 or variables["TUNER_MESSAGE"].startswith("disk: no"))
    assert code == 0 or len(facts["message"]) > 100_000
    assert capsys.readouterr().err == ""


def test_of_several_that_tell_at_once_one_runs_it(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", [sys.executable, "-c", TELLS])

    for notice in [Notice(run, 0), Notice(run, 0)]:
        notice.wait()

    assert len((tmp_path / "told").read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["sh", "-c", "echo one; echo no route to host >&2; exit 7"], "failed with exit code 7: no route to host"),
        (["false"], "failed with exit code 1"),
        (["./there_is_none"], "cannot be started: "),
        # What it started itself keeps its output open.
        (["sh", "-c", "sleep 60 & sleep 60"], "took more than 0 s and was killed"),
    ],
)
def test_a_command_that_fails_is_one_line(
    command: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = a_run(tmp_path / "run", command)
    monkeypatch.setattr(end, "LIMIT_S", 0.4 if "killed" in said else 30.0)
    began_s = time.monotonic()

    Notice(run, 0).wait()

    line = capsys.readouterr().err
    assert line.startswith("WARNING: the command of log.notify, ") and said in line and line.count("\n") == 1
    assert time.monotonic() - began_s < 10


def test_a_command_that_asks_nothing_is_not_waited_for_by_what_tells_it(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", ["true"])
    run.write_status(RunStatus(state="failed", message="x" * 1_000_000))

    Notice(run, 1).wait()

    assert (run.ranks / "notify.log").read_bytes() == b""


def test_a_run_without_a_command_or_without_a_recipe_tells_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made.failed(tmp_path / "run")

    Notice(run, 1).wait()
    run.recipe.write_text("")
    Notice(run, 1).wait()

    assert not (run.ranks / "notify.log").exists() and capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("curl -d @- 'https://ntfy.sh/my runs'", ("curl", "-d", "@-", "https://ntfy.sh/my runs")),
        ("['mail', '-s', 'a, b', 'me']", ("mail", "-s", "a, b", "me")),
        ("echo $HOME; true | x", ("echo", "$HOME;", "true", "|", "x")),  # no shell reads it
        ("none", ()),
    ],
)
def test_a_command_is_a_line_or_a_list_of_words(typed: str, words: tuple[str, ...]) -> None:
    found = loading.load("tiny_full_sample_e1", Overrides(pairs=(("--set", f"log.notify={typed}"),)))

    assert found.config.log.command == words


@pytest.mark.parametrize("typed", ["echo 'open", "", "[]"])
def test_what_is_no_command_is_refused(typed: str) -> None:
    with refused(RecipeError, f"--set log.notify={typed}"):
        loading.load("tiny_full_sample_e1", Overrides(pairs=(("--set", f"log.notify={typed}"),)))
