"""The trainer is the truth: it takes as many steps as a dry run has said, for every kind of data that is counted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from accelerate.data_loader import prepare_data_loader
from transformers import LlamaConfig, LlamaForCausalLM

from tests.cli.command import Tuner
from tests.cli.conftest import tuner as tuner
from tests.data.conftest import cache as cache
from tests.data.conftest import make_tokenizer
from tests.launch.plans import made
from tuner.data.prepare import prepare
from tuner.data.text_encoder import TextEncoder
from tuner.launch.resolved_run import ResolvedRun
from tuner.launch.steps import Certainty
from tuner.worker import trainer_setup

ALPACA = {"instruction": "Why?", "output": "Because."}
PAIR = {"prompt": "What is red?", "chosen": "A colour.", "rejected": "A dog."}
JUDGED = {"prompt": "What is red?", "completion": "A colour.", "label": True}
SFT, KTO, DPO = (f"tiny_{name}_custom_e1" for name in ("full", "kto_full", "dpo_full"))
MIXED = "[dict(path='rows.jsonl', weight=0.25), dict(path='more.jsonl', weight=2.5)]"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(name: str, row: dict[str, Any], number: int) -> None:
    Path(name).write_text(f"{json.dumps(row)}\n" * number)


def planned(recipe: str, *sets: str, batch: tuple[int, int, int] = (2, 2, 1)) -> ResolvedRun:
    micro, accumulation, ranks = batch
    geometry = (f"train_dataloader.batch_size={micro}", f"accumulative_counts={accumulation}")
    own = () if "mixture" in "".join(sets) else ("train_dataloader.dataset.path=rows.jsonl",)
    values = ("train_dataloader.dataset.packing=False", "train_dataloader.dataset.max_length=64", *own, *geometry)
    return made(*values, *sets, recipe=recipe, flags={"nproc_per_node": ranks})


def model() -> Any:
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=512, pad_token_id=0, **shape))


def trained(plan: ResolvedRun, rank: int = 0) -> tuple[int, int]:
    """Return the steps of an epoch, and of the run, of TRL's trainer on the prepared data; as a rank of the plan's."""
    config, tokenizer = plan.recipe.config, make_tokenizer(pads=True)
    prepared = prepare(config.train_dataloader.dataset, TextEncoder(tokenizer), objective=config.objective.type)
    models = (model(), model() if config.objective.type in ("dpo", "kto") else None)
    trainer = trainer_setup.evaluator(config, models, TextEncoder(tokenizer), prepared.dataset, 1, "trainer")
    args = trainer.args
    args.per_device_train_batch_size = trainer._train_batch_size = plan.batch.micro_batch
    args.gradient_accumulation_steps = plan.batch.accumulation
    args.num_train_epochs, args.max_steps = config.train_cfg.max_epochs, config.train_cfg.max_steps or -1
    # As accelerate does on the other ranks, which are not here.
    trainer.accelerator.prepare = partial(
        prepare_data_loader, num_processes=plan.batch.ranks, process_index=rank, put_on_device=False
    )
    with patch.object(type(args), "world_size", plan.batch.ranks):
        values = trainer.set_initial_training_values(args, trainer.get_train_dataloader())
    return values[1], values[6]


def assert_as_trained(plan: ResolvedRun) -> None:
    told = plan.steps
    assert told.per_epoch.certainty is Certainty.UNLESS_DROPPED
    for rank in range(plan.batch.ranks):
        assert (told.per_epoch.value, told.total.value) == trained(plan, rank)


@pytest.mark.parametrize("rows", [1, 8, 9, 12])
@pytest.mark.parametrize("batch", [(2, 2, 1), (2, 2, 2), (1, 3, 2)])
def test_the_last_batch_may_be_uneven(rows: int, batch: tuple[int, int, int]) -> None:
    write("rows.jsonl", ALPACA, rows)

    assert_as_trained(planned(SFT, "max_epochs=3", batch=batch))


@pytest.mark.parametrize(
    ("sets", "per_epoch"),
    [
        (("max_rows=10",), 3),
        ((f"train_dataloader.dataset.mixture={MIXED}",), 9),
        ((f"train_dataloader.dataset.mixture={MIXED}", "max_rows=11"), 3),
        (("max_rows=10", "max_steps=7"), 3),
    ],
)
def test_max_rows_mixtures_and_max_steps_change_the_steps(sets: Sequence[str], per_epoch: int) -> None:
    write("rows.jsonl", ALPACA, 30)
    write("more.jsonl", ALPACA, 11)
    plan = planned(SFT, *sets)

    assert plan.steps.per_epoch.value == per_epoch
    assert_as_trained(plan)


@pytest.mark.parametrize(("row", "samples"), [(PAIR, 18), (JUDGED, 9)])
def test_kto_learns_from_both_answers_of_a_pair(row: dict[str, Any], samples: int) -> None:
    write("rows.jsonl", row, 12)
    plan = planned(KTO, "max_rows=9", batch=(2, 2, 2))

    assert plan.steps.samples.value == samples
    assert_as_trained(plan)


def test_other_objectives_learn_from_a_pair_once() -> None:
    write("rows.jsonl", PAIR, 9)

    assert_as_trained(planned(DPO))


def test_kto_on_a_mixture_of_pairs_and_single_answers() -> None:
    write("rows.jsonl", PAIR, 30)
    write("more.jsonl", JUDGED, 11)

    assert_as_trained(planned(KTO, f"train_dataloader.dataset.mixture={MIXED}"))


def test_arrays_and_csv_files_are_counted_too() -> None:
    Path("rows.json").write_text(json.dumps([ALPACA] * 5))
    Path("more.csv").write_text('instruction,output\nWhy?,"two\nlines"\n\nWhy?,Because.\n')
    mixture = "[dict(path='rows.json'), dict(path='more.csv')]"
    plan = planned(SFT, f"train_dataloader.dataset.mixture={mixture}")

    assert plan.steps.rows.value == 7
    assert_as_trained(plan)


def test_rows_that_are_dropped_make_it_less_and_those_that_are_sampled_are_counted_so() -> None:
    Path("rows.jsonl").write_text(f"{json.dumps(ALPACA)}\n" * 9 + '{"instruction": "Why?", "output": ""}\n' * 4)
    plan = planned(SFT)

    assert (plan.steps.total.value, trained(plan)[1]) == (3, 3)
    assert plan.steps.total.certainty is Certainty.ABOUT


def test_a_dry_run_says_so(tuner: Tuner) -> None:
    write("rows.jsonl", ALPACA, 1000)
    sets = ("max_rows=10", "train_dataloader.dataset.packing=False", "accumulative_counts=1")
    asked = ("train", SFT, "--data", "rows.jsonl", *(word for change in sets for word in ("--set", change)))

    told = json.loads(tuner(*asked, "--set", "train_dataloader.batch_size=2", "--dry-run", "--json").out)["batch"]

    assert (told["steps_per_epoch"], told["steps"]) == trained(planned(SFT, *sets[:1], batch=(2, 1, 1)))
    assert (told["rows"], told["samples"], told["steps"]) == (10, 10, 5)
