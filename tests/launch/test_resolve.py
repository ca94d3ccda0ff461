from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import NOW, TINY, checkpoint, made, task, written_run
from tests.machine.gpus import A100, CPU, GIB, H200, T4, V100, machine
from tests.refused import refused
from tuner.errors import DataError, MachineError, ModelError, RunDirectoryError, UsageError
from tuner.launch import memory, preflight, render
from tuner.launch.render import batch_counts
from tuner.machine.slurm import expand_tasks
from tuner.recipes import loading
from tuner.recipes.schema import resolved_recipe

TWO_GPUS = machine(A100, A100)
UNLESS_DROPPED = "exact unless samples are dropped: no token to train on within max_length"
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def _paths(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# What is written


def test_planning_writes_nothing(tmp_path: Path) -> None:
    made(work_dir=tmp_path / "run")
    made()

    assert _paths(tmp_path) == []


def test_the_files_are_the_plan(tmp_path: Path) -> None:
    found = made("lr=1e-5", "seed=7", deepspeed="zero2", hardware=machine(H200), command=("tuner", "train", TINY))

    assert set(render.files(found)) == {"recipe.py", "recipe.json", "deepspeed.json", "run.json"}
    assert json.loads(render.files(found)["deepspeed.json"]) == found.final.config
    facts = json.loads(render.files(found)["run.json"])
    assert facts["name"] == TINY
    assert facts["argv"] == render.argv(found)
    assert facts["command"] == ["tuner", "train", TINY]
    assert facts["seed"] == 7
    assert facts["deepspeed"] == "deepspeed_zero2"
    assert facts["precision"]["dtype"] == "bf16"
    assert facts["world_size"] == 1
    assert facts["resume"] is None
    assert facts["launch_id"] == found.launch_id
    assert facts["hardware"]["gpus"][0]["name"] == "NVIDIA H200"
    assert facts["versions"]["python"] == sys.version.split()[0]


def test_the_written_recipe_is_the_whole_one_and_pins_what_was_decided(tmp_path: Path) -> None:
    data = tmp_path / "größe" / "my data.jsonl"
    data.parent.mkdir()
    data.write_text('{"text": "x"}\n')
    found = made(
        f"train_dataloader.dataset.path={os.path.relpath(data)}", "val_dataloader=None", hardware=machine(H200)
    )

    path = tmp_path / "elsewhere" / "recipe.py"
    path.parent.mkdir()
    path.write_text(render.files(found)["recipe.py"], encoding="utf-8")
    again = loading.load(str(path))

    assert again.config.train_dataloader.dataset.path == str(data)
    assert again.config.deepspeed == found.level == "none", "auto was decided once"
    expected = found.recipe.values
    expected["train_dataloader"]["dataset"]["path"] = str(data)
    assert again.values == expected | {"deepspeed": "none"}


@pytest.mark.parametrize(
    ("recipe", "sets"),
    [
        (TINY, ()),
        (TINY, ("lr=1e-5", "attn_implementation=eager", "chat_template=chatml")),
        ("tiny_dpo_lora_ultrafeedback_e1", ()),
        ("tiny_kto_full_kto_mix_14k_e1", ()),
        ("tiny_pretrain_full_sample_e1", ("optimizer.type=Muon", "clip_grad=None")),
        ("internlm2_chat_7b_qlora_oasst1_e3", ()),
        ("llama2_7b_full_alpaca_e3", ("max_steps=7",)),
        ("qwen3_8b_orpo_lora_ultrafeedback_e1", ()),
    ],
)
def test_the_ranks_read_the_values_of_the_written_recipe_resolved(
    tmp_path: Path, recipe: str, sets: tuple[str, ...]
) -> None:
    files = render.files(made(*sets, recipe=recipe, hardware=machine(H200)))
    path = tmp_path / "recipe.py"
    path.write_text(files["recipe.py"], encoding="utf-8")

    config = resolved_recipe(json.loads(files["recipe.json"]), tmp_path / "recipe.json")

    assert config == loading.load(str(path)).config


def test_a_recipe_that_another_version_of_tuner_resolved_is_refused(tmp_path: Path) -> None:
    document = json.loads(render.files(made())["recipe.json"]) | {"schema": 0}

    with refused(RunDirectoryError, "recipe.json", 0, 1):
        resolved_recipe(document, tmp_path / "recipe.json")


def test_a_users_json_is_pinned_as_a_whole(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{"zero_optimization": {"stage": 1}, "steps_per_print": 3}')

    found = made(deepspeed="my.json")

    (tmp_path / "recipe.py").write_text(render.files(found)["recipe.py"])
    (tmp_path / "my.json").unlink()
    again = made(recipe="./recipe.py")
    assert again.final.config == found.final.config


# Which DeepSpeed


@pytest.mark.parametrize(
    ("hardware", "name", "level"),
    [
        (CPU, TINY, "none"),
        (machine(H200), "internlm2_chat_7b_qlora_oasst1_e3", "none"),
        (machine(*[H200] * 8), "internlm2_7b_full_alpaca_e1", "deepspeed_zero1"),
        (machine(*[V100] * 8), "llama2_7b_full_alpaca_e1", "deepspeed_zero3"),  # ZeRO-2 leaves 3 % free
        (machine(*[V100] * 8), "internlm2_7b_full_alpaca_e1", "deepspeed_zero3"),
        (machine(*[T4] * 8), "internlm2_7b_full_alpaca_e1", "deepspeed_zero3_offload"),
    ],
)
def test_auto_takes_a_level_that_fits_and_says_why(hardware: Any, name: str, level: str) -> None:
    found = made(recipe=name, hardware=hardware)

    assert found.level == level
    assert found.level_and_split.level_reason


def test_a_run_that_nothing_can_hold_is_refused_with_what_would_fit() -> None:
    hopeless = {"recipe": "qwen2_5_72b_instruct_full_alpaca_e1", "hardware": machine(V100)}

    for refuses in (preflight.foresee, preflight.check):
        with pytest.raises(MachineError) as caught:
            refuses(made(**hopeless))
        assert "does not fit" in str(caught.value)
        assert "quantization=dict(bits=4)" in str(caught.value)
    ignored = made(**hopeless, ignore_fit=True)
    assert ignored.level.endswith("_offload")
    assert preflight.foresee(ignored)


def test_a_level_that_may_not_fit_is_a_warning_and_a_hopeless_one_is_refused_at_the_start() -> None:
    found = made(recipe="internlm2_7b_full_alpaca_e1", hardware=machine(V100), deepspeed="none")

    assert any("may not fit: it needs about " in warning for warning in found.warnings)
    assert memory.hopeless(found.level_and_split)


def test_a_users_json_is_judged_by_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}')
    names = {"recipe": "internlm2_7b_full_alpaca_e1", "hardware": machine(*[A100] * 8)}
    offloaded, sharded = made(**names, deepspeed=str(tmp_path / "my.json")), made(**names, deepspeed="zero3")

    assert offloaded.fit and sharded.fit
    assert offloaded.fit.peak.gpu["optimizer_states"] == 0 < sharded.fit.peak.gpu["optimizer_states"]


def test_the_smallest_gpu_decides() -> None:
    small = A100._replace(memory_bytes=8 * GIB)

    assert made(recipe="internlm2_chat_7b_qlora_oasst1_e3", hardware=machine(A100, small)).level != "deepspeed_zero1"
    assert made(recipe="internlm2_chat_7b_qlora_oasst1_e3", hardware=machine(A100, A100)).level == "deepspeed_zero1"


def test_the_flag_wins_over_the_recipe_and_the_recipe_over_auto() -> None:
    assert made("deepspeed=zero3").level == "deepspeed_zero3"
    assert made("deepspeed=zero3", deepspeed="none").level == "none"
    assert made("deepspeed=zero3", deepspeed="auto").level == "none"


def test_an_empty_flag_is_not_taken_for_none_given() -> None:
    """As in --deepspeed "$UNSET"."""
    from tuner.errors import DeepSpeedConfigError

    with pytest.raises(DeepSpeedConfigError):
        made(deepspeed="")


# Batch arithmetic


def test_the_batch_is_counted_over_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text("{}\n\n{}\n{}\n{}\n{}")
    data = ("train_dataloader.dataset.path=data.jsonl", "val_dataloader=None")

    found = made(*data, "packing=False", "train_dataloader.batch_size=2", "accumulative_counts=1", hardware=TWO_GPUS)

    assert batch_counts(found).to_json() | {"epochs": 0, "max_steps": 0} == {
        "micro_batch": 2,
        "accumulation": 1,
        "ranks": 2,
        "global_batch": 4,
        "rows": 5,
        "rows_are": "exact",
        "samples": 5,
        "steps_per_epoch": 2,
        "steps_per_epoch_is": UNLESS_DROPPED,
        "epochs": 0,
        "max_steps": 0,
        "steps": 2,
        "steps_are": UNLESS_DROPPED,
        "steps_done": 0,
        "steps_left": 2,
    }
    assert found.final.config["train_batch_size"] == 4


def test_a_resumed_run_has_the_samples_of_its_checkpoint(tmp_path: Path) -> None:
    run = written_run(tmp_path / "run").path
    checkpoint(run, 4, data={"rows": 25, "tokens": 9})

    found = batch_counts(made("max_epochs=3", resume="run"))

    assert found.global_batch == 2
    assert (found.samples, found.steps_per_epoch, found.steps_per_epoch_is) == (25, 13, "exact")
    assert (found.steps, found.steps_done, found.steps_left, found.steps_are) == (39, 4, 35, "exact")


# What is refused before anything starts


@pytest.mark.parametrize(
    ("sets", "error"),
    [
        ("model.path=./missing", ModelError),
        ("model.path=None", ModelError),
        ("train_dataloader.dataset.path=./missing.jsonl", DataError),
        ("dtype=fp16", MachineError),
    ],
)
def test_what_cannot_succeed_is_refused(sets: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        made(sets)


# The run directory


def test_a_run_has_a_directory_of_its_own_by_recipe_and_time(tmp_path: Path) -> None:
    assert made().run_path == tmp_path / "work_dirs" / TINY / "20260102_030405"
    assert made(work_dir=Path("here")).run_path == tmp_path / "here"
    assert made().launch_id != made(now=NOW + timedelta(microseconds=1)).launch_id
    written_run(made().run_path)
    assert made().run_path == tmp_path / "work_dirs" / TINY / "20260102_030405_2", "a run of the same second"


def test_all_tasks_of_a_slurm_job_take_the_same_directory_and_launch(tmp_path: Path) -> None:
    plans = [made(environ=task(rank), flags={"launcher": "slurm"}) for rank in (0, 1)]

    assert {plan.run_path for plan in plans} == {tmp_path / "work_dirs" / TINY / "slurm-7"}
    assert len({plan.launch_id for plan in plans}) == 1
    requeued = made(environ=task(0, SLURM_RESTART_COUNT="1"), flags={"launcher": "slurm"})
    assert requeued.launch_id != plans[0].launch_id


def test_a_taken_directory_is_refused(tmp_path: Path) -> None:
    written_run(tmp_path / "run")

    with refused(RunDirectoryError, "--work-dir"):
        made(work_dir=tmp_path / "run")


_NAMES = {
    "mpi": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "env": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
}


def _first_of_node(launcher: str, counts: str, node: int) -> dict[str, str]:
    """Return the variables of the first rank of a node; `counts` has the ranks of each node, as Slurm writes them."""
    each = expand_tasks(counts)
    rank, world = sum(each[:node]), sum(each)
    if launcher == "slurm":
        place = {"SLURM_NODEID": str(node), "SLURM_STEP_NUM_NODES": str(len(each)), "SLURM_LOCALID": "0"}
        return task(rank, tasks=world, **place, SLURM_STEP_TASKS_PER_NODE=counts)
    values = dict(zip(_NAMES[launcher], map(str, (rank, world, 0, each[node])), strict=True))
    return {"PATH": os.defpath, "MASTER_ADDR": "n1", "MASTER_PORT": "29511", **values}


@pytest.mark.parametrize("launcher", ["slurm", "mpi", "env"])
@pytest.mark.parametrize("counts", ["3,1", "1,3", "2(x3),1", "1,2(x2),3"])
@pytest.mark.parametrize("hardware", [CPU, machine(*[A100] * 8)])
def test_every_node_splits_the_batch_over_all_ranks_however_many_it_has_itself(
    hardware: Any, counts: str, launcher: str
) -> None:
    num_ranks, num_nodes = sum(expand_tasks(counts)), len(expand_tasks(counts))
    sets = ("train_dataloader.batch_size=auto", "accumulative_counts=auto", f"global_batch_size={24 * num_ranks}")
    environs = [_first_of_node(launcher, counts, node) for node in range(num_nodes)]
    plans = [made(*sets, environ=own, hardware=hardware, flags={"launcher": launcher}) for own in environs]

    for plan in plans:
        assert plan.batch.ranks == plan.topology.world_size == num_ranks
        assert plan.batch.global_batch == plan.final.config["train_batch_size"] == 24 * num_ranks
    assert len({(plan.batch, plan.level) for plan in plans}) == 1, "rank 0's files are those of all ranks"


@pytest.mark.parametrize("written", [["recipe.py"], ["recipe.py", "deepspeed.json"], ["recipe.py", "run.json"]])
@pytest.mark.parametrize("resume", [None, "auto"])
def test_a_task_of_slurm_takes_the_directory_that_rank_0_is_writing(
    tmp_path: Path, written: list[str], resume: str | None
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    for name in written:
        (path / name).write_text("{}")

    assert made(environ=task(1), flags={"launcher": "slurm"}, work_dir=path, resume=resume).run_path == path
    if resume is None:
        with pytest.raises(RunDirectoryError):
            made(environ=task(0), flags={"launcher": "slurm"}, work_dir=path)


def test_geometry_is_refused_before_directories_are_looked_at(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        made(flags={"nnodes": 2}, work_dir=tmp_path)


def test_ranks_are_bound_to_cores_by_who_starts_them() -> None:
    assert json.loads(render.files(made(bind_cores=True))["run.json"])["bind_cores"] is True

    with refused(UsageError, "--bind-cores-to-rank") as caught:
        made(bind_cores=True, environ=task(0), flags={"launcher": "slurm"})
    assert "--cpu-bind" in caught.value.fix


@pytest.mark.parametrize(
    ("block", "sets", "compiles"),
    [
        ({"disable": False, "backend": "inductor"}, (), True),
        ({"disable": True, "backend": "inductor"}, (), False),
        ({"disable": False, "backend": "inductor"}, ("torch_compile=False",), False),
    ],
)
def test_a_deepspeed_config_that_compiles_as_it_once_did_sets_the_recipes_torch_compile(
    tmp_path: Path, block: dict[str, Any], sets: tuple[str, ...], compiles: bool
) -> None:
    path = tmp_path / "zero1_torch_compile.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "compile": block}))

    found = made(*sets, deepspeed=str(path))

    assert found.recipe.config.train_cfg.torch_compile is compiles
    assert not {"disable", "backend"} & found.final.config.get("compile", {}).keys()
    if compiles:
        assert found.recipe.origins["train_cfg.torch_compile"].text.startswith(f"{path}:1:")
    assert any("compile.backend is no longer read by DeepSpeed" in warning for warning in found.warnings)
