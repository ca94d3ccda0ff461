from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch.plans import PATH, made, task
from tests.launch.test_preflight_model import LLAMA, folder
from tests.machine.gpus import A100, CPU, machine
from tuner.launch import render
from tuner.machine.topology import SUPERVISED
from tuner.runs import restarts
from tuner.runs.directory import RunDirectory
from tuner.runs.records import EndedAttempt

TWO_GPUS = machine(A100, A100)
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def _env(*, environ: Mapping[str, str] = PATH, **request: Any) -> dict[str, str]:
    return render.environment(made(environ=environ, **request))


# The files


@pytest.mark.parametrize(
    ("sets", "stored", "needs"),
    [
        ([], {}, False),
        (["optimizer.type=AdamW8bit"], {}, True),
        ([], {"quantization_config": {"quant_method": "bitsandbytes"}}, True),
    ],
)
def test_ranks_import_bitsandbytes_where_something_may_need_it(
    tmp_path: Path, sets: list[str], stored: dict[str, Any], needs: bool
) -> None:
    model = folder(tmp_path / "model", {**LLAMA, **stored})

    files = render.files(made(*sets, model=str(model)))

    assert json.loads(files["run.json"])["needs_bitsandbytes"] is needs
    assert json.loads(render.files(made(*sets))["run.json"])["needs_bitsandbytes"] is bool(sets), "the package's model"


# The command


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_ranks_of_one_machine_meet_at_a_free_port(tmp_path: Path, num_ranks: int) -> None:
    found = made(flags={"nproc_per_node": num_ranks}, work_dir=tmp_path / "run")

    env = render.environment(found)

    assert render.argv(found) == [sys.executable, "-m", "tuner.worker", str(tmp_path / "run")]
    assert render.of_ranks(found.topology) == [{"RANK": str(at), "LOCAL_RANK": str(at)} for at in range(num_ranks)]
    assert env["WORLD_SIZE"] == env["LOCAL_WORLD_SIZE"] == str(num_ranks)
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("127.0.0.1", "0"), "free when they start"
    assert not env.keys() & {"RANK", "LOCAL_RANK"}


@pytest.mark.parametrize(("flags", "told"), [({}, True), ({"nproc_per_node": 2}, True), ({"launcher": "none"}, False)])
def test_a_rank_is_told_of_a_supervisor_where_there_is_one(flags: dict[str, Any], told: bool) -> None:
    assert (SUPERVISED in _env(flags=flags)) is told


TWO_NODES = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1", "master_port": 1234}


def test_several_machines_meet_at_the_given_address_and_each_starts_its_own_ranks(tmp_path: Path) -> None:
    found = made(hardware=TWO_GPUS, flags=TWO_NODES, work_dir=tmp_path / "run")

    env = render.environment(found)

    assert render.argv(found) == [sys.executable, "-m", "tuner.worker", str(tmp_path / "run")]
    assert render.of_ranks(found.topology) == [{"RANK": "2", "LOCAL_RANK": "0"}, {"RANK": "3", "LOCAL_RANK": "1"}]
    assert (env["WORLD_SIZE"], env["LOCAL_WORLD_SIZE"]) == ("4", "2")
    assert (env["MASTER_ADDR"], env["MASTER_PORT"]) == ("10.0.0.1", "1234")
    flags = json.loads(render.files(found)["run.json"])["node_flags"]
    assert flags == ["--nnodes=2", "--master-addr=10.0.0.1", "--master-port=1234"], "to resume it"


@pytest.mark.parametrize("name", ["a b", "größe", "$HOME", "a$$b", "${local_rank}", "it's", '"quoted"', "-n", "a;b"])
def test_a_path_reaches_the_ranks_as_it_is(tmp_path: Path, name: str) -> None:
    assert render.argv(made(work_dir=tmp_path / name, flags=TWO_NODES))[-1] == str(tmp_path / name)


def test_a_task_of_slurm_becomes_the_worker_itself(tmp_path: Path) -> None:
    found = made(environ=task(1), flags={"launcher": "slurm"}, work_dir=tmp_path / "run")

    assert render.argv(found) == [sys.executable, "-m", "tuner.worker", str(tmp_path / "run")]
    env = render.environment(found)
    assert {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")} == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert env["MASTER_ADDR"] == "n1"
    assert env["MASTER_PORT"] == str(found.topology.master_port)


def test_without_a_launcher_this_process_is_rank_0_of_1() -> None:
    found = made(flags={"launcher": "none"}, hardware=TWO_GPUS)

    assert render.argv(found)[:3] == [sys.executable, "-m", "tuner.worker"]
    env = render.environment(found)
    assert (env["RANK"], env["WORLD_SIZE"], env["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")


# The environment


@pytest.mark.parametrize(("hardware", "name"), [(CPU, "cpu"), (TWO_GPUS, "cuda")])
def test_deepspeed_is_told_its_accelerator(hardware: Any, name: str) -> None:
    assert _env(hardware=hardware)["DS_ACCELERATOR"] == name


def test_cores_are_shared_among_the_processes() -> None:
    assert _env(hardware=TWO_GPUS)["OMP_NUM_THREADS"] == "8"
    assert _env(flags={"nproc_per_node": 5})["OMP_NUM_THREADS"] == "1"


def test_idle_threads_of_ranks_on_a_cpu_sleep_soon() -> None:
    assert _env()["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in _env(hardware=TWO_GPUS)


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_how_threads_wait_is_the_users_choice(name: str) -> None:
    assert "GOMP_SPINCOUNT" not in _env(environ={**PATH, name: "17"})


def test_memory_of_gpus_is_taken_in_segments_that_grow() -> None:
    assert _env(hardware=TWO_GPUS)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert not [name for name in _env() if "ALLOC_CONF" in name]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_settings_of_the_allocator_that_the_user_made_stand(name: str) -> None:
    env = _env(hardware=TWO_GPUS, environ={**PATH, name: "max_split_size_mb:128"})

    assert not [name for name in env if "ALLOC_CONF" in name]


def test_the_settings_of_the_allocator_have_the_names_that_torch_reads() -> None:
    library = Path(torch.__file__).parent / "lib" / "libc10.so"

    names = set(re.findall(rb"\bPYTORCH_\w*ALLOC_CONF\b", library.read_bytes()))

    assert {name.decode() for name in names} == set(render._ALLOCATORS)


def test_what_the_user_set_stays() -> None:
    assert "OMP_NUM_THREADS" in _env(flags=TWO_NODES)
    assert "OMP_NUM_THREADS" not in _env(flags=TWO_NODES, environ=PATH | {"OMP_NUM_THREADS": "17"})


def test_the_interpreters_own_scripts_are_on_path_once() -> None:
    scripts = str(Path(sys.executable).parent)

    assert _env()["PATH"] == f"{scripts}:{PATH['PATH']}"
    assert "PATH" not in _env(environ={"PATH": f"/bin:{scripts}"})


def test_no_secret_of_the_environment_is_written_down() -> None:
    environ = PATH | {"HF_TOKEN": "hf_canary", "WANDB_API_KEY": "canary"}
    found = made(environ=environ)

    given = (*render.files(found).values(), *render.argv(found), *render.environment(found).values())
    assert "canary" not in "".join(given)


def test_the_ranks_of_an_srun_after_a_failure_in_its_job_are_compared(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    environ = task(0, TUNER_MAX_REQUEUES="3", TUNER_MAX_RESTARTS="2")
    plan = made(environ=environ, flags={"launcher": "slurm"}, work_dir=run.path)
    run.path.mkdir()
    first = json.loads(render.files(plan)["run.json"])["follows_failure"]

    restarts.note_restart(run, "7", EndedAttempt(cause="killed", step=3, began=0, saved=2))

    assert (first, json.loads(render.files(plan)["run.json"])["follows_failure"]) == (False, True)
    restarts.note_restart(run, "8", EndedAttempt(cause="killed", step=3, began=0, saved=2))
    assert not json.loads(render.files(plan)["run.json"])["follows_failure"], "that was another job"
