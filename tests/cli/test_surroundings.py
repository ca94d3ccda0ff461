"""Where a command finds itself: a folder that was deleted, a terminal of ASCII."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

RUN = "from tuner.cli import main; main()"


@pytest.mark.parametrize("command", ["runs", "train tiny_full_sample_e1 --dry-run", "report x", "export x y", "doctor"])
def test_a_working_directory_that_was_deleted_is_one_message(command: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    script = f"import os; os.rmdir({str(gone)!r}); {RUN}"

    argv = [sys.executable, "-P", "-c", script, *command.split()]
    done = subprocess.run(argv, cwd=gone, capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert done.stderr.startswith("error[bad-usage]: the working directory cannot be used")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["list", "train tiny_full_sample_e1 --dry-run"])
def test_streams_that_are_closed_lead_nowhere(command: str, closed: str, tmp_path: Path) -> None:
    numbers = "print(*[os.path.realpath(f'/proc/self/fd/{number}') for number in range(3)], file=open('numbers', 'w'))"
    script = f"import os; from tuner.cli import main\ntry: main()\nfinally: {numbers}"

    shell = ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-P", "-c", script, *command.split()]
    done = subprocess.run(shell, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert os.devnull in (tmp_path / "numbers").read_text().split()[1:]


def test_what_ascii_lacks_is_written_as_codes(tmp_path: Path) -> None:
    # click writes its own text as UTF-8 whatever the stream says; rich, and a library's print, do not.
    script = "from tuner import cli; cli.tuner = lambda **_: print('é'); cli.main()"

    argv = [sys.executable, "-P", "-c", script, "list"]
    environ = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, timeout=60)

    assert done.returncode == 0, done.stderr
    assert done.stdout == b"\\xe9\n"


def test_a_histogram_is_drawn_in_ascii_where_there_is_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from tuner.cli.data import print_split
    from tuner.data import prepare

    monkeypatch.setattr(prepare, "describe", lambda *_: "train")
    view = SimpleNamespace(prepared=SimpleNamespace(bad_rows=()), lengths={"samples": np.array([1] * 900 + [100])})
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        print_split(Console(file=stream, soft_wrap=True), "train", view)  # type: ignore[arg-type]

    text = (tmp_path / "out").read_text()
    assert "#" * 40 in text
    assert "  . 1" in text
