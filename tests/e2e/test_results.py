"""A run's result is judged as the run judged it, answers a script, and talks in a terminal."""

from __future__ import annotations

import contextlib
import json
import os
import pty
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import runner
from tests.e2e.runs import Finished, environment, ok, train, wait_until
from tests.e2e.warm import warm
from tests.tiny_model import tiny

pytestmark = pytest.mark.e2e

# Two ranks and batches of 3 divide 41 rows of different lengths nowhere.
RECIPE = """
_base_ = "tiny_lora_sample_e1"
train_dataloader = dict(batch_size=2, dataset=dict(max_length=128))
val_dataloader = dict(batch_size=3, dataset=dict(max_rows=41, packing=False))
optim_wrapper = dict(optimizer=dict(lr=3e-3), accumulative_counts=1, dtype="fp32")
train_cfg = dict(max_steps=3)
log = dict(interval=1, num_samples=0)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("results")
    (folder / "judged.py").write_text(RECIPE)
    return ok(train(folder / "judged.py", folder / "run", ranks=2))


@pytest.mark.long  # tests/results/test_evaluate.py
def test_eval_finds_the_loss_that_training_found(
    run: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before, trained = (line["eval_loss"] for line in run.metrics if "eval_loss" in line)
    assert before > trained
    tuner = runner(monkeypatch, capsys)

    found = [json.loads(tuner("eval", run.path, "--json", "--batch-size", size).out) for size in (3, 41)]

    for value in found:
        assert value["metrics"]["loss"] == pytest.approx(trained, rel=1e-5)
        assert value["counts"]["read"] == 41


class Terminal:
    """A program in a terminal of its own, and all that it has shown."""

    def __init__(self, *arguments: object) -> None:
        self._main, program = pty.openpty()
        os.set_blocking(self._main, False)
        # It is the controlling terminal of the program's session: Ctrl-C typed there is a signal.
        self.process = warm().start(arguments, env=environment(), terminal=os.ttyname(program))
        os.close(program)
        self.text = ""

    def types(self, text: str) -> None:
        os.write(self._main, text.encode())

    def shows(self, words: str, times: int = 1) -> bool:
        with contextlib.suppress(BlockingIOError, OSError):  # nothing yet; the program has closed it
            self.text += os.read(self._main, 1 << 16).decode(errors="replace")
        return self.text.count(words) >= times

    def close(self) -> None:
        os.close(self._main)
        self.process.kill()
        self.process.wait()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    # It has learned no end of an answer, so its own goes on until it is interrupted.
    untrained = tiny()
    made = Terminal("chat", untrained, "--max-new-tokens", 400, "--temperature", 1)
    yield made
    made.close()


def test_in_a_terminal_ctrl_c_ends_the_answer_and_ctrl_d_the_conversation(terminal: Terminal, tmp_path: Path) -> None:
    wait_until(lambda: terminal.shows("\n> "))
    terminal.types("/system Be kind.\n")
    wait_until(lambda: terminal.shows("The system prompt is set."))
    wait_until(lambda: terminal.shows("\n> ", 2))

    before = len(terminal.text)
    terminal.types("Why?\n")
    wait_until(lambda: terminal.shows("\n> ", 2) and len(terminal.text) > before + len("Why?\r\n") + 5)
    terminal.types("\x03")
    wait_until(lambda: terminal.shows("\n> ", 3))
    assert terminal.process.poll() is None
    terminal.types("/reset\n")
    wait_until(lambda: terminal.shows("The conversation is cleared."))
    wait_until(lambda: terminal.shows("\n> ", 4))
    terminal.types("\x04")

    assert terminal.process.wait(60) == 0, terminal.text
    assert "Ctrl-D or /exit ends" not in terminal.text  # the answer took the Ctrl-C, not the prompt
    assert "Traceback" not in terminal.text
