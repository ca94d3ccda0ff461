"""DeepSpeed on CUDA: every preset and method trains `tiny` to the loss of the run without ZeRO, and resumes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from tests.e2e.runs import Finished, ok, quick, train
from tuner.machine.hardware import Hardware
from tuner.zero import presets

pytestmark = [pytest.mark.gpu, pytest.mark.e2e, pytest.mark.timeout(1200)]  # an offloading preset compiles CPU Adam

METHODS = ("full", "freeze", "lora", "dora", "qlora")
APART = {"fp32": 1e-3, "bf16": 5e-2}
"""Of losses near 8: order of additions in fp32, rounding in bf16."""
Reference = Callable[[str, str], Finished]


@pytest.fixture(scope="module")
def reference(machine: Hardware, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Return what trains a method without ZeRO, once for all tests."""

    @cache
    def of(method: str, dtype: str) -> Finished:
        folder = tmp_path_factory.mktemp(f"{method}-{dtype}")
        asked = ("--deepspeed", "none", "--set", f"dtype={dtype}")
        return ok(train(quick(folder, method), folder / "run", *asked, ranks=len(machine.gpus)))

    return of


def dtype_of(method: str) -> str:
    """Return a type that the method's kernels compute in: those of 4 bits in 16."""
    return "bf16" if method == "qlora" else "fp32"


@pytest.mark.parametrize("preset", [rung.name for rung in presets.rungs() if rung.stage])
@pytest.mark.parametrize("method", METHODS)
def test_every_preset_and_method_trains_to_the_loss_without_zero(
    reference: Reference, machine: Hardware, tmp_path: Path, method: str, preset: str
) -> None:
    dtype = dtype_of(method)
    asked = ("--deepspeed", preset, "--set", f"dtype={dtype}")

    run = ok(train(quick(tmp_path, method), tmp_path / "run", *asked, ranks=len(machine.gpus)))

    assert run.losses == pytest.approx(reference(method, dtype).losses, abs=APART[dtype])
    assert run.losses[-1] < run.losses[0]
    is_adapter = (run.path / "final" / "adapter_config.json").is_file()
    (AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM).from_pretrained(run.path / "final")


def test_the_type_is_what_the_gpus_compute_in(machine: Hardware, tmp_path: Path) -> None:
    run = ok(train(quick(tmp_path, "full"), tmp_path / "run", "--set", "dtype=auto", ranks=len(machine.gpus)))

    config = run.json("deepspeed.json")
    wanted, other = ("bf16", "fp16") if machine.has_native_bf16 else ("fp16", "bf16")
    assert config[wanted]["enabled"] and not config.get(other, {}).get("enabled")
    assert all(line["memory_bytes"] < machine.smallest_gpu_bytes for line in run.metrics if "loss" in line)


def test_a_run_goes_on_with_the_losses_of_one_that_never_stopped(machine: Hardware, tmp_path: Path) -> None:
    recipe, asked = quick(tmp_path, "full"), ("--deepspeed", "zero3")
    whole = ok(train(recipe, tmp_path / "whole", *asked, ranks=len(machine.gpus)))
    checkpoint = whole.path / "checkpoints" / "checkpoint-2"

    resumed = ok(train(recipe, tmp_path / "on", *asked, "--resume", checkpoint, ranks=len(machine.gpus)))

    assert resumed.losses == pytest.approx(whole.losses[2:], rel=1e-4)


def test_the_result_answers_validation_prompts_on_the_gpu(machine: Hardware, tmp_path: Path) -> None:
    run = ok(train("tiny_full_sample", tmp_path / "run", "--max-steps", "4", ranks=len(machine.gpus)))

    assert len((run.path / "samples.jsonl").read_text().splitlines()) == 8
    assert "no samples" not in run.text


def test_two_gpus_train_to_the_loss_of_one(two_gpus: Hardware, tmp_path: Path) -> None:
    recipe = quick(tmp_path, "full")

    alone = ok(train(recipe, tmp_path / "one", "--set", "accumulative_counts=4", ranks=1))
    two = ok(train(recipe, tmp_path / "two", "--deepspeed", "zero3", ranks=2))

    assert two.losses == pytest.approx(alone.losses, abs=APART["fp32"])
