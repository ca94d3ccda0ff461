"""How a run learns that ranks split its layers: from `--ds`, a JSON or the recipe; and what may resume from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import NOW, PATH, TINY, checkpoint, made, written_run
from tests.machine.gpus import A100, CPU, machine
from tests.refused import refused
from tuner.errors import DeepSpeedConfigError, RecipeError
from tuner.launch.announcement import announcement
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine.hardware import Hardware
from tuner.machine.topology import LaunchFlags
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.runs.resume_point import IncompatibleStates

DS, SET = "autotp_size=2", "autotp_size=2"
pytestmark = pytest.mark.usefixtures("in_an_empty_folder")


def split(*ds: str, ranks: int = 4, deepspeed: str | None = None, hardware: Hardware = CPU) -> ResolvedRun:
    overrides = Overrides(ds=ds, pairs=[("--set", "accumulative_counts=auto"), ("--set", "global_batch_size=8")])
    flags = LaunchFlags(nproc_per_node=ranks)
    return resolve_run(Request(identify(TINY), overrides, deepspeed, flags=flags), PATH, hardware, NOW)


def facts(run: ResolvedRun) -> tuple[int, int, int, object]:
    size = run.recipe.config.train_cfg.autotp_size
    return run.batch.ranks, run.batch.global_batch, size, run.final.config["tensor_parallel"]["autotp_size"]


def test_a_flag_a_json_and_the_recipe_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}')

    for run in (
        split(DS),
        split(DS, deepspeed="zero3"),
        split("autotp_size=2.0"),
        split("tensor_parallel.autotp_size=2", deepspeed="zero1"),
        split(deepspeed="my.json"),
        made(SET, "accumulative_counts=auto", "global_batch_size=8", flags={"nproc_per_node": 4}),
    ):
        assert facts(run) == (2, 8, 2, 2)


def test_the_announcement_names_the_groups_and_the_split() -> None:
    (batch,) = [line for line in announcement(split(DS), ()) if line.startswith("batch size")]
    (where,) = [line for line in announcement(split(DS), ()) if "AutoTP" in line]

    assert "2 groups of 2 processes" in batch and "2 processes (AutoTP)" in where
    assert not [line for line in announcement(split(), ()) if "AutoTP" in line]


def test_auto_takes_a_level_with_zero_on_gpus() -> None:
    run = split(DS, ranks=2, hardware=machine(A100, A100))

    assert run.final.config["zero_optimization"]["stage"] > 0 and facts(run)[0] == 1


def test_noise_on_embeddings_is_refused_of_a_flag_as_of_the_recipe() -> None:
    noise = ("--set", "neftune_noise_alpha=5")
    for overrides in (Overrides(ds=(DS,), pairs=[noise]), Overrides(pairs=[noise, ("--set", SET)])):
        request = Request(identify(TINY), overrides, flags=LaunchFlags(nproc_per_node=2))
        with refused(RecipeError, "objective.neftune_noise_alpha"):
            resolve_run(request, PATH, CPU, NOW)


def test_fewer_ranks_than_none_are_refused() -> None:
    with refused(DeepSpeedConfigError, "--ds autotp_size=-2", "tensor_parallel.autotp_size"):
        split("autotp_size=-2")


def test_ranks_that_cannot_be_grouped_are_refused() -> None:
    with refused(RecipeError, "train_cfg.autotp_size", 3, 2):
        split(DS, ranks=3)


@pytest.mark.parametrize("then", [(), ("autotp_size=4",)])
def test_a_run_resumes_with_the_same_split_alone(tmp_path: Path, then: tuple[str, ...]) -> None:
    shape = ("accumulative_counts=auto", "global_batch_size=8")
    ranks: dict[str, Any] = {"flags": {"nproc_per_node": 4}, "deepspeed": "zero1"}
    run = written_run(tmp_path / "run", sets=(SET, *shape), **ranks).path
    saved = checkpoint(run, 2)

    resumed = made(SET, *shape, resume=str(run), **ranks)
    assert resumed.resume is not None and resumed.resume.path == saved
    with refused(IncompatibleStates, "--resume", 2):
        made(*then, *shape, resume=str(run), **ranks)
    with refused(IncompatibleStates, "--resume", 2):
        made(*then, *shape, resume=str(run), resume_weights=True, **ranks)
