"""bench/gpu.py goes on where it was left, and works out a GPU's use."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import psutil
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
    out, failures = tmp_path / "gpu.jsonl", tmp_path / "failures"

    def fails() -> dict[str, object]:
        failures.open("a").write(".")
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(gpu, "ON_CPU", True)
    monkeypatch.setattr(gpu, "pieces", lambda: [Piece("fails", 1, fails), Piece("long", 1000, dict)])

    codes = []
    for words in (["--for", "10"], ["--for", "10"], ["--for", "2000"], ["--only", "fails"]):
        monkeypatch.setattr("sys.argv", ["gpu", "--out", str(out), *words])
        codes.append(gpu.main())

    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["piece"] for line in lines] == ["fails", "long", "fails"]
    assert (codes, failures.read_text()) == ([75, 75, 0, 0], "..")
    assert "illegal memory access" in lines[0]["failed"] and "failed" not in lines[1]


def test_a_piece_that_takes_too_long_is_written_down_as_such_and_what_it_started_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"

    def waits() -> dict[str, object]:
        process = subprocess.Popen(["sleep", "60"], start_new_session=True)
        started.write_text(str(process.pid))
        return {"code": process.wait()}

    monkeypatch.setattr(gpu, "SLOWER", 1)

    gpu.run(Piece("slow", 1, waits), tmp_path / "gpu.jsonl")
    gpu.run(Piece("gone", 1, lambda: os._exit(3)), tmp_path / "gpu.jsonl")

    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["failed"] for line in lines] == ["not done after 1 s", "its process ended with exit code 3"]
    assert all(line["cards"] and line["commit"] and line["versions"]["torch"] for line in lines)
    assert not psutil.pid_exists(int(started.read_text()))


def test_variants_behind_one_that_ends_its_process_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = iter([(["a", "b"], 1), ([], -6), (["c"], 0)])
    begins = []

    def runs(command: list[str], stdout: IO[str], **_: object) -> SimpleNamespace:
        begins.append(command[-1])
        names, code = next(processes)
        stdout.writelines(
            json.dumps({"name": name} | ({"failed": "CUDA"} if name == "b" else {})) + "\n" for name in names
        )
        return SimpleNamespace(returncode=code)

    monkeypatch.setattr(subprocess, "run", runs)

    found = gpu.kernels("1b", "full", 100)

    assert begins == ["0", "2", "3"]
    assert [(variant["name"], variant.get("failed")) for variant in found["variants"]] == [
        ("a", None), ("b", "CUDA"), ("number 2", "exit code -6"), ("c", None),
    ]  # fmt: skip
    assert "failed" not in found


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
