"""What a plan promises of a run, and the plan of the next run with what the earlier one has measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import Tuner
from tests.launch.plans import made, written_run
from tests.machine.gpus import H100, machine
from tests.runs.test_ledger import at, beat, write
from tuner.errors import TunerError
from tuner.launch import measured_rates, planning, promised
from tuner.launch.machines import MachineFlags
from tuner.machine.hardware import Hardware
from tuner.recipes import loading
from tuner.recipes.recipe import Overrides
from tuner.runs.beats import Phase
from tuner.runs.records import RunStatus

PACKED = "qwen3_0_6b_lora_alpaca_e1"
ON_H100 = MachineFlags(gpus=1, gpu="h100")


def measured(folder: Path, recipe: str, hardware: Hardware, *sets: str, step_s: float = 0.5) -> Path:
    """Return a run of ten steps that took so many seconds each, with 1,000 tokens a step."""
    run = written_run(folder, recipe=recipe, hardware=hardware, sets=sets)
    spent = beat(60.0, 10, Phase.FINISH, [], startup=1.0, steps=10 * step_s)
    write(run, run.path, spent, RunStatus(state="done", exit_code=0, step=10, ended=at(60.0)), started=at(0.0))
    run.metrics.write_text(json.dumps({"step": 10, "loss": 1.0, "num_tokens": 10_000}) + "\n")
    return run.path


def test_memory_seconds_and_the_disk_are_promised_on_a_gpu() -> None:
    run = made("pack_length=None", "max_steps=100", recipe=PACKED, hardware=machine(H100))
    found = promised.of(run)
    assert found and run.fit and found.step_s and found.peak_bytes and found.disk_bytes
    tokens = run.batch.global_batch * run.recipe.config.train_dataloader.dataset.max_length

    assert 0 < found.peak_bytes < run.fit.peak.gpu_bytes  # CUDA's context is no tensor
    assert found.tokens_per_second == pytest.approx(tokens / found.step_s)
    assert found.hours == pytest.approx(100 * found.step_s / 3600)


@pytest.mark.parametrize("sets", [("packing=False",), ("pack_length=64",)])
def test_no_seconds_are_promised_of_rows_shorter_than_those_that_are_planned(sets: tuple[str, ...]) -> None:
    found = promised.of(made(*sets, "max_steps=100", recipe=PACKED, hardware=machine(H100)))

    assert found and found.peak_bytes and found.step_s is None and found.hours is None


def test_on_a_cpu_the_disk_alone_is_promised() -> None:
    found = promised.of(made())

    assert found and found.disk_bytes and found.peak_bytes is None and found.step_s is None


def test_a_step_is_scaled_by_the_ratio_of_what_was_measured_and_what_was_planned(tmp_path: Path) -> None:
    folder = measured(tmp_path / "run", PACKED, machine(H100), "pack_length=None", "max_steps=100", step_s=3.0)
    sets = [("--set", "pack_length=None"), ("--set", "max_steps=50"), ("--set", "max_length=1024")]
    plan = planning.make(loading.load(PACKED, Overrides(pairs=sets)), ON_H100, {})
    assert plan.report and plan.report.choice and plan.report.choice.taken.time
    rates = measured_rates.of(plan, folder)

    assert rates.ratio and rates.measured_step_s == pytest.approx(3.0)
    assert rates.step_s == pytest.approx(rates.ratio * plan.report.choice.taken.time.total_s)
    assert rates.hours == pytest.approx(50 * rates.step_s / 3600)


def test_on_cpus_tokens_and_flops_scale_a_step(tmp_path: Path, tuner: Tuner) -> None:
    folder = measured(tmp_path / "run", "tiny_full_sample_e1", Hardware(num_cpus=2), "pack_length=64")
    arguments = ("plan", "tiny_full_sample_e1", "--set", "pack_length=128", "--max-steps", "7", "--from", str(folder))
    found = json.loads(tuner(*arguments, "--json").out)
    a_token_s = 5.0 / 10_000

    assert found["measured"]["ratio"] is None
    assert found["measured"]["tokens_per_second"] == pytest.approx(1 / a_token_s)
    assert (found["measured"]["step_s"] / (128 * a_token_s)) % 1 == pytest.approx(0)  # whole rows
    assert found["measured"]["hours"] == pytest.approx(7 * found["measured"]["step_s"] / 3600)


def test_rates_of_another_model_or_other_gpus_or_of_no_step_are_refused(tmp_path: Path) -> None:
    folder = measured(tmp_path / "run", PACKED, machine(H100), "pack_length=None")
    other = planning.make(loading.load("qwen3_1_7b_lora_alpaca_e1"), ON_H100, {})
    elsewhere = planning.make(loading.load(PACKED), ON_H100._replace(gpu="rtx4090"), {})
    again = planning.make(loading.load(PACKED), ON_H100, {})
    unstarted = written_run(tmp_path / "other", recipe=PACKED, hardware=machine(H100)).path

    for plan, run, words in ((other, folder, "model"), (elsewhere, folder, "H100"), (again, unstarted, "step")):
        with pytest.raises(TunerError, match=words):
            measured_rates.of(plan, run)
    assert measured_rates.of(again, folder).step_s > 0


def test_without_a_recipe_the_plan_is_of_the_runs_own(tmp_path: Path, tuner: Tuner) -> None:
    folder = measured(tmp_path / "run", "tiny_full_sample_e1", Hardware(num_cpus=2))

    assert json.loads(tuner("plan", "--from", str(folder), "--json").out)["measured"]["run"] == str(folder)
