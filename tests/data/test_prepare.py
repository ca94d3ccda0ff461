from __future__ import annotations

import importlib
import random
import resource
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.conftest import Settings, conversation, make_tokenizer
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


def test_packing_loses_and_repeats_no_token(jsonl: Callable[..., Path], tokenizer: Any) -> None:
    rows = texts(200)

    prepared = prepare(Settings(str(jsonl(rows)), max_length=64), TextEncoder(tokenizer), objective="pretrain")

    alone = [[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id] for row in rows]
    assert sorted(segments(prepared.dataset)) == sorted(alone)
    assert all(sum(row["seq_lengths"]) <= 64 for row in prepared.dataset)
    counts = prepared.counts
    assert (counts.read, counts.kept, counts.dropped, counts.truncated) == (200, 200, 0, 0)
    assert counts.tokens == sum(map(len, alone))
    assert counts.trained_tokens == counts.tokens - 200
    assert counts.efficiency == counts.tokens / (len(prepared.dataset) * 64) > 0.98


@pytest.mark.parametrize("packing", [True, False])
def test_the_hash_of_prepared_rows_tells_changed_and_reordered_rows_apart(
    jsonl: Callable[..., Path], tokenizer: Any, packing: bool
) -> None:
    def hashed(rows: list[dict[str, str]]) -> str:
        given = Settings(str(jsonl(rows)), max_length=64, packing=packing)
        return prepare(given, TextEncoder(tokenizer), objective="pretrain").sha256

    rows = texts(600)
    assert hashed(rows) == hashed(rows)
    assert len({hashed(rows), hashed(rows[::-1]), hashed([*rows[:-1], rows[0]])}) == 3


def test_a_longer_sample_is_split_into_samples_of_their_own(jsonl: Callable[..., Path], tokenizer: Any) -> None:
    text = " ".join(WORDS * 10)

    prepared = prepare(
        Settings(str(jsonl([{"text": text}])), max_length=16), TextEncoder(tokenizer), objective="pretrain"
    )

    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    parts = sorted(segments(prepared.dataset), key=lambda part: ids.index(part[0]) if len(part) == 16 else len(ids))
    assert sorted(parts) == sorted(ids[at : at + 16] for at in range(0, len(ids), 16))
    unpredictable = sum(len(row["seq_lengths"]) for row in prepared.dataset)
    assert prepared.counts.trained_tokens == len(ids) - unpredictable
    assert prepared.counts.truncated == 0


def test_chunks_of_samples_lose_no_token_either(
    jsonl: Callable[..., Path], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "SAMPLES_PER_CHUNK", 16)
    rows = texts(100, longest=60)

    prepared = prepare(Settings(str(jsonl(rows)), max_length=32), TextEncoder(tokenizer), objective="pretrain")

    alone = [[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id] for row in rows]
    assert sorted(segments(prepared.dataset)) == sorted(
        ids[at : at + 32] for ids in alone for at in range(0, len(ids), 32)
    )


def test_labels_follow_their_tokens_into_packed_rows(jsonl: Callable[..., Path], tokenizer: Any) -> None:
    rows = [conversation(f"{word}?", f"{word}!") for word in WORDS]

    prepared = prepare(Settings(str(jsonl(rows)), max_length=128), TextEncoder(tokenizer), objective="sft")

    trained: list[str] = []
    for row in prepared.dataset:
        pairs = zip(row["input_ids"], row["labels"], strict=True)
        shown = ("\0" if label == masks.IGNORED else tokenizer.decode([token]) for token, label in pairs)
        trained += "".join(shown).split("\0")
    assert sorted(filter(None, trained)) == sorted(f"{word}!<|im_end|>" for word in WORDS)


def test_the_result_is_the_same_with_any_cache_and_batch_size(
    jsonl: Callable[..., Path], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(str(jsonl(texts(60))), max_length=32)
    first = prepare(settings, TextEncoder(tokenizer), objective="pretrain").dataset.to_list()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "other")
    monkeypatch.setattr("tuner.data.encoding.BATCH_ROWS", 7)

    assert prepare(settings, TextEncoder(tokenizer), objective="pretrain").dataset.to_list() == first


def test_without_packing_a_long_sample_is_cut_at_the_end_and_counted(
    jsonl: Callable[..., Path], tokenizer: Any
) -> None:
    long, short = " ".join(WORDS * 4), "one two"

    settings = Settings(str(jsonl([{"text": long}, {"text": short}])), max_length=16, packing=False)
    prepared = prepare(settings, TextEncoder(tokenizer), objective="pretrain")

    ids = [*tokenizer(long)["input_ids"], tokenizer.eos_token_id]
    assert prepared.dataset[0]["input_ids"] == ids[:16]
    assert [row["seq_lengths"] for row in prepared.dataset] == [[16], [len(prepared.dataset[1]["input_ids"])]]
    assert (prepared.counts.truncated, prepared.counts.truncated_tokens) == (1, len(ids) - 16)


def test_a_bad_row_far_down_is_named_by_file_and_line(jsonl: Callable[..., Path], tokenizer: Any, cache: Path) -> None:
    path = jsonl([conversation("one", "two")] * 700 + [{"messages": [{"role": "user", "content": None}]}])

    with pytest.raises(DataError) as caught:
        prepare(Settings(str(path)), TextEncoder(tokenizer), objective="sft")

    assert caught.value.where == f"{path}:701"
    assert list((cache / "tuner").iterdir()) == []


def test_the_cache_answers_only_for_the_same_content_and_settings(
    jsonl: Callable[..., Path], tokenizer: Any, cache: Path
) -> None:
    path = jsonl([conversation("one", "two"), conversation("three", "four")])
    settings = Settings(str(path))
    first = prepare(settings, TextEncoder(tokenizer), objective="sft")
    built = set((cache / "tuner").iterdir())

    assert prepare(settings, TextEncoder(tokenizer), objective="sft").counts == first.counts
    assert set((cache / "tuner").iterdir()) == built

    for changed in ({"max_length": 32}, {"packing": False}):
        prepare(settings.with_values(changed), TextEncoder(tokenizer), objective="sft")
    prepare(settings, TextEncoder(tokenizer), objective="pretrain")
    prepare(settings, TextEncoder(make_tokenizer((str(tokenizer.chat_template)) + "{# other #}")), objective="sft")
    jsonl([conversation("one", "two"), conversation("three", "five")])
    prepare(settings, TextEncoder(tokenizer), objective="sft")
    assert len(set((cache / "tuner").iterdir())) == len(built) + 5


def test_the_rows_are_memory_mapped(jsonl: Callable[..., Path], tokenizer: Any, cache: Path) -> None:
    prepared = prepare(Settings(str(jsonl(texts(5)))), TextEncoder(tokenizer), objective="pretrain")

    [file] = prepared.dataset.cache_files
    assert Path(file["filename"]).is_relative_to(cache)


@pytest.mark.parametrize("packing_rows", [True, False])
def test_a_cache_that_cannot_be_written_is_a_disk_error_and_leaves_nothing(
    jsonl: Callable[..., Path], tokenizer: Any, cache: Path, packing_rows: bool
) -> None:
    settings = Settings(str(jsonl(texts(200))), packing=packing_rows)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, before[1]))
    try:
        with pytest.raises(DiskError, match="File too large"):
            prepare(settings, TextEncoder(tokenizer), objective="pretrain")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    assert list((cache / "tuner").iterdir()) == []


def test_several_ranks_may_prepare_the_same_rows_at_once(jsonl: Callable[..., Path], cache: Path) -> None:
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


def test_describe_says_everything_in_one_line(jsonl: Callable[..., Path], tokenizer: Any) -> None:
    path = jsonl([conversation("one", "two"), conversation("two", "one"), conversation("one", "one")])
    packed = prepare(Settings(str(path), max_length=64), TextEncoder(tokenizer), objective="sft")
    cut = prepare(
        Settings(str(path), format="messages", max_length=64, packing=False), TextEncoder(tokenizer), objective="sft"
    )

    counts = packed.counts
    end = f"{counts.trained_tokens} of {counts.tokens} tokens trained, 0 truncated, 0 dropped"
    shape = (
        f"{counts.packed_rows} packed row{'s' * (counts.packed_rows > 1)} of 64 tokens, {counts.efficiency:.1%} full"
    )
    assert describe(packed) == f"train: 3 rows of format 'messages' (detected) -> {shape}, {end}"
    assert describe(cut, "validation") == (
        f"validation: 3 rows of format 'messages' -> 3 samples of at most 64 tokens, {end}"
    )


def test_a_mixture_is_one_data_set_told_part_by_part(jsonl: Callable[..., Path], tokenizer: Any) -> None:
    chats, alpaca = jsonl([conversation("one", "two")] * 3), [{"instruction": "five", "output": "six"}] * 4
    shares = (MixtureEntry(path=str(chats)), MixtureEntry(path=str(jsonl(alpaca, "alpaca.jsonl")), weight=0.5))
    settings = Settings(path=None, mixture=shares, max_length=64)

    prepared = prepare(settings, TextEncoder(tokenizer), objective="sft")

    assert [(data_set.format, data_set.detected, data_set.read) for data_set in prepared.sets] == [
        ("messages", True, 3),
        ("alpaca", True, 2),
    ]
    assert (prepared.counts.read, prepared.counts.kept) == (5, 5)
    head, *lines = describe(prepared).splitlines()
    assert head.startswith("train: 5 rows of 2 data sets -> ")
    assert lines[1] == f"  {shares[1].path}: 2 rows of format 'alpaca' (detected)"


def test_texts_and_conversations_may_be_mixed_for_pretraining(jsonl: Callable[..., Path], tokenizer: Any) -> None:
    shares = (
        MixtureEntry(path=str(jsonl([conversation("one", "two")]))),
        MixtureEntry(path=str(jsonl(texts(2), "texts.jsonl"))),
    )
    settings = Settings(path=None, mixture=shares, packing=False)

    prepared = prepare(settings, TextEncoder(tokenizer), objective="pretrain")

    assert len(prepared.dataset) == 3
    assert prepared.counts.trained_tokens == prepared.counts.tokens - 3


def test_changed_code_of_a_users_function_makes_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Any
) -> None:
    data, code = tmp_path / "my.jsonl", tmp_path / "rows_of_tests.py"
    data.write_text('{"q": "Why?"}\n')
    monkeypatch.syspath_prepend(tmp_path)
    code.write_text("def text(row): return row['q']\n")
    settings = Settings(str(data), format="rows_of_tests:text")

    first = prepare(settings, TextEncoder(tokenizer), objective="pretrain")
    code.write_text("def text(row): return row['q'] * 3\n")
    sys.modules.pop("rows_of_tests")
    importlib.invalidate_caches()
    second = prepare(settings, TextEncoder(tokenizer), objective="pretrain")

    assert second.counts.tokens > first.counts.tokens
