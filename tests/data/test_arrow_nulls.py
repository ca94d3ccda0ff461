"""A struct of Arrow has the keys of all rows; a row keeps its own alone, however its file or object came about."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuner.data import sources
from tuner.data.sources import file_of_rows, find


def row(tool: str, argument: str, value: object, **turn: object) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": tool, "arguments": {argument: value}}}
    properties = {argument: {"type": "string", "enum": ["a"]}} if tool == "run" else {argument: {"type": "integer"}}
    return {
        "messages": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call], **turn},
        ],
        "tools": [{"name": tool, "parameters": {"type": "object", "properties": properties}}],
        "score": None if tool == "run" else {"x": 1},
    }


ROWS = [row("run", "code", "1"), row("add", "a", 1, reasoning_content="A sum."), row("add", "b", 2)]
Table = Callable[[Path], Any]


def parquet(folder: Path) -> Path:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return folder / "rows.parquet"


def large_lists(folder: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    lists = [(field.name, pa.large_list(field.type.value_type) if pa.types.is_list(field.type) else field.type)
             for field in table.schema]  # fmt: skip
    pq.write_table(table.cast(pa.schema(lists)), folder / "rows.parquet")
    return folder / "rows.parquet"


def arrow(folder: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as stream, pa.ipc.new_file(stream, table.schema) as writer:
        writer.write_table(table)
    return folder / "rows.arrow"


def saved(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def dataset(folder: Path) -> Path | None:
    return file_of_rows(datasets.Dataset.from_list(ROWS), "data", folder)


def frame(folder: Path) -> Path | None:
    return file_of_rows(pd.read_parquet(parquet(folder)), "data", folder)


def arrow_frame(folder: Path) -> Path | None:
    return file_of_rows(pd.read_parquet(parquet(folder), dtype_backend="pyarrow"), "data", folder)


@pytest.mark.parametrize("write", [parquet, large_lists, arrow, saved, dataset, frame, arrow_frame])
def test_a_row_of_a_table_has_its_own_keys_alone(write: Table, tmp_path: Path) -> None:
    assert [read for _, read in find(str(write(tmp_path))).read()] == ROWS


def test_rows_of_the_hub_have_their_own_keys_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded = datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **settings: loaded)
    monkeypatch.chdir(tmp_path)

    assert [read for _, read in sources.find("owner/rows").read()] == ROWS


def test_a_null_that_a_row_was_written_with_stays(tmp_path: Path) -> None:
    rows = [{"text": "a\u2028b", "tools": [{"name": "a", "default": None}]}, {"text": "b", "tools": [{"name": "b"}]}]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in rows))
    texts = [{**line, "tools": json.dumps(line["tools"])} for line in rows]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "texts.parquet")
    pairs = pa.array([[("default", None)]], type=pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"arguments": pairs}), tmp_path / "maps.parquet")

    for source in (lines, file_of_rows(rows, "data", tmp_path), file_of_rows(pd.DataFrame(rows), "data", tmp_path)):
        assert [line for _, line in find(str(source)).read()] == rows
    assert [line for _, line in find(str(tmp_path / "texts.parquet")).read()] == texts
    assert [line for _, line in find(str(tmp_path / "maps.parquet")).read()] == [{"arguments": {"default": None}}]
