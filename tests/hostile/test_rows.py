"""Rows from outside: each kind of damage is told with its file and line, or left out and listed, up to `bad_rows`."""

from __future__ import annotations

import datetime
import gzip
import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.canary import Canary
from tests.data.conftest import Settings, make_tokenizer
from tests.data.conftest import cache as cache
from tests.refused import refused
from tuner.data import readers, sources
from tuner.data.prepare import describe, prepare
from tuner.data.prepared import Prepared
from tuner.data.readers.text_files import MAX_ROW_BYTES
from tuner.data.text_encoder import TextEncoder
from tuner.errors import DataError
from tuner.recipes.schema import MixtureEntry

GOOD = '{"instruction": "Why?", "output": "Because."}'
PAIR = '{"prompt": "What is red?", "chosen": "A colour.", "rejected": "A dog."}'
DEEP = "[" * 50_000 + "]" * 50_000
CALL = '{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": %s}}]}'
ASKED = '{"messages": [{"role": "user", "content": "a"}, %s]}'

BAD: dict[str, str | bytes] = {
    "torn": '{"instruction": "Why?", "output": "Beca',
    "torn behind a key": '{"instruction": ',
    "a word": '{"instruction": nope}',
    "null": "null",
    "a number": "7",
    "a text": '"Why?"',
    "a list": "[]",
    "an empty object": "{}",
    "a null value": '{"instruction": "Why?", "output": null}',
    "a number as text": '{"instruction": "Why?", "output": 7}',
    "NaN as text": '{"instruction": "Why?", "output": NaN}',
    "not UTF-8": b'{"instruction": "Why?", "output": "\xff"}',
    "UTF-16": '{"instruction": "Why?", "output": "b"}'.encode("utf-16-le").replace(b"\n", b""),
    "a NUL byte": '{"instruction": "Why?", \0"output": "b"}',
    "half a surrogate pair": '{"instruction": "Why?", "output": "\\ud83d"}',
    "a key twice": '{"instruction": "Why?", "output": "a", "output": "b"}',
    "two rows": f"{GOOD} {GOOD}",
    "nested too deeply": '{"instruction": "Why?", "output": ' + DEEP + "}",
    "an unused column nested 900 deep": GOOD.removesuffix("}") + ', "more": ' + "[" * 900 + "]" * 900 + "}",
    "an unused column nested 101 deep": GOOD.removesuffix("}") + ', "a": ' + '{"a":' * 101 + "1" + "}" * 102,
    "a number too long": '{"instruction": "Why?", "output": ' + "9" * 5_000 + "}",
    "control characters": '{"instruction": "Why?", "\x1b[2J": "b"}',
}
BAD_TURNS: dict[str, str] = {
    "turns nested too deeply in a text": f'{{"messages": "{DEEP}"}}',
    "tools nested 900 deep in a text": ASKED.replace("]}", f'], "tools": "{"[" * 900 + "]" * 900}"}}') % CALL % '"{}"',
    "arguments nested 900 deep in a text": ASKED % (CALL % f'"{"[" * 900 + "]" * 900}"'),
    "a part nested 900 deep": ASKED.replace('"a"', "[" * 900 + "]" * 900) % (CALL % "{}"),
    "tools nested too deeply in a text": ASKED.replace("]}", f'], "tools": "{DEEP}"}}') % CALL % '"{}"',
    "half a surrogate pair in a call": ASKED % (CALL % '{"a": "\\ud83d"}'),
    "half a surrogate pair in the tools": (ASKED % (CALL % "{}")).removesuffix("}")
    + ', "tools": [{"name": "\\ud83d"}]}',
    "a part whose type is an object": ASKED.replace('"a"', '[{"type": {}, "text": "a"}]') % (CALL % "{}"),
    "a part whose type is a list": ASKED.replace('"a"', '[{"type": ["text"], "text": "a"}]') % (CALL % "{}"),
    "turns that are numbers": '{"messages": [1, 2]}',
    "a role that is a list": '{"messages": [{"role": [], "content": "a"}]}',
}
# A template that shows tools and calls, as those of models that have tools do.
TEMPLATE = (
    "{{ tools | tojson if tools else '' }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}<|im_end|>{% endgeneration %}\n"
    "{% else %}{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def prepared(path: Path, objective: str = "sft", **settings: Any) -> Prepared:
    return prepare(Settings(str(path), **settings), TextEncoder(make_tokenizer(TEMPLATE)), objective=objective)  # type: ignore[arg-type]


def written(folder: Path, *lines: str | bytes, name: str = "rows.jsonl") -> Path:
    path = folder / name
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


@pytest.mark.parametrize("name", [*BAD, *BAD_TURNS])
def test_a_bad_row_is_told_with_its_line_and_can_be_left_out(name: str, tmp_path: Path) -> None:
    good = GOOD if name in BAD else ASKED % '{"role": "assistant", "content": "b"}'
    path = written(tmp_path, good, BAD.get(name) or BAD_TURNS[name], good)
    format = "alpaca" if name in BAD else "messages"

    with refused(DataError, f"{path}:2") as caught:
        prepared(path, format=format)
    left = prepared(path, format=format, bad_rows=1)

    assert len(str(caught.value)) < 1_000
    assert left.counts.kept == 2
    (bad,) = left.changed()
    assert (bad["where"], bad["what"], bad["reason"]) == (f"{path}:2", "bad", caught.value.what)
    assert "1 bad rows left out" in describe(left)


def test_one_bad_row_more_than_may_be_left_out_is_the_error(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, "null", "[]", '{"a": 1}', GOOD)

    assert prepared(path, format="alpaca", bad_rows=3).counts.bad == 3
    with pytest.raises(DataError, match=r"more than dataset\.bad_rows = 2") as caught:
        prepared(path, format="alpaca", bad_rows=2)
    assert caught.value.where == f"{path}:4"
    with pytest.raises(DataError, match="the row is null"):
        prepared(path, format="alpaca")


def test_pairs_leave_bad_rows_out_too(tmp_path: Path) -> None:
    path = written(tmp_path, PAIR, '{"prompt": "a", "chosen": 1, "rejected": "b"}', "torn{", PAIR)

    assert prepared(path, "dpo", format="preference", bad_rows=2).counts.kept == 2


def test_a_mixture_counts_a_row_once_however_often_it_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, GOOD, "null")
    part = MixtureEntry(path=str(path), format="alpaca")
    settings = Settings(None, mixture=(part, part), bad_rows=1)

    found = prepare(settings, TextEncoder(make_tokenizer()), objective="sft")  # type: ignore[arg-type]

    assert (found.counts.bad, found.counts.kept) == (1, 2)


def test_where_every_row_is_bad_there_is_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        prepared(written(tmp_path, "null", "[]"), format="alpaca", bad_rows=5)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.csv", "rows.txt"])
def test_a_row_without_end_is_refused_before_it_fills_the_memory(name: str, tmp_path: Path) -> None:
    start = {"rows.json": f'[{GOOD},\n{{"a": "', "rows.csv": 'a,b\n"'}.get(name, f"{GOOD}\n")
    content = start.encode() + b"x" * 100_000_000
    path = tmp_path / name
    path.write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    del content

    tracemalloc.start()
    with pytest.raises(DataError, match=r"longer than 32 MiB|larger than field limit") as caught:
        list(readers.rows_of_file(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert caught.value.where == f"{path}:2"
    assert peak < 12 * MAX_ROW_BYTES


def test_the_rows_after_one_without_end_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.data.readers.text_files.MAX_ROW_BYTES", 100)
    monkeypatch.setattr("tuner.data.readers.text_files.BYTES_AT_ONCE", 7)
    path = written(tmp_path, GOOD, "x" * 101, GOOD, "x" * 300)
    broken: list[DataError] = []

    found = list(readers.rows_of_file(path, broken.append))

    assert [place for place, _ in found] == [f"{path}:1", f"{path}:3"]
    assert [error.where for error in broken] == [f"{path}:2", f"{path}:4"]


def _arrow(path: Path, table: pa.Table) -> Path:
    with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return path


def _parquet(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize("write", [_arrow, _parquet])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([b"good", b"\xff\xfe"]).cast(pa.binary()).view(pa.string()),
        pa.array([0, 2**50], pa.timestamp("s")),
        pa.array([0, 10**8], pa.int32()).cast(pa.date32()),
    ],
    ids=["not UTF-8", "a moment that Python has not", "a day that Python has not"],
)
def test_columns_that_are_not_what_they_say_are_refused(
    write: Callable[[Path, pa.Table], Path], column: pa.Array, tmp_path: Path
) -> None:
    path = write(tmp_path / ("a.arrow" if write is _arrow else "a.parquet"), pa.table({"text": column}))

    with pytest.raises(DataError, match="cannot read the"):
        list(sources.find(str(path)).read())


def test_offsets_that_point_outside_are_refused(tmp_path: Path) -> None:
    offsets, values = pa.array([0, 10**6, 2], pa.int32()), pa.array([1, 2], pa.int32())
    column = pa.Array.from_buffers(pa.list_(pa.int32()), 2, [None, offsets.buffers()[1]], children=[values])
    path = tmp_path / "a.arrow"
    batch = pa.RecordBatch.from_arrays([column], ["text"])
    with pa.OSFile(str(path), "wb") as stream, pa.ipc.new_stream(stream, batch.schema) as writer:
        writer.write_batch(batch)

    with pytest.raises(DataError, match="cannot read the Arrow file"):
        list(readers.rows_of_file(path))


def test_a_type_that_comes_as_a_pickle_is_not_unpickled(tmp_path: Path) -> None:
    kind = {b"ARROW:extension:name": b"arrow.py_extension_type"}
    kind[b"ARROW:extension:metadata"] = pickle.dumps(Canary(tmp_path / "canary"))
    schema = pa.schema([pa.field("text", pa.string(), metadata=kind)])
    path = _arrow(tmp_path / "a.arrow", pa.table([["a"]], schema=schema))

    list(readers.rows_of_file(path))

    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["rows.pkl", "rows.py", "rows.npy", "rows", "rows.gz", "rows.pkl.gz", "rows.xlsx"])
def test_a_file_that_could_hold_code_is_no_data(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Canary(tmp_path / "canary")))

    with pytest.raises(DataError, match="has an unsupported file type"):
        sources.find(str(path))
    assert not (tmp_path / "canary").exists()


def test_the_script_in_a_folder_of_data_is_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("data.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    written(folder, GOOD, name="train.jsonl")

    assert [row for _, row in sources.find(str(folder)).read()] == [json.loads(GOOD)]
    assert not (tmp_path / "canary").exists()


def test_a_calendar_without_surprises_is_read(tmp_path: Path) -> None:
    """The check on what a file says of itself refuses no good file."""
    table = pa.table({"day": [datetime.date(2026, 1, 2)], "text": ["é"], "nested": [[{"a": None}]]})

    for path in (_arrow(tmp_path / "a.arrow", table), _parquet(tmp_path / "a.parquet", table)):
        assert [row["text"] for _, row in readers.rows_of_file(path)] == ["é"]
