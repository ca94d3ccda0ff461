"""The job's script: run by a real bash with an srun that only tells what it was given."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.refused import refused
from tuner.errors import UsageError
from tuner.launch import sbatch
from tuner.launch.sbatch import Job

WEIRD = (
    *("$(touch canary)", "`touch canary`", "; touch canary", "a && touch canary #", "a b", "it's", 'q"q', "${HOME}"),
    *("*", "~", "-rf", "ünï ☃", "!!", "x|y>z<w", "back\\slash", "%j%%", ""),
)
SRUN = f"#!{sys.executable}\nimport json, os, sys\nprint(json.dumps([os.getcwd(), *sys.argv[1:]]))\nsys.exit(7)\n"


def _job(**changed: Any) -> Job:
    values: dict[str, Any] = {
        "name": "mine",
        "nodes": 2,
        "gpus_per_node": 8,
        "tasks_per_node": 8,
        "cpus_per_task": None,
        "time": None,
        "options": [],
        "array": None,
        "max_requeues": 3,
        "stop_before_s": 120,
    }
    return Job(**values | changed)


def _run(text: str, folder: Path, code: int = 7, **env: str) -> list[str]:
    """Run a script under bash where only our srun is, which ends with 7; return where srun stood and its arguments."""
    srun = folder / "bin" / "srun"
    srun.parent.mkdir(exist_ok=True)
    srun.write_text(SRUN)
    srun.chmod(0o755)
    script = folder / "script.sh"
    script.write_text(text)
    variables = {"PATH": f"{srun.parent}:{os.environ['PATH']}", "HOME": "/nowhere", **env}
    done = subprocess.run(["/bin/bash", script], cwd="/", env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _directives(text: str) -> list[str]:
    lines = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    return [word for line in lines for word in shlex.split(line)]


@pytest.mark.parametrize("value", WEIRD)
def test_no_value_becomes_shell(tmp_path: Path, value: str) -> None:
    cwd = tmp_path / f"cwd {value.replace('/', '')}"
    cwd.mkdir()
    train = ["python", "train", f"--set=x={value}", value]

    standing, *arguments = _run(sbatch.script(_job(), tmp_path / "run", train, cwd), tmp_path)

    assert standing == str(cwd)
    assert arguments == [
        "--kill-on-bad-exit=1",
        *train,
        *("--launcher", "slurm", "--resume", "auto", "--work-dir", str(tmp_path / "run")),
    ]
    assert not list(tmp_path.rglob("canary"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])), min_size=1, max_size=4))
def test_any_words_reach_srun_as_they_are(tmp_path: Path, words: list[str]) -> None:
    _, _, *arguments = _run(sbatch.script(_job(), tmp_path / "run", words, tmp_path), tmp_path)

    assert arguments[: len(words)] == words


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["{index}", "a", "$x", "'", '"', " ", "{", "}"]), max_size=6).map("".join))
def test_a_task_of_an_array_finds_its_number_in_any_value(tmp_path: Path, value: str) -> None:
    text = sbatch.script(_job(array="0-3"), tmp_path / "run", ["python", value], tmp_path)

    _, _, _, found, *_, run = _run(text, tmp_path, SLURM_ARRAY_TASK_ID="42")

    assert found == value.replace("{index}", "42") == sbatch.at_index(value, "42")
    assert run == str(tmp_path / "run" / "42")


ENDS = ("/bin/sh", "-c", 'echo "$@" >> ends; exit $1', "after")
"""In place of `after_srun`: it writes down its arguments and ends with srun's code."""


def test_what_says_how_a_run_ended_gets_the_code_of_srun(tmp_path: Path) -> None:
    text = sbatch.script(_job(), tmp_path / "a $run", ["python"], tmp_path, ENDS)

    assert _run(text, tmp_path)[1:3] == ["--kill-on-bad-exit=1", "python"]

    words = f"7 {tmp_path}/a $run --nodes=2 --tasks-per-node=8 --max-restarts=0\n"
    assert (tmp_path / "ends").read_text() == words


def test_a_job_that_may_restart_outlives_a_node_and_starts_srun_again_where_it_is_told(tmp_path: Path) -> None:
    job = _job(max_restarts=3, spare_nodes=1)
    again = """echo "$@" > told_of; [ -e told ] && exit 7; touch told; echo --nodes=2 --nodelist=n1,n3"""
    text = sbatch.script(job, tmp_path / "run", ["python"], tmp_path, ("/bin/sh", "-c", again, "after"))
    assert "export TUNER_MAX_RESTARTS=3\n" in text  # ranks leave the telling to `after_srun`

    _, *arguments = _run(text, tmp_path)

    assert {"--nodes=3", "--no-kill"} <= set(_directives(text))
    assert (tmp_path / "told_of").read_text().split()[-1] == f"--stop-before={job.stop_before_s}"
    assert arguments[:3] == ["--nodes=2", "--nodelist=n1,n3", "--kill-on-bad-exit=1"]


def test_a_run_that_is_done_ends_the_job(tmp_path: Path) -> None:
    text = sbatch.script(_job(max_restarts=3), tmp_path / "run", ["python"], tmp_path, ("/bin/true",))

    _run(text, tmp_path, code=0)


def test_without_an_array_braces_are_braces(tmp_path: Path) -> None:
    text = sbatch.script(_job(), tmp_path / "run", ["{index}"], tmp_path)

    assert _run(text, tmp_path)[2] == "{index}"


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "a\x1b[0m", "a\x85b", "a\u2028b", "a\udcffb"])
def test_a_control_character_is_refused_in_every_value(tmp_path: Path, value: str) -> None:
    for given_ in (
        lambda: sbatch.script(_job(), tmp_path, [value], tmp_path),
        lambda: sbatch.script(_job(), tmp_path, ["x"], tmp_path / value),
        lambda: sbatch.script(_job(), tmp_path / value, ["x"], tmp_path),
        lambda: sbatch.check(_job(name=value)),
        lambda: sbatch.check(_job(options=[("partition", value)])),
    ):
        with pytest.raises(UsageError) as caught:
            given_()
        assert value not in str(caught.value), "shown as an escape"


@pytest.mark.parametrize(
    "value", ["a b", "a'b", 'a"b', "a#b", "a\\b", "$x", "`x`", "", "ü", "a;b", "{x}", "a\n#SBATCH"]
)
def test_an_option_holds_nothing_that_sbatch_splits_or_expands(value: str) -> None:
    with refused(UsageError, "--account") as caught:
        sbatch.check(_job(options=[("account", value)]))
    assert caught.value.where == "--account"


def test_a_backslash_in_the_run_directory_would_switch_off_the_logs_name(tmp_path: Path) -> None:
    with refused(UsageError, "--work-dir"):
        sbatch.options(_job(), tmp_path / "a\\b")


def test_the_script_asks_for_what_was_asked() -> None:
    job = _job(
        cpus_per_task=4,
        time="1-0",
        options=[("partition", "main"), ("constraint", "a100&ib")],
        array="0-7%2",
        stop_before_s=300,
    )

    text = sbatch.script(job, Path("/r n/50%"), ["python"], Path("/"))

    assert _directives(text) == sbatch.options(job, Path("/r n/50%"))
    assert set(_directives(text)) == {
        "--partition=main",
        "--constraint=a100&ib",
        "--job-name=mine",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=4",
        "--time=1-0",
        "--array=0-7%2",
        "--signal=USR2@300",
        "--output=/r n/50%%/slurm-%A_%a.out",
        "--open-mode=append",
        "--requeue",
    }
    assert "\nsrun --kill-on-bad-exit=1 --cpus-per-task=4 python " in text
    assert "export TUNER_MAX_REQUEUES=3\n" in text


def test_ranks_on_cpus_ask_for_no_gpu() -> None:
    assert not [text for text in sbatch.options(_job(gpus_per_node=0), Path("/r")) if "gpu" in text]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:00:00", 3600), ("1-0", 86400), ("1-2:3", 93780), ("0-0:5:1", 301)],
)
def test_a_time_limit_is_read_as_slurm_reads_it(text: str, seconds: int) -> None:
    sbatch.check(_job(time=text, stop_before_s=seconds - 61))
    with refused(UsageError, "--time", seconds):
        sbatch.check(_job(time=text, stop_before_s=seconds - 60))


@pytest.mark.parametrize("text", ["", "soon", "1h", "1:2:3:4", "1 -0", "1;2"])
def test_a_time_that_slurm_does_not_know_is_refused(text: str) -> None:
    with refused(UsageError, "--time"):
        sbatch.check(_job(time=text))


@pytest.mark.parametrize("text", ["UNLIMITED", "infinite", "0", "0:00"])
def test_no_time_limit_is_none(text: str) -> None:
    sbatch.check(_job(time=text))


@pytest.mark.parametrize(("text", "first"), [("0-3", "0"), ("1,4,7", "1"), ("2-16:4%2", "2"), ("5", "5")])
def test_an_array_begins_with_its_first_number(text: str, first: str) -> None:
    sbatch.check(_job(array=text))

    assert _job(array=text).first_index == first


@pytest.mark.parametrize("text", ["", "a", "0-", "0-3;x", "1,,2", "-1"])
def test_what_is_no_list_of_numbers_is_no_array(text: str) -> None:
    with refused(UsageError, "--array"):
        sbatch.check(_job(array=text))


@pytest.mark.parametrize(
    ("text", "option", "words"),
    [
        ("nice=5", ("nice", "5"), "--nice=5"),
        ("--mail-type=END", ("mail-type", "END"), "--mail-type=END"),
        ("exclusive", ("exclusive", None), "--exclusive"),
    ],
)
def test_any_other_option_of_sbatch_is_passed_on(text: str, option: tuple[str, str | None], words: str) -> None:
    assert sbatch.parse_option(text) == option
    job = _job(options=[option])

    sbatch.check(job)

    assert words in _directives(sbatch.script(job, Path("/run"), ["python"], Path("/")))


@pytest.mark.parametrize("text", ["", "=5", "Nice=5", "a b=5", "-p=x", "a b"])
def test_what_is_no_long_option_is_refused(text: str) -> None:
    with refused(UsageError, "--sbatch"):
        sbatch.parse_option(text)


@pytest.mark.parametrize(
    "text", ["output=x", "outp=x", "signal=B:9", "wrap=id", "nodes=9", "no-req=1", "wait", "quiet"]
)
def test_an_option_that_submit_sets_itself_is_refused_even_shortened(text: str) -> None:
    with refused(UsageError, "--sbatch"):
        sbatch.parse_option(text)
