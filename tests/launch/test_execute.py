from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.plans import made, task
from tests.launch.rank import process
from tests.refused import refused
from tuner.errors import MachineError, RunDirectoryError
from tuner.launch import builds, render
from tuner.launch import execute as execute_module
from tuner.launch.execute import execute

# A rank of its own: `execute` becomes it, so it runs in a child.
BECOME = """
import os, sys
from pathlib import Path
from tests.launch.plans import made
from tuner.launch import render
from tuner.launch.execute import execute
environ = {**os.environ, "MINE": "kept", "FSDP_VERSION": "2"}
plan = made(flags={"launcher": "none"}, work_dir=Path(sys.argv[1]), environ=environ)
seen = "os.environ['RANK'], os.environ['MINE'], 'FSDP_VERSION' in os.environ"
code = f"import os, sys; print(os.getpid(), {seen}, sys.argv[1])"
render.argv = lambda run: [sys.executable, "-c", f"{code}; sys.exit(7)", str(run.run_path)]
execute(plan)
"""
ROOT = Path(__file__).parents[2]


def test_the_directory_is_there_before_the_ranks_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    plan = made(work_dir=run, environ=os.environ)
    looks = "sys.exit(0 if {'run.json', 'recipe.py', 'deepspeed.json'} <= set(os.listdir(sys.argv[1])) else 9)"
    monkeypatch.setattr(render, "argv", lambda _: process(run, looks))

    code = execute(plan)

    assert code == 0
    files = render.files(plan)
    assert {name: (run / name).read_text(encoding="utf-8") for name in files} == files


@pytest.mark.parametrize(("does", "state", "code"), [("sys.exit(3)", "failed", 3), ("sys.exit(0)", "done", 0)])
def test_a_run_that_ended_runs_the_users_command_once(
    does: str, state: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = tmp_path / "run", tmp_path / "said"
    plan = made(f"log.notify=['sh', '-c', 'cat >> {said}']", work_dir=run, environ=os.environ)
    monkeypatch.setattr(render, "argv", lambda _: process(run, does))

    assert execute(plan) == code

    (told,) = map(json.loads, said.read_text().splitlines())
    assert (told["event"], told["state"], told["exit_code"], told["run"]) == ("ended", state, code, str(run))


def test_a_run_that_does_not_start_runs_the_users_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MachineError("no compiler")

    said = tmp_path / "said"
    plan = made(f"log.notify=['sh', '-c', 'cat >> {said}']", work_dir=tmp_path / "run", environ=os.environ)
    monkeypatch.setattr(builds, "build", fails)

    with pytest.raises(MachineError):
        execute(plan)

    assert json.loads(said.read_text())["message"].startswith("bad-environment: no compiler")


def test_the_plans_variables_reach_the_ranks_over_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    plan = made(work_dir=run, environ={**os.environ, "PYTHONSAFEPATH": "", "MINE": "kept"})
    tells = "open(sys.argv[1] + '/told', 'w').write(os.environ['PYTHONSAFEPATH'] + os.environ['MINE'])"
    monkeypatch.setattr(render, "argv", lambda _: process(run, tells))

    execute(plan)

    assert (run / "told").read_text() == "1kept"


def test_what_another_launcher_left_reaches_no_rank_and_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    left = {"TORCHELASTIC_RESTART_COUNT": "3", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    plan = made(work_dir=run, environ={**os.environ, **left})
    tells = "open(sys.argv[1] + '/told', 'w').write('\\n'.join(os.environ))"
    monkeypatch.setattr(render, "argv", lambda _: process(run, tells))

    execute(plan)

    assert not left.keys() & set((run / "told").read_text().splitlines())
    assert all(any(name in told for told in plan.warnings) for name in left)


def test_a_taken_directory_starts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    plan = made(work_dir=run, environ=os.environ)
    monkeypatch.setattr(render, "argv", lambda _: process(run, "said('started')"))
    run.mkdir()
    (run / "mine").touch()

    with pytest.raises(RunDirectoryError):
        execute(plan)

    assert [path.name for path in run.iterdir()] == ["mine"]


def test_without_a_launcher_this_process_becomes_the_rank(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}

    with subprocess.Popen(
        [sys.executable, "-c", BECOME, tmp_path / "my run"], env=environ, stdout=subprocess.PIPE, text=True
    ) as child:
        text, _ = child.communicate(timeout=60)

    assert text == f"{child.pid} 0 kept False {tmp_path / 'my run'}\n"
    assert child.returncode == 7
    assert json.loads((tmp_path / "my run" / "status.json").read_text())["pid"] == child.pid


def test_a_later_rank_of_slurm_writes_nothing_and_waits_for_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_module, "_LEAST_WAIT_S", 0.2)
    plan = made("hang_timeout=0.1", environ=task(1), flags={"launcher": "slurm"}, work_dir=tmp_path / "run")

    with refused(RunDirectoryError, "--work-dir", tmp_path / "run"):
        execute(plan)

    assert list(tmp_path.iterdir()) == []
