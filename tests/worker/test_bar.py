from __future__ import annotations

import os
import pty

import pytest

from tuner.worker.callbacks import Bar

LOGS = {"loss": 2.5, "tokens_per_second": 1200.0, "learning_rate": 1e-4}


def test_without_a_terminal_every_logged_step_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    bar = Bar(None)
    bar.start(4, 0)
    bar.step(1)
    bar.log(1, 4, dict(LOGS))
    bar.stop()

    assert capfd.readouterr().out.startswith("step 1/4  loss 2.5000  lr 1.00e-04  1,200 tokens/s")


def test_on_a_terminal_the_bar_is_there_and_lines_of_others_are_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        bar = Bar(terminal)
        bar.start(4, 0)
        bar.step(1)
        bar.log(1, 4, dict(LOGS))
        bar.log(1, 4, {"eval_loss": 2.25})
        print("a library's line")
        bar.stop()
        shown = os.read(master, 100_000).decode()

    os.close(master)
    assert "1/4" in shown and "library" not in shown
    assert capfd.readouterr().out == "validation loss 2.2500\na library's line\n"
