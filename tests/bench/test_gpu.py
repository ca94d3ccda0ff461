"""bench/gpu.py goes on where it was left, and works out a GPU's use."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from bench import gpu
from bench.gpu import Piece, flops_per_token, tables
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
    monkeypatch.setattr(gpu, "pieces", lambda folder: [piece("short", 1), piece("long", 1000)])

    codes = []
    for seconds in ("10", "10", "2000"):
        monkeypatch.setattr("sys.argv", ["gpu", "--out", str(tmp_path), "--for", seconds])
        codes.append(gpu.main())

    assert (ran, codes) == (["short", "long"], [75, 75, 0])


def test_a_piece_that_takes_too_long_is_written_down_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sleeps() -> dict[str, object]:
        time.sleep(30)
        return {}

    monkeypatch.setattr(gpu, "ON_CPU", False)

    gpu.run(Piece("slow", 1, sleeps), tmp_path)

    assert json.loads((tmp_path / "slow.json").read_text())["failed"] == "not done after 1 s"


def test_tables_have_the_use_of_the_gpu_and_multiples_of_the_loop(tmp_path: Path) -> None:
    one = {"level": "none", "flops_per_token": 6e9, "peak_bytes": 30e9, "planned_bytes": 31e9}
    found = {
        "ceiling": {"flops_s": 600e12},
        "speed-1b-full-loop": one | {"tokens_s_gpu": 40_000.0, "planned_bytes": None},
        "speed-1b-full-tuner": one | {"tokens_s_gpu": 50_000.0},
        "speed-1b-full-trl": {"failed": "OutOfMemoryError"},
    }
    for name, what in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(what))

    text = tables(tmp_path)

    assert "| 1b full | tuner | none | 50,000 | 50.0% | 1.25 | 30.0 | 31.0 |" in text
    assert "| 1b full | TRL `trl sft` |  | OutOfMemoryError |  |" in text


def test_the_scripts_parse() -> None:
    for script in ("gpu.sh", "peers.sh"):
        subprocess.run(["bash", "-n", str(Path(gpu.__file__).with_name(script))], check=True)
