from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import PATH, made
from tests.machine.gpus import H200, machine
from tests.refused import refused
from tuner.errors import UsageError
from tuner.fit.splits import possible_splits
from tuner.launch import render
from tuner.launch.pins import Pins
from tuner.launch.remedies import ON_OOM, commands, for_lost_node_0, lighter
from tuner.machine.hostfile import NODE
from tuner.machine.topology import Topology, local
from tuner.recipes.loading import load
from tuner.recipes.overrides import parse_override
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import RecipeConfig
from tuner.runs.records import RunRecord
from tuner.runs.resume_point import share_states
from tuner.zero import presets

GPU, HOST = "gpu-out-of-memory", "host-out-of-memory"
RUN = Path("/runs/my run")
TYPED = ["tuner", "train", "mine.py", "--resume", "auto", "--work-dir=out", "--deepspeed", "zero2"]
ONE_NODE = local(2)


def _config(*sets: str, recipe: str = "tiny_full_sample_e1") -> RecipeConfig:
    config = load(recipe, Overrides(pairs=[("--set", text) for text in sets])).config
    return config.with_split(possible_splits(config, 2)[0])


def _batches(micro: int, accumulation: int, recipe: str = "tiny_full_sample_e1") -> RecipeConfig:
    sets = (f"train_dataloader.batch_size={micro}", f"accumulative_counts={accumulation}", "val_dataloader=none")
    return _config(*sets, "gradient_checkpointing=True", recipe=recipe)


def _commands(
    config: RecipeConfig, level: str = "deepspeed_zero2", topology: Topology = ONE_NODE
) -> dict[str, list[str]]:
    found = commands(TYPED, config, level, topology, topology.nproc_per_node, RUN)
    return {cause: shlex.split(text) for cause, text in found.items()}


# What is lighter


@pytest.mark.parametrize(
    ("micro", "accumulation", "after"),
    [(8, 2, (4, 4)), (2, 1, (1, 2)), (3, 16, (1, 48)), (6, 4, (3, 8)), (7, 3, (3, 7)), (5, 1, (1, 5))],
)
def test_half_the_micro_batch_keeps_the_global_batch(micro: int, accumulation: int, after: tuple[int, int]) -> None:
    change = lighter(_batches(micro, accumulation), "deepspeed_zero2", 2, GPU)

    values = {"train_dataloader.batch_size": after[0], "optim_wrapper.accumulative_counts": after[1]}
    assert change == Pins(ON_OOM, values)
    assert after[0] * after[1] == micro * accumulation


def test_the_changes_are_overrides_that_a_recipe_takes() -> None:
    config = _config("train_dataloader.batch_size=4", "val_dataloader.batch_size=4", "train_dataloader.num_workers=1")
    change = lighter(config, "deepspeed_zero2", 2, GPU)

    assert change and len(change.values) == 3
    for text in change.flags[1::2]:
        parse_override(text, "--set", config.model_dump())


def test_validation_takes_no_larger_batches_than_training() -> None:
    change = lighter(_config("train_dataloader.batch_size=1", "val_dataloader.batch_size=8"), "none", 2, GPU)

    assert change == Pins(ON_OOM, {"val_dataloader.batch_size": 1})


def test_a_micro_batch_of_kto_keeps_a_pair() -> None:
    config = _batches(4, 1, "tiny_kto_lora_sample_preferences_e1")

    assert lighter(config, "deepspeed_zero2", 2, GPU) == Pins(
        ON_OOM, {"train_dataloader.batch_size": 2, "optim_wrapper.accumulative_counts": 2}
    )
    smaller = _batches(2, 2, "tiny_kto_lora_sample_preferences_e1")
    assert lighter(smaller, "deepspeed_zero2", 2, GPU) == Pins(ON_OOM, level="deepspeed_zero3")


@pytest.mark.parametrize(
    ("level", "world", "cause", "after"),
    [
        ("none", 2, GPU, "deepspeed_zero1"),
        ("deepspeed_zero2", 2, GPU, "deepspeed_zero3"),
        ("deepspeed_zero3", 2, GPU, "deepspeed_zero3_offload"),
        ("deepspeed_zero2_offload", 2, GPU, "deepspeed_zero3_offload"),
        ("deepspeed_zero2_offload", 2, HOST, "deepspeed_zero3"),
        ("deepspeed_zero3_offload", 2, GPU, None),
        ("deepspeed_zero2", 2, HOST, "deepspeed_zero3"),
        ("deepspeed_zero3", 2, HOST, None),
        ("none", 1, GPU, next(rung.name for rung in presets.rungs() if rung.offloaded)),
        ("none", 1, HOST, None),
        ("/my/ds.json", 2, GPU, None),
        ("deepspeed_zero2", 2, "not-a-number", None),
    ],
)
def test_at_micro_batch_1_the_next_level_that_helps_is_taken(
    level: str, world: int, cause: str, after: str | None
) -> None:
    change = lighter(_batches(1, 4), level, world, cause)

    assert change == (Pins(ON_OOM, level=after) if after else None)


def test_a_run_is_made_lighter_a_finite_number_of_times() -> None:
    config, level, num, sets = _batches(8, 1), "none", 0, ["gradient_checkpointing=False"]
    while change := lighter(config, level, 2, GPU):
        num += 1
        level = change.level or level
        sets += [f"{key}={value}" for key, value in change.values.items()]
        config = _config("val_dataloader=none", *sets)

    assert (level, num) == ("deepspeed_zero3_offload", 3 + 1 + 4)


def test_activations_are_computed_again_before_the_next_level() -> None:
    config = _config("train_dataloader.batch_size=1", "val_dataloader=none", "gradient_checkpointing=False")

    recomputes = {"train_cfg.gradient_checkpointing": True, "train_cfg.recomputed_layers": None}
    assert lighter(config, "deepspeed_zero2", 2, GPU) == Pins(ON_OOM, recomputes)
    some = _config(
        "train_dataloader.batch_size=1", "val_dataloader=none", "recomputed_layers=1", "gradient_checkpointing=True"
    )
    assert lighter(some, "deepspeed_zero2", 2, GPU) == Pins(ON_OOM, recomputes)
    assert lighter(config, "deepspeed_zero2", 2, HOST) == Pins(ON_OOM, level="deepspeed_zero3")


@pytest.mark.parametrize(
    ("stage", "other", "do"), [(1, 2, True), (2, 1, True), (3, 3, True), (2, 3, False), (0, 1, False), (0, 0, True)]
)
def test_states_are_shared_by_zero_1_and_2_alone(stage: int, other: int, do: bool) -> None:
    assert share_states(stage, other) is do


# What to type


def test_the_command_goes_on_in_the_runs_own_directory() -> None:
    again = _commands(_batches(2, 2))["again"]

    assert again == ["tuner", "train", "mine.py", "--deepspeed", "zero2", "--work-dir", str(RUN), "--resume", "auto"]


@pytest.mark.parametrize("named", [("--output-dir", "out"), ("--output_dir=out",), ("--work_dir", "out")])
def test_the_directory_is_named_once_whatever_its_flag_was_called(named: tuple[str, ...]) -> None:
    command = ["tuner", "train", "mine.py", *named]

    again = commands(command, _batches(2, 2), "zero2", ONE_NODE, ONE_NODE.nproc_per_node, RUN)["again"]

    assert again == f"tuner train mine.py --work-dir {shlex.quote(str(RUN))} --resume auto"


def test_the_lighter_command_keeps_the_global_batch() -> None:
    found = _commands(_batches(2, 2))

    sets = ["--set", "train_dataloader.batch_size=1", "--set", "optim_wrapper.accumulative_counts=4"]
    assert found[GPU] == [*found["again"], *sets]


def test_another_level_that_reads_the_checkpoints_goes_on() -> None:
    found = _commands(_batches(1, 4), "deepspeed_zero1")[GPU]

    assert found[3:] == ["--work-dir", str(RUN), "--resume", "auto", "--deepspeed", "deepspeed_zero2"]


def test_to_another_level_that_cannot_take_its_states_a_run_moves_its_weights() -> None:
    found = _commands(_batches(1, 4))[HOST]

    goes_on = ["--work-dir", str(RUN), "--resume", "auto", "--resume-weights"]
    assert found[3:] == [*goes_on, "--deepspeed", "deepspeed_zero3"]


def test_where_nothing_is_lighter_no_command_is_planned() -> None:
    assert GPU not in _commands(_batches(1, 4), "deepspeed_zero3_offload")


def test_a_diverged_run_is_tried_with_a_tenth_of_the_learning_rate() -> None:
    found = _commands(_config("lr=3e-3"))["not-a-number"]

    assert found[-2:] == ["--set", "optim_wrapper.optimizer.lr=0.0003"]


def test_shared_memory_is_spared_by_loading_in_the_ranks() -> None:
    assert "shared-memory" not in _commands(_config())
    found = _commands(_config("train_dataloader.num_workers=4"))["shared-memory"]
    assert found[-2:] == ["--set", "train_dataloader.num_workers=0"]


def test_a_number_of_ranks_that_a_variable_said_is_typed() -> None:
    plan = made(environ={"PATH": "/usr/bin", "NPROC_PER_NODE": "2"}, command=("tuner", "train", "x"))

    assert '"again": "tuner train x --nproc-per-node 2 --work-dir' in render.files(plan)["run.json"]
    assert (
        "--nproc-per-node"
        not in render.files(made(hardware=machine(H200, H200)))["run.json"].split('"again"')[1].split("\n")[0]
    )


@pytest.mark.parametrize(
    ("flags", "started"),
    [
        ({"launcher": "none"}, "1 process"),
        ({"nnodes": 2, "node_rank": 0, "master_addr": "n1"}, "2 nodes"),
    ],
)
def test_retry_needs_a_supervisor_that_sees_all_ranks(flags: dict[str, Any], started: str) -> None:
    with refused(UsageError, "--on-oom", started):
        made(flags=flags, on_oom="retry")

    made(flags=flags)


@pytest.mark.parametrize(
    ("words", "hosts", "typed"),
    [
        ("x --nnodes=2 --work-dir R --node-rank=0", (), "x --nnodes=2 --work-dir R --node-rank=0"),
        ("x --hostfile=h --master-addr=a", ("h0", "h1"), "x --hostfile=h --exclude=h0 --resume R --work-dir R-2"),
        ("x --exclude=h2", ("h0", "h1"), "x --exclude=h2@h0 --resume R --work-dir R-2"),
        ("x --exclude=h0:1@h2", ("h0", "h1"), "x --exclude=h2@h0 --resume R --work-dir R-2"),
        ("x --include=h1:0@h0", ("h0", "h1"), "x --include=h1:0 --resume R --work-dir R-2"),
        ("x --hostfile=h --spare-nodes=1", ("h0", "h1"), "x --hostfile=h --spare-nodes=1 --resume R --work-dir R-2"),
    ],
)  # fmt: skip
def test_what_to_type_when_node_0_is_lost_is_told_by_the_launcher(
    words: str, hosts: tuple[str, ...], typed: str
) -> None:
    nodes = Topology("local", 2, 1, 2, 4, master_addr="10.0.0.1", master_port=29500)

    told = for_lost_node_0(f"tuner train {words}", nodes, hosts, Path("R"))

    assert told.endswith(typed)
    assert ("10.0.0.1" in told) is not bool(hosts)


def test_without_node_0_a_run_of_fewer_nodes_has_one_less() -> None:
    nodes = Topology("local", 3, 1, 1, 3, master_addr="a", master_port=1, min_nodes=2, max_nodes=3)

    told = for_lost_node_0("tuner train x --nnodes=2:3", nodes, ("h0", "h1", "h2"), Path("R"))

    assert "--nnodes=2:2 " in told


BY_HAND = {"nnodes": "1:2", "node_rank": 0, "master_addr": "10.0.0.1", "nproc_per_node": 2}
ON_HOSTS = ("tuner", "train", "x", "--hostfile", "my hosts", "--ssh=ssh -p 22", "--max_restarts", "2", "--lr", "1")


@pytest.mark.parametrize(
    ("environ", "request_", "flags"),
    [
        ({}, {"flags": {"nproc_per_node": 2}}, []),
        (
            {},
            {"flags": BY_HAND, "max_restarts": 2},
            ["--nnodes=1:2", "--master-addr=10.0.0.1", "--master-port=29500", "--nproc-per-node=2", "--max-restarts=2"],
        ),
        (
            {NODE: "h0", "NNODES": "2", "NODE_RANK": "0", "ADDR": "10.0.0.1"},
            {"command": ON_HOSTS, "max_restarts": 2},
            ["--hostfile={here}/my hosts", "--ssh=ssh -p 22", "--max-restarts=2"],
        ),
        (
            {"PET_NNODES": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "a", "PET_NPROC_PER_NODE": "1"},
            {"flags": {"launcher": "env"}},
            ["--launcher=env"],
        ),
    ],
)
def test_the_nodes_of_a_run_are_resumed_as_they_were_started(
    environ: dict[str, str],
    request_: dict[str, Any],
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = made(environ={**PATH, **environ}, work_dir=tmp_path / "run", **request_)

    record = RunRecord.model_validate_json(render.files(run)["run.json"])

    assert record.node_flags == [flag.format(here=tmp_path) for flag in flags]
    words = shlex.split(record.on_node(record.next["again"], 1))
    for flag in record.node_flags:
        assert words.count(flag) == 1 and flag.partition("=")[0] not in words
    assert ("--node-rank=1" in words) is ("--nnodes=1:2" in words)
