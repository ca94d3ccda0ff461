"""Real ranks that split the layers of the tiny model learn what one rank learns, and go on from their checkpoints."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.runs import Once, distance, finish, fork, ok, processes_of, train, wait_until
from tests.e2e.test_long_context import is_same, recipe, run

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SPLIT = ("--ds", "autotp_size=2")
WEIGHTS = {"full": "model", "lora": "adapter_model"}


@pytest.mark.parametrize("method", WEIGHTS)
def test_ranks_that_split_the_layers_learn_what_one_rank_learns_at_every_level(
    tmp_path: Path, once: Once, method: str
) -> None:
    path = recipe(tmp_path, method)
    alone = run(path, tmp_path / "alone", "none", ranks=1)

    for level in ("none", "zero1", "zero2", "zero3"):
        split = once(recipe, method, "--deepspeed", level, *SPLIT)
        is_same(split, alone, WEIGHTS[method])
        norms = [[line["grad_norm"] for line in each.metrics if "grad_norm" in line] for each in (split, alone)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        of_runs = [each.json("status.json")["num_trained_weights"] for each in (split, alone)]
        assert of_runs[0] == of_runs[1]
    for level in ("zero1", "zero3"):
        is_same(run(path, tmp_path / f"four {level}", level, *SPLIT, ranks=4), alone, WEIGHTS[method])


@pytest.mark.parametrize(("method", "level"), [("full", "zero2"), ("full", "zero3"), ("lora", "zero1")])
def test_a_killed_run_goes_on_to_the_bit(tmp_path: Path, once: Once, method: str, level: str) -> None:
    path, weights = recipe(tmp_path, method), f"final/{WEIGHTS[method]}.safetensors"
    whole = once(recipe, method, "--deepspeed", level, *SPLIT)
    folder = tmp_path / "killed"
    process = fork(path, "--work-dir", folder, "--deepspeed", level, *SPLIT)
    wait_until(lambda: (folder / "checkpoints" / "checkpoint-2" / "manifest.json").is_file())
    for rank in processes_of(folder):
        rank.send_signal(signal.SIGKILL)
    finish(process, folder)

    resumed = ok(train(path, folder, "--deepspeed", level, *SPLIT, "--resume", "auto"))

    assert resumed.losses[-2:] == whole.losses[-2:]
    weights_resumed, other = (load_file(each.path / weights) for each in (resumed, whole))
    assert weights_resumed.keys() == other.keys() and distance(weights_resumed, other) == 0


def test_another_split_is_refused_before_a_rank_starts(tmp_path: Path) -> None:
    path = recipe(tmp_path)
    run(path, tmp_path / "run", "zero1", *SPLIT, "--set", "max_steps=2")

    for more in ((), ("--resume-weights",)):
        again = train(path, tmp_path / "run", "--deepspeed", "zero1", "--resume", "auto", *more)
        assert again.code == 2 and "split" in again.text, again.text
