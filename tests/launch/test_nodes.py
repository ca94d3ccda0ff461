"""What each of two launchers does when its attempt has ended."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.place import Place, at_once, kill, met
from tests.launch.place import place as place
from tests.launch.plans import PATH, checkpoint, made
from tests.launch.processes import wait_until
from tuner.errors import Hang, Stopped
from tuner.launch import execute, render, retry, supervise
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine.hostfile import MEETING
from tuner.runs import checkpoints, creation
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus

WHERE = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": 29_555, "nproc_per_node": 1}


def _two(folder: Path, **facts: Any) -> tuple[RunDirectory, ResolvedRun, ResolvedRun]:
    """Return a run that both nodes have planned and node 0 has begun, and what its status says."""
    asked = {"work_dir": folder, "max_restarts": 2}
    plans = [made(flags={**WHERE, "node_rank": rank}, **asked) for rank in (0, 1)]
    run = creation.create(folder, render.files(plans[0]), resume=False)
    run.ranks.mkdir()
    run.write_status(RunStatus(state="failed", **facts))
    return run, plans[0], plans[1]


@pytest.mark.parametrize("code", [0, 2])
def test_node_0_that_did_not_crash_tells_the_others_to_end_and_says_nothing(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int
) -> None:
    run, first, _ = _two(tmp_path / "run")
    leader, caller = met(place, run.path)

    assert retry.next_attempt(first, run, code, leader) is None

    caller.ended(1, "", None, None)
    assert caller.await_next() == (None, f"node 0 ended with code {code}")
    assert capfd.readouterr().err == ""


def test_ranks_that_all_stopped_start_no_more(place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, first, second = _two(tmp_path / "run")
    leader, caller = met(place, run.path)

    ended = at_once(
        lambda: retry.next_attempt(first, run, 75, leader), lambda: retry.next_attempt(second, run, 75, caller)
    )

    assert ended == [None, None]
    assert capfd.readouterr().err == ""


def test_ranks_that_stopped_because_the_launcher_of_another_node_was_killed_go_on(place: Place, tmp_path: Path) -> None:
    run, first, _ = _two(tmp_path / "run")
    leader, caller = met(place, run.path, launch=first.launch_id)
    kill(caller)

    again = retry.next_attempt(first, run, 75, leader)

    assert again and len(again.request.attempts) == 1


def test_ranks_that_stopped_with_those_of_a_node_that_failed_go_on_too(place: Place, tmp_path: Path) -> None:
    run, first, second = _two(tmp_path / "run")

    _goes_on(run, first, second, *met(place, run.path, launch=first.launch_id), second_code=75)


def test_node_0_does_not_go_on_where_another_was_told_to_stop(
    place: Place, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, first, second = _two(tmp_path / "run", signal=15)
    leader, caller = met(place, run.path)
    assert retry.next_attempt(second, run, 143, caller) is None
    run.write_status(RunStatus(state="failed"))

    assert retry.next_attempt(first, run, 1, leader) is None

    assert capfd.readouterr().err == "--max-restarts: not possible: node 1 ended with code 143\n"


def _goes_on(
    run: RunDirectory, first: ResolvedRun, second: ResolvedRun, leader: Any, caller: Any, second_code: int = 1
) -> tuple[ResolvedRun, ResolvedRun]:
    """Return the next attempt of both nodes, as `execute` goes on with it."""

    def of_node_0() -> ResolvedRun | None:
        again = retry.next_attempt(first, run, 1, leader)
        if again:
            leader.wait()
            creation.create(run.path, render.files(again), resume=True)
            leader.go(again.launch_id)
        return again

    first_again, second_again = at_once(of_node_0, lambda: retry.next_attempt(second, run, second_code, caller))
    assert isinstance(first_again, ResolvedRun) and isinstance(second_again, ResolvedRun), (first_again, second_again)
    return first_again, second_again


def test_both_nodes_go_on_in_the_attempt_that_node_0_writes(place: Place, tmp_path: Path) -> None:
    run, first, second = _two(tmp_path / "run")

    first_again, second_again = _goes_on(run, first, second, *met(place, run.path, launch=first.launch_id))

    assert first_again.launch_id != first.launch_id, "node 1 must tell the attempts apart"
    assert second_again.launch_id == first_again.launch_id
    assert (render.argv(second_again), second_again.topology) == (render.argv(second), second.topology)


def test_of_a_restart_on_several_nodes_the_first_alone_reads_every_byte_of_the_checkpoint(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, first, second = _two(tmp_path / "run")
    checkpoint(run.path, 3)
    hashed: list[str] = []
    real = checkpoints.xxh3_128
    monkeypatch.setattr(checkpoints, "xxh3_128", lambda path: (hashed.append(path.name), real(path))[1])

    _goes_on(run, first, second, *met(place, run.path, launch=first.launch_id))

    assert sorted(hashed) == ["model.safetensors", "recipe.py"]


def test_ranks_do_not_get_the_secret_of_the_launch() -> None:
    run = made(flags={**WHERE, "node_rank": 0}, environ={**PATH, MEETING: "secret n1 n2"})

    assert not any("secret" in value for value in supervise._environment(run).values())


@pytest.mark.parametrize("told_first", [False, True])
def test_a_node_that_stops_between_two_attempts_ends_as_it_decided_whatever_another_tells_it_meanwhile(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told_first: bool
) -> None:
    events: list[Any] = []
    first = made(flags={**WHERE, "node_rank": 0}, work_dir=tmp_path / "run", max_restarts=2, on_event=events.append)
    leader, caller = met(place, first.run_path)

    def another_stops() -> None:
        stopped = Stopped("by SIGINT")
        stopped.exit_code = 128 + signal.SIGINT
        caller.fail(stopped)
        wait_until(lambda: leader.told_error is not None)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), leader.loop).result(10)

    def gathered(resolved: ResolvedRun, _: object) -> ResolvedRun:
        if (resolved.run_path / "run.json").exists():
            another_stops() if told_first else signal.raise_signal(signal.SIGTERM)
            time.sleep(10)
        return resolved

    def run_ranks(*_: object, **__: object) -> int:
        wait_until(lambda: leader.runs)  # the meeting begins a launch in its own thread
        leader.ended(1, "", None, None)
        return 1

    def has_ended(*_: object) -> Callable[[], None]:
        signal.raise_signal(signal.SIGTERM) if told_first else another_stops()
        return lambda: events.append("told")

    monkeypatch.setattr(execute.elastic, "gathered", gathered)
    monkeypatch.setattr(execute.supervise, "run_ranks", run_ranks)
    monkeypatch.setattr(execute.retry, "next_attempt", lambda resolved, *_: resolved)
    monkeypatch.setattr(execute.hooks, "run_has_ended", has_ended)
    before = signal.signal(signal.SIGTERM, lambda *_: pytest.fail("it would have been killed"))
    try:
        with leader.interrupting():
            code = execute.execute(first, leader)
    finally:
        signal.signal(signal.SIGTERM, before)

    status = RunDirectory(first.run_path).read_status()
    assert code == status.exit_code == 128 + (signal.SIGINT if told_first else signal.SIGTERM)
    assert status.signal == (None if told_first else signal.SIGTERM)
    assert [each["event"] for each in events if each != "told"] == ["started", "ended"]
    assert "told" in events


def test_a_restart_that_cannot_begin_ends_the_run_with_its_reason_in_the_status_the_report_and_the_last_event(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Any] = []
    first = made(flags={**WHERE, "node_rank": 0}, work_dir=tmp_path / "run", max_restarts=2, on_event=events.append)
    leader, _ = met(place, first.run_path)

    def gathered(resolved: ResolvedRun, _: object) -> ResolvedRun:
        if (resolved.run_path / "run.json").exists():
            raise Hang("not all nodes were there")
        return resolved

    monkeypatch.setattr(execute.elastic, "gathered", gathered)
    monkeypatch.setattr(execute.supervise, "run_ranks", lambda *_, **__: 75)
    monkeypatch.setattr(execute.retry, "next_attempt", lambda resolved, *_: resolved)
    monkeypatch.setattr(execute.hooks, "run_has_ended", lambda *_: lambda: events.append("told"))
    with pytest.raises(Hang), leader.interrupting():
        execute.execute(first, leader)

    status = RunDirectory(first.run_path).read_status()
    assert (status.state, status.exit_code) == ("failed", 124)
    assert events[1] == "told"
    assert (events[2]["event"], events[2]["exit_code"]) == ("ended", 124)


@pytest.mark.parametrize("waits", ["await_ends", "raise_abandoned"])
def test_a_stop_while_the_ranks_of_other_nodes_are_waited_for_is_no_refused_restart(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    run, first, _ = _two(tmp_path / "run")
    leader, _ = met(place, run.path)

    def stop() -> None:
        raise Stopped("whoever started all nodes has ended")

    monkeypatch.setattr(leader, waits, stop)

    with pytest.raises(Stopped):
        retry.next_attempt(first, run, 1, leader)
