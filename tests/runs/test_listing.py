from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.launch.plans import checkpoint, written_run
from tuner.files import dump_json
from tuner.report import page
from tuner.report.gathered import gather
from tuner.runs import beats, listing, lock, metrics
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus


def listed(folder: Path) -> listing.Listed:
    (found,) = listing.below(folder)
    return found


def held(run: RunDirectory, **facts: object) -> None:
    """Give a run another holder than this process."""
    holder = json.loads((run.path / lock.NAME).read_text())
    (run.path / lock.NAME).write_text(json.dumps({**holder, **facts}))


def test_a_run_whose_process_lives_is_running(tmp_path: Path) -> None:
    written_run(tmp_path / "a" / "b")  # held by this very process

    assert (listed(tmp_path).state, listed(tmp_path).name, listed(tmp_path).why) == ("running", "a/b", "")


@pytest.mark.parametrize("facts", [{"pid": 2**22 + 1}, {"started_s": 1.0}, {"pid": "7"}, {"pid": 2**70}])
def test_a_run_whose_process_is_gone_died(facts: dict[str, object], tmp_path: Path) -> None:
    held(written_run(tmp_path / "run"), **facts)

    assert listed(tmp_path).state == "died"
    assert "its process is gone" in listed(tmp_path).why


@pytest.mark.parametrize("text", [None, "", "{}", "[]"])
def test_a_run_that_nobody_holds_died(text: str | None, tmp_path: Path) -> None:
    file = written_run(tmp_path / "run").path / lock.NAME
    file.unlink()
    if text is not None:
        file.write_text(text)

    assert listed(tmp_path).state == "died"


def test_a_run_of_another_machine_is_not_judged(tmp_path: Path) -> None:
    held(written_run(tmp_path / "run"), host="node-7", pid=7)

    assert listed(tmp_path).state == "running"
    assert listed(tmp_path).why.startswith("process 7 on node-7, as recorded")


def test_a_failed_run_tells_its_cause_and_where_it_can_go_on(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    found = {"cause": "gpu-out-of-memory", "what": "a GPU ran out of memory"}
    run.write_status(RunStatus(state="failed", exit_code=1, message="long\nand longer", diagnosis=found))
    checkpoint(run.path, 20)
    checkpoint(run.path, 30, valid=False)

    assert listed(tmp_path).state == "failed"
    assert listed(tmp_path).why == "gpu-out-of-memory: a GPU ran out of memory"
    assert listed(tmp_path).resumable_step == 20


def test_a_stopped_run_tells_the_first_line_of_its_message(tmp_path: Path) -> None:
    written_run(tmp_path / "run").write_status(
        RunStatus(state="stopped", exit_code=75, message="stopped at step 3\nmore")
    )

    assert (listed(tmp_path).state, listed(tmp_path).why, listed(tmp_path).resumable_step) == (
        "stopped",
        "stopped at step 3",
        None,
    )


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("run.json", "{", "run.json is missing or is not JSON"),
        ("run.json", "[]", "run.json is not a JSON object"),
        ("status.json", None, "status.json is missing or is not JSON"),
        ("status.json", "\xff\x00", "status.json is missing or is not JSON"),
        (
            "status.json",
            '{"state": "walking"}',
            "status.json is damaged: state = 'walking': Input should be 'running', 'done', 'failed' or 'stopped'",
        ),
    ],
)
def test_a_damaged_run_is_listed_with_what_is_wrong(tmp_path: Path, name: str, content: str | None, why: str) -> None:
    run = written_run(tmp_path / "run")
    if content is None:
        (run.path / name).unlink()
    else:
        (run.path / name).write_bytes(content.encode("latin-1"))

    assert (listed(tmp_path).state, listed(tmp_path).why) == ("damaged", why)


def test_what_is_no_run_is_not_listed_nor_what_stands_inside_a_run(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("")
    (tmp_path / "other").mkdir()
    run = written_run(tmp_path / "run")
    earlier = run.path / "attempts" / "1"
    earlier.mkdir(parents=True)
    for name in ("recipe.py", "run.json"):
        (earlier / name).write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)

    assert [found.name for found in listing.below(tmp_path)] == ["run"]
    assert [found.name for found in listing.below(run.path)] == ["run"]


def test_the_run_that_wrote_last_stands_at_the_end(tmp_path: Path) -> None:
    for name, age in (("a", 5), ("b", 50), ("c", 500)):
        run = written_run(tmp_path / name)
        for file in (run.run_json, run.status, run.recipe):
            os.utime(file, (1e9 - age, 1e9 - age))

    assert [found.name for found in listing.below(tmp_path)] == ["c", "b", "a"]


def test_a_run_that_logs_nothing_for_long_is_seen_by_its_sign_of_life(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    for file in (run.run_json, run.status, run.recipe):
        os.utime(file, (1e9, 1e9))
    run.ranks.mkdir()
    beats.path_of(run, 0).write_text("")
    os.utime(beats.path_of(run, 0), (1e9 + 3600, 1e9 + 3600))

    assert listed(tmp_path).seen == 1e9 + 3600


def test_a_run_that_is_the_working_directory_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_run(tmp_path / "run")
    monkeypatch.chdir(tmp_path / "run")

    assert listed(Path()).name == "run"


def lines(run: RunDirectory, *found: dict[str, object]) -> None:
    for line in found:
        run.log_metrics(line)


def test_step_loss_and_speed_are_the_last_that_were_logged(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    lines(run, {"step": 1, "loss": 3.0, "tokens_per_second": 9.0}, {"step": 2, "loss": 2.0, "tokens_per_second": 10.0})
    lines(run, {"step": 2, "eval_loss": 2.5})
    with run.metrics.open("a") as stream:
        stream.write('{"step": 3, "lo')  # the run was killed while it wrote

    found = listed(tmp_path)
    assert (found.step, found.loss, found.tokens_per_second) == (2, 2.0, 10.0)


def test_a_run_that_is_done_came_further_than_it_logged(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    lines(run, {"step": 4000, "loss": 3.0})
    run.write_status(RunStatus(state="done", exit_code=0, step=4006))

    assert listed(tmp_path).step == 4006


def test_what_is_no_number_is_left_out_of_a_curve(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    odd = ('"low"', "null", "NaN", "-Infinity", "1e999", "9" * 400, "[1]")
    values = ("3.0", *odd, "2")
    run.metrics.write_text("".join(f'{{"step": {step}, "loss": {value}}}\n' for step, value in enumerate(values)))

    assert metrics.curves(run, ["loss", "eval_loss"]) == {"loss": ([0, len(odd) + 1], [3.0, 2]), "eval_loss": ([], [])}


# What one damaged run does to the others

ODD = (
    "NaN",
    "9" * 5_000,
    "1e999",
    "[" * 50_000,
    "[[1]]",
    '{"a": [1]}',
    '"text"',
    "null",
    "true",
    "-1",
    '{"gpus": [1], "gpu_bytes": {"weights": "x"}}',
)


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("file", ["run.json", "status.json", "metrics.jsonl", "lock", "samples.jsonl", "manifest.json"])
def test_a_damaged_run_hides_no_other_from_the_list_and_from_the_report(tmp_path: Path, file: str, odd: str) -> None:
    whole, damaged = written_run(tmp_path / "whole"), written_run(tmp_path / "damaged")
    for run in (whole, damaged):
        lines(run, {"step": 1, "loss": 2.5})
    place = damaged.path / file if file != "manifest.json" else checkpoint(damaged.path, 2) / file
    keys = json.loads(place.read_text()) if place.suffix == ".json" or file == "lock" else {"step": 2, "loss": 1.0}
    texts = [odd, *(json.dumps({**keys, key: "@"}).replace('"@"', odd) for key in keys)]
    for text in (*texts, json.dumps(dict.fromkeys(keys, "@")).replace('"@"', odd)):
        place.write_text(text)

        found = {run.name: run for run in listing.below(tmp_path)}
        gathered = gather([damaged.path])

        assert (found["whole"].state, found["whole"].step, found["whole"].loss) == ("running", 1, 2.5)
        assert dump_json([run.to_json() for run in found.values()])
        assert [run.name for run in gathered] == ["damaged"]
    both = page.render(gather([whole.path, damaged.path]))
    assert re.search(r"whole</th>\s*<td class=\"state running\">running", both)


# Jobs of Slurm


def _submitted(folder: Path, job: str = "812") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    RunDirectory(folder).script.write_text("#!/bin/bash\n")
    RunDirectory(folder).job.write_text(f"{job}\n")


@pytest.mark.parametrize(
    ("queue", "state", "reason"),
    [
        ({"812": "PENDING Priority"}, "pending", "Priority"),
        ({"812": "REQUEUE_HOLD job requeued in held state"}, "pending", "held"),
        ({"812": "CONFIGURING None"}, "running", "is starting"),
        ({"812": "RUNNING None"}, "running", "is starting"),
    ],
)
def test_a_job_that_waits_is_listed_before_its_run_begins(
    tmp_path: Path, queue: dict[str, str], state: str, reason: str
) -> None:
    _submitted(tmp_path / "a" / "first")

    (found,) = listing.below(tmp_path, lambda: queue)

    assert (found.name, found.state, found.resumable_step) == ("a/first", state, None)
    assert "812" in found.why and reason in found.why
    assert not found.ledger.interruptions  # it has no attempt yet


def test_a_run_whose_job_was_requeued_waits_and_resumes(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run")
    run.write_status(RunStatus(state="stopped", exit_code=75, message="stopped"))
    checkpoint(run.path, 3)
    _submitted(run.path)

    (waits,) = listing.below(tmp_path, lambda: {"812": "PENDING BeginTime"})
    (ended,) = listing.below(tmp_path, dict)

    assert (waits.state, waits.resumable_step, ended.state) == ("pending", 3, "stopped")


def test_a_job_that_is_gone_without_a_run_is_none_and_one_of_an_array_is_its_tasks(tmp_path: Path) -> None:
    _submitted(tmp_path / "cancelled")
    _submitted(tmp_path / "array")
    written_run(tmp_path / "array" / "0")

    assert [found.name for found in listing.below(tmp_path, dict)] == ["array/0"]


@pytest.mark.parametrize(("queue", "names"), [({"812": "RUNNING None"}, set()), ({"812": "PENDING x"}, {"array"})])
def test_an_array_at_work_is_its_runs_and_itself_only_while_a_task_waits(
    tmp_path: Path, queue: dict[str, str], names: set[str]
) -> None:
    _submitted(tmp_path / "array")
    written_run(tmp_path / "array" / "0")

    assert {found.name for found in listing.below(tmp_path, lambda: queue)} == {"array/0", *names}
    assert {found.name for found in listing.below(tmp_path, lambda: None)} == {"array/0"}


def test_a_folder_whose_number_of_a_job_was_not_written_hides_no_other(tmp_path: Path) -> None:
    _submitted(tmp_path / "a", job="")
    _submitted(tmp_path / "b")

    assert [found.name for found in listing.below(tmp_path, lambda: None)] == ["b"]


def test_without_a_slurm_to_ask_a_job_is_listed_as_submitted_and_slurm_is_asked_for_nothing_else(
    tmp_path: Path,
) -> None:
    written_run(tmp_path / "run")
    asked: list[str] = []
    listing.below(tmp_path, lambda: asked.append("queue"))  # type: ignore[func-returns-value]
    assert asked == []

    _submitted(tmp_path / "other")

    assert {found.state for found in listing.below(tmp_path, lambda: None)} == {"pending", "running"}


def test_a_run_of_another_machine_whose_job_has_ended_died(tmp_path: Path) -> None:
    held(written_run(tmp_path / "run"), host="node-7", pid=7, job="812")

    (died,) = listing.below(tmp_path, dict, lambda job: job == "812")
    (running,) = listing.below(tmp_path, dict, lambda _: False)

    assert (died.state, running.state) == ("died", "running")
    assert [len(found.ledger.interruptions) for found in (died, running)] == [1, 0]
