"""bench/gpu.py goes on where it was left, and works out a GPU's use."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu import Piece, flops_per_token, tables
from bench.tools import Tick
from tuner.recipes.loading import load


@pytest.mark.parametrize(("method", "a_parameter"), [("full", 6), ("lora", 4)])
def test_a_token_takes_six_operations_a_parameter_and_four_where_it_is_frozen(method: str, a_parameter: int) -> None:
    found = flops_per_token(load(f"llama3_8b_{method}_custom_e1").config)

    assert found == pytest.approx(a_parameter * 8.03e9, rel=0.15)  # an embedding multiplies nothing, adapters add some


def test_what_is_found_is_not_run_again_and_what_does_not_fit_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def piece(name: str, allowed_s: int) -> Piece:
        return Piece(name, allowed_s, lambda: {"ran": ran.append(name)})

    monkeypatch.setattr(gpu, "ON_CPU", True)
    monkeypatch.setattr(gpu, "pieces", lambda: [piece("short", 1), piece("long", 1000)])

    codes = []
    for seconds in ("10", "10", "2000"):
        monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path / "gpu.jsonl"), "--for", seconds])
        codes.append(gpu.main())

    assert (ran, codes) == (["short", "long"], [75, 75, 0])


def test_a_piece_that_takes_too_long_is_written_down_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleeps() -> dict[str, object]:
        time.sleep(30)
        return {}

    monkeypatch.setattr(gpu, "ON_CPU", False)

    gpu.run(Piece("slow", 1, sleeps), tmp_path / "gpu.jsonl")

    line = json.loads((tmp_path / "gpu.jsonl").read_text())
    assert (line["piece"], line["failed"]) == ("slow", "not done after 1 s")
    assert line["cards"] and line["commit"] and line["versions"]["torch"]


def test_tables_have_the_use_of_the_gpu_multiples_of_the_loop_and_say_what_was_not_measured() -> None:
    shared = {"level": "none", "flops_per_token": 6e9, "peak_bytes": 30e9, "planned_bytes": 31e9, "idle": 0.04}
    found = {
        "ceiling": {"flops_s": 600e12, "machine": "a machine"},
        "speed-1b-full-loop": shared | {"tokens_s_gpu": 40_000.0, "planned_bytes": None},
        "speed-1b-full-tuner": shared | {"tokens_s_gpu": 50_000.0},
        "speed-1b-full-trl": {"failed": "OutOfMemoryError"},
        "users-1b-full-tuner": {"tokens_s_gpu": 12_000.0},
        "kernels-1b-full": {"variants": [{"name": "chunks", "rows": 4, "ms": 1.5}], "failed": "exit code 1"},
    }

    text = tables(found)

    assert "| 1b full | tuner | none | 50,000 | 50.0% | 1.25 | 4% | 30.0 | 31.0 |" in text
    assert "| 1b full | TRL `trl sft` |  | OutOfMemoryError |  |" in text
    assert "| 1b full | 12,000 tokens/s | not measured | not measured |" in text
    assert "| chunks | 4 | 1.5 |" in text and "Kernels, 8b lora:\n\nnot measured" in text


def test_a_result_of_another_commit_is_measured_again(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    gpu.run(Piece("one", 5, dict), out)
    assert gpu.results(out).keys() == {"one"}

    out.write_text(out.read_text().replace(gpu.surroundings()["commit"], "another"))

    assert not gpu.results(out)


def test_the_speed_of_a_run_takes_the_tokens_of_the_steps_that_are_timed() -> None:
    found = [Tick(wall=10.0 * step, cpu=0, gpu_peak_bytes=0, num_tokens=500.0 * (step - 1)) for step in range(1, 9)]

    assert gpu.rate(found) == pytest.approx(50)


def test_the_scripts_parse() -> None:
    for script in ("gpu.sh", "peers.sh"):
        subprocess.run(["bash", "-n", str(Path(gpu.__file__).with_name(script))], check=True)
