"""What a GPU can train: the longest rows, their limits, and the commands."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.machine.gpus import A100, machine
from tuner.errors import ModelError, UsageError
from tuner.launch import planning, trainable
from tuner.launch.machines import MachineFlags
from tuner.launch.trainable import Cell, Row
from tuner.machine import hardware
from tuner.recipes import catalog, loading
from tuner.recipes.recipe import Overrides

RTX4090 = MachineFlags(gpus=1, gpu="rtx4090", host_memory="64GB")


def row(part: str, flags: MachineFlags = RTX4090, *, overrides: Overrides | None = None) -> Row:
    (found,) = trainable.table(flags, {}, (part,), overrides).rows
    return found


def recommended(cell: Cell, *, longer: int = 0) -> str | None:
    """Return the level that the recipe of a cell's command takes, with so many tokens more; None: nothing fits."""
    assert cell.command
    _, _, name, *words = shlex.split(cell.command)
    tokens = int(words[words.index("--max-length") + 1]) + longer
    values = (f"max_length={tokens}", "model.attn_implementation=flash_attention_2", "train_cfg.loss=chunked")
    recipe = loading.load(name, Overrides(pairs=[("--set", value) for value in values]))
    return planning.make(recipe, RTX4090, {}).recommended


@pytest.mark.parametrize(("part", "method"), [("qwen3_8b", "qlora"), ("llama3_2_1b_instruct", "full")])
def test_the_command_of_a_cell_fits_and_no_longer_row_does(part: str, method: str) -> None:
    on_gpus, offloaded = row(part, overrides=Overrides(method=method)).cells[method]

    assert "offload" in str(recommended(offloaded)) and recommended(offloaded, longer=2048) is None
    assert not on_gpus.tokens or "offload" not in str(recommended(on_gpus))


def test_a_cell_is_of_the_gpu_alone_or_with_offloading_and_what_does_not_fit_has_no_command() -> None:
    found = row("qwen3_14b").cells

    assert found["lora"][0] == Cell(0, False, None) and found["lora"][0].to_json() is None
    assert found["lora"][1].tokens == 27 * 1024
    assert found["qlora"][0].tokens == 16 * 1024
    assert found["full"] == (Cell(0, False, None), Cell(0, False, None))


def test_the_models_own_limit_caps_a_row_and_is_said() -> None:
    found = row("qwen3_0_6b")
    lora, _ = found.cells["lora"]

    assert found.context == 40960
    assert lora.tokens == 40960 and lora.is_limit
    assert not row("qwen3_8b").cells["lora"][0].is_limit


def test_without_a_number_the_hosts_memory_is_assumed_and_limits_what_offloads() -> None:
    unnamed = trainable.table(MachineFlags(gpus=2, gpu="rtx4090"), {}, ("llama3_2_1b_instruct",))
    named = trainable.table(RTX4090._replace(host_memory="16GB"), {}, ("llama3_2_1b_instruct",))

    assert unnamed.host_is_assumed and not named.host_is_assumed
    assert unnamed.to_json()["machines"]["host_bytes"] == 4 * 24564 * 2**20
    assert unnamed.rows[0].cells["full"][1].tokens and not named.rows[0].cells["full"][1].tokens


def test_two_gpus_share_the_states() -> None:
    one_gpu, two_gpus = (row("qwen3_8b", RTX4090._replace(gpus=number)).cells["lora"][0].tokens for number in (1, 2))

    assert two_gpus > one_gpu > 0


def test_changes_of_the_recipe_count_and_stand_in_the_command() -> None:
    tiled = Overrides(method="lora", pairs=(("--set", "tiled_mlp=True"),))
    found = row("qwen3_8b", overrides=tiled)

    assert [*found.cells] == ["lora"]
    assert found.cells["lora"][0].tokens > row("qwen3_8b").cells["lora"][0].tokens
    assert str(found.cells["lora"][0].command).endswith(" --set tiled_mlp=True")


def test_the_models_that_are_shown_are_in_the_catalog() -> None:
    assert {*trainable.MODELS} <= {*catalog.of_package("models")}


def test_a_model_of_the_users_own_catalog_is_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").write_text('model = dict(path="me/mine")\narchitecture = "qwen3_0_6b"\n')
    with catalog.using(tmp_path):
        assert trainable.models()[-1] == "mine"
        assert row("mine").path == "me/mine"


def test_without_a_gpu_here_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "detect", lambda _: machine())
    with pytest.raises(UsageError, match="machine has none"):
        trainable.table(MachineFlags(), {})


def test_the_gpus_and_the_memory_of_this_machine_count_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    here = machine(A100)._replace(host_memory_bytes=10**11)
    monkeypatch.setattr(hardware, "detect", lambda _: here)
    found = trainable.table(MachineFlags(), {}, ("qwen3_0_6b",))

    assert found.to_json()["machines"]["host_bytes"] == 10**11 and not found.host_is_assumed


def test_a_model_of_unknown_size_is_left_out_of_many_and_refused_alone() -> None:
    with pytest.raises(ModelError):
        trainable.table(RTX4090, {}, ("baichuan_7b",))
    both = trainable.table(RTX4090, {}, ("baichuan_7b", "qwen3_0_6b"))

    assert [found.name for found in both.rows] == ["qwen3_0_6b"]
