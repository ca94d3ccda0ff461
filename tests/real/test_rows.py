"""What is held out stands in no other file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real import files
from tests.real.__main__ import MISSING

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_without_a_registry_each_file_has_its_rows_and_no_row_stands_twice(tmp_path: Path) -> None:
    # In a fresh process: pytest replaces functions of the standard library.
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1"}
    done = subprocess.run([sys.executable, "-m", "tests.real", tmp_path], env=env, capture_output=True, text=True)

    assert done.returncode == MISSING, done.stderr
    assert "Traceback" not in done.stderr
    rows = {
        name: [file.read_text("utf-8").splitlines() for file in files.paths(tmp_path, name)] for name in files.SIZES
    }
    assert {name: tuple(map(len, of_file)) for name, of_file in rows.items()} == files.SIZES
    every = [row for of_file in rows.values() for part in of_file for row in part]
    assert len(set(every)) == len(every)
