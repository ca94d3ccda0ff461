"""The table of `python -m bench learn`: which cells are run, what their lines say, and one cell from end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench import curves, learn

ROOT = Path(__file__).parents[2]
CELL = learn.Cell("docs-135", "lora", "own", "trl", epochs=3)
RECORD = {
    "held_out": "abc",
    "tokens": 1000,
    "steps": 50,
    "max_steps": 100,
    "before": {"loss": 4.0},
    "after": {"loss": 3.0},
    "curve": {"25": {"loss": 3.5}},
    "wall_s": 90.4,
    "cpu_s": 120.6,
    "training_s": 30.0,
    "peak_bytes": 2_340_000_000,
    "beside": "nothing",
}


def record(cell: learn.Cell = CELL, **more: Any) -> dict[str, Any]:
    return {"cell": asdict(cell) | {"changes": list(cell.changes)}, **RECORD, **more}


def test_a_cells_last_line_counts(tmp_path: Path) -> None:
    results = learn.Results(tmp_path / "results.jsonl")
    results.add(CELL, {"failed": "no memory"})
    results.add(CELL, RECORD)

    (read,) = learn.Results(tmp_path / "results.jsonl").records.items()

    assert read == (CELL, record())


def test_the_untrained_model_is_measured_once_for_the_same_rows(tmp_path: Path) -> None:
    results = learn.Results(tmp_path / "results.jsonl")
    results.add(CELL, RECORD)

    assert results.before("abc") == {"loss": 4.0}
    assert results.before("other rows") is None


def test_a_row_says_how_much_of_the_run_was_trained() -> None:
    row = learn.row(record())

    assert row["steps"] == "50 of 100"
    assert row["held-out loss"] == "4.000 → 3.000"
    assert row["the whole command, s"] == "90 (121)"
    assert row["training, s / 1,000 tokens"] == "20.00", "30 s for half of 3 epochs of 1,000 tokens"
    assert row["memory, GB"] == "2.3"


def test_a_curve_goes_from_before_the_first_step_to_after_the_last() -> None:
    assert curves.points(record()) == [(0, 0.0, 4.0), (25, 750.0, 3.5), (50, 1500.0, 3.0)]


@pytest.mark.e2e
@pytest.mark.long
def test_a_cell_is_trained_and_measured() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "bench.learn", "--tiny", "--tool", "tuner", "--json", os.devnull]

    done = subprocess.run(argv, env=env, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("| docs-135 | lora | own | tuner |")]
    steps, loss = line.split(" | ")[5:7]
    before, after = map(float, loss.split(" → "))
    assert int(steps) > 10 and after < before - 0.1


def test_without_the_model_the_message_names_make_real(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "bench.learn", "--real", str(tmp_path), "--results", str(tmp_path / "results.jsonl")]

    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)

    assert done.returncode == 1 and "`make real` prepares it" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "results.jsonl").exists()
