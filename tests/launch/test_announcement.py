"""The lines that a run, --dry-run and `tuner plan` begin with."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import made
from tests.machine.gpus import A100, CPU, T4, machine
from tuner.files import sized
from tuner.fit.advice import WITHOUT_OFFLOADING
from tuner.launch.announcement import announcement
from tuner.launch.checks.host import host_bytes
from tuner.launch.resolved_run import ResolvedRun

EIGHT = machine(*[A100] * 8)
STARTS = ("model: ", "data: ", "steps: ", "batch size: ", "DeepSpeed: ", "memory: ", "run directory: ")


def lines(run: ResolvedRun, *warnings: str) -> list[str]:
    return announcement(run, warnings)


def starting(found: list[str], start: str) -> str:
    (line,) = [line for line in found if line.startswith(start)]
    return line


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"recipe": "qwen3_8b_lora_alpaca_e1"}, "Qwen/Qwen3-8B (LoRA, SFT), 43.6 M of 8.19 B parameters trained"),
        ({"recipe": "qwen3_8b_qlora_alpaca_e1"}, "Qwen/Qwen3-8B (QLoRA, SFT), 43.6 M of 8.19 B parameters trained"),
        ({"recipe": "qwen3_8b_full_alpaca_e1"}, "Qwen/Qwen3-8B (full fine-tuning, SFT), all 8.19 B parameters trained"),
    ],
)
def test_the_first_line_is_the_model_its_method_and_what_is_trained(values: dict[str, Any], expected: str) -> None:
    found = lines(made(**values, hardware=EIGHT))

    assert found[0] == f"model: {expected}"


def test_an_adapter_that_is_trained_further_is_named(tmp_path: Path) -> None:
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter_model.safetensors").touch()

    found = lines(made(f"adapter.path={tmp_path}", recipe="qwen3_8b_lora_alpaca_e1", hardware=EIGHT))

    assert found[0].startswith(f"model: Qwen/Qwen3-8B with the adapter {tmp_path} (LoRA, SFT), ")


def test_on_gpus_there_are_seven_lines_in_one_order_and_then_the_warnings() -> None:
    run = made(recipe="qwen3_8b_lora_alpaca_e1", hardware=EIGHT)

    found = lines(run, "one", "two", "one")

    of_run = [line for line in found if not line.startswith("WARNING: ")]
    assert [line.partition(": ")[0] + ": " for line in of_run] == [*STARTS]
    assert found[-2:] == ["WARNING: one", "WARNING: two"]


def test_without_a_gpu_it_says_so_in_one_sentence() -> None:
    found = lines(made())

    assert "No GPU found: training on the CPU in fp32, without ZeRO" in found
    assert starting(found, "memory: ").endswith("for weights and optimizer states")
    assert len([line for line in found if not line.startswith("WARNING: ")]) <= 8


def test_the_memory_line_says_which_percentage_of_each_memory_is_needed() -> None:
    host = made(hardware=CPU._replace(host_memory_bytes=4 * 2**30))
    gpus = made(recipe="qwen3_8b_full_alpaca_e1", hardware=EIGHT)
    assert gpus.fit

    needs, there, on_host = gpus.fit.peak, gpus.fit.machines, host_bytes(host)
    of_gpus = ((needs.gpu_bytes, there.gpu_bytes), (needs.host_bytes, there.host_bytes))
    for run, sizes in ((host, [(on_host, 4 * 2**30)]), (gpus, of_gpus)):
        told = re.findall(
            r"([0-9.]+ [GM]iB) on [a-zA-Z ]+ \(([0-9]+)% of ([0-9.]+ GiB)\)", starting(lines(run), "memory: ")
        )
        known = [(needed, size) for needed, size in sizes if needed and size]
        assert told == [size_and_percent(*pair) for pair in known] and known


def size_and_percent(needed: float, there: int) -> tuple[str, str, str]:
    return sized(needed), f"{100 * needed / there:.0f}", sized(there)


def test_the_batch_is_written_as_the_product_that_it_is() -> None:
    values = ("train_dataloader.batch_size=2", "accumulative_counts=4")

    found = lines(made(*values, hardware=EIGHT))

    assert starting(found, "batch size: ") == "batch size: 64 (2 per device x 4 accumulation steps x 8 processes)"


def test_no_line_holds_none_or_a_path_of_the_package() -> None:
    for run in (made(), made(recipe="qwen3_8b_full_alpaca_e1", hardware=EIGHT)):
        text = "\n".join(lines(run))
        assert "None" not in text and "configs/" not in text


def test_memory_that_does_not_fit_is_a_warning_and_no_line_besides() -> None:
    run = made(recipe="qwen3_8b_lora_alpaca_e1", hardware=EIGHT)
    compared = run.level_and_split.compared
    assert run.fit is not None and compared is not None
    machines = run.fit.machines._replace(gpu_bytes=int(run.fit.peak.gpu_bytes / 2))
    taken = compared.taken._replace(fit=run.fit._replace(machines=machines))
    tight = replace(run, level_and_split=replace(run.level_and_split, compared=compared._replace(taken=taken)))

    assert not [line for line in lines(tight) if line.startswith("memory: ")]


def test_auto_that_offloads_names_the_changes_that_need_no_offloading_and_qlora_is_one() -> None:
    config = "internlm2_7b_full_alpaca_e1"

    found = lines(made(recipe=config, hardware=machine(*[T4] * 8)))
    named = lines(made(recipe=config, hardware=machine(*[T4] * 8), deepspeed="zero3_offload"))

    start = found.index(WITHOUT_OFFLOADING)
    assert any("quantization=dict(bits=4)" in line for line in found[start + 1 : start + 4])
    assert WITHOUT_OFFLOADING not in named


@pytest.mark.parametrize(
    ("recipe", "sets", "measured"),
    [
        ("tiny_kto_full_custom_e1", (), "the 2 samples of a micro-batch and of all processes together"),
        ("tiny_kto_full_custom_e1", ("loss_type=apo_zero_unpaired",), None),
        ("tiny_dpo_full_custom_e1", ("loss_type=sft",), "the 1 sample of a micro-batch,"),
        ("tiny_dpo_full_custom_e1", (), None),
    ],
)
def test_a_loss_that_depends_on_the_split_or_the_number_of_processes_says_so(
    recipe: str, sets: tuple[str, ...], measured: str | None, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    pair, single = {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "completion": "b", "label": True}
    rows.write_text(f"{json.dumps(single if 'kto' in recipe else pair)}\n" * 64)
    sets = (*sets, f"train_dataloader.dataset.path={rows}")
    found = [line for line in lines(made(*sets, recipe=recipe, hardware=EIGHT)) if line.startswith("split: ")]

    assert [measured in line for line in found] == ([True] if measured else [])
