from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Tuner
from tests.launch.plans import checkpoint, written_run
from tests.launch.rank import process
from tests.machine.gpus import A100, H200, machine
from tuner.launch import render
from tuner.machine import hardware

TINY = "tiny_full_sample_e1"
GUIDE = Path(__file__).parents[1] / "zero" / "data" / "guide_ds_config.json"


def _json(tuner: Tuner, *arguments: object) -> dict[str, Any]:
    result = tuner("train", TINY, "--dry-run", "--json", *arguments)
    assert result.code == 0, result.err
    assert result.err == ""
    found: dict[str, Any] = json.loads(result.out)
    return found


def test_ctrl_c_before_a_run_starts_has_the_signals_code(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda _: os.kill(os.getpid(), signal.SIGINT))

    found = tuner("train", TINY)

    assert (found.code, found.out, found.err.strip()) == (130, "", "Aborted!")


# --dry-run


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]])
def test_a_dry_run_refuses_a_command_to_notify_by_as_a_start_does(tuner: Tuner, dry_run: list[str]) -> None:
    found = tuner("train", TINY, "--set", "log.notify=no-such-command", *dry_run)

    assert (found.code, found.out, len(found.messages)) == (3, "", 1)
    assert "log.notify: no command 'no-such-command'." in found.err


@pytest.mark.usefixtures("nothing_starts")
def test_a_dry_run_as_json_is_json_and_nothing_else(tuner: Tuner, tmp_path: Path) -> None:
    found = _json(tuner, "--deepspeed", GUIDE)

    assert set(found) == {
        "version",
        "argv",
        "env",
        "ranks",
        "deepspeed",
        "batch",
        "origins",
        "warnings",
        "level",
        "fit",
        "precision",
        "run_directory",
        "resume",
    }
    assert found["argv"][0] == sys.executable
    assert found["argv"][1:3] == ["-m", "tuner.worker"]
    assert found["deepspeed"]["zero_optimization"]["stage"] == 2
    assert found["origins"]["gradient_clipping"]["from"].startswith("recipe optim_wrapper.clip_grad.max_norm")
    assert found["origins"]["train_batch_size"]["beat"] == [{"value": 16, "from": f"{GUIDE}:2:3"}]
    assert any("sparse_attention" in warning for warning in found["warnings"])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("nothing_starts")
def test_overrides_reach_the_config(tuner: Tuner) -> None:
    xtuner = ("--cfg-options", "train_dataloader.batch_size=3", "accumulative_counts=5", "max_norm=0.25")

    found = _json(tuner, "--deepspeed", "deepspeed_zero3", *xtuner)

    assert found["deepspeed"]["train_batch_size"] == 15
    assert found["deepspeed"]["gradient_clipping"] == 0.25
    assert found["level"] == {"name": "deepspeed_zero3", "reason": None}
    assert found["batch"]["micro_batch"] == 3


@pytest.mark.usefixtures("nothing_starts")
def test_gpus_of_this_machine_decide_processes_precision_and_level(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "detect", lambda environ: machine(H200, A100))

    found = _json(tuner)

    assert len(found["ranks"]) == 2
    assert found["precision"]["dtype"] == "bf16"
    assert found["level"]["name"].startswith("deepspeed_zero") and "a step" in found["level"]["reason"]
    assert found["env"]["DS_ACCELERATOR"] == "cuda"


@pytest.mark.usefixtures("nothing_starts")
def test_variables_of_a_launcher_are_read(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NPROC_PER_NODE": "2", "NNODES": "2", "NODE_RANK": "1", "ADDR": "h", "PORT": "9"}.items():
        monkeypatch.setenv(name, value)

    found = _json(tuner)

    assert [own["RANK"] for own in found["ranks"]] == ["2", "3"]
    assert (found["env"]["MASTER_ADDR"], found["env"]["MASTER_PORT"], found["env"]["WORLD_SIZE"]) == ("h", "9", "4")
    assert found["batch"]["ranks"] == 4


@pytest.mark.usefixtures("nothing_starts")
def test_a_dry_run_of_a_hostfile_shows_its_hosts_and_reaches_none(tuner: Tuner) -> None:
    Path("hosts").write_text("n1 slots=2\nn2 slots=4\n")
    Path(".deepspeed_env").write_text("WANDB_API_KEY=not shown\n")

    hosts = ("--hostfile", "hosts", "--include", "n1@n2:1,3", "--ssh", "/not/there")
    shown = tuner("train", TINY, *hosts, "--allow-code", "--dry-run")

    assert shown.code == 0, shown.err
    assert "n1: node 0 of 2, 2 processes\n" in shown.out
    assert "n2: node 1 of 2, 2 processes CUDA_VISIBLE_DEVICES=1,3\n" in shown.out
    assert "on n1, port 29501 (nodes) and 29500 (ranks)\n" in shown.out
    assert "Nothing was started" in shown.out
    assert "WANDB_API_KEY" in shown.err
    assert "not shown" not in shown.out + shown.err


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (("--max-restarts", "1", "--spare-nodes", "1", "--nnodes", "1:2"), None),
        (("--max-restarts", "1", "--spare-nodes", "1", "--nnodes", "1:3"), "Use --nnodes 1:2."),
        (("--spare-nodes", "1"), "--max-restarts"),
        (("--max-restarts", "1", "--spare-nodes", "3"), "none is left to train"),
        (("--nnodes", "3"), "--nnodes=3 with --hostfile"),
    ],
)
def test_spare_hosts_and_fewer_nodes_of_a_hostfile(tuner: Tuner, flags: tuple[str, ...], refusal: str | None) -> None:
    Path("hosts").write_text("n1 slots=1\nn2 slots=1\nn3 slots=1\n")

    shown = tuner("train", TINY, "--hostfile", "hosts", *flags, "--dry-run")

    if refusal:
        assert shown.code == 2 and refusal in shown.err
    else:
        assert shown.code == 0, shown.err
        assert "n2: node 1 of 2, 1 processes\n" in shown.out and "n3: takes the place" in shown.out


def test_code_that_is_not_allowed_is_refused_before_a_host_is_reached(tuner: Tuner) -> None:
    Path("hosts").write_text("n1 slots=2\nn2 slots=2\n")
    Path("ssh").write_text("#!/bin/sh\ntouch reached\nexit 255\n")
    Path("ssh").chmod(0o755)
    Path("mine.py").write_text(f"_base_ = '{TINY}'\nlog = dict(notify='touch canary')\n")

    found = tuner("train", "./mine.py", "--hostfile", "hosts", "--ssh", str(Path("ssh").absolute()))

    assert found.code == 2 and "mine.py:2" in found.err and "--allow-code" in found.err
    assert not Path("reached").exists()


@pytest.mark.usefixtures("nothing_starts")
def test_modules_of_the_hosts_are_judged_by_the_hosts(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("hosts").write_text("n1 slots=2\n")
    Path("mine.py").write_text(f"_base_ = '{TINY}'\ntrain_cfg = dict(callbacks=('of_the_hosts.module:Callback',))\n")
    start = ("train", "./mine.py", "--hostfile", "hosts", "--ssh", "/not/there", "--dry-run")
    assert tuner(*start).code == 2

    (tmp_path / ".deepspeed_env").write_text("PYTHONPATH=/of/the/hosts\n")

    assert tuner(*start).code == 0


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("name", ["a b", "größe", "it's $HOME"])
def test_odd_names_survive(tuner: Tuner, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "my data.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / name / "my ds.json").write_text('{"steps_per_print": 3}')
    recipe = tmp_path / name / "mine.py"
    recipe.write_text(f'_base_ = "{TINY}"\n')
    arguments = ("--data", f"{name}/my data.jsonl", "--deepspeed", f"{name}/my ds.json", "--work-dir", f"{name}/run")

    result = tuner("train", recipe, "--dry-run", "--json", *arguments)

    found = json.loads(result.out)
    assert found["run_directory"] == str(tmp_path / name / "run")
    assert found["argv"][-1] == found["run_directory"]
    assert found["deepspeed"]["steps_per_print"] == 3
    assert found["batch"]["rows"] == 1


@pytest.mark.usefixtures("nothing_starts")
def test_a_dry_run_tells_where_a_resumed_run_goes_on(tuner: Tuner, tmp_path: Path) -> None:
    run = written_run(tmp_path / "run").path
    saved = checkpoint(run, 4)
    checkpoint(run, 6, valid=False)
    before = sorted(tmp_path.rglob("*"))

    found = _json(tuner, "--resume", "run")

    assert (found["run_directory"], found["resume"]) == (str(run), str(saved))
    told = tuner("train", TINY, "--dry-run", "--resume", "run").err
    assert f"Resuming from {saved}" in told
    assert "checkpoint-6 is skipped" in told
    assert (found["batch"]["steps_done"], found["batch"]["steps_left"]) == (4, found["batch"]["steps"] - 4)
    assert (
        f"steps: about {found['batch']['steps']:,}, resuming from step 4, {found['batch']['steps_left']:,} left ("
        in told
    )
    assert sorted(tmp_path.rglob("*")) == before


# Without --dry-run, with a small process in place of a rank


@pytest.mark.parametrize(
    ("rank", "code"),
    [("write('done')", 0), ("report(0, 1, 'the loss is nan'); sys.exit(1)", 1), ("report(0, 75, 'saved')", 75)],
)
def test_the_exit_code_is_the_runs(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, code: int
) -> None:
    code_of_rank = rank.replace("write('done')", "said('done')")
    monkeypatch.setattr(render, "argv", lambda run: process(run.run_path, code_of_rank))

    result = tuner("train", TINY, "--work-dir", "run", "--deepspeed", "zero2")

    assert result.code == code
    assert "\nrun directory: run\n" in result.err
    assert "No GPU found: training on the CPU in fp32, with ZeRO-2 (deepspeed_zero2)\n" in result.err
    status = json.loads((tmp_path / "run" / "status.json").read_text())
    assert status["state"] == {0: "running", 1: "failed", 75: "stopped"}[code]


def test_the_command_is_kept_in_the_run(tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "argv", lambda run: process(run.run_path, ""))

    tuner("train", TINY, "--work-dir", "my run", "--set", "lr=1e-5")

    facts = json.loads((tmp_path / "my run" / "run.json").read_text())
    assert facts["command"] == ["tuner", "train", TINY, "--work-dir", "my run", "--set", "lr=1e-5"]


def test_a_run_is_run_again_from_its_own_recipe(tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "argv", lambda run: process(run.run_path, ""))
    first, second = tmp_path / "first", tmp_path / "second"

    (tmp_path / "my.json").write_text('{"zero_optimization": {"stage": 1}, "steps_per_print": 3}')

    tuner("train", TINY, "--work-dir", first, "--deepspeed", "my.json", "--set", "lr=1e-5")
    result = tuner("train", first / "recipe.py", "--work-dir", second)

    assert result.code == 0, result.err
    assert (first / "deepspeed.json").read_text() == (second / "deepspeed.json").read_text()


def test_only_rank_0_of_slurm_announces_the_run(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch, nothing_starts: None
) -> None:
    from tests.launch.plans import task
    from tuner.launch import execute

    monkeypatch.setattr(execute, "execute", lambda resolved, meeting: 0)
    told = []
    for rank in (0, 1):
        for name, value in task(rank).items():
            monkeypatch.setenv(name, value)
        told.append(tuner("train", TINY, "--launcher", "slurm", "--work-dir", "run").err)

    assert "training on the CPU with 2 processes (slurm) in fp32" in told[0]
    assert told[1] == ""
