from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.refused import refused
from tests.runs.made_records import run_json
from tuner.errors import DiskError, RunDirectoryError
from tuner.runs import checkpoints, creation, directory
from tuner.runs.creation import check_free, create
from tuner.runs.directory import RunDirectory, is_run, newest_run, wait_for
from tuner.runs.records import ManifestFacts, RankReport, RunStatus

FILES = {"recipe.py": "a = 1\n", "deepspeed.json": "{}\n", "run.json": run_json()}


def _tree(path: Path) -> dict[str, str]:
    return {str(file.relative_to(path)): file.read_text() for file in sorted(path.rglob("*")) if file.is_file()}


def test_a_run_directory_holds_what_it_was_given_to_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "größe mit leerzeichen"
    text = FILES | {"recipe.py": "# ü\nname = 'x'\n"}

    run = create(path, text, resume=False)

    assert {name: (path / name).read_bytes() for name in text} == {name: value.encode() for name, value in text.items()}
    assert run.read_json(run.status) == {"version": 1, "state": "running", "pid": os.getpid()}
    assert is_run(path)


def test_run_json_is_written_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    real = creation.write_text

    def recording(path: Path, text: str) -> None:
        assert not (tmp_path / "run" / "run.json").exists()
        written.append(path.name)
        real(path, text)

    monkeypatch.setattr(creation, "write_text", recording)

    create(tmp_path / "run", {"run.json": "{}", **FILES}, resume=False)

    assert written[-1] == "run.json"
    assert set(written) == set(FILES)


def test_a_crash_in_the_middle_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(path: Path, text: str) -> None:
        if path.name == "deepspeed.json":
            raise DiskError("full")

    monkeypatch.setattr(creation, "write_text", failing)

    with pytest.raises(DiskError):
        create(tmp_path / "run", FILES, resume=False)

    assert not is_run(tmp_path / "run")


# Never over something else


@pytest.mark.parametrize("both_looked", [False, True])
def test_an_earlier_run_is_never_overwritten_though_both_saw_an_empty_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, both_looked: bool
) -> None:
    if both_looked:  # before either wrote
        monkeypatch.setattr(creation, "check_free", lambda path, *, resume: None)
    create(tmp_path / "run", FILES, resume=False)
    before = _tree(tmp_path)

    with refused(RunDirectoryError, "--work-dir"):
        create(tmp_path / "run", FILES | {"recipe.py": "b = 2\n"}, resume=False)

    assert _tree(tmp_path) == before


def test_a_folder_with_anything_in_it_is_refused_without_a_hint_to_resume(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()

    with pytest.raises(RunDirectoryError) as caught:
        check_free(tmp_path, resume=False)

    assert str(tmp_path) in str(caught.value)
    assert "--work-dir" in str(caught.value)
    assert "--resume" not in str(caught.value)


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    assert is_run(create(tmp_path, FILES, resume=False).path)


@pytest.mark.parametrize("below", ["", "run", "run/deeper"])
def test_a_file_in_the_way_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")

    with refused(RunDirectoryError, "--work-dir") as caught:
        check_free(tmp_path / "file" / below, resume=False)

    assert str(tmp_path / "file") in str(caught.value)
    assert _tree(tmp_path) == {"file": "mine"}


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "\x1b[31m", "\x7f", "\udcff"])
def test_a_name_that_fits_on_no_line_or_is_no_text_is_refused(tmp_path: Path, name: str) -> None:
    with refused(RunDirectoryError, "--work-dir"):
        check_free(tmp_path / name / "run", resume=False)


def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")

    with refused(RunDirectoryError, "--work-dir"):
        create(tmp_path / "link", FILES, resume=False)


def test_checking_creates_nothing(tmp_path: Path) -> None:
    check_free(tmp_path / "a" / "b", resume=False)
    check_free(tmp_path / "a" / "b", resume=True)

    assert list(tmp_path.iterdir()) == []


# Disks that cannot be written to


@pytest.fixture
def read_only(mounted: Callable[[str], Path]) -> Path:
    return mounted("ro,size=1m")


@pytest.mark.parametrize("below", [".", "new", "new/deeper"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_read_only_disk_is_refused_before_anything_starts(read_only: Path, below: str, resume: bool) -> None:
    with refused(DiskError, "--work-dir", read_only, "--work-dir"):
        check_free(read_only / below, resume=resume)


def _as_nobody(path: Path) -> str:
    """Return what `check_free` raises in a child without root's rights: `DiskError: ...`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgid(65534)
            os.setuid(65534)
            check_free(path, resume=False)
            os.write(writer, b"nothing")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as stream:
        return stream.read()


@pytest.mark.parametrize("mode", [0o755, 0o555, 0o000])
@pytest.mark.parametrize("below", [".", "new"])
def test_a_folder_of_somebody_else_is_refused(mode: int, below: str) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    folder = Path(tempfile.mkdtemp(dir="/tmp"))  # pytest's own folders are closed to others
    folder.chmod(mode)

    try:
        told = _as_nobody(folder / below)
    finally:
        folder.rmdir()

    assert told.startswith("DiskError: ")
    assert str(folder) in told


def test_a_name_too_long_for_the_disk_is_one_error(tmp_path: Path) -> None:
    with refused(DiskError, None, "x" * 300, os.strerror(errno.ENAMETOOLONG)):
        check_free(tmp_path / ("x" * 300), resume=False)


# Resuming keeps what was there


def test_resuming_keeps_each_earlier_attempt_whole(tmp_path: Path) -> None:
    path = tmp_path / "run"
    create(path, FILES, resume=False)
    for attempt in ("second", "third"):
        RunDirectory(path).report_failure(RankReport(rank=1, exit_code=75, message=f"before {attempt}"))
        RunDirectory(path).write_status(RunStatus(state="stopped", exit_code=75, step=7))
        create(path, FILES | {"run.json": run_json(launch_id=attempt)}, resume=True)

    run = RunDirectory(path)
    assert run.read_run().launch_id == "third"
    assert run.read_json(run.status)["state"] == "running"
    assert run.failures() == []
    assert sorted(kept.name for kept in (path / "attempts").iterdir()) == ["1", "2"]
    first = _tree(path / "attempts" / "1")
    assert first["run.json"] == FILES["run.json"]
    assert json.loads(first["status.json"])["state"] == "stopped"
    assert json.loads(first["ranks/1.json"])["message"] == "before second"
    assert json.loads((path / "attempts" / "2" / "run.json").read_text())["launch_id"] == "second"


@pytest.mark.parametrize("has_validated", [True, False])
def test_a_validation_that_the_checkpoints_log_has_not_is_repeated_and_its_lines_are_set_aside(
    tmp_path: Path, has_validated: bool
) -> None:
    run = create(tmp_path / "run", FILES, resume=False)
    metrics = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}, {"step": 2, "eval_loss": 2.5}]
    for line in metrics:
        run.log_metrics(line)
    run.answers.write_text('{"step": 2, "answer": "yes"}\n')
    checkpoint = run.checkpoints / "checkpoint-2"
    checkpoint.mkdir(parents=True)
    log = metrics if has_validated else metrics[:2]
    (checkpoint / "trainer_state.json").write_text(json.dumps({"log_history": log}))

    create(run.path, FILES | {"run.json": run_json(resume_step=2, resume=str(checkpoint))}, resume=True)

    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == log
    assert bool(run.answers.read_text()) is has_validated
    assert (run.path / "attempts" / "1" / "answers.jsonl").exists() is not has_validated


def test_a_run_whose_older_attempts_were_removed_can_still_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    create(path, FILES, resume=False)
    for _ in range(2):
        create(path, FILES, resume=True)
    shutil.rmtree(path / "attempts" / "1")

    create(path, FILES, resume=True)

    assert sorted(kept.name for kept in (path / "attempts").iterdir()) == ["2", "3"]


def test_resuming_touches_neither_checkpoints_nor_metrics_nor_the_users_files(tmp_path: Path) -> None:
    path = tmp_path / "run"
    run = create(path, FILES, resume=False)
    run.log_metrics({"step": 1})
    (run.checkpoints / "checkpoint-1").mkdir(parents=True)
    (run.checkpoints / "checkpoint-1" / "model").write_text("weights")
    (path / "notes.txt").write_text("mine")
    kept = {name: text for name, text in _tree(path).items() if name.startswith(("checkpoints", "metrics", "notes"))}

    create(path, FILES | {"run.json": run_json(resume_step=1)}, resume=True)

    assert kept.items() <= _tree(path).items()


@pytest.mark.parametrize(
    ("resume_step", "kept", "cut"),
    [(2, [0, 1, 2], [3, 4]), (None, [], [0, 1, 2, 3, 4]), (0, [], [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4], [])],
)
def test_the_metrics_of_steps_that_run_again_are_kept_with_the_attempt_that_wrote_them(
    tmp_path: Path, resume_step: int | None, kept: list[int], cut: list[int]
) -> None:
    run = create(tmp_path / "run", FILES, resume=False)
    for step in range(5):  # 0: the validation before the first step
        run.log_metrics({"step": step})

    create(run.path, FILES | {"run.json": run_json(resume_step=resume_step)}, resume=True)

    aside = run.path / "attempts" / "1" / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in run.metrics.read_text().splitlines()] == kept
    assert [json.loads(line)["step"] for line in aside.read_text().splitlines()] == cut if cut else not aside.exists()


def test_a_line_that_a_killed_rank_left_half_written_does_not_stay_in_the_metrics(tmp_path: Path) -> None:
    run = create(tmp_path / "run", FILES, resume=False)
    run.log_metrics({"step": 1})
    with run.metrics.open("a") as stream:
        stream.write('{"step": 2, "lo')

    create(run.path, FILES | {"run.json": run_json(resume_step=2)}, resume=True)

    assert run.metrics.read_text() == '{"step": 1}\n'


def test_whoever_looks_while_a_run_is_resumed_sees_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Slurm the other ranks look at the directory while rank 0 renews it."""
    create(tmp_path / "run", FILES, resume=False)
    real = creation.write_text
    seen: list[bool] = []

    def looking(path: Path, text: str) -> None:
        seen.append(is_run(tmp_path / "run"))
        real(path, text)

    monkeypatch.setattr(creation, "write_text", looking)

    create(tmp_path / "run", FILES, resume=True)

    assert seen == [True] * len(FILES)


# Other ranks wait for rank 0


def test_a_rank_waits_until_rank_0_has_written_this_launch(tmp_path: Path) -> None:
    path = tmp_path / "run"
    create(path, FILES, resume=False)
    later = threading.Timer(0.3, create, (path, FILES | {"run.json": run_json(launch_id="second")}), {"resume": True})
    later.start()

    run = wait_for(path, "second", 60)
    seen = run.read_run().launch_id

    later.join()
    assert run.path == path
    assert seen == "second", "the first launch's files are not this one's"


def test_a_rank_gives_up_waiting_and_says_for_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_TOLD_S", 0.1)
    told: list[str] = []

    with refused(RunDirectoryError, "--work-dir", tmp_path / "run"):
        wait_for(tmp_path / "run", "second", 1.0, told.append)

    assert len(told) == 3 and all(str(tmp_path / "run") in line for line in told), "after 0.1, 0.3 and 0.7 s"


# Reports


def test_reports_come_back_in_the_order_of_their_writing(tmp_path: Path) -> None:
    run = create(tmp_path / "run", FILES, resume=False)
    for at, rank in enumerate((3, 0, 12)):
        run.report_failure(RankReport(rank=rank, exit_code=1, message=f"rank {rank}\nfell ü"))
        os.utime(run.ranks / f"{rank}.json", ns=(0, 10**9 * (at + 1)))
    (run.ranks / "3.log").write_text("what rank 3 printed")

    assert [report.rank for report in run.failures()] == [3, 0, 12]
    assert run.failures()[0] == RankReport(rank=3, exit_code=1, message="rank 3\nfell ü")


def test_a_report_without_its_exit_code_is_refused_by_its_file(tmp_path: Path) -> None:
    run = create(tmp_path / "run", FILES, resume=False)
    run.report_failure(RankReport(rank=1, exit_code=1, message="failed"))
    (run.ranks / "1.json").write_text("{}")

    with pytest.raises(RunDirectoryError, match=r"1\.json"):
        run.failures()


def test_metrics_are_one_line_of_strict_json_each(tmp_path: Path) -> None:
    run = create(tmp_path / "run", FILES, resume=False)

    run.log_metrics({"step": 1, "loss": 0.5})
    run.log_metrics({"step": 2, "loss": 0.25})

    assert [json.loads(line) for line in run.metrics.read_text().splitlines()] == [
        {"step": 1, "loss": 0.5},
        {"step": 2, "loss": 0.25},
    ]
    with pytest.raises(ValueError):
        run.log_metrics({"loss": float("nan")})


@pytest.mark.parametrize("content", [None, "", "{", b"\xff"])
def test_a_file_that_is_missing_or_no_json_is_named(tmp_path: Path, content: Any) -> None:
    run = RunDirectory(tmp_path)
    if content is not None:
        run.run_json.write_bytes(content if isinstance(content, bytes) else content.encode())

    with refused(RunDirectoryError, str(tmp_path), "run.json"):
        run.read_json(run.run_json)


# Finding runs


def test_the_newest_run_is_the_one_that_started_last(tmp_path: Path) -> None:
    for age, name in ((3, "a"), (1, "b"), (2, "c")):
        create(tmp_path / name, FILES, resume=False)
        os.utime(tmp_path / name / "run.json", (10**9 - age, 10**9 - age))
    (tmp_path / "no run").mkdir()
    (tmp_path / "a file").touch()

    assert newest_run(tmp_path) == tmp_path / "b"


def test_where_no_run_is_there_is_no_newest(tmp_path: Path) -> None:
    assert newest_run(tmp_path) is None
    assert newest_run(tmp_path / "missing") is None
    (tmp_path / "file").touch()
    assert newest_run(tmp_path / "file") is None


def test_a_start_that_was_killed_before_the_run_was_there_is_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    dead = {"pid": 2**22 + 1, "started_s": 1.0, "host": socket.gethostname(), "job": None, "restarts": 0}
    (path / "lock").write_text(json.dumps(dead))
    (path / "recipe.py").write_text("half of")
    (path / ".deepspeed.json.x1.tmp").touch()

    run = create(path, FILES, resume=False)

    assert run.recipe.read_text() == FILES["recipe.py"]
    assert not list(path.glob(".*.tmp"))


@pytest.mark.parametrize("names", [["recipe.py"], ["lock", "recipe.py", "notes.txt"]])
def test_what_a_killed_start_cannot_have_left_is_somebodys(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).touch()

    with refused(RunDirectoryError, "--work-dir"):
        create(tmp_path, FILES, resume=False)

    assert (tmp_path / "recipe.py").read_text() == ""


def test_checkpoints_after_the_one_that_is_resumed_from_are_kept_with_their_attempt(tmp_path: Path) -> None:
    run = create(tmp_path / "run", FILES, resume=False)
    for step in (2, 4, 6):
        (run.checkpoints / f"checkpoint-{step}").mkdir(parents=True)
        checkpoints.seal(run.checkpoints / f"checkpoint-{step}", ManifestFacts(step=step))

    create(run.path, {**FILES, "run.json": run_json(resume_step=2)}, resume=True)

    newest, _ = checkpoints.newest_valid(run.checkpoints)
    assert newest and newest.step == 2
    aside = run.path / "attempts" / "1" / "checkpoints"
    assert sorted(checkpoint.name for checkpoint in aside.iterdir()) == ["checkpoint-4", "checkpoint-6"]
