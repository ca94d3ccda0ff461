"""Rows with the same question and answer are counted, and are on one side of a split."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tuner.data import copies
from tuner.data.formats import FORMATS
from tuner.data.pipeline import Pipeline
from tuner.recipes.schema import Dataset, MixtureEntry

Row = dict[str, Any]


def chat(question: str, answer: str, **others: Any) -> Row:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **others}


def written(path: Path, rows: Iterable[Row]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def places(dataset: Dataset, objective: str = "sft") -> list[str]:
    pipeline = Pipeline(dataset, objective)
    tally = pipeline.tally()
    return [place for place, _ in pipeline.samples(tally, tally.refuse)]


def both_sides(dataset: Dataset, objective: str = "sft") -> tuple[list[str], list[str]]:
    held_out = dataset.model_copy(update={"held_out": True})
    return places(dataset, objective), places(held_out, objective)


def key(name: str, row: Row) -> int:
    return copies.key_of(FORMATS[name].read(row))


def split(path: str | None, part: float = 0.2, copied: str = "together", **others: Any) -> Dataset:
    settings = {"val_split": part, "val_seed": 1, "val_copies": copied, "max_length": 64, "packing": False, **others}
    return Dataset(path=path, **settings)


def test_case_and_spaces_make_no_other_question_or_answer() -> None:
    assert key("messages", chat("What is  2?", "Two.")) == key("messages", chat(" what is\n2? ", "TWO."))
    assert key("messages", chat("What is 2?", "Two.")) != key("messages", chat("What is 2?", "Two!"))
    assert key("messages", chat("What is 2?", "Two.")) != key("messages", chat("What is 3?", "Two."))


def test_the_same_question_and_answer_in_another_format_is_a_copy() -> None:
    assert key("messages", chat("Q", "A")) == key("alpaca", {"instruction": "q", "input": "", "output": "a"})


def test_a_judgement_is_no_part_of_an_answer_and_the_rejected_answer_is() -> None:
    good, bad = ({"prompt": "q", "completion": "a", "label": label} for label in (True, False))
    assert key("feedback", good) == key("feedback", bad)
    pair, other = ({"prompt": "q", "chosen": "a", "rejected": text} for text in ("b", "c"))
    assert key("preference", pair) != key("preference", other)


@pytest.mark.parametrize("seed", range(5))
def test_copies_of_a_row_are_on_one_side(tmp_path: Path, seed: int) -> None:
    rows = [chat(f"Q {number % 20}", "A" if number < 50 else " a ", id=number) for number in range(100)]
    path = written(tmp_path / "rows.jsonl", rows)

    train, held_out = both_sides(split(path, val_seed=seed))

    question = {f"{path}:{line}": number % 20 for line, number in enumerate(range(100), 1)}
    assert len(train) + len(held_out) == 100 and len(held_out) == 20
    assert not {question[place] for place in train} & {question[place] for place in held_out}


def test_the_same_question_about_another_image_is_no_copy(tmp_path: Path) -> None:
    rows = [chat("Is it red?", "No.", image=f"{number % 10}.png") for number in range(20)]
    dataset = Dataset(path=written(tmp_path / "rows.jsonl", rows), max_length=64, packing=False)
    pipeline = Pipeline(dataset, "sft", decodes_images=False)

    keys = [pipeline.key_of(data_set, placed) for data_set, placed in pipeline.mixture.read()]

    assert keys[:10] == keys[10:]
    assert len(set(keys)) == 10


def test_apart_copies_are_where_their_places_fall(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", [chat("Q", "A")] * 100)

    train, held_out = both_sides(split(path, copied="apart"))

    assert (len(train), len(held_out)) == (80, 20)


def test_without_copies_both_ways_hold_out_the_same_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", (chat(f"Q {number}", "A") for number in range(100)))

    assert both_sides(split(path)) == both_sides(split(path, copied="apart"))


def test_copies_in_two_data_sets_of_a_mixture_are_on_one_side(tmp_path: Path) -> None:
    first = written(tmp_path / "a.jsonl", (chat(f"Q {number}", "A") for number in range(60)))
    other = written(tmp_path / "b.jsonl", ({"instruction": f"q {number}", "output": "A"} for number in range(60)))
    shares = (MixtureEntry(path=first), MixtureEntry(path=other, weight=2.0))

    train, held_out = both_sides(split(None, mixture=shares))

    lines = [{place.rpartition(":")[2] for place in side} for side in (train, held_out)]
    assert held_out and not lines[0] & lines[1]
    assert len(train) + len(held_out) == 180


def test_prompts_and_pairs_and_texts_have_copies_too(tmp_path: Path) -> None:
    for name, objective, row in (
        ("prompts", "grpo", {"prompt": "What?", "solution": "1"}),
        ("pairs", "dpo", {"prompt": "What?", "chosen": "1", "rejected": "2"}),
        ("texts", "pretrain", {"text": "Once upon a time."}),
    ):
        path = written(tmp_path / f"{name}.jsonl", itertools.chain([row] * 10, ()))
        sides = both_sides(split(path, 0.5), objective)
        assert sorted(map(len, sides)) == [0, 10], name


def test_a_row_that_a_mixture_reads_twice_is_no_copy() -> None:
    twice, copied = (1, 10), (1, 11)

    assert copies.count([twice, twice, (2, 12)]) == 0
    assert copies.count([twice, copied, (2, 12)]) == 2


def test_a_broken_line_is_counted_once_with_the_training_rows(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.jsonl", (chat(f"Q {number}", "A") for number in range(40)))
    with Path(path).open("a", encoding="utf-8") as stream:
        stream.write('{"messages": [\n')
    counts = []

    for held_out in (False, True):
        pipeline = Pipeline(split(path, bad_rows=1, held_out=held_out), "sft")
        tally = pipeline.tally()
        list(pipeline.samples(tally, tally.refuse))
        counts.append(tally.counts.bad)

    assert counts == [1, 0]
