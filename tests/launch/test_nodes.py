"""Launchers of several nodes agree through the run directory alone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.launch.plans import checkpoint, made
from tests.runs.made_records import run_json
from tuner.files import write_text
from tuner.launch import render, retry
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import ResolvedRun
from tuner.runs import checkpoints, creation
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    begun = RunDirectory(tmp_path)
    begun.ranks.mkdir()
    write_text(begun.run_json, run_json())
    return begun


def test_node_0_waits_until_the_ranks_of_all_nodes_have_ended(run: RunDirectory) -> None:
    retry.report_ended(run, 0, None)
    retry.report_ended(run, 2, None)
    heard: list[str | None] = []
    waits = threading.Thread(target=lambda: heard.append(retry.await_objection(run, 3, 60)))
    waits.start()
    waits.join(0.3)
    assert waits.is_alive()

    retry.report_ended(run, 1, "node 1 ended with code 75")

    waits.join(20)
    assert heard == ["node 1 ended with code 75"]


def test_where_nobody_objects_there_is_no_objection(run: RunDirectory) -> None:
    retry.report_ended(run, 0, None)
    retry.report_ended(run, 1, None)

    assert retry.await_objection(run, 2, 60) is None


def test_a_node_that_never_ends_is_named(run: RunDirectory) -> None:
    retry.report_ended(run, 0, None)

    assert retry.await_objection(run, 3, 0.2) == "no status from node 1, 2 for 0 s"


def test_a_node_whose_ranks_still_move_is_waited_for(run: RunDirectory) -> None:
    retry.report_ended(run, 0, None)
    heard: list[str | None] = []
    waits = threading.Thread(target=lambda: heard.append(retry.await_objection(run, 2, 0.8)))
    waits.start()
    for moment in range(1, 7):
        (run.ranks / "1.beat").write_text(str(moment))
        waits.join(0.2)
    assert waits.is_alive()

    retry.report_ended(run, 1, None)

    waits.join(20)
    assert heard == [None]


@pytest.mark.parametrize(("hang_timeout", "grace"), [(1800, 300), (7200, 300), (60, 3600)])
def test_ranks_that_wait_for_a_lost_peer_have_their_whole_hang_timeout_to_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang_timeout: int, grace: int
) -> None:
    given: list[float] = []
    monkeypatch.setattr(retry, "await_objection", lambda _run, _nodes, wait_s: given.append(wait_s) or "enough")
    run, first, _ = _two(tmp_path / "run", f"hang_timeout={hang_timeout}", grace_s=grace)

    retry.next_attempt(first, run, 1, resolve_run)

    assert given == [hang_timeout + grace + 120]


def test_the_next_attempt_or_a_refusal_is_node_0s_word(run: RunDirectory) -> None:
    write_text(run.run_json, run_json(launch_id="second"))
    assert retry.await_decision(run, "first", 60) == ("second", None)

    retry.report_ended(run, 1, None)
    retry.refuse_restart(run, "too often")
    assert retry.await_decision(run, "second", 60) == (None, "too often")


def test_a_node_0_that_is_gone_is_not_waited_for_without_end(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "_DECIDING_S", 0)

    assert retry.await_decision(run, "first", 0.2) == (None, "no status from node 0 for 0 s")


# What one of two launchers does when its attempt ended


def _two(
    folder: Path, *sets: str, grace_s: float = 300, **facts: object
) -> tuple[RunDirectory, ResolvedRun, ResolvedRun]:
    """Return a run that both nodes have planned and node 0 has begun, and what its status says."""
    where = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": 29_555, "nproc_per_node": 1}
    asked = {"work_dir": folder, "max_restarts": 2, "grace_s": grace_s}
    plans = [made(*sets, flags={**where, "node_rank": rank}, **asked) for rank in (0, 1)]
    run = creation.create(folder, render.files(plans[0]), resume=False)
    run.ranks.mkdir()
    run.write_status(RunStatus(state="failed", **facts))
    return run, plans[0], plans[1]


@pytest.mark.parametrize("code", [0, 2, 75])
def test_node_0_that_did_not_crash_tells_the_others_to_end_and_says_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    run, first, _ = _two(tmp_path / "run")

    assert retry.next_attempt(first, run, code, resolve_run) is None

    assert retry.await_decision(run, first.launch_id, 60) == (None, f"node 0 ended with code {code}")
    assert capfd.readouterr().err == ""


def test_node_0_does_not_go_on_where_another_was_told_to_stop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, first, second = _two(tmp_path / "run", signal=15)
    assert retry.next_attempt(second, run, 143, resolve_run) is None
    run.write_status(RunStatus(state="failed"))

    assert retry.next_attempt(first, run, 1, resolve_run) is None

    assert capfd.readouterr().err == "--max-restarts: not possible: node 1 ended with code 143\n"


def test_both_nodes_go_on_in_the_attempt_that_node_0_writes(tmp_path: Path) -> None:
    run, first, second = _two(tmp_path / "run")
    retry.report_ended(run, 1, None)

    first_again = retry.next_attempt(first, run, 1, resolve_run)
    assert first_again and first_again.launch_id != first.launch_id, "node 1 must tell the attempts apart"
    creation.create(run.path, render.files(first_again), resume=True)
    run.ranks.mkdir()
    run.write_status(RunStatus(state="failed"))
    second_again = retry.next_attempt(second, run, 1, resolve_run)

    assert second_again and second_again.launch_id == first_again.launch_id
    assert (render.argv(second_again), second_again.topology) == (render.argv(second), second.topology)


def test_of_a_restart_on_several_nodes_the_first_alone_reads_every_byte_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, first, second = _two(tmp_path / "run")
    checkpoint(run.path, 3)
    retry.report_ended(run, 1, None)
    hashed: list[str] = []
    real = checkpoints.xxh3_128
    monkeypatch.setattr(checkpoints, "xxh3_128", lambda path: (hashed.append(path.name), real(path))[1])

    first_again = retry.next_attempt(first, run, 1, resolve_run)
    assert first_again and sorted(hashed) == ["model.safetensors", "recipe.py"]
    creation.create(run.path, render.files(first_again), resume=True)
    run.ranks.mkdir()
    run.write_status(RunStatus(state="failed"))
    hashed.clear()
    second_again = retry.next_attempt(second, run, 1, resolve_run)

    assert second_again and second_again.launch_id == first_again.launch_id
    assert hashed == []
