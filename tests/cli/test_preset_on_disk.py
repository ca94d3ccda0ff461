"""A rung that swaps to a disk comes after all others, only where a folder is named, and what is printed names it."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest

import tuner as in_python
from tests.cli.command import Tuner
from tests.fit.recipes import lightest
from tuner.fit import advice
from tuner.fit.levels import Machines
from tuner.launch import trainable
from tuner.launch.machines import MachineFlags
from tuner.zero import presets
from tuner.zero.config import OFFLOADS, ZERO

NAME = "deepspeed_zero3_nvme"
DISK = "/mnt/my disk"
FOLDERS = {f"{ZERO}.{block}.nvme_path": DISK for block in OFFLOADS}
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
    assert words[::2] == ["--ds", "--ds"]
    assert dict(word.split("=") for word in words[1::2]) == FOLDERS
    assert plan(tuner, *arguments)["communication"] == {}
    assert "nvme_path" not in in_memory
    assert plan(tuner, *HOST_FULL, "--host-memory", "512GB")["communication"]["none"]["step_s"] > 0


def test_what_a_plan_advises_is_accepted_by_a_run(tuner: Tuner) -> None:
    without = tuner("plan", *HOST_FULL[:-2], "--host-memory", "64GB", "--deepspeed", NAME)
    words = [word for key, path in FOLDERS.items() for word in ("--ds", f"{key}={path}")]
    named = tuner("plan", *HOST_FULL[:-2], "--host-memory", "64GB", "--deepspeed", NAME, *words)

    assert (without.code, named.code) == (2, 0)


def test_a_plan_in_python_names_the_folder_as_arguments_of_one_call() -> None:
    shown = repr(in_python.plan(HOST_FULL[0], gpus=1, gpu="rtx4090", host_memory="64GB", nvme=DISK))

    (line,) = [line for line in shown.splitlines() if "recommended: " in line]
    arguments = eval(f"dict({line.partition('recommended: ')[2]})")  # noqa: S307 (it is there to be typed)
    assert arguments == {"deepspeed": NAME, "ds": FOLDERS}


def test_a_change_after_which_the_rung_fits_names_the_folder_and_no_other_level_is_swapped() -> None:
    recipe = lightest("llama2_70b_full_alpaca_e3")
    heavy = recipe.with_split(recipe.split._replace(micro_batch=8, accumulation=2, recompute=False))
    machines = Machines(8, 80 * 2**30, host_bytes=256 * 2**30, nvme_path=DISK)
    assert recipe.architecture is not None

    swapping = [each for each in advice.changes(heavy, recipe.architecture, machines) if "nvme" in each.flags]

    assert swapping and {each.level for each in swapping} == {NAME}
    for each in swapping:
        assert eval(f"dict({each.options.in_python})")["ds"] == FOLDERS  # noqa: S307 (it is there to be typed)


@pytest.mark.parametrize("packs", [False, True])
def test_the_rung_is_not_advised_for_experts_in_4_bits(packs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "RUNGS", (NAME,))
    recipe = lightest("qwen3_30b_a3b_qlora_alpaca_e1").with_values({"quantization.experts": packs})
    recipe = recipe.with_split(recipe.split._replace(micro_batch=1024, accumulation=1, recompute=False))
    assert recipe.architecture is not None

    advised = advice.changes(recipe, recipe.architecture, Machines(1, 400 * 2**30, nvme_path=DISK))

    assert bool([change for change in advised if change.level == NAME]) is not packs


def test_the_command_of_a_row_for_which_only_a_disk_has_room_names_the_preset_and_the_folder() -> None:
    flags = MachineFlags(gpus=1, gpu="rtx4090", host_memory="32GB", nvme=DISK)
    (row,) = trainable.table(flags, {}, ("llama2_7b",)).rows

    commands = {method: shlex.split(str(cells[1].command)) for method, cells in row.cells.items()}
    assert commands["full"][-6:-4] == ["--deepspeed", NAME]
    assert dict(word.split("=") for word in commands["full"][-3::2]) == FOLDERS
    assert "--deepspeed" not in commands["lora"]
