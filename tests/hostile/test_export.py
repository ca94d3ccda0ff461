"""What a killed export leaves is removed by the next one; what a live one holds stays."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import environment, ok, quick, train, wait_until
from tuner.results.export import drafted

SLOW = """
import time
from tuner.cli import main
from tuner.results import export, tensors

def write(*arguments):
    written = tensors.write(*arguments)
    print("written", flush=True)
    time.sleep(600)
    return written

export.write = write
main()
"""


def test_the_next_export_removes_what_a_killed_one_left_and_nothing_that_a_live_one_holds(tmp_path: Path) -> None:
    with drafted(tmp_path / "out") as live, drafted(tmp_path / "other") as other:
        live.mkdir()
        other.mkdir()
        host = live.parent.name.rpartition(".")[0]
        left = tmp_path / f"{host}.killed00"
        (left / "weights").mkdir(parents=True)

        with drafted(tmp_path / "out") as again:
            again.mkdir()
            assert not left.exists()
            assert live.exists() and other.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "other"}


@pytest.mark.e2e
@pytest.mark.long
def test_a_real_export_that_is_killed_leaves_a_folder_that_the_next_one_removes(tmp_path: Path) -> None:
    run = ok(train(quick(tmp_path, "full"), tmp_path / "run", "--set", "max_steps=1", ranks=1))
    words = ["export", str(run.path), str(tmp_path / "out")]
    export = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words], env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert export.stdout is not None
    wait_until(lambda: "written" in export.stdout.readline())
    export.send_signal(signal.SIGKILL)
    export.wait()
    export.stdout.close()
    [left] = tmp_path.glob(".out.exporting-*")
    assert sum(file.stat().st_size for file in left.rglob("*.safetensors")) > 1 << 20

    subprocess.run([sys.executable, "-m", "tuner", *words], env=environment(), check=True, capture_output=True)

    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
    assert (tmp_path / "out" / "model.safetensors").is_file()
