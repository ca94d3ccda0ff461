"""A preset is what its JSON says: `auto` knows its stage and what it offloads from its values, whatever its name is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fit.recipes import lightest
from tuner.errors import DeepSpeedConfigError
from tuner.fit.advice import levels
from tuner.fit.levels import Costs, Machines
from tuner.recipes import catalog
from tuner.zero import presets
from tuner.zero.choice import open_config

NVME = {"device": "nvme", "nvme_path": "/local_nvme"}
ON_DISK = {"stage": 3, "offload_optimizer": NVME, "offload_param": NVME, "reduce_bucket_size": "auto"}


def written(folder: Path, name: str, zero: dict[str, object]) -> None:
    path = folder / catalog.PRESETS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"zero_optimization": zero}), encoding="utf-8")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the package one preset more, which has no line in `RUNGS`."""
    shutil.copytree(catalog.PACKAGE / catalog.PRESETS, tmp_path / catalog.PRESETS)
    written(tmp_path, "deepspeed_sixth", ON_DISK)
    monkeypatch.setattr(catalog, "PACKAGE", tmp_path)
    catalog._files.cache_clear()
    yield
    catalog._files.cache_clear()


def test_every_rung_is_a_preset_or_none_and_those_that_offload_come_last() -> None:
    offloads = [bool(rung.offloaded) for rung in presets.rungs()]

    assert {*presets.RUNGS} <= {*presets.names()} == {*catalog.presets(), "none"}
    assert offloads == sorted(offloads)


@pytest.mark.usefixtures("package")
def test_a_json_in_the_folder_is_a_preset_that_auto_never_takes() -> None:
    sixth = presets.find("deepspeed_sixth")

    assert presets.names()[: len(presets.RUNGS)] == presets.RUNGS
    assert "deepspeed_sixth" in presets.names()
    assert (sixth.stage, sixth.offloaded, sixth.is_rung) == (3, ("offload_optimizer", "offload_param"), False)
    assert sixth not in presets.rungs()
    assert open_config("sixth", "--deepspeed").preset == "deepspeed_sixth"


@pytest.mark.usefixtures("package")
def test_a_rung_that_swaps_is_counted_only_where_a_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, "deepspeed_swaps", {"stage": 3, "offload_optimizer": {"device": "nvme"}})
    catalog._files.cache_clear()
    monkeypatch.setattr(presets, "RUNGS", (*presets.RUNGS, "deepspeed_swaps"))
    recipe, machines = lightest("qwen3_8b_full_alpaca_e3"), Machines(1, 24 * 2**30)
    assert recipe.architecture

    here, on_disk = (
        [fit.level for fit in levels(recipe, recipe.architecture, machines._replace(disk=path))]
        for path in ("", "/disk")
    )

    assert on_disk[-1] == "deepspeed_swaps" and "deepspeed_swaps" not in here
    assert [rung.name for rung in presets.rungs()] == here


@pytest.mark.usefixtures("package")
def test_what_a_preset_costs_is_read_from_its_values() -> None:
    costs = Costs.of_preset("deepspeed_sixth", 4096)

    assert (costs.stage, costs.offload_optimizer, costs.offload_param) == (3, True, True)
    assert (costs.optimizer_buffers, costs.param_buffers, costs.params_in_host) == (4, 5, 1_000_000_000)
    assert costs.reduce_bucket == 4096 * 4096


def test_a_user_who_replaces_a_rung_changes_what_auto_knows_of_it(here: Path) -> None:
    written(here / catalog.HERE, "deepspeed_zero2", {"stage": 3, "offload_optimizer": {"device": "cpu"}})

    costs = Costs.of_preset("deepspeed_zero2", 64)

    assert (costs.stage, costs.offloads) == (3, True)


def test_a_wrong_file_in_place_of_a_rung_is_refused_with_its_place(here: Path) -> None:
    written(here / catalog.HERE, "deepspeed_zero2", {"stage": "two"})

    with pytest.raises(DeepSpeedConfigError) as caught:
        presets.rungs()

    assert "deepspeed_zero2.json:1" in str(caught.value.where)


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_rung_of_a_stage_offloads_if_one_there_does(stage: int, offloads: bool) -> None:
    there = [bool(rung.offloaded) for rung in presets.rungs() if rung.stage == stage]

    found = presets.of_stage(stage, offloads=offloads)

    assert (found.stage, bool(found.offloaded)) == (stage, offloads if offloads in there else there[0])
