from __future__ import annotations

import contextlib
import io
import os
import pty
from collections.abc import Iterator

import pytest

from tuner.worker.step_log import ProgressBar

LOGS = {
    "loss": 2.5,
    "grad_norm": 0.123456,
    "tokens_per_second": 1200.0,
    "learning_rate": 1e-4,
    "memory_bytes": 3 * 1024**3,
}


def drawn(terminal: int) -> Iterator[str]:
    """Yield what was drawn on a terminal whose other end is closed; it arrives in pieces."""
    with contextlib.suppress(OSError):
        while data := os.read(terminal, 4096):
            yield data.decode(errors="replace")


def test_without_a_terminal_every_logged_step_is_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(None)
    bar.start(4, 0)
    bar.step(1)
    bar.log(1, 4, dict(LOGS))
    bar.stop()

    said = "step 1/4  loss 2.5000  grad 0.123  lr 1.00e-04  1,200 tokens/s  3.0 GiB  0:00:"
    assert capfd.readouterr().out.startswith(said)


def test_speed_is_that_of_one_rank_and_what_is_unknown_is_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(None)
    bar.start(4, 0)
    bar.log(1, 4, {**LOGS, "mfu": 0.412, "grad_norm": None}, num_ranks=8)

    assert "loss 2.5000  lr 1.00e-04  150 tokens/s per rank  MFU 41%  3.0 GiB" in capfd.readouterr().out


def test_the_mean_reward_stands_beside_a_loss_that_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(None)
    bar.start(2, 0)
    bar.log(1, 2, {**LOGS, "reward": 0.25})
    bar.log(2, 2, {"eval_loss": -0.5, "eval_reward": 0.5})

    step, validation = capfd.readouterr().out.splitlines()
    assert "loss 2.5000  reward 0.250  " in step
    assert validation.startswith("step 2/2  validation reward 0.500  ")


@pytest.mark.parametrize(
    ("columns", "there", "not_there"), [(80, "grad 0.123", "lr"), (200, "1,200 tokens/s  3.0 GiB", "…")]
)
def test_the_bar_and_its_values_stand_in_one_line(
    columns: int, there: str, not_there: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with io.StringIO() as terminal:
        bar = ProgressBar(terminal)
        bar.start(10_000, 0)
        bar.log(1, 10_000, {**LOGS, "rewards/margins": 0.25})
        bar.stop()
        last = terminal.getvalue().splitlines()[-1]

    assert len(last) <= columns and last.startswith("step ") and last.endswith("left")
    assert there in last and not_there not in last


def test_the_time_left_is_told_of_steps_that_take_a_minute_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    now_s = 0.0
    with io.StringIO() as terminal:
        bar = ProgressBar(terminal)
        bar.progress.get_time = lambda: now_s
        bar.start(12, 2)
        for step in (3, 4, 5):
            now_s += 60
            bar.step(step)
        bar.stop()
        last = terminal.getvalue().splitlines()[-1]

    assert last.split()[-2:] == ["0:07:00", "left"]


def test_a_terminal_that_cannot_draw_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        bar = ProgressBar(terminal)
        bar.start(4, 0)
        bar.log(1, 4, dict(LOGS))
        bar.stop()

    os.close(master)
    assert capfd.readouterr().out.startswith("step 1/4  loss 2.5000")


def test_on_a_terminal_the_bar_is_there_and_lines_of_others_are_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as terminal:
        bar = ProgressBar(terminal)
        bar.start(4, 0)
        bar.step(1)
        bar.log(1, 4, dict(LOGS))
        bar.log(1, 4, {"eval_loss": 2.25})
        print("a library's line")
        bar.stop()
    shown = "".join(drawn(master))

    os.close(master)
    assert "1/4" in shown and "library" not in shown
    assert capfd.readouterr().out == "step 1/4  validation loss 2.2500\na library's line\n"


def test_rewards_without_an_opinion_end_no_run(capfd: pytest.CaptureFixture[str]) -> None:
    bar = ProgressBar(None)
    bar.start(2, 0)
    bar.log(0, 2, {"eval_loss": 0.0, "eval_reward": None})
    bar.log(1, 2, {**LOGS, "reward": None})

    validation, step = capfd.readouterr().out.splitlines()
    assert validation.startswith("step 0/2  validation") and "loss 2.5000  grad" in step
