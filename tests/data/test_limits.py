"""What a row, a template or a tokenizer unfolds to is bounded, and told with the row's place."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Regex, normalizers

from tests.data.conftest import CHATML, Prepare, Settings, Write, conversation, make_tokenizer
from tests.refused import refused
from tuner.data import limits, masks, readers, templates
from tuner.data.inspection import bad_rows
from tuner.data.prepare import prepare
from tuner.data.sample import Chat
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError

GOOD = {"instruction": "Why?", "output": "Because."}
LONG = {"instruction": "Why?", "output": "a " * (limits.MAX_SAMPLE_BYTES // 2)}


def refusal(tokenizer: Any, chat: Chat) -> DataError:
    with pytest.raises(DataError) as caught:
        masks.encode_chats(templates.choose_template(tokenizer), [("here:7", chat)])
    return caught.value


def test_a_row_that_is_longer_than_can_be_tokenized_is_told_with_its_line_and_can_be_left_out(
    prepared: Prepare, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, (GOOD, LONG, GOOD))).encode()))
    assert path.stat().st_size < 30_000

    with refused(DataError, f"{path.name}:2", "8 MiB"):
        prepared(path)
    left = prepared(path, bad_rows=1)
    assert (left.counts.kept, left.counts.bad) == (2, 1)
    assert [error.where for error in bad_rows(Settings(str(path)), TextEncoder(make_tokenizer()), "sft")] == [
        f"{path}:2"
    ]  # type: ignore[arg-type]


def test_a_column_that_is_named_many_times_is_not_filled_in(prepared: Prepare, jsonl: Write) -> None:
    path = jsonl([{"a": "x" * 100_000, "output": "b"}])

    with refused(DataError, f"{path.name}:1", "8 MiB"):
        prepared(path, format="alpaca", columns={"instruction": "{a}" * 100_000})


def test_long_rows_are_tokenized_a_few_at_a_time(
    prepared: Prepare, jsonl: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_SAMPLE_BYTES", 2_000)
    path = jsonl([conversation("Why?", "a " * 400)] * 7)
    ticks: list[int] = []

    whole = prepared(path, max_length=5_000, packing=False)
    prepare(
        Settings(str(path), max_length=4_000, packing=False),
        TextEncoder(make_tokenizer()),
        tick=lambda: ticks.append(1),
        objective="sft",
    )  # type: ignore[arg-type]

    assert whole.counts.kept == 7
    assert len(ticks) > 2


EXPENSIVE = {
    "without end": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a number of a billion digits": "{% set n = 9 ** (9 ** 9) %}",
    "of a row's every turn": "{% for i in messages %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
}
LARGE = {
    "a text of ten gigabytes": "{% set n = 'x' * 10**10 %}",
    "a text that is doubled": "{% set n = namespace(x='x') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a width": "{{ '%10000000000d' % 1 }}",
    "more bytes than there are numbers for": "{{ 'x' * 10**30 }}",
}


@pytest.mark.parametrize("name", [*EXPENSIVE, *LARGE, "far more than it is given"])
def test_a_template_that_takes_long_or_much_memory_is_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = ("MAX_TEMPLATE_S", 0.1) if name in EXPENSIVE else ("MAX_BYTES_AT_ONCE", 256 * 1024**2)
    monkeypatch.setattr(limits, *limit)
    costly = (EXPENSIVE | LARGE).get(name, "{{ 'x' * 1000000 }}")
    tokenizer = make_tokenizer("{% if messages | length > 2 %}" + costly + "{% endif %}" + CHATML)

    started = time.monotonic()
    error = refusal(tokenizer, Chat(conversation("a", "b", "c", "d")["messages"]))

    is_long = "takes more than 0.1 s of processor time" in error.what
    assert (is_long, "bytes into 1,000," in error.what) == (name in EXPENSIVE, name not in EXPENSIVE | LARGE)
    assert error.where == "here:7"
    assert time.monotonic() - started < 20


def test_many_short_turns_are_no_swollen_conversation() -> None:
    tokenizer = make_tokenizer()
    chat = Chat(conversation(*"ab" * 5_000)["messages"])

    [[((ids, _), *_)]] = masks.encode_chats(templates.choose_template(tokenizer), [("here:1", chat)])

    assert len(ids) > 30_000


def test_turns_without_number_do_not_hold_up_a_template_without_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_TEMPLATE_S", 0.1)
    plain = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")

    error = refusal(make_tokenizer(plain), Chat(conversation(*"ab" * 10_000)["messages"]))

    assert "takes more than 0.1 s of processor time" in error.what


@pytest.mark.parametrize(
    "rules",
    [
        normalizers.Replace("a", "b" * 1_000),
        normalizers.Sequence([normalizers.Replace(Regex("."), "bbbb")] * 5),
        normalizers.Prepend("a" * 1_000),
    ],
    ids=["a long one", "a chain", "at the start"],
)
def test_a_tokenizer_that_swells_texts_is_refused(rules: Any) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = rules

    error = refusal(tokenizer, Chat(conversation("a", "b")["messages"]))

    assert "the tokenizer turns one byte into up to " in error.what
    assert error.where == "the tokenizer"


def test_a_text_that_swells_when_it_is_normalized_is_told_with_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_SAMPLE_BYTES", 100_000)
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFKC()
    swelling = "\ufdfa" * 20_000  # becomes eighteen characters

    error = refusal(tokenizer, Chat(conversation("a", swelling)["messages"]))

    assert "as the tokenizer normalizes it" in error.what
    assert error.where == "here:7"


def test_what_is_inside_the_limits_leaves_no_limit_behind() -> None:
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGVTALRM)

    tokenizer = make_tokenizer()
    masks.encode_chats(templates.choose_template(tokenizer), [("here:1", Chat(conversation("a", "b")["messages"]))])

    assert (resource.getrlimit(resource.RLIMIT_DATA), signal.getsignal(signal.SIGVTALRM)) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def _same_text(path: Path, count: int, length: int, **settings: Any) -> Path:
    outputs = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["ab" * (length // 2)]))
    table = pa.table({"instruction": ["Why?"] * count, "output": outputs})
    if path.suffix == ".parquet":
        pq.write_table(table, path, compression="zstd", **settings)
    else:
        with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
            writer.write_table(table)
    return path


def test_parquet_that_unfolds_is_refused_with_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES_AT_ONCE", 100 * 1024**2)
    path = _same_text(tmp_path / "a.parquet", 100, 64 * 1024**2, store_schema=False)
    assert path.stat().st_size < 20_000

    with refused(DataError, f"{path.name}, row 1", "100 MiB"):
        next(readers.rows_of_file(path))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_long_rows_of_columns_are_read_one_by_one(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BYTES_AT_ONCE", 100 * 1024**2)
    path = _same_text(tmp_path / name, 300, 2 * 1024**2)

    assert [len(row["output"]) for _, row in readers.rows_of_file(path)] == [2 * 1024**2] * 300


def test_a_csv_row_of_many_long_lines_is_refused_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.data.readers.text_files.MAX_ROW_BYTES", 1_000)
    path = tmp_path / "a.csv"
    path.write_text("a,b\n1,2\n" + '"xx\nyy",' * 1_000 + "1\n", encoding="utf-8")

    with refused(DataError, f"{path}:3"):
        list(readers.rows_of_file(path))
