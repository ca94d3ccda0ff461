"""What the suite's measurements share: turns, medians, ratios, and a table that says where it was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import tools
from bench.save import saves
from bench.steps import cells
from bench.table import Spent, Table, Unmeasured, failed, in_turns, median, spent


def test_peers_take_turns_and_a_peer_without_figures_is_not_tried_again() -> None:
    asked: list[str] = []

    def measure(name: str) -> list[Spent]:
        asked.append(name)
        if name == "lame":
            raise Unmeasured("not installed")
        return [Spent(1.0, 2.0)]

    found = in_turns(["loop", "lame", "tuner"], 2, measure)

    assert asked == ["loop", "lame", "tuner", "loop", "tuner"]
    assert found == {"loop": [Spent(1.0, 2.0)] * 2, "lame": "not installed", "tuner": [Spent(1.0, 2.0)] * 2}


def test_a_row_has_multiples_of_the_floor_and_the_reason_of_who_has_none() -> None:
    found = {"loop": [Spent(2.0, 1.0)], "trl": "not installed", "tuner": [Spent(3.0, 1.0), Spent(9.0, 9.0)]}

    row = cells(found)

    assert row["TRL `trl sft`, s"] == "not installed"
    assert row["tuner / minimal loop"] == "3.00 (5.00)"


def test_a_median_is_of_the_wall_and_of_the_processor_each() -> None:
    assert median([Spent(1, 9), Spent(2, 8), Spent(30, 1)]) == Spent(2, 8)


def test_a_table_is_markdown_and_json_and_names_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("steps", "What is equal.", [{"who": "a|b", "s": Spent(1.5, 1.0)}, {"who": "c", "MB": 12.5}])

    table.show(tmp_path / "tables" / "steps.json")

    printed = capsys.readouterr().out
    assert "| who | s | MB |" in printed and "| a\\|b | 1.500 (1.000) |  |" in printed and "| c |  | 12.5 |" in printed
    told = json.loads((tmp_path / "tables" / "steps.json").read_text())
    assert told["rows"][0] == {"who": "a|b", "s": {"wall": 1.5, "cpu": 1.0}}
    assert told["machine"]["cores"] and told["versions"]["torch"] in printed


def test_a_save_costs_what_its_steps_take_beyond_undisturbed_ones() -> None:
    plain = Spent(1.0, 1.0)
    found = [Spent(4.0, 2.0), Spent(1.5, 1.0), plain, plain] * 2 + [Spent(4.0, 2.0)]

    assert saves(found) == [Spent(3.5, 1.0)] * 2


def test_a_peer_that_no_script_has_installed_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "PEERS", tmp_path)

    with pytest.raises(Unmeasured, match="not installed"):
        tools.environment("llamafactory")


def test_why_a_tool_failed_is_its_own_last_error() -> None:
    said = "ValueError: no such model\nsubprocess.CalledProcessError: Command 'torchrun' died\nChildFailedError: \n"

    assert str(failed("trl", said)) == "failed: ValueError: no such model"


def test_what_a_command_took_counts_what_it_started_and_a_failing_one_is_no_figure() -> None:
    work = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'sum(range(3_000_000))'])"

    took = spent([sys.executable, "-c", work])

    assert took.cpu > 0 and took.wall > 0
    with pytest.raises(Unmeasured, match="failed: ValueError: no"):
        spent([sys.executable, "-c", "raise ValueError('no')"])
