"""What DeepSpeed measures by a user's JSON: in the run directory and in the report, not on the terminal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.runs import ok, quick, train

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MEASURED = {
    "zero_optimization": {"stage": 2},
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "flops_profiler": {"enabled": True, "profile_step": 2},
    "comms_logger": {"enabled": True, "verbose": True},
    "csv_monitor": {"enabled": True},
}


def test_what_deepspeed_measures_is_kept_and_shown_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "measured.json").write_text(json.dumps(MEASURED))

    run = ok(train(quick(tmp_path, "full"), tmp_path / "run", "--deepspeed", str(tmp_path / "measured.json"), ranks=2))

    folder = run.path / "deepspeed"
    times = [json.loads(line) for line in (folder / "wall_clock.jsonl").read_text().splitlines()]
    assert all(value >= 0 for line in times for value in line.values()) and any("bwd" in line for line in times)
    sent = json.loads((folder / "communication.jsonl").read_text().splitlines()[-1])
    assert any(facts["count"] > 0 for name, sizes in sent.items() if name != "step" for facts in sizes.values())
    assert "fwd flops per GPU" in (folder / "flops_profiler.txt").read_text()
    memory = [json.loads(line) for line in (folder / "memory.jsonl").read_text().splitlines()]
    assert {"Engine before forward", "Engine after step"} <= {line["at"] for line in memory}
    assert "comm op" in (folder / "deepspeed.log").read_text()
    assert list((folder / "csv").rglob("*.csv"))
    for noise in ("time (ms)", "Flops Profiler", "comm op", "MaxMA", "MA "):
        assert noise not in run.text
    report = (run.path / "report.html").read_text()
    assert "Measured by DeepSpeed" in report and "fwd flops per GPU" in report
    assert not list(tmp_path.glob("DeepSpeedJobName*")) and not list(Path.cwd().glob("DeepSpeedJobName*"))
