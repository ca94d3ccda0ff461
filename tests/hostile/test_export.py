"""What a killed export leaves is removed by the next one; what a live one holds stays."""

from __future__ import annotations

from pathlib import Path

from tuner.results.export import unfinished


def test_the_next_export_removes_what_a_killed_one_left_and_nothing_that_a_live_one_holds(tmp_path: Path) -> None:
    left, other = tmp_path / ".out.exporting-killed00", tmp_path / ".other.exporting-killed00"
    left.mkdir()
    other.mkdir()

    with unfinished(tmp_path / "out") as live, unfinished(tmp_path / "out"):
        assert not left.exists()
        assert other.exists()
        assert Path(live).exists()
