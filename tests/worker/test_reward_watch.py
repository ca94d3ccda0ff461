"""A run that learns nothing from its rewards says so, once."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

from transformers import TrainerControl, TrainerState, TrainingArguments

from tests.each import each
from tuner.runs.directory import RunDirectory
from tuner.worker.callbacks import REWARD_STEPS, WatchRewards

GOOD = {"reward_std": 0.5, "frac_reward_zero_std": 0.2, "completions/clipped_ratio": 0.1, "kl": 0.01}


def _warnings(folder: Path, lines: Iterable[tuple[int, dict[str, float]]]) -> list[str]:
    run, state = RunDirectory(folder), TrainerState()
    watch, arguments = WatchRewards(run), TrainingArguments(output_dir=str(folder), report_to="none", use_cpu=True)
    watch.on_train_begin(arguments, state, TrainerControl())
    for step, logs in lines:
        state.global_step = step
        watch.on_log(arguments, state, TrainerControl(), logs=logs)
    if not run.warnings.is_file():
        return []
    return [json.loads(line)["warning"] for line in run.warnings.read_text().splitlines()]


def test_each_sign_is_warned_of_once(tmp_path: Path) -> None:
    cases = (
        ("frac_reward_zero_std", 1.0, "nothing is learned"),
        ("completions/clipped_ratio", 0.6, "max_completion_length"),
        ("kl", 3.0, "KL divergence"),
    )
    for number, (key, value, text) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        warnings = _warnings(folder, ((step, {**GOOD, key: value}) for step in range(1, 3 * REWARD_STEPS)))
        assert len(warnings) == 1 and text in warnings[0] and f"At step {REWARD_STEPS}: " in warnings[0]


@each((1, 5, 10))
def test_steps_between_logged_lines_count(interval: int) -> None:
    steps = range(interval, 2 * REWARD_STEPS + 1, interval)
    flat = {**GOOD, "frac_reward_zero_std": 1.0}
    assert len(_warnings(Path(tempfile.mkdtemp()), ((step, flat) for step in steps))) == 1
    flat_but_one = (
        (step, GOOD if step == REWARD_STEPS else flat) for step in range(interval, 2 * REWARD_STEPS, interval)
    )
    assert _warnings(Path(tempfile.mkdtemp()), flat_but_one) == []


def test_lines_without_a_reward_are_left_out(tmp_path: Path) -> None:
    lines = [(step, {"loss": 1.0} if step % 2 else GOOD | {"kl": 2.0}) for step in range(1, REWARD_STEPS)]
    assert _warnings(tmp_path, lines) == []
