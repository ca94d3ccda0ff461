"""Answers to validation prompts after training, which can end no run; tests/e2e/test_quickstart.py has them in one."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import termios
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.results.made import make_result
from tuner.recipes.loading import load
from tuner.worker.samples import show_samples

WIDE = 60


def guard(**facts: Any) -> Any:
    ticks: list[int] = []
    heart = SimpleNamespace(tick=lambda: ticks.append(1), ticks=ticks)
    return SimpleNamespace(heart=heart, stop_requested=False, terminal=None, **facts)


@pytest.mark.parametrize("recipe", ["tiny_full_sample_e1", "tiny_lora_sample_e1"])
def test_every_answer_is_a_sign_of_life_and_one_model_is_held_at_a_time(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = make_result(tmp_path / "run", recipe, "num_samples=2")
    loaded: list[Any] = []
    real = AutoModelForCausalLM.from_pretrained

    def noted(*args: Any, **options: Any) -> Any:
        assert not [one for one in loaded if one() is not None], "another one is still in memory"
        model = real(*args, **options)
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", noted)
    watched = guard()

    show_samples(load(str(run.recipe)).config, run, watched)

    found = [json.loads(line) for line in (run.path / "samples.jsonl").read_text().splitlines()]
    assert len(found) == 2 and all(isinstance(one["before"], str) for one in found)
    assert len(watched.heart.ticks) >= 4, "two answers of two models, of a token or more"
    assert len(loaded) == (1 if "lora" in recipe else 2)


def test_who_asks_to_stop_waits_for_no_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1", "num_samples=2")
    asked = guard()
    asked.stop_requested = True

    show_samples(load(str(run.recipe)).config, run, asked)

    assert capfd.readouterr().out == "WARNING: no samples: RuntimeError: a signal asked to stop\n"
    assert not (run.path / "samples.jsonl").exists()


def test_the_table_is_as_wide_as_the_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_full_sample_e1", "num_samples=1")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDE, 0, 0))
    with os.fdopen(slave, "w") as terminal:
        shown = guard()
        shown.terminal = terminal
        show_samples(load(str(run.recipe)).config, run, shown)

    os.close(master)
    assert max(map(len, capfd.readouterr().out.splitlines())) == WIDE
