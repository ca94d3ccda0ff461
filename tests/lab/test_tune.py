"""What `tuner tune` measures, in which order, and what it writes; its ranks: tests/e2e/test_tune.py."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import PATH, made
from tests.machine.gpus import A100, CPU, H200, machine
from tests.refused import refused
from tuner.errors import UsageError
from tuner.fit.candidates import best_of_levels
from tuner.lab import tune
from tuner.lab.tune import Candidate, Measured, Tuned, candidates, for_some_steps
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine import libraries
from tuner.machine.hardware import Gpu
from tuner.machine.topology import LaunchFlags
from tuner.recipes.merging import leaves
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Split
from tuner.runs.directory import RunDirectory
from tuner.runs.records import RunStatus
from tuner.zero import choice

OPEN = "tiny_lora_sample_e1"


def search(base: ResolvedRun, *out_of_memory: Split) -> Tuned:
    """Measure every candidate on paper: larger micro-batches are faster, some run out of memory."""
    tuned = Tuned(base.recipe, Path("tuned.py"), base.topology.world_size, [])
    for candidate in candidates(base, tuned):
        failed = Measured(candidate, failure="out of memory", exit_code=1)
        ran = Measured(candidate, float(candidate.split.micro_batch))
        tuned.measured.append(failed if candidate.split in out_of_memory else ran)
    return tuned


def test_every_split_of_the_global_batch_is_measured_then_the_other_loss_then_other_levels() -> None:
    base = made("global_batch_size=4", recipe=OPEN, hardware=CPU, flags={"nproc_per_node": 2})
    tuned = search(base)

    splits = [trial.candidate.split for trial in tuned.measured]
    assert {split.samples for split in splits} == {2}
    assert set(splits) == {Split(size, 2 // size, again) for size in (1, 2) for again in (True, False)}
    assert [trial.candidate.loss for trial in tuned.measured].count("whole") == 1
    assert {trial.candidate.level for trial in tuned.measured} == {f"deepspeed_zero{stage}" for stage in (1, 2, 3)}
    assert splits[0] == base.recipe.config.split, "what a run would take comes first"


def test_some_recomputed_layers_are_measured_where_the_plan_compares_them() -> None:
    gpu = machine(Gpu("NVIDIA GeForce RTX 4090", 24 << 30, (8, 9)))
    base = made(recipe="llama3_8b_instruct_qlora_alpaca_e3", hardware=gpu)

    tried = [trial.candidate for trial in search(base).measured if trial.candidate.split.recomputed_layers]

    assert min(candidate.split.recomputed_layers or 0 for candidate in tried) == 10
    assert [candidate.pins.values["train_cfg.recomputed_layers"] for candidate in tried] == [
        candidate.split.recomputed_layers for candidate in tried
    ]


def test_other_levels_come_with_the_split_that_the_plan_shows_for_them() -> None:
    asked: dict[str, Any] = {"recipe": "qwen3_14b_full_alpaca_e3", "hardware": machine(*[H200] * 4)}
    base = made("global_batch_size=16", **asked)
    opened = made("global_batch_size=16", "recomputed_layers=auto", **asked).level_and_split
    assert opened.compared is not None

    tried = {trial.candidate.level: trial.candidate.split for trial in search(base).measured}

    planned = {candidate.level: candidate.split for candidate in best_of_levels(opened.compared.candidates)}
    others = [level for level in tried if level != base.level]
    assert others
    assert {level: tried[level] for level in others} == {level: planned[level] for level in others}


def test_kernels_that_are_on_are_measured_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "installed_flash_attention", lambda _: ["flash_attention_2"])
    monkeypatch.setattr(libraries, "is_installed", lambda _: True)
    base = made("global_batch_size=2", recipe="llama3_1_8b_lora_alpaca_e3", hardware=machine(A100))

    tried = [trial.candidate for trial in search(base).measured if trial.candidate.kernels]

    assert [candidate.kernels for candidate in tried[:1]] == [{"use_liger_kernel": False}]
    assert tried[0].pins.values["model.use_liger_kernel"] is False
    assert "sdpa" in {candidate.kernels.get("attn_implementation") for candidate in tried}


def test_what_is_changed_over_a_preset_is_written_with_the_level_that_was_fastest() -> None:
    base = made(recipe=OPEN, hardware=CPU, deepspeed="zero2")
    changed = choice.laid(base.document, [choice.layer_of_flag("steps_per_print=7")])
    base = replace(base, level_and_split=replace(base.level_and_split, document=changed))
    tuned = Tuned(base.recipe, Path("tuned.py"), 1, [])
    tuned.measured.append(Measured(next(candidates(base, tuned)), 10.0))

    assert tuned.recipe().config.deepspeed == {"base": "deepspeed_zero2", "steps_per_print": 7}


def test_more_than_what_ran_out_of_memory_is_not_tried() -> None:
    base = made("global_batch_size=4", recipe=OPEN, hardware=CPU._replace(host_memory_bytes=0))
    tuned = search(base, Split(2, 2, recompute=False))

    assert Split(4, 1, recompute=False) not in [trial.candidate.split for trial in tuned.measured]
    assert tuned.fastest is not None and tuned.fastest.candidate.split == Split(4, 1, recompute=True)
    assert tuned.exit_code == 0


def test_a_search_in_which_nothing_ran_ends_with_the_first_failure() -> None:
    base = made("global_batch_size=1", recipe=OPEN, hardware=CPU)

    assert search(base, Split(1, 1, recompute=True), Split(1, 1, recompute=False)).exit_code == 1


def test_the_recipe_that_is_written_differs_in_the_split_alone() -> None:
    base = made(recipe="llama3_1_8b_lora_alpaca_e3", hardware=machine(A100))
    best = Candidate(Split(4, 4, recompute=False), "deepspeed_zero2", "whole")
    tuned = Tuned(base.recipe, Path("tuned.py"), 1, [Measured(best, 10.0)])

    old, new = dict(leaves(base.recipe.values)), dict(leaves(tuned.recipe().values))

    changed = {key for key in new if old[key] != new[key]}
    assert changed <= {
        "train_dataloader.batch_size",
        "optim_wrapper.accumulative_counts",
        "train_cfg.gradient_checkpointing",
        "train_cfg.loss",
        "deepspeed",
    }
    assert tuned.recipe().config.split == best.split


def test_a_candidate_trains_and_does_nothing_else() -> None:
    config = made("val_split=0.1", recipe=OPEN, hardware=CPU).recipe.config

    short = for_some_steps(config, 3, ranks=2)

    assert (short.train_cfg.max_steps, short.val_dataloader, short.log.interval) == (3, None, 1)
    assert short.checkpoint.interval > 3
    assert short.split == config.split


def _asked(**flags: int | str) -> Request:
    return Request(identify(OPEN), Overrides(), None, LaunchFlags(**flags), command=("tuner", "tune"))  # type: ignore[arg-type]


def test_ctrl_c_leaves_what_was_measured_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    done = iter([Measured(Candidate(Split(1, 16, recompute=True), "none", "whole"), 10.0)])

    def measure(*_: object) -> Measured:
        if event := next(done, None):
            return event
        raise KeyboardInterrupt

    monkeypatch.setattr(tune._Bench, "measure", measure)
    told: list[Measured] = []

    tuned = tune.tune(_asked(), PATH, told.append, steps=3, minutes=10.0)

    assert tuned.measured == told and len(told) == 1
    assert (tuned.fastest, tuned.is_whole, tuned.exit_code) == (told[0], False, 130)


def test_no_candidate_writes_the_model_that_it_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(resolved: ResolvedRun, run: RunDirectory, **_: object) -> int:
        assert run.read_json(run.run_json)["saves_result"] is False
        return 1

    monkeypatch.setattr(tune.supervise, "run_ranks", ran)

    tuned = tune.tune(_asked(), PATH, lambda _: None, steps=3, minutes=0.0)

    assert [trial.exit_code for trial in tuned.measured] == [1]


def test_several_nodes_are_refused() -> None:
    with refused(UsageError, "the number of nodes"):
        tune.tune(_asked(nnodes=2, node_rank=0, master_addr="n1"), PATH, lambda _: None, steps=3, minutes=10.0)


@pytest.mark.parametrize("output", [None, "no/folder/fast.py", "fast.txt"])
def test_a_result_that_cannot_be_written_is_refused_before_anything_is_measured(
    output: str | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(f"{OPEN}_tuned.py").write_text("mine", encoding="utf-8")
    monkeypatch.setattr(tune._Bench, "measure", lambda *_: pytest.fail("it measured"))

    with refused(UsageError, "--output"):
        tune.tune(_asked(), PATH, lambda _: None, steps=3, minutes=10.0, output=Path(output) if output else None)


def test_a_failure_without_a_word_is_a_row_too() -> None:
    assert tune._failure(RunStatus(state="failed", message=""), 1) == "it failed (1)"


def test_a_candidate_is_resolved_in_memory_and_its_values_say_whose_they_are(tmp_path: Path) -> None:
    base = made("global_batch_size=8", recipe=OPEN, hardware=machine(A100, A100))
    bench = tune._Bench(_asked(), base, tmp_path, PATH, steps=3)
    candidate = Candidate(Split(1, 4, recompute=True), "deepspeed_zero3", "whole", kernels={"use_liger_kernel": False})

    run = bench._resolved(candidate)

    config = run.recipe.config
    assert (config.split, run.level, config.train_cfg.loss) == (candidate.split, "deepspeed_zero3", "whole")
    assert config.train_cfg.max_steps == 3
    assert run.recipe.origins["train_cfg.loss"].text == "tuner tune"
    assert list(tmp_path.iterdir()) == []


def test_no_level_is_tried_that_the_launch_would_refuse() -> None:
    gpus = machine(*[H200] * 4)._replace(has_compiler=True)
    base = made("torch_compile=True", "train_cfg.loss=chunked", recipe="qwen3_8b_full_alpaca_e3", hardware=gpus)

    best = Candidate(base.recipe.config.split, "deepspeed_zero1", "chunked")

    levels = {name for name, _ in tune._levels(base.level_and_split, best)}

    assert levels == {"deepspeed_zero2"} and "deepspeed_zero3" in base.level_and_split.refused
