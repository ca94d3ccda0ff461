"""A node that is not well is named before a rank starts; GPUs are not asked here (tests/machine/test_health.py)."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.plans import made, written_run
from tuner.errors import MachineError
from tuner.launch import preflight, retry
from tuner.launch.checks import host
from tuner.machine import health
from tuner.machine.health import Ailment
from tuner.runs.records import RunStatus


def test_a_node_that_is_well_says_nothing(tmp_path: Path) -> None:
    assert list(host.is_well(made(work_dir=tmp_path / "run"))) == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_has_the_nodes_name_and_what_is_fatal_refuses_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, hangs = Ailment("GPU 1: slowed", "Cool it."), Ailment("/shared did not answer", "Look.", is_fatal=True)
    monkeypatch.setattr(health, "gpus", lambda uuids: [slow])
    monkeypatch.setattr(health, "folder", lambda path: [hangs])
    run = made(work_dir=tmp_path / "run")

    warning, error = host.is_well(run)

    assert str(warning).startswith(f"{socket.gethostname()}: GPU 1: slowed")
    assert isinstance(error, MachineError) and socket.gethostname() in error.what
    with pytest.raises(MachineError, match="/shared did not answer"):
        preflight.check(run)


def test_a_folder_that_cannot_be_written_is_left_to_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path) -> list[Ailment]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(health, "folder", refuses)

    assert list(host.is_well(made(work_dir=tmp_path / "run"))) == []


def test_a_restart_says_what_is_wrong_with_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(health, "gpus", lambda uuids: [Ailment("GPU 1: the kernel's log has XID 79", "Reset it.")])
    plan = made(work_dir=tmp_path / "run")
    run = written_run(tmp_path / "run")
    run.write_status(RunStatus(state="failed", exit_code=1, message="..."))
    again = replace(plan, request=plan.request._replace(max_restarts=1))
    monkeypatch.setattr(retry, "resolve_run", lambda request, *_: replace(plan, request=request))

    retry.next_attempt(again, run, 1)

    assert "WARNING" in (told := capsys.readouterr().err) and "XID 79" in told
