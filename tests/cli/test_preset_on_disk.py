"""A rung that swaps to a disk comes after all others, only where a folder is named, and what is printed names it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import tuner as in_python
from tests.cli.command import Tuner
from tests.fit.recipes import lightest
from tuner.fit import advice
from tuner.fit.levels import Machines
from tuner.launch import trainable
from tuner.launch.machines import MachineFlags
from tuner.recipes.recipe import Overrides
from tuner.zero import presets
from tuner.zero.config import OFFLOADS, ZERO

NAME = "deepspeed_zero3_nvme"
DISK = "/mnt/my disk"
HOST_FULL = ("qwen3_8b_full_alpaca_e3", "--gpus", "1", "--gpu", "rtx4090", "--nvme", DISK)
"""A host of 170 GB has room for what is offloaded, with less than a tenth to spare; one of 64 GB has not."""


def plan(tuner: Tuner, *arguments: str) -> dict[str, Any]:
    done = tuner("plan", *arguments, "--json")
    assert done.code == 0, done.err
    value: dict[str, Any] = json.loads(done.out)
    return value


def test_a_host_that_is_nearly_full_comes_before_a_disk(tuner: Tuner) -> None:
    full, too_small = (plan(tuner, *HOST_FULL, "--host-memory", size) for size in ("170GB", "64GB"))

    spare = full["presets"]["deepspeed_zero3_offload"]["spare_host_bytes"]
    assert full["presets"][NAME]["fits"] and 0 < spare < 17e9
    assert full["recommended"] == "deepspeed_zero3_offload"
    assert too_small["recommended"] == NAME


def test_without_a_folder_the_rung_is_not_there(tuner: Tuner) -> None:
    there = plan(tuner, *HOST_FULL[:-2], "--host-memory", "64GB")

    assert NAME not in there["presets"] and there["recommended"] is None


def test_the_level_to_take_is_shown_with_its_folder_and_without_seconds(tuner: Tuner) -> None:
    arguments = (*HOST_FULL, "--host-memory", "64GB")
    on_disk, in_memory = tuner("plan", *arguments).out, tuner("plan", *HOST_FULL, "--host-memory", "512GB").out

    words = shlex.split(" ".join(on_disk.partition("folder to swap to: ")[2].split()).partition(". ")[0].rstrip("."))
    assert words == ["--nvme", DISK]
    assert plan(tuner, *arguments)["communication"] == {}
    assert "--nvme" not in in_memory
    assert plan(tuner, *arguments)["step_s"] is None
    assert plan(tuner, *HOST_FULL, "--host-memory", "512GB")["step_s"] > 0


def test_a_run_takes_the_folder_as_a_plan_names_it(tuner: Tuner) -> None:
    without, named = (
        tuner("train", "tiny_full_sample_e1", "--deepspeed", NAME, *words, "--dry-run", "--json")
        for words in ((), ("--nvme", DISK))
    )

    assert (without.code, named.code) == (2, 0)
    zero = json.loads(named.out)["deepspeed"][ZERO]
    assert [zero[block]["nvme_path"] for block in OFFLOADS] == [DISK, DISK]


def test_a_folder_that_ds_names_is_that_of_the_plan_too(tuner: Tuner) -> None:
    by_ds = plan(tuner, *HOST_FULL[:-2], "--host-memory", "64GB", "--ds", f"{ZERO}.offload_param.nvme_path={DISK}")

    assert by_ds["recommended"] == NAME


def test_a_plan_refuses_buffers_in_which_deepspeed_would_stop_and_writes_their_size_where_it_is_open(
    tuner: Tuner,
) -> None:
    words = ("llama2_7b_full_alpaca_e3", "--gpu", "rtx4090", "--nvme", DISK, "--deepspeed", NAME)
    too_small = ("--ds", f"{ZERO}.offload_param.buffer_size=100000000")

    assert tuner("plan", *words, "--gpus", "1", *too_small).code == 2
    assert tuner("plan", *words, "--gpus", "2", *too_small).code == 0
    final = json.loads(tuner("show", *words, "--gpus", "2", "--json").out)["deepspeed"]
    assert final[ZERO]["offload_param"]["buffer_size"] == 32_000 * 4096 // 2


def test_a_preset_that_waits_for_a_folder_is_checked_without_an_error(tuner: Tuner) -> None:
    alone, with_recipe = tuner("check", NAME), tuner("check", "tiny_full_sample_e1", "--deepspeed", NAME)

    assert (alone.code, with_recipe.code) == (0, 2)
    assert "--nvme PATH" in alone.out


def test_a_plan_of_one_gpu_with_a_named_config_on_a_disk_has_no_seconds(tuner: Tuner) -> None:
    words = ("plan", "qwen3_8b_full_alpaca_e3", "--gpus", "1", "--gpu", "h100", "--json", "--deepspeed")

    in_memory, on_disk = (json.loads(tuner(*words, *level).out) for level in (("zero2",), (NAME, "--nvme", DISK)))

    assert in_memory["communication"]
    assert not on_disk["communication"]


def test_below_stage_3_no_folder_is_needed_as_nothing_is_swapped(tuner: Tuner) -> None:
    Path("ds.json").write_text(json.dumps({ZERO: {"stage": 2, "offload_optimizer": {"device": "nvme"}}}))

    checked = tuner("check", "ds.json")

    assert checked.code == 0
    assert "--nvme" not in checked.out


def test_a_plan_in_python_names_the_folder_as_arguments_of_one_call() -> None:
    shown = repr(in_python.plan(HOST_FULL[0], gpus=1, gpu="rtx4090", host_memory="64GB", nvme=DISK))

    (line,) = [line for line in shown.splitlines() if "recommended: " in line]
    arguments = eval(f"dict({line.partition('recommended: ')[2]})")  # noqa: S307 (it is there to be typed)
    assert arguments == {"deepspeed": NAME, "nvme": DISK}


def test_a_change_after_which_the_rung_fits_names_the_folder_and_no_other_level_is_swapped() -> None:
    recipe = lightest("llama2_70b_full_alpaca_e3")
    heavy = recipe.with_split(recipe.split._replace(micro_batch=8, accumulation=2, recompute=False))
    machines = Machines(8, 80 * 2**30, host_bytes=256 * 2**30, disk=DISK)
    assert recipe.architecture is not None

    swapping = [each for each in advice.changes(heavy, recipe.architecture, machines) if "--nvme" in each.flags]

    assert swapping and {each.level for each in swapping} == {NAME}
    for each in swapping:
        assert eval(f"dict({each.options.in_python})")["nvme"] == DISK  # noqa: S307 (it is there to be typed)


@pytest.mark.parametrize("packs", [False, True])
def test_the_rung_is_not_advised_for_experts_in_4_bits(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "RUNGS", (NAME,))
    recipe = lightest("qwen3_30b_a3b_qlora_alpaca_e1").with_values({"quantization.experts": packs})
    recipe = recipe.with_split(recipe.split._replace(micro_batch=1024, accumulation=1, recompute=False))
    assert recipe.architecture is not None

    advised = advice.changes(recipe, recipe.architecture, Machines(1, 400 * 2**30, disk=DISK))

    assert bool([change for change in advised if change.level == NAME]) is not packs


def test_the_command_of_a_row_for_which_only_a_disk_has_room_names_the_preset_and_the_folder() -> None:
    flags = MachineFlags(gpus=1, gpu="rtx4090", host_memory="32GB")
    (row,) = trainable.table(flags, {}, ("llama2_7b",), Overrides(nvme=DISK)).rows

    commands = {method: shlex.split(str(cells[1].command)) for method, cells in row.cells.items()}
    assert commands["full"][-4:] == ["--deepspeed", NAME, "--nvme", DISK]
    assert "--deepspeed" not in commands["lora"]
