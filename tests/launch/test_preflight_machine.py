"""A machine on which a run would end is told before a rank starts; a fake driver stands in for GPUs."""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
import socket
import threading
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.launch.plans import checkpoint, made, task, written_run
from tests.launch.test_preflight_model import LLAMA, folder
from tests.machine.gpus import A100, CPU, GIB, T4, V100, machine
from tuner.errors import DiskError, MachineError, RecipeError
from tuner.launch import render
from tuner.launch.checks import Finding, gpus, host, inputs
from tuner.launch.resolved_run import ResolvedRun
from tuner.machine import hardware, libraries
from tuner.machine.hardware import GpuUse, Hardware
from tuner.runs import creation
from tuner.runs.checkpoints import unfinished

Disk = namedtuple("Disk", "total used free")
FLASH = "model.attn_implementation=flash_attention_2"
BIG = "llama2_7b_full_alpaca_e3"
EIGHT = machine(*(A100._replace(uuid=f"GPU-{number}") for number in range(8)))


def texts(found: list[Finding]) -> str:
    return "\n".join(map(str, found))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return a function that sets the free bytes of every file system."""

    def has(free: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: Disk(0, 0, int(free)))

    return has


# Attention, precision, drivers


def test_flash_attention_needs_a_gpu() -> None:
    errors = list(gpus.attention(made(FLASH)))

    assert [type(error) for error in errors] == [MachineError, RecipeError]
    assert "needs a GPU" in texts(errors)
    assert "needs bf16 or fp16, and this run uses fp32" in texts(errors)
    assert "attn_implementation=sdpa" in texts(errors)


def test_flash_attention_needs_an_ampere() -> None:
    assert "8.0 or more, and a GPU of this machine has 7.5" in texts(
        list(gpus.attention(made(FLASH, hardware=machine(A100, T4))))
    )


@pytest.mark.parametrize("package", ["flash_attn", "kernels"])
def test_flash_attention_needs_one_of_its_packages(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    plan = made(FLASH, hardware=machine(A100))
    there: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in there or None)

    (error,) = gpus.attention(plan)
    there.add(package)

    assert "the package flash_attn" in str(error)
    assert list(gpus.attention(plan)) == []


def test_sdpa_needs_nothing() -> None:
    assert list(gpus.attention(made("model.attn_implementation=sdpa"))) == []


def test_emulated_bf16_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "torch_cuda_version", lambda: "12.8")  # newer ones have no kernels for a V100

    assert "emulated on Tesla V100" in texts(list(gpus.precision(made("dtype=bf16", hardware=machine(V100)))))
    assert list(gpus.precision(made(hardware=machine(V100)))) == []
    assert list(gpus.precision(made("dtype=bf16", hardware=machine(A100)))) == []


def test_a_gpu_that_torch_has_no_kernels_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "torch_cuda_version", lambda: "13.0")

    (error,) = gpus.precision(made(hardware=machine(V100, V100)))

    assert isinstance(error, MachineError)
    assert "no kernels for Tesla V100" in str(error)
    assert list(gpus.precision(made(hardware=machine(A100)))) == []


def _of_slurm(tasks: str, num_gpus: int) -> ResolvedRun:
    nodes = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_STEP_NODELIST": "n[1-2]"}
    return made(environ=task(0, tasks=4, **nodes), hardware=machine(*[A100] * num_gpus), flags={"launcher": "slurm"})


def test_gpus_that_no_task_uses_are_told() -> None:
    assert texts(list(gpus.spread(_of_slurm("2(x2)", 4)))) == (
        "2 of 4 GPUs of a node stay idle: srun --ntasks-per-node=4 uses all."
    )
    assert not list(gpus.spread(_of_slurm("2(x2)", 2)))
    assert not list(gpus.spread(made(hardware=machine(A100, A100), flags={"nproc_per_node": 1}))), "asked for"


def test_tasks_that_srun_spread_unevenly_are_told() -> None:
    told = texts(list(gpus.spread(_of_slurm("3,1", 0))))

    assert told == "the nodes run 3, 1 tasks: srun --ntasks-per-node=2 gives each node as many."


@pytest.mark.parametrize(
    ("has", "built", "refused"),
    [((12, 4), "13.0", True), ((12, 4), "12.8", False), ((13, 0), "12.8", False), (None, "13.0", False)],
)
def test_a_driver_older_than_torchs_cuda_is_refused(has: tuple[int, int] | None, built: str, refused: bool) -> None:
    assert bool(list(gpus.too_old_driver(has, built))) is refused


# Busy GPUs


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that sets what the driver says of GPU-0."""

    def says(free: float, *processes: tuple[int, int]) -> None:
        monkeypatch.setattr(hardware, "gpu_use", lambda: {"GPU-0": GpuUse(int(free), processes)})

    return says


def test_a_busy_gpu_is_told_with_pid_and_bytes(driver: Callable[..., None]) -> None:
    driver(70 * GIB, (4711, 10 * GIB))

    (warning,) = gpus.busy(made(hardware=EIGHT))

    assert isinstance(warning, str)
    assert "pid 4711 has 10.0 GiB" in warning
    assert "70.0 GiB of 80.0 GiB are free" in warning


def test_a_gpu_too_full_for_the_plan_is_refused_unless_that_is_to_be_ignored(driver: Callable[..., None]) -> None:
    plan = made(recipe=BIG, hardware=EIGHT, deepspeed="zero3")
    assert plan.fit and plan.fit.fits
    driver(plan.fit.peak.gpu_bytes - 1, (4711, 10 * GIB))

    (error,) = gpus.busy(plan)
    (warning,) = gpus.busy(replace(plan, request=plan.request._replace(ignore_fit=True)))

    assert isinstance(error, MachineError)
    assert error.exit_code == 3
    assert "4711" in str(error)
    assert isinstance(warning, str)


def test_memory_taken_by_processes_outside_a_container_is_told(driver: Callable[..., None]) -> None:
    driver(40 * GIB)

    assert "not visible here" in texts(list(gpus.busy(made(hardware=EIGHT))))


def test_an_idle_gpu_and_this_process_are_not_told(driver: Callable[..., None]) -> None:
    driver(80 * GIB - 1, (os.getpid(), 300))

    assert list(gpus.busy(made(hardware=EIGHT))) == []


def test_gpus_that_the_run_does_not_use_may_be_busy(driver: Callable[..., None]) -> None:
    driver(1, (4711, 79 * GIB))

    assert list(gpus.busy(made(hardware=machine(A100, A100._replace(uuid="GPU-0")), flags={"nproc_per_node": 1}))) == []


# Disks and memory


def needed(plan: ResolvedRun) -> tuple[float, float]:
    sizes = host.checkpoint_bytes(plan)
    assert sizes
    return sizes


def test_in_fp32_without_zero_the_weights_are_their_own_masters() -> None:
    alone, sharded = (needed(made("dtype=fp32", deepspeed=level))[0] for level in ("none", "zero1"))

    assert alone == 803_712 * (4 + 4 + 8)
    assert sharded - alone == 803_712 * 4


def test_checkpoint_sizes_are_those_measured() -> None:
    # On DeepSpeed 0.19.8 with bf16: files of tiny_full_sample (803,712 parameters) and its LoRA (466,944 trained).
    bf16 = "dtype=bf16"
    full, lora = (
        needed(made(bf16, *more, recipe=f"tiny_{method}_sample_e1", deepspeed="none"))
        for method, more in (("full", ()), ("lora", ("adapter.r=64",)))
    )
    sharded = needed(made(bf16, deepspeed="zero3"))
    frozen = needed(made(bf16, recipe="tiny_freeze_sample_e1", deepspeed="zero2"))

    assert full == (pytest.approx(13_465_975, rel=0.05), pytest.approx(1_710_763, rel=0.1))
    assert sharded[0] == pytest.approx(11_485_740, rel=0.05)
    assert frozen == (pytest.approx(5_616_501, rel=0.05), pytest.approx(1_710_764, rel=0.1))
    assert lora == (pytest.approx(8_125_079, rel=0.1), pytest.approx(1_045_285, rel=0.12))


def test_a_disk_without_room_for_the_checkpoints_is_refused(disk: Callable[[float], None], tmp_path: Path) -> None:
    many = ("train_cfg.max_steps=10", "checkpoint.interval=1", "checkpoint.max_keep_ckpts=2")
    plan = made(*many, work_dir=tmp_path / "not" / "there")
    checkpoint_bytes, final = needed(plan)

    disk(3 * checkpoint_bytes + final - 1)
    (error,) = host.checkpoints(plan)
    disk(3 * checkpoint_bytes + final)

    assert isinstance(error, DiskError)
    assert error.exit_code == 74
    assert "3 checkpoints" in str(error)
    assert str(tmp_path) in str(error)
    assert list(host.checkpoints(plan)) == []


def test_room_that_a_killed_save_takes_is_counted_as_free(disk: Callable[[float], None], tmp_path: Path) -> None:
    plan = made("train_cfg.max_steps=10", "checkpoint.interval=10", work_dir=tmp_path / "run")
    checkpoint_bytes, final = needed(plan)
    left = unfinished(plan.run_path / "checkpoints") / "checkpoint-10"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(bytes(1000))

    disk(2 * checkpoint_bytes + final - 1000)
    assert list(host.checkpoints(plan)) == []

    disk(2 * checkpoint_bytes + final - 1001)
    assert len(list(host.checkpoints(plan))) == 1


@pytest.mark.parametrize(("way", "times"), [("universal", 2), ("weights", 1 / 3)])
def test_a_disk_without_room_to_convert_the_checkpoint_is_refused(
    disk: Callable[[float], None], tmp_path: Path, way: str, times: float
) -> None:
    batch = ("train_dataloader.batch_size=2", "accumulative_counts=4", "val_dataloader=none")
    run, two = tmp_path / "run", {"nproc_per_node": 2}
    creation.create(run, render.files(made(*batch, work_dir=run, deepspeed="zero2", flags=two)), resume=False)
    saved = checkpoint(run, 2)
    states = saved / "global_step2" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    states.parent.mkdir()
    states.write_bytes(bytes(30 * 1024**2))
    on = {"deepspeed": "zero2", "flags": {"nproc_per_node": 1}}
    if way == "weights":
        on = {"deepspeed": "zero3", "flags": two, "resume_weights": True}
    plan = made(*batch, work_dir=run, resume="auto", **on)
    checkpoint_bytes, _ = needed(plan)
    most = max(times * 30 * 1024**2, min(times, 1) * 30 * 1024**2 + checkpoint_bytes)
    assert plan.resume and plan.resume.load_as == way

    disk(most - 1)
    (error,) = host.conversion(plan)
    disk(most)

    assert isinstance(error, DiskError)
    assert error.exit_code == 74
    assert "are free, and converting checkpoint-2 for these ranks needs " in str(error)
    assert "use the 2 ranks and --deepspeed deepspeed_zero2 that saved it" in str(error)
    assert list(host.conversion(plan)) == []
    assert list(host.conversion(made(*batch))) == []


ROWS = ("val_dataloader=none", "max_rows=1", "checkpoint.max_keep_ckpts=5", "checkpoint.interval=1")


@pytest.mark.parametrize(
    ("sets", "count"),
    [
        pytest.param(
            ("train_cfg.max_steps=10", "checkpoint.interval=500", "checkpoint.max_keep_ckpts=5"), 1, id="short"
        ),
        pytest.param((*ROWS, "train_dataloader.dataset.packing=False"), 2, id="one step, and one at the end"),
        pytest.param(ROWS, 6, id="packing may make more steps than rows"),
        pytest.param(
            ("train_cfg.max_steps=10", "checkpoint.max_keep_ckpts=2", "checkpoint.save_best=auto"), 4, id="best"
        ),
    ],
)
def test_room_is_needed_for_as_many_checkpoints_as_a_run_keeps(
    sets: tuple[str, ...], count: int, disk: Callable[[float], None]
) -> None:
    plan = made(*sets)
    checkpoint_bytes, final = needed(plan)

    disk(count * checkpoint_bytes + final - 1)
    refused = list(host.checkpoints(plan))
    disk(count * checkpoint_bytes + final)

    assert f"{count} checkpoint" in texts(refused)
    assert list(host.checkpoints(plan)) == []


def test_a_resumed_run_needs_room_for_the_steps_that_are_left(disk: Callable[[float], None], tmp_path: Path) -> None:
    run = written_run(tmp_path / "run").path
    saved = checkpoint(run, 90)
    keeps = ("checkpoint.interval=10", "checkpoint.max_keep_ckpts=9", "train_cfg.max_steps=100")
    plan = made(*keeps, work_dir=tmp_path / "other", resume=str(saved))
    checkpoint_bytes, final = needed(plan)

    disk(2 * checkpoint_bytes + final)

    assert plan.steps.left == 10
    assert list(host.checkpoints(plan)) == []


def test_a_disk_without_room_for_the_download_is_refused(disk: Callable[[float], None]) -> None:
    plan = made(recipe=BIG, hardware=EIGHT)

    disk(13e9)
    (error,) = inputs.download(plan)
    disk(14e9)

    assert isinstance(error, DiskError)
    assert "HF_HOME" in str(error)
    assert list(inputs.download(plan)) == []


def test_a_disk_without_room_for_the_joined_model_is_refused(disk: Callable[[float], None], tmp_path: Path) -> None:
    environ = {"TUNER_CACHE": str(tmp_path / "cache")}
    tower = "model.vision=dict(path='openai/clip-vit-large-patch14-336')"
    plan = made(tower, recipe=BIG, hardware=EIGHT, environ=environ)

    disk(13e9)
    (error,) = host.joined_model(plan)
    (tmp_path / "cache" / "llava-v1-0").mkdir(parents=True)
    (warning,) = host.joined_model(plan)
    disk(15e9)

    assert isinstance(error, DiskError) and "TUNER_CACHE" in str(error)
    assert isinstance(warning, str) and "unless it is there already" in warning
    assert [*host.joined_model(plan), *host.joined_model(made(recipe=BIG, hardware=EIGHT))] == []


def test_shared_memory_too_small_for_the_workers_batches_is_refused(disk: Callable[[float], None]) -> None:
    plan = made("train_dataloader.num_workers=64", "train_dataloader.batch_size=64", hardware=EIGHT)

    disk(64 * 1024**2)
    (error,) = host.shared_memory(plan)
    disk(8 * GIB)

    assert isinstance(error, MachineError)
    assert "num_workers=0" in str(error)
    assert list(host.shared_memory(plan)) == []


def test_little_shared_memory_between_gpus_is_told(disk: Callable[[float], None]) -> None:
    disk(64 * 1024**2)

    assert "shm-size" in texts(list(host.shared_memory(made(hardware=EIGHT))))
    assert list(host.shared_memory(made(hardware=machine(A100)))) == []
    assert list(host.shared_memory(made())) == []


def test_a_model_larger_than_a_cpu_hosts_memory_is_refused() -> None:
    plan = made(recipe=BIG, deepspeed="zero2")

    (error,) = host.host_memory(plan)

    assert isinstance(error, MachineError)
    assert "not enough memory: this run needs at least 126.2 GiB of RAM, and this machine has 16.0 GiB" in str(error)
    assert list(host.host_memory(replace(plan, request=plan.request._replace(ignore_fit=True)))) == []
    assert list(host.host_memory(made())) == []


def test_a_host_whose_memory_is_in_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_host_bytes", lambda: GIB)

    (warning,) = host.host_memory(made(recipe=BIG, hardware=EIGHT, deepspeed="zero2_offload"))

    assert isinstance(warning, str)
    assert "of host memory, and 1.0 GiB are free: close other programs" in warning


# The system


def test_a_port_in_use_is_refused_for_the_leader_alone() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        number = taken.getsockname()[1]
        flags = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": number, "nproc_per_node": 1}

        (error,) = host.port(made(flags={**flags, "node_rank": 0}))

        assert isinstance(error, MachineError)
        assert f"cannot listen on port {number}" in str(error)
        assert list(host.port(made(flags={**flags, "node_rank": 1}))) == []
    assert list(host.port(made(flags={**flags, "node_rank": 0}))) == []


def test_a_resume_waits_for_its_port_while_processes_that_inherited_it_end() -> None:
    with socket.create_server(("", 0)) as held:
        place = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": held.getsockname()[1], "node_rank": 0}
        again = made(flags={**place, "nproc_per_node": 1}, resume="auto")
        threading.Timer(0.3, held.close).start()

        assert list(host.port(again)) == []


def test_another_port_that_is_named_is_one() -> None:
    with socket.socket() as held:
        with suppress(OSError):  # taken by another process: as good
            held.bind(("", 65533))
            held.listen()
        place = {"nnodes": 2, "master_addr": "127.0.0.1", "master_port": 65533, "node_rank": 0, "nproc_per_node": 1}

        (error,) = host.port(made(flags=place))

    assert "--master-port 65523" in str(error)


def test_one_node_has_no_port_to_be_in_use() -> None:
    assert list(host.port(made())) == []


def test_an_mpirun_that_would_not_notice_a_lost_host_is_told() -> None:
    several = made(flags={"nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1"})
    of_orte = {"OMPI_MCA_orte_num_nodes": "2"}

    (warning,) = host.lost_hosts(replace(several, environ=of_orte))

    assert "oob_tcp_keepalive_time" in str(warning)
    is_set = {**of_orte, "OMPI_MCA_oob_tcp_keepalive_time": "10"}
    for plan, environ in ((made(), of_orte), (several, {}), (several, is_set)):
        assert list(host.lost_hosts(replace(plan, environ=environ))) == []


def test_open_mpi_5_is_asked_with_its_own_options_which_stand_on_its_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    several = made(flags={"nnodes": 2, "node_rank": 0, "master_addr": "h0"})
    # 5.0.11: -mca reaches the ranks and not the daemons, and --prtemca the daemons and not the ranks
    of_prte = {"PRTE_LAUNCHED": "1", "OMPI_MCA_oob_tcp_keepalive_time": "10"}
    words = ["prterun", "-np", "2"]
    monkeypatch.setattr(host, "parents_words", lambda: words)

    (warning,) = host.lost_hosts(replace(several, environ=of_prte))
    assert "--prtemca oob_tcp_keepalive_time 10" in str(warning)
    words += ["--prtemca", "oob_tcp_keepalive_time", "10"]

    assert list(host.lost_hosts(replace(several, environ=of_prte))) == []


def test_a_job_of_several_nodes_without_srun_is_told_that_one_trains() -> None:
    job = {"SLURM_JOB_ID": "8", "SLURM_JOB_NUM_NODES": "2"}
    several = {"nnodes": 2, "node_rank": 0, "master_addr": "127.0.0.1"}

    (warning,) = host.forgotten_nodes(replace(made(), environ=job))

    assert "this Slurm job has 2 nodes, and the run uses one" in str(warning)
    for plan, environ in ((made(flags=several), job), (made(), {**job, "SLURM_STEP_ID": "0"}), (made(), {})):
        assert list(host.forgotten_nodes(replace(plan, environ=environ))) == []


def test_a_limit_of_open_files_under_which_nothing_starts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (12, 12))

    (error,) = host.open_files(made())

    assert isinstance(error, MachineError)
    assert "may open 12 files" in str(error) and "ulimit -n 256" in str(error)


def test_many_workers_need_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made("train_dataloader.num_workers=32")
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 65536))

    (warning,) = host.open_files(plan)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4096, 65536))

    assert "1024 files" in str(warning)
    assert "ulimit -n" in str(warning)
    assert list(host.open_files(plan)) == []


@pytest.mark.parametrize(("width", "hardware", "num_warnings"), [(96, CPU, 1), (64, CPU, 0), (96, machine(A100), 0)])
def test_matrices_that_a_cpu_stores_badly_in_4_bits_are_named(
    width: int, hardware: Hardware, num_warnings: int, tmp_path: Path
) -> None:
    shape = {"hidden_size": width, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    path = folder(tmp_path / "model", {**LLAMA, **shape})
    run = made(model=str(path), recipe="tiny_qlora_sample_e1", hardware=hardware)

    warnings = list(gpus.four_bits(run))

    assert len(warnings) == num_warnings and all("96" in str(warning) for warning in warnings)


def test_an_optimizer_of_bitsandbytes_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else real(name))

    assert "bitsandbytes is not installed" in texts(list(host.installed(made("optimizer.type=AdamW8bit"))))
    assert list(host.installed(made(hardware=CPU))) == []
