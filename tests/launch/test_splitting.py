"""Who says how a step is split: the recipe, a user's JSON, or the plan; and what a run is told of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.launch.plans import checkpoint, made, written_run
from tests.machine.gpus import A100, CPU, machine
from tuner.fit.splits import possible_splits
from tuner.launch import render
from tuner.launch.resolved_run import ResolvedRun
from tuner.recipes.loading import load
from tuner.recipes.merging import Kind
from tuner.recipes.recipe import Overrides
from tuner.recipes.schema import Split
from tuner.runs import creation

OPEN, OF_XTUNER = "llama3_1_8b_lora_alpaca_e3", "internlm2_chat_7b_qlora_oasst1_e3"
SMALL = "tiny_lora_sample_e1"
MICRO, GLOBAL = "train_dataloader.batch_size", "train_cfg.global_batch_size"


def split(found: ResolvedRun) -> Split:
    return found.recipe.config.split


def test_a_gpus_plan_chooses_the_split_and_says_so() -> None:
    found = made(recipe=OPEN, hardware=machine(A100, A100))

    assert split(found).samples == 8 and split(found).micro_batch > 1 and not split(found).recompute
    origin = found.recipe.origins[MICRO]
    assert origin.place.kind is Kind.DERIVED and "fastest" in origin.text
    assert found.final.config["train_micro_batch_size_per_gpu"] == split(found).micro_batch
    assert found.recipe_as_run.config.split == split(found)
    assert found.fit and found.fit.fits


def test_a_cpu_takes_the_largest_micro_batch_and_pads_no_rows() -> None:
    sets = ("global_batch_size=16", "train_dataloader.dataset.packing=False")
    packed, by_sample = (made(*some, recipe=SMALL, hardware=CPU) for some in (sets[:1], sets))
    alone = made(*sets, "attn_implementation=eager", recipe=SMALL, hardware=CPU)

    assert split(packed) == split(by_sample) == Split(16, 1, recompute=False)
    assert "at most 50% of the host" in packed.recipe.origins[MICRO].text
    assert split(alone) == Split(1, 16, recompute=False)


@pytest.mark.parametrize(("recipe", "host_bytes"), [(OPEN, CPU.host_memory_bytes), (SMALL, 0)])
def test_a_cpu_whose_memory_is_small_or_not_known_takes_one_by_sixteen_with_recomputation(
    recipe: str, host_bytes: int
) -> None:
    found = made("global_batch_size=16", recipe=recipe, hardware=CPU._replace(host_memory_bytes=host_bytes))

    assert split(found) == Split(1, 16, recompute=True)


@pytest.mark.parametrize(("coefficient", "is_fixed"), [(None, True), (0.01, True), (0, False)])
def test_a_router_that_is_kept_balanced_fixes_the_micro_batch(coefficient: float | None, is_fixed: bool) -> None:
    sets = (f"router_aux_loss_coef={coefficient}", "global_batch_size=16")
    config = load("olmoe_1b_7b_lora_alpaca_e1", Overrides(pairs=[("--set", change) for change in sets])).config

    sizes = {ranks: {split.micro_batch for split in possible_splits(config, ranks)} for ranks in (1, 4)}

    assert sizes == ({1: {1}, 4: {1}} if is_fixed else {1: {1, 2, 4, 8, 16}, 4: {1, 2, 4}})


def test_a_name_of_xtuners_keeps_its_rows_of_a_rank_and_takes_as_many_at_once_as_fit() -> None:
    for gpus in ((A100,), (A100, A100)):
        micro, accumulation, recompute, _ = split(made(recipe=OF_XTUNER, hardware=machine(*gpus)))
        assert (micro * accumulation, recompute) == (16, False)
        assert micro > 1


def test_what_is_named_stays_and_the_rest_follows_the_global_batch() -> None:
    sets = ("global_batch_size=24", f"{MICRO}=3", "gradient_checkpointing=True")

    assert split(made(*sets, recipe=OPEN, hardware=machine(A100, A100))) == Split(3, 4, recompute=True)


def test_validation_takes_the_micro_batch_that_fits(tmp_path: Path) -> None:
    found = made("val_split=0.1", recipe=OPEN, hardware=machine(A100))

    assert found.recipe.config.val_dataloader is not None
    assert found.recipe.config.val_dataloader.batch_size == split(found).micro_batch


def test_a_jsons_numbers_stand_where_the_recipe_says_auto(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}')

    taken = made(recipe=OPEN, hardware=machine(A100, A100), deepspeed=str(path))
    numbers = (f"{MICRO}=1", "accumulative_counts=16")
    beaten = made(*numbers, recipe=OPEN, hardware=machine(A100, A100), deepspeed=str(path))

    assert split(taken)[:2] == (2, 3)
    assert taken.recipe.origins[MICRO].text == f"{path}:1:2"
    assert not any("overrides" in warning for warning in taken.warnings)
    assert split(beaten)[:2] == (1, 16)
    assert any("overrides 2" in warning for warning in beaten.warnings)


def test_a_jsons_global_batch_stands_for_that_of_an_open_recipe(tmp_path: Path) -> None:
    path = tmp_path / "my.json"
    path.write_text(json.dumps({"train_batch_size": 24, "train_micro_batch_size_per_gpu": "auto"}))

    assert made(recipe=OPEN, hardware=machine(A100, A100), deepspeed=str(path)).batch.global_batch == 24


def test_an_open_recipe_goes_on_with_its_global_batch_on_other_ranks(tmp_path: Path) -> None:
    recipe = "tiny_lora_sample_e1"
    run = tmp_path / "run"
    written_run(run, recipe=recipe, flags={"nproc_per_node": 8})
    checkpoint(run, 5)

    found = made(recipe=recipe, resume=str(run), flags={"nproc_per_node": 1}, resume_weights=True)

    assert made(recipe=recipe).batch.global_batch == 1
    assert found.batch.global_batch == 8
    assert "keep the global batch of 8" in " ".join(found.notes)


def own_rows(folder: Path, count: int, words: int = 30) -> str:
    """Write chats of about 4 x `words` bytes each."""
    file = folder / "rows.jsonl"
    answer = "word " * words
    turns = ([{"role": "user", "content": f"{at}?"}, {"role": "assistant", "content": answer}] for at in range(count))
    file.write_text("".join(f"{json.dumps({'messages': two})}\n" for two in turns))
    return str(file)


def without_recipe(rows: str, *sets: str, **request: Any) -> ResolvedRun:
    return made(f"train_dataloader.dataset.path={rows}", *sets, recipe=None, model="package:tiny", **request)


def pack_length(found: ResolvedRun) -> int | None:
    length = found.recipe.config.train_dataloader.dataset.pack_length
    assert length != "auto"
    return length


def test_few_rows_make_small_steps_and_many_rows_steps_of_32768_tokens(tmp_path: Path) -> None:
    few, many = own_rows(tmp_path, 300), tmp_path / "many"
    many.mkdir()

    found, whole = without_recipe(few), without_recipe(own_rows(many, 100_000, words=120))

    assert found.batch.global_batch == 1 and pack_length(found) == 64
    assert "tokens an epoch" in found.recipe.origins[GLOBAL].text
    assert (whole.batch.global_batch, pack_length(whole)) == (64, None)
    assert whole.recipe.config.train_dataloader.dataset.max_length == 512


def test_the_steps_of_a_run_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    rows = own_rows(tmp_path, 100_000)

    one_rank, eight_ranks = (without_recipe(rows, flags={"nproc_per_node": count}) for count in (1, 8))

    assert one_rank.batch.global_batch == eight_ranks.batch.global_batch == 16
    assert one_rank.steps.total == eight_ranks.steps.total


@pytest.mark.parametrize("named", ["max_steps=2", "max_steps=20000"])
def test_a_number_of_steps_changes_no_batch(tmp_path: Path, named: str) -> None:
    rows = own_rows(tmp_path, 300)

    plain, found = without_recipe(rows), without_recipe(rows, named)

    assert (found.batch, pack_length(found)) == (plain.batch, pack_length(plain))


def test_samples_that_are_not_packed_get_a_smaller_batch_too(tmp_path: Path) -> None:
    found = without_recipe(own_rows(tmp_path, 300), "train_dataloader.dataset.packing=False")

    assert found.batch.global_batch == 1 and found.steps.total.value == 3 * (300 - 15), "15 rows are held out"


@pytest.mark.parametrize(
    "named", ["global_batch_size=16", "accumulative_counts=16", "train_cfg.global_batch_size=None"]
)
def test_a_number_that_the_user_names_stays_however_few_the_rows(tmp_path: Path, named: str) -> None:
    assert without_recipe(own_rows(tmp_path, 300), named).batch.global_batch == 16


def test_each_rank_keeps_a_sample_of_a_smaller_global_batch(tmp_path: Path) -> None:
    found = without_recipe(own_rows(tmp_path, 300), flags={"nproc_per_node": 2})

    assert found.batch.global_batch == 2 and found.batch.ranks == 2


def test_a_run_resumes_with_the_global_batch_that_its_rows_gave(tmp_path: Path) -> None:
    rows, run = own_rows(tmp_path, 300), tmp_path / "run"
    started = without_recipe(rows, work_dir=run)
    creation.create(run, render.files(started), resume=False)
    checkpoint(run, 5)

    again = without_recipe(rows, resume=str(run))
    on_one_and_its_recipe = made(recipe=str(run / "recipe.py"), resume=str(run))

    assert started.batch == again.batch == on_one_and_its_recipe.batch
    assert not any("batch" in note for note in again.notes)
