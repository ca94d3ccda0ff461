from __future__ import annotations

import importlib
import random
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import Prepare, Settings, Write, conversation, make_tokenizer
from tests.refused import refused
from tuner.data import masks, packing
from tuner.data.prepare import describe, prepare
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError, DiskError
from tuner.recipes.schema import MixtureEntry

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def texts(count: int, longest: int = 40, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)  # noqa: S311 -- data for a test
    return [{"text": " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))} for _ in range(count)]


def segments(dataset: Any) -> list[list[int]]:
    """Return the token ids of every sample of every row."""
    found = []
    for row in dataset:
        ends = np.cumsum(row["seq_lengths"])
        assert ends[-1] == len(row["input_ids"]) == len(row["labels"])
        found += [list(part) for part in np.split(row["input_ids"], ends[:-1])]
    return found


@pytest.mark.parametrize(("max_length", "chunk", "full"), [(64, packing.SAMPLES_PER_CHUNK, 0.98), (16, 16, 0.9)])
def test_packing_splits_what_is_longer_and_loses_and_repeats_no_token(
    prepared: Prepare, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, max_length: int, chunk: int, full: float
) -> None:
    monkeypatch.setattr(packing, "SAMPLES_PER_CHUNK", chunk)
    rows = texts(200)

    made = prepared(rows, "pretrain", max_length=max_length)

    alone = [[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id] for row in rows]
    parts = [ids[at : at + max_length] for ids in alone for at in range(0, len(ids), max_length)]
    assert sorted(segments(made.dataset)) == sorted(parts)
    assert all(sum(row["seq_lengths"]) <= max_length for row in made.dataset)
    counts = made.counts
    assert (counts.read, counts.kept, counts.dropped, counts.truncated) == (200, 200, 0, 0)
    assert counts.tokens == sum(map(len, alone))
    assert counts.trained_tokens == counts.tokens - len(parts)
    assert made.efficiency() == counts.tokens / (len(made.dataset) * max_length) > full


def test_rows_that_one_long_sample_fills_are_told_with_their_length(prepared: Prepare) -> None:
    rows = [conversation("one", "two")] * 3 + [conversation("one", "two " * 100)]

    made = prepared(rows, pack_length=64, max_length=1024)

    lengths = list(map(len, made.dataset["input_ids"]))
    assert sorted(lengths)[-2] <= 64 < max(lengths)
    assert f"packed rows of 64 to {max(lengths):,} tokens, " in describe(made)
    assert made.efficiency() == sum(lengths) / sum(max(length, 64) for length in lengths)


@pytest.mark.parametrize("packing", [True, False])
def test_the_hash_of_prepared_rows_tells_changed_and_reordered_rows_apart(prepared: Prepare, packing: bool) -> None:
    def hashed(rows: list[dict[str, str]]) -> str:
        return prepared(rows, "pretrain", packing=packing).sha256

    rows = texts(600)
    assert hashed(rows) == hashed(rows)
    assert len({hashed(rows), hashed(rows[::-1]), hashed([*rows[:-1], rows[0]])}) == 3


def test_labels_follow_their_tokens_into_packed_rows(prepared: Prepare, tokenizer: Any) -> None:
    rows = [conversation(f"{word}?", f"{word}!") for word in WORDS]

    made = prepared(rows, max_length=128)

    trained: list[str] = []
    for row in made.dataset:
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        shown = ("\0" if label == masks.IGNORED else tokenizer.decode([token]) for token, label in pairs)
        trained += "".join(shown).split("\0")
    assert sorted(filter(None, trained)) == sorted(f"{word}!<|im_end|>" for word in WORDS)


def test_the_result_is_the_same_with_any_cache_and_batch_size(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = prepared(texts(60), "pretrain", max_length=32).dataset.to_list()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "other")
    monkeypatch.setattr("tuner.data.encoding.BATCH_ROWS", 7)

    assert prepared(texts(60), "pretrain", max_length=32).dataset.to_list() == first


def test_without_packing_a_long_sample_is_cut_at_the_end_and_counted(prepared: Prepare, tokenizer: Any) -> None:
    long, short = " ".join(WORDS * 4), "one two"

    made = prepared([{"text": long}, {"text": short}], "pretrain", max_length=16, packing=False)

    ids = [*tokenizer(long)["input_ids"], tokenizer.eos_token_id]
    assert made.dataset[0]["input_ids"] == ids[:16]
    assert [row["seq_lengths"] for row in made.dataset] == [[16], [len(made.dataset[1]["input_ids"])]]
    assert (made.counts.truncated, made.counts.truncated_tokens) == (1, len(ids) - 16)


def test_a_bad_row_far_down_is_named_by_file_and_line(prepared: Prepare, jsonl: Write, cache: Path) -> None:
    path = jsonl([conversation("one", "two")] * 700 + [{"messages": [{"role": "user", "content": None}]}])

    with refused(DataError, f"{path}:701"):
        prepared(path)

    assert list((cache / "tuner").iterdir()) == []


def test_the_cache_answers_only_for_the_same_content_and_settings(
    prepared: Prepare, tokenizer: Any, cache: Path
) -> None:
    rows = [conversation("one", "two"), conversation("three", "four")]
    first = prepared(rows)
    built = set((cache / "tuner").iterdir())

    assert prepared(rows).counts == first.counts
    assert set((cache / "tuner").iterdir()) == built

    prepared(rows, max_length=32)
    prepared(rows, packing=False)
    prepared(rows, "pretrain")
    prepared(rows, tokenizer=make_tokenizer(f"{tokenizer.chat_template}{{# other #}}"))
    prepared([rows[0], conversation("three", "five")])
    assert len(set((cache / "tuner").iterdir())) == len(built) + 5


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}'])
def test_a_cache_whose_counts_are_damaged_is_refused_with_the_folder_to_remove(
    prepared: Prepare, cache: Path, text: str
) -> None:
    rows = [conversation("one", "two")]
    prepared(rows)
    (folder,) = (cache / "tuner").iterdir()
    (folder / "counts.json").write_text(text)

    with refused(DataError, folder.name, "counts.json"):
        prepared(rows)


def test_the_rows_are_memory_mapped(prepared: Prepare, cache: Path) -> None:
    made = prepared(texts(5), "pretrain")

    [file] = made.dataset.cache_files
    assert Path(file["filename"]).is_relative_to(cache)


@pytest.mark.parametrize("packing_rows", [True, False])
def test_a_cache_that_cannot_be_written_is_a_disk_error_and_leaves_nothing(
    prepared: Prepare, jsonl: Write, cache: Path, packing_rows: bool
) -> None:
    path, before = jsonl(texts(200)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, before[1]))
    try:
        with pytest.raises(DiskError, match="File too large"):
            prepared(path, "pretrain", packing=packing_rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert list((cache / "tuner").iterdir()) == []


def test_several_ranks_may_prepare_the_same_rows_at_once(jsonl: Write, cache: Path) -> None:
    settings = Settings(str(jsonl(texts(50))))
    start = threading.Barrier(4)

    def rank(_: int) -> list[Any]:
        tokenizer = make_tokenizer()
        start.wait()
        return list(prepare(settings, TextEncoder(tokenizer), objective="pretrain").dataset.to_list())

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(rank, range(4)))

    assert all(result == results[0] for result in results)
    assert len(list((cache / "tuner").iterdir())) == 1


def test_describe_says_everything_in_one_line(prepared: Prepare, jsonl: Write) -> None:
    path = jsonl([conversation("one", "two"), conversation("two", "one"), conversation("one", "one")])
    packed = prepared(path, max_length=64)
    cut = prepared(path, format="messages", max_length=64, packing=False)

    counts = packed.counts
    end = f"{counts.trained_tokens} of {counts.tokens} tokens trained, 0 truncated, 0 dropped"
    shape = (
        f"{counts.packed_rows} packed row{'s' * (counts.packed_rows > 1)} of 64 tokens, {packed.efficiency():.1%} full"
    )
    assert describe(packed) == f"train: 3 rows of format 'messages' (detected) -> {shape}, {end}"
    assert describe(cut, "validation") == (
        f"validation: 3 rows of format 'messages' -> 3 samples of at most 64 tokens, {end}"
    )


def test_a_mixture_is_one_data_set_told_part_by_part(prepared: Prepare, jsonl: Write) -> None:
    chats, alpaca = jsonl([conversation("one", "two")] * 3), [{"instruction": "five", "output": "six"}] * 4
    shares = (MixtureEntry(path=str(chats)), MixtureEntry(path=str(jsonl(alpaca, "alpaca.jsonl")), weight=0.5))

    made = prepared(None, mixture=shares)

    assert [(data_set.format, data_set.detected, data_set.read) for data_set in made.sets] == [
        ("messages", True, 3),
        ("alpaca", True, 2),
    ]
    assert (made.counts.read, made.counts.kept) == (5, 5)
    head, *lines = describe(made).splitlines()
    assert head.startswith("train: 5 rows of 2 data sets -> ")
    assert lines[1] == f"  {shares[1].path}: 2 rows of format 'alpaca' (detected)"


def test_texts_and_conversations_may_be_mixed_for_pretraining(prepared: Prepare, jsonl: Write) -> None:
    shares = (
        MixtureEntry(path=str(jsonl([conversation("one", "two")]))),
        MixtureEntry(path=str(jsonl(texts(2), "texts.jsonl"))),
    )

    made = prepared(None, "pretrain", mixture=shares, packing=False)

    assert len(made.dataset) == 3
    assert made.counts.trained_tokens == made.counts.tokens - 3


def test_changed_code_of_a_users_function_makes_other_rows(
    prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = tmp_path / "rows_of_tests.py"
    monkeypatch.syspath_prepend(tmp_path)
    code.write_text("def text(row): return row['q']\n")

    first = prepared([{"q": "Why?"}], "pretrain", format="rows_of_tests:text")
    code.write_text("def text(row): return row['q'] * 3\n")
    sys.modules.pop("rows_of_tests")
    importlib.invalidate_caches()
    second = prepared([{"q": "Why?"}], "pretrain", format="rows_of_tests:text")

    assert second.counts.tokens > first.counts.tokens
