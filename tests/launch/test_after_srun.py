"""What a job of `tuner submit` does when its srun has ended; a real Slurm: tests/slurm/test_again.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.runs.made_records import made_beat, run_json
from tuner.files import write_text
from tuner.launch import after_srun
from tuner.launch.after_srun import Job
from tuner.machine import slurm
from tuner.runs import lock
from tuner.runs.beats import path_of
from tuner.runs.directory import RunDirectory
from tuner.runs.records import DiagnosisRecord, RankReport, RunStatus

KILLED = "srun: error: n2: task 1: Killed\nsrun: error: n1: task 0: Exited with exit code 1\n"
AGAIN = "--max-restarts after killed: attempt 2 on n1, n3, from checkpoint-4.\n"
OVER = "srun: Force Terminated StepId=8.0\n"


class Slurm:
    """The nodes of a job, and what was asked of Slurm."""

    def __init__(self, *nodes: str) -> None:
        self.nodes = list(nodes)
        self.unwell: dict[str, str] = {}
        self.state: str | None = None
        self.seconds_left: int | None = None
        self.requeued_without: list[list[str]] = []


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Slurm:
    made = Slurm("n1", "n2")
    monkeypatch.setattr(slurm, "hosts", lambda _: made.nodes)
    monkeypatch.setattr(slurm, "unwell", lambda _: made.unwell)
    monkeypatch.setattr(slurm, "not_running", lambda _: made.state)
    monkeypatch.setattr(slurm, "seconds_left", lambda _: made.seconds_left)
    monkeypatch.setattr(slurm, "requeue_without", lambda _, nodes: made.requeued_without.append(nodes))
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return a run of two ranks on two nodes that is at work."""
    made = RunDirectory(tmp_path)
    made.ranks.mkdir()
    write_text(made.run_json, run_json(world_size=2, num_nodes=2))
    made.write_status(RunStatus(state="running"))
    for rank in (0, 1):
        path_of(made, rank).write_bytes(made_beat(rank, 7, f"n{rank + 1}.cluster", 3, "in step 2", 1.0, 0.0).to_bytes())
    return made


def _job(run: RunDirectory, log: str = KILLED + OVER, **changed: Any) -> Job:
    (run.path / "slurm-8.out").write_text(log)
    values: dict[str, Any] = {"id": "8", "nodelist": "n[1-2]", "num_restarts": 0, "max_requeues": 3, "max_restarts": 2}
    return Job(**values | {"num_nodes": 2, "tasks_per_node": 1, "log": run.path / "slurm-8.out"} | changed)


def _failed(run: RunDirectory, cause: str, rank: int, code: int, step: int = 2) -> None:
    diagnosis = DiagnosisRecord(cause=cause, what=cause, rank=rank, step=step)
    run.write_status(RunStatus(state="failed", exit_code=code, message=cause, diagnosis=diagnosis))


def _cause(run: RunDirectory) -> tuple[str | None, int | None]:
    """Return what the run ended of, and the rank that it began with, by its status."""
    diagnosis = run.read_status().diagnosis
    return (diagnosis.cause, diagnosis.rank) if diagnosis else (None, None)


def test_a_killed_rank_that_could_not_tell_is_told_with_its_cause(run: RunDirectory, cluster: Slurm) -> None:
    code, options = after_srun.after_srun(run, 137, _job(run, max_restarts=0))

    status = run.read_status()
    assert (code, options) == (137, [])
    assert (status.state, status.exit_code, *_cause(run)) == ("failed", 137, "killed", 1)
    assert run.report.is_file()


def test_without_slurms_words_it_is_told_that_some_rank_was_killed(run: RunDirectory, cluster: Slurm) -> None:
    assert after_srun.after_srun(run, 137, _job(run, log="", max_restarts=0)) == (137, [])

    assert _cause(run) == ("killed", None)


def test_a_rank_that_only_lost_another_one_does_not_hide_which_was_killed(run: RunDirectory, cluster: Slurm) -> None:
    run.report_failure(RankReport(rank=0, exit_code=1, message="RuntimeError: Connection closed by peer"))
    _failed(run, "lost-peer", 0, 1)

    after_srun.after_srun(run, 137, _job(run, max_restarts=0))

    assert _cause(run) == ("killed", 1)


@pytest.mark.parametrize(("max_restarts", "code", "notices"), [(2, 1, 0), (0, 1, 1), (2, 2, 1)])
def test_the_users_command_starts_when_no_restart_follows(
    run: RunDirectory, cluster: Slurm, max_restarts: int, code: int, notices: int
) -> None:
    notify = ["sh", "-c", f"echo $TUNER_EXIT_CODE >> {run.path}/told"]
    run.resolved_recipe.write_text(json.dumps({"schema": 1, "recipe": {"log": {"notify": notify}}}))
    _failed(run, "bug", 0, code)

    _, options = after_srun.after_srun(run, code, _job(run, log="", max_restarts=max_restarts))

    told = run.path / "told"
    assert (told.read_text() if told.exists() else "") == f"{code}\n" * notices
    assert bool(options) != bool(notices)


@pytest.mark.parametrize(
    ("state", "srun_code", "code"), [("done", 0, 0), ("done", 143, 0), ("stopped", 75, 75), ("stopped", 143, 75)]
)
def test_what_the_ranks_have_written_counts_and_not_the_code_of_srun(
    run: RunDirectory, cluster: Slurm, state: Any, srun_code: int, code: int
) -> None:
    run.write_status(RunStatus(state=state, exit_code=code))

    assert after_srun.after_srun(run, srun_code, _job(run)) == (code, [])


def test_a_mistake_is_not_repeated(run: RunDirectory, cluster: Slurm) -> None:
    assert after_srun.after_srun(run, 2, _job(run)) == (2, [])


def test_no_rank_that_began_is_no_success(tmp_path: Path, cluster: Slurm) -> None:
    run = RunDirectory(tmp_path)

    assert after_srun.after_srun(run, 0, _job(run, log=""))[0] != 0


def test_after_a_crash_the_run_goes_on_and_spare_nodes_come_first(run: RunDirectory, cluster: Slurm) -> None:
    cluster.nodes = ["n1", "n2", "n3"]

    code, options = after_srun.after_srun(run, 137, _job(run))

    assert (code, options) == (0, ["--nodes=2", "--ntasks=2", "--nodelist=n1,n3"])
    assert run.read_json(run.requeues)["restarts"] == [
        {"cause": "killed", "step": None, "began": 0, "saved": 0, "node": "n2"}
    ]


def test_a_node_that_slurm_lost_is_named_and_left_out_though_srun_ended_with_0(
    run: RunDirectory, cluster: Slurm, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.nodes, cluster.unwell = ["n1", "n2", "n3"], {"n2": "down*"}

    code, options = after_srun.after_srun(run, 0, _job(run, log="srun: error: Node failure on n2\n"))

    assert (code, options[-1]) == (0, "--nodelist=n1,n3")
    assert "n2 is down*" in capfd.readouterr().err
    assert _cause(run) == ("lost-peer", 1)


def test_a_rank_without_memory_is_told_as_that_and_not_started_again(run: RunDirectory, cluster: Slurm) -> None:
    log = "srun: error: n2: task 1: Out Of Memory\nsrun: error: n1: task 0: Exited with exit code 1\n"

    code, options = after_srun.after_srun(run, 253, _job(run, log=log + OVER))

    assert _cause(run) == ("host-out-of-memory", 1)
    assert (code, options) == (run.read_status().exit_code, [])


def test_a_node_that_is_drained_is_left_out_and_is_not_the_cause(run: RunDirectory, cluster: Slurm) -> None:
    cluster.nodes, cluster.unwell = ["n1", "n2", "n3"], {"n1": "draining"}

    code, options = after_srun.after_srun(run, 137, _job(run))

    assert (code, options[-1]) == (0, "--nodelist=n2,n3")
    assert _cause(run) == ("killed", 1)


def test_a_node_that_is_lost_before_a_rank_begins_is_left_out_too(tmp_path: Path, cluster: Slurm) -> None:
    cluster.nodes, cluster.unwell, run = ["n1", "n2", "n3"], {"n1": "down"}, RunDirectory(tmp_path)

    assert after_srun.after_srun(run, 0, _job(run, log=""))[1][-1] == "--nodelist=n2,n3"


def test_with_too_few_nodes_the_job_is_requeued_without_the_one_that_failed(
    run: RunDirectory, cluster: Slurm, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster.unwell = {"n2": "down"}

    assert after_srun.after_srun(run, 0, _job(run)) == (0, [])

    assert cluster.requeued_without == [["n2"]]
    assert "Job 8 is requeued without n2: n2 is down." in capfd.readouterr().err


@pytest.mark.parametrize(("cause", "code", "without"), [("crashed", 139, [["n2"]]), ("bug", 1, [])])
def test_a_node_that_failed_twice_is_left_out_unless_the_error_comes_on_every_node(
    run: RunDirectory, cluster: Slurm, cause: str, code: int, without: list[list[str]]
) -> None:
    for step in (2, 3):
        _failed(run, cause, 1, code, step)
        _, options = after_srun.after_srun(run, code, _job(run, log="", max_restarts=5))

    assert (cluster.requeued_without, options[-1:]) == (without, [] if without else ["--nodelist=n1,n2"])


def test_a_job_that_may_not_be_requeued_ends_with_the_runs_code(run: RunDirectory, cluster: Slurm) -> None:
    cluster.unwell = {"n2": "down"}

    assert after_srun.after_srun(run, 0, _job(run, max_requeues=0)) == (1, [])
    assert cluster.requeued_without == []


@pytest.mark.parametrize(
    ("left_s", "max_requeues", "goes_on"),
    [(None, 3, True), (191, 3, True), (190, 3, False), (0, 3, False), (90, 0, True)],
)
def test_before_its_time_limit_a_job_that_may_be_requeued_starts_no_srun_that_would_miss_the_signal(
    run: RunDirectory, cluster: Slurm, left_s: int | None, max_requeues: int, goes_on: bool
) -> None:
    cluster.seconds_left = left_s

    code, options = after_srun.after_srun(run, 137, _job(run, stop_before_s=120, max_requeues=max_requeues))

    assert (code, bool(options)) == (0, goes_on)
    assert cluster.requeued_without == ([] if goes_on else [[]])


def test_restarts_end_without_progress(run: RunDirectory, cluster: Slurm) -> None:
    ended = []
    for step in (2, 3, 4):
        _failed(run, "crashed", step % 2, 139, step)
        ended.append(after_srun.after_srun(run, 139, _job(run, log="", max_restarts=2)))

    assert [bool(options) for _, options in ended] == [True, True, False]
    assert ended[-1][0] == 139


@pytest.mark.parametrize(
    ("log", "code"), [("srun: error: n1: task 0: Exited with exit code 140\n", 140), (KILLED + OVER, 137)]
)
def test_a_run_that_was_told_to_end_and_a_cancelled_job_start_nothing(
    run: RunDirectory, cluster: Slurm, log: str, code: int
) -> None:
    cluster.state = "Slurm says that it is CANCELLED" if code == 137 else None

    assert after_srun.after_srun(run, code, _job(run, log=log))[1] == []


@pytest.mark.parametrize(("job", "is_free"), [("8", True), ("77", False)])
def test_the_next_srun_finds_the_directory_of_its_job_free_and_not_that_of_another(
    run: RunDirectory, cluster: Slurm, job: str, is_free: bool
) -> None:
    (run.path / lock.NAME).write_text(
        json.dumps({"pid": 9, "started_s": 1.0, "host": "n1", "job": job, "restarts": 0, "cluster": "c"})
    )

    after_srun.after_srun(run, 137, _job(run))

    assert (lock.holder(run.path) is None) is is_free


@pytest.mark.parametrize(
    ("log", "exits"),
    [
        (KILLED + OVER, [(1, -9), (0, 1)]),
        ("srun: error: n1: tasks 0-1,3: Segmentation fault (core dumped)\n", [(0, -11), (1, -11), (3, -11)]),
        (KILLED + OVER + AGAIN + "srun: error: n1: task 0: Exited with exit code 74\n" + OVER, [(0, 74)]),
        (KILLED + OVER + AGAIN + "step 3/4\nsrun: error: Node failure on n2\n", []),
        (KILLED + "slurmstepd-n1: error: *** JOB 8 ON n1 CANCELLED AT 10:41 DUE TO JOB REQUEUE ***\nstep 3/4\n", []),
        ("srun: error: n1: task 0: Out Of Memory\n", [(0, -9)]),
        ("step 1/4\n", []),
    ],
)
def test_the_ends_of_tasks_are_read_from_what_the_last_srun_said(log: str, exits: list[tuple[int, int]]) -> None:
    assert after_srun._exits(after_srun._ends(log)) == exits


def test_the_options_of_the_next_srun_are_printed_for_the_script(
    run: RunDirectory, cluster: Slurm, capfd: pytest.CaptureFixture[str]
) -> None:
    (run.path / "slurm-8.out").write_text(KILLED + OVER)
    environ = {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "n[1-2]", slurm.MAX_REQUEUES: "3"}
    words = ["137", str(run.path), "--nodes=1", "--tasks-per-node=2", "--max-restarts=1", "--stop-before=120"]

    assert after_srun.main(words, environ) == 0

    assert capfd.readouterr().out == "--nodes=1 --ntasks=2 --nodelist=n1\n"
