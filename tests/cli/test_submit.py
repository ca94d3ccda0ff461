"""`tuner submit`: mistakes are told before the queue, and what is submitted holds nothing of this shell's secrets."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.command import Result, Tuner
from tests.launch.plans import checkpoint, written_run
from tests.machine.fake_slurm import FakeSlurm

TINY = "tiny_full_sample_e1"
CPU = ("--gpus-per-node", 0)
BIG = ("--gpus-per-node", 1, "--gpu", "a100-80g", "--deepspeed", "zero3", "--dry-run")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    made = FakeSlurm(tmp_path / "slurm")
    made.says("812")
    monkeypatch.setenv("PATH", made.path)
    return made


def _srun(text: str) -> list[str]:
    """Return the words of the script's one srun."""
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    return shlex.split(line)


def _refused(found: Result, code: int, *said: str) -> None:
    assert found.code == code, found.err
    assert len(found.messages) == 1
    assert all(text in found.err for text in said), found.err


def test_a_dry_run_prints_the_script_and_does_nothing_else(tuner: Tuner, fake: FakeSlurm, tmp_path: Path) -> None:
    found = tuner("submit", TINY, "--nodes", 2, *CPU, "--tasks-per-node", 4, "--partition", "main", "--dry-run")

    assert found.code == 0, found.err
    assert found.out.startswith("#!/bin/bash\n#SBATCH --partition=main\n")
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=4\n" in found.out
    assert fake.calls() == []
    assert [path.name for path in tmp_path.iterdir()] == ["slurm"]


def test_a_job_that_was_submitted_is_in_the_list_of_runs(tuner: Tuner, fake: FakeSlurm) -> None:
    assert tuner("submit", TINY, *CPU, "--work-dir", "work_dirs/first").code == 0
    fake.says("812 PENDING Priority")

    (listed,) = json.loads(tuner("runs", "--json").out)

    assert (listed["name"], listed["state"]) == ("first", "pending")
    assert "Priority" in listed["why"]


def test_the_steps_of_a_job_are_told_as_those_of_a_run(tuner: Tuner, fake: FakeSlurm) -> None:
    values = ["--set", "max_rows=10", "--set", "train_dataloader.dataset.packing=False", "--set", "max_epochs=3"]
    values += ["--set", "train_dataloader.batch_size=2", "--set", "accumulative_counts=1"]

    told = tuner("submit", TINY, *CPU, "--tasks-per-node", 2, *values, "--dry-run").err

    assert "steps: 9 (fewer if rows are dropped: no token to train on within max_length)" in told


def test_the_job_trains_what_train_would(tuner: Tuner, fake: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "my data.jsonl").write_text('{"text": "a"}\n')
    changes = [
        "--deepspeed",
        "zero2",
        "--ds",
        "steps_per_print=5",
        "--data",
        "my data.jsonl",
        "--seed",
        7,
        "--set",
        "lr=1e-5",
        "--ignore-fit",
    ]

    words = _srun(tuner("submit", TINY, *CPU, "--work-dir", "my run", *changes, "--dry-run").out)

    begin = words.index("train") + 1
    assert words[begin - 4 : begin] == ["-P", "-m", "tuner", "train"]
    assert words[begin:] == [
        TINY,
        *("--deepspeed=zero2", "--data=my data.jsonl", "--seed=7", "--ds=steps_per_print=5"),
        *("--set=lr=1e-5", "--ignore-fit"),
        *("--launcher", "slurm", "--resume", "auto", "--work-dir", str(tmp_path / "my run")),
    ]


def test_a_job_is_submitted_with_its_script_in_the_run_directory(tuner: Tuner, fake: FakeSlurm, tmp_path: Path) -> None:
    found = tuner("submit", TINY, *CPU, "--work-dir", "run")

    run = tmp_path / "run"
    assert found.code == 0, found.err
    assert f"tail -F {run}/slurm-812.out; scancel 812" in found.out
    (call,) = fake.calls()
    assert call[:2] == ["sbatch", "--parsable"] and call[-1] == str(run / "submit.sh")
    assert f"--output={run}/slurm-%j.out" in call
    assert sorted(path.name for path in run.iterdir()) == ["job", "submit.sh"]
    assert _srun((run / "submit.sh").read_text())[-1] == str(run)


def test_no_variable_of_this_shell_is_written_anywhere(
    tuner: Tuner, fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "MY_SECRET"):
        monkeypatch.setenv(name, "hf_canary")

    found = tuner("submit", TINY, *CPU, "--work-dir", "run")

    assert "hf_canary" not in found.out + found.err
    assert "hf_canary" not in str(fake.calls())
    assert not [file for file in (tmp_path / "run").rglob("*") if "hf_canary" in file.read_text()]


def test_a_job_inherits_no_launcher(tuner: Tuner, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    outer = {"NNODES": "3", "NPROC_PER_NODE": "9", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_CONF": "/c"}
    for name, value in outer.items():
        monkeypatch.setenv(name, value)

    assert tuner("submit", TINY, *CPU).code == 0

    assert outer.keys() & fake.environ().keys() == {"SLURM_CONF"}


def test_tasks_of_an_array_train_in_folders_of_their_own(tuner: Tuner, fake: FakeSlurm, tmp_path: Path) -> None:
    found = tuner("submit", TINY, *CPU, "--array", "3-5", "--set", "seed={index}", "--work-dir", "run")

    assert found.code == 0, found.err
    assert f"tail -F {tmp_path}/run/slurm-812_3.out" in found.out
    script = (tmp_path / "run" / "submit.sh").read_text()
    assert "#SBATCH --array=3-5\n" in script
    assert '--set=seed="$SLURM_ARRAY_TASK_ID"' in script
    assert f'--work-dir {tmp_path}/run/"$SLURM_ARRAY_TASK_ID"\n' in script


def test_tasks_of_an_array_may_differ_in_their_deepspeed_config(tuner: Tuner, fake: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "ds_3.json").write_text("{}")

    found = tuner("submit", TINY, *CPU, "--array", "3-4", "--deepspeed", "ds_{index}.json", "--work-dir", "run")

    assert found.code == 0, found.err
    assert '--deepspeed=ds_"$SLURM_ARRAY_TASK_ID".json' in (tmp_path / "run" / "submit.sh").read_text()


def test_a_run_that_was_interrupted_may_be_submitted_again(tuner: Tuner, fake: FakeSlurm, tmp_path: Path) -> None:
    written_run(tmp_path / "run")
    checkpoint(tmp_path / "run", 4)

    assert tuner("submit", TINY, *CPU, "--work-dir", "run").code == 0
    _refused(tuner("submit", TINY, *CPU, "--tasks-per-node", 7, "--work-dir", "run"), 2, "global batch")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["tiny_lra_sample_e1", *CPU], 2, "Did you mean 'tiny_lora_sample_e1'?"),
        ([TINY, *CPU, "--set", "lrr=1"], 2, "lrr"),
        ([TINY, *CPU, "--array", "0-3", "--set", "lr={index}x"], 2, "0x"),
        ([TINY, *CPU, "--deepspeed", "zero9"], 2, "zero9"),
        ([TINY, *CPU, "--data", "absent.jsonl"], 2, "absent.jsonl"),
        ([TINY, *CPU, "--partition", "main; touch canary"], 2, "--partition"),
        ([TINY, *CPU, "--sbatch", "output=x"], 2, "--sbatch"),
        ([TINY, *CPU, "--work-dir", "a\nb"], 2, "a\\nb"),
        ([TINY, *CPU, "--time", "2"], 2, "--stop-before"),
        ([TINY, *CPU, "--spare-nodes", 1], 2, "Add --max-restarts"),
        ([TINY, "--gpus-per-node", "8", "--tasks-per-node", "4"], 2, "each GPU gets one rank"),
        ([TINY, "--gpus-per-node", "8", "--gpu", "a100x"], 2, "a100x"),
        (["llama2_70b_full_alpaca_e3", *BIG], 3, "this run does not fit: it needs about"),
    ],
)
def test_a_mistake_is_told_now_and_not_in_the_queue(
    tuner: Tuner, fake: FakeSlurm, tmp_path: Path, arguments: list[object], code: int, said: str
) -> None:
    _refused(tuner("submit", *arguments), code, said)

    assert fake.calls() == []
    assert [path.name for path in tmp_path.iterdir()] == ["slurm"]


def test_bad_rows_are_told_now(tuner: Tuner, fake: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "my.jsonl").write_text('{"messages": 7}\n')

    _refused(tuner("submit", TINY, *CPU, "--data", "my.jsonl"), 2, "my.jsonl:1")
    assert fake.calls() == []


def test_memory_is_judged_only_for_gpus_that_are_named(tuner: Tuner, fake: FakeSlurm) -> None:
    found = tuner("submit", "llama2_70b_full_alpaca_e3", "--gpus-per-node", 1, "--dry-run")

    assert found.code == 0, found.err
    assert "the job's GPUs are unknown, so GPU memory is not checked: set --gpu, such as --gpu a100-80g." in found.err


def test_without_sbatch_there_is_no_job(tuner: Tuner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    _refused(tuner("submit", TINY, *CPU), 3, "sbatch is not installed")


HOSTS = ("submit", "llama2_70b_full_alpaca_e3", "--gpus-per-node", "8", "--gpu", "a100-80g", "--dry-run")
OFFLOADED = (*HOSTS, "--deepspeed", "zero3_offload")


@pytest.mark.parametrize("said", [("--host-memory", "64GB"), ("--mem", "64G"), ("--mem", "65536")])
def test_the_memory_of_a_jobs_hosts_is_judged_where_it_is_said(tuner: Tuner, said: tuple[str, str]) -> None:
    small, large = tuner(*OFFLOADED, *said), tuner(*OFFLOADED, "--host-memory", "4TB")

    assert (small.code, small.out) != (0, "") and "host" in small.err
    assert large.code == 0, large.err
    assert "3725.3 GiB" in large.err
    assert (
        "the job's GPUs are unknown, so GPU memory is not checked: set --gpu, such as --gpu a100-80g."
        not in small.err + large.err
    )


@pytest.mark.parametrize("said", [(), ("--mem", "0")])
def test_hosts_of_unknown_memory_are_said_not_to_be_judged(tuner: Tuner, said: tuple[str, ...]) -> None:
    assert (
        "the memory of the job's hosts is unknown, so it is not checked: set --mem or --host-memory."
        in tuner(*OFFLOADED, *said).err
    )


def test_a_job_is_announced_as_a_training_is_and_the_script_stays_alone_on_stdout(tuner: Tuner) -> None:
    found = tuner(*HOSTS)

    assert found.code == 0, found.err
    assert found.out.startswith("#!/bin/bash\n")
    starts = ("data: ", "steps: ", "batch size: ", "DeepSpeed: ", "memory: ", "run directory: ")
    assert [start for start in starts if f"\n{start}" not in found.err] == []
    assert re.search(r"^batch size: 16 \(.* x 8 processes\)$", found.err, re.MULTILINE)
