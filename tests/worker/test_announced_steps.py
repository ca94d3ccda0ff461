"""A packed run takes about as many steps as a dry run announces, whatever the rows look like."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.data.conftest import cache as cache
from tests.launch.plans import made
from tuner.data.prepare import prepare
from tuner.data.step_count import count_steps
from tuner.data.text_encoder import TextEncoder
from tuner.machine.topology import Batch
from tuner.models.load import pretrained_path, tokenizer_of
from tuner.recipes.schema import RecipeConfig

Row = dict[str, Any]
RECIPE = "tiny_lora_custom_e3"
WORDS = ("red", "blue", "a colour", "the sea", "because", "Paris", "is", "not", "often", "function", "returns")


def chat(rng: random.Random, low: int, high: int, turns: int = 1) -> Row:
    """Return a conversation with answers of `low` to `high` words."""
    messages = []
    for _ in range(turns):
        messages += [{"role": "user", "content": " ".join(rng.choices(WORDS, k=5))}]
        messages += [{"role": "assistant", "content": " ".join(rng.choices(WORDS, k=rng.randint(low, high)))}]
    return {"messages": messages}


def long_tail(rng: random.Random) -> Row:
    return chat(rng, 5, 20) if rng.random() < 0.9 else chat(rng, 200, 400)


def alpaca(rng: random.Random) -> Row:
    return {"instruction": "Which colour?", "output": " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))}


def sharegpt(rng: random.Random) -> Row:
    turns = chat(rng, 10, 30, turns=3)["messages"]
    names = {"user": "human", "assistant": "gpt"}
    return {"conversations": [{"from": names[turn["role"]], "value": turn["content"]} for turn in turns]}


def other_script(rng: random.Random) -> Row:
    answer = "".join(rng.choices("日本語の文章です。漢字仮名交じり", k=rng.randint(20, 200)))
    return {"messages": [{"role": "user", "content": "日本語?"}, {"role": "assistant", "content": answer}]}


def code(rng: random.Random) -> Row:
    answer = "\n".join(f"    x_{rng.randint(0, 99)} = f({rng.random():.6f})" for _ in range(rng.randint(3, 30)))
    return {"messages": [{"role": "user", "content": "Write it."}, {"role": "assistant", "content": answer}]}


CASES: dict[str, tuple[Callable[[random.Random], Row], int, tuple[str, ...]]] = {
    "few short rows": (lambda rng: chat(rng, 5, 30), 40, ()),
    "short rows": (lambda rng: chat(rng, 5, 30), 600, ()),
    "very short rows": (lambda rng: chat(rng, 1, 2), 2000, ()),
    "long rows": (lambda rng: chat(rng, 150, 300), 300, ()),
    "rows above max_length": (lambda rng: chat(rng, 400, 900), 150, ()),
    "a long tail": (long_tail, 600, ()),
    "several turns": (lambda rng: chat(rng, 5, 60, turns=4), 400, ()),
    "Alpaca's keys": (alpaca, 700, ()),
    "ShareGPT's keys": (sharegpt, 300, ()),
    "another script": (other_script, 400, ()),
    "code": (code, 400, ()),
    "a batch and a length of packs by hand": (
        lambda rng: chat(rng, 5, 60),
        500,
        ("global_batch_size=4", "train_dataloader.dataset.pack_length=300"),
    ),
}


def real_steps(config: RecipeConfig, batch: Batch) -> int:
    """Return the optimizer steps that the trainer takes on the rows as they are packed."""
    tokenizer = tokenizer_of(config, pretrained_path(config.model))
    prepared = prepare(config.train_dataloader.dataset, TextEncoder(tokenizer), objective=config.objective.type)
    return count_steps(config, batch, len(prepared.dataset))


QUICK = (
    "few short rows",
    "rows above max_length",
    "a long tail",
    "another script",
    "a batch and a length of packs by hand",
)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_the_announced_number_of_steps_is_within_a_fifth(tmp_path: Path, case: str) -> None:
    row_of, count, sets = CASES[case]
    rng, file = random.Random(case), tmp_path / "rows.jsonl"  # noqa: S311
    file.write_text("".join(f"{json.dumps(row_of(rng))}\n" for _ in range(count)), encoding="utf-8")

    plan = made(f"train_dataloader.dataset.path={file}", *sets, recipe=RECIPE)

    real = real_steps(plan.recipe.config, plan.batch)
    assert plan.steps.total.value == pytest.approx(real, rel=0.2)
