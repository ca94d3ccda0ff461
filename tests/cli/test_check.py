"""`tuner check`: all findings at once, each with its place, and an exit code; nothing starts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Result, Tuner
from tests.cli.made_runs import make_run
from tuner.runs import checkpoints
from tuner.runs.records import ManifestFacts
from tuner.zero import presets
from tuner.zero.config import swaps

TINY = "tiny_full_sample_e1"
GUIDE = Path(__file__).parents[1] / "zero" / "data" / "guide_ds_config.json"
BAD_JSON = '{\n  "gradient_cliping": 1,\n  "bf16": {"enabled": 1}, "seed": 3,\n  "amp": {"enabled": true}\n}\n'
BAD_RECIPE = f"""_base_ = '{TINY}'
optim_wrapper = dict(accumulative_counts=0,
                     optimizer=dict(lr=-1))
train_cfg = dict(max_epoch=2)
"""

pytestmark = pytest.mark.usefixtures("nothing_starts")


def _findings(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.out)["findings"]
    return found


WITHOUT_DISKS = [name for name in presets.names() if not any(swaps(presets.find(name).config))]
"""This machine may lack what a preset needs that swaps to disks: libaio, and the disk."""


@pytest.mark.parametrize("name", [*WITHOUT_DISKS, "zero2", TINY])
def test_what_ships_is_right(tuner: Tuner, name: str) -> None:
    result = tuner("check", name)

    assert (result.code, result.out) == (0, f"{name}: no problems\n")


def test_what_is_on_the_hub_is_not_looked_up_and_named(tuner: Tuner) -> None:
    name, on_hub = (
        "internlm2_chat_7b_qlora_oasst1_e3",
        ["internlm/internlm2-chat-7b", "timdettmers/openassistant-guanaco"],
    )

    result = tuner("check", name)

    assert (result.code, result.out) == (0, f"{name}: no problems; not looked up on the hub: {', '.join(on_hub)}\n")
    assert json.loads(tuner("check", name, "--json").out)["on_hub"] == on_hub


def test_all_findings_of_a_json_are_told_with_line_and_column(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text(BAD_JSON)

    result, as_json = tuner("check", "my.json"), tuner("check", "my.json", "--json")

    assert (result.code, as_json.code, json.loads(as_json.out)["ok"]) == (2, 2, False)
    places = [
        ("error", "my.json:2:3"),
        ("error", "my.json:3:12"),
        ("error", "my.json:4:3"),
        ("warning", "my.json:3:27"),
    ]
    assert [(finding["severity"], finding["where"]) for finding in _findings(as_json)] == places
    first, second, third, fourth, last = result.out.splitlines()
    assert first.startswith("my.json:2:3: error[bad-deepspeed-config]: there is no key 'gradient_cliping'")
    assert first.endswith("Did you mean 'gradient_clipping'?")
    assert second.startswith("my.json:3:12: error[bad-deepspeed-config]: bf16.enabled = 1 is not true or false")
    assert third.startswith("my.json:4:3: error[bad-deepspeed-config]: amp was removed")
    assert fourth.startswith("my.json:3:27: warning: seed was never read")
    assert last == "my.json: 3 errors, 1 warning"


def test_warnings_alone_are_no_failure(tuner: Tuner) -> None:
    result = tuner("check", GUIDE)

    assert result.code == 0
    assert result.out.splitlines()[-1] == f"{GUIDE}: 6 warnings"


def test_every_mistake_of_a_recipe_and_of_its_json_is_told(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BAD_RECIPE)
    (tmp_path / "my.json").write_text(BAD_JSON)

    result = tuner("check", "./mine.py", "--deepspeed", "my.json")

    assert result.code == 2
    assert result.out.splitlines()[-1] == "./mine.py: 6 errors, 1 warning"
    for told in ("optimizer.lr = -1", "accumulative_counts = 0", "Did you mean 'max_epochs'?", "amp was removed"):
        assert told in result.out
    assert "Also:" not in result.out


def test_json_holds_code_place_and_fix_of_every_mistake_of_a_recipe(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(BAD_RECIPE)

    found = _findings(tuner("check", "./mine.py", "--json"))

    assert [(finding["code"], finding["where"]) for finding in found] == [
        ("bad-recipe", "./mine.py:3"),
        ("bad-recipe", "./mine.py:2"),
        ("bad-recipe", "./mine.py:4"),
    ]
    assert found[2]["what"] == "no key 'train_cfg.max_epoch'"
    assert found[2]["fix"] == "Did you mean 'max_epochs'?"


def test_a_model_and_data_that_are_not_there_are_told_together(tuner: Tuner) -> None:
    result = tuner("check", TINY, "--model", "./nowhere", "--data", "none.jsonl", "--set", "chat_template=chatl")

    assert result.code == 2
    found = result.out.splitlines()
    assert found[0].startswith("model.path: error[bad-model]: the model './nowhere' does not exist")
    assert found[1].startswith("train_dataloader.dataset.path: error[bad-data]: the data 'none.jsonl' does not exist")
    assert found[2].startswith(
        "model.chat_template: error[bad-recipe]: no chat template 'chatl'. Did you mean 'chatml'?"
    )


def test_what_the_recipe_overrides_in_the_json_is_told(tuner: Tuner) -> None:
    result = tuner("check", TINY, "--deepspeed", GUIDE, "--set", "accumulative_counts=8", "--json")

    assert result.code == 0
    texts = [finding["what"] for finding in _findings(result)]
    assert not [text for text in texts if text.startswith("gradient_accumulation_steps")]
    assert not [text for text in texts if text.startswith("train_batch_size")], "2 x 8 x 1 is what the JSON says"
    assert [text for text in texts if text.startswith("optimizer: the recipe overrides")]
    assert len([text for text in texts if text.startswith("seed was never read")]) == 1


def test_a_json_that_no_run_survives_is_an_error_with_a_recipe_and_a_warning_alone(
    tuner: Tuner, tmp_path: Path
) -> None:
    (tmp_path / "my.json").write_text('{"expert_parallel": {"enabled": true}}')

    alone, with_recipe = tuner("check", "my.json"), tuner("check", TINY, "--deepspeed", "my.json")

    assert (alone.code, alone.out.splitlines()[-1]) == (0, "my.json: 1 warning")
    assert (with_recipe.code, with_recipe.out.splitlines()[-1]) == (2, f"{TINY}: 1 error")


def test_what_needs_a_gpu_is_checked_for_the_gpu_that_is_named(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{"zero_optimization": {"stage": 3, "zero_quantized_weights": true}}')

    here = tuner("check", TINY, "--deepspeed", "my.json")
    there = tuner("check", TINY, "--deepspeed", "my.json", "--gpus", "8", "--gpu", "a100-80g")

    assert here.code == 2
    assert "my.json:1:36: error[bad-deepspeed-config]: " in here.out
    assert "needs an NVIDIA GPU" in here.out
    assert there.code == 0, there.out


def test_what_this_machine_lacks_is_an_error_with_a_recipe_and_a_warning_alone(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "my.json").write_text('{"csv_monitor": {"enabled": true, "output_path": "/proc/no"}}')

    alone, with_recipe = tuner("check", "my.json"), tuner("check", TINY, "--deepspeed", "my.json")
    there = tuner("check", TINY, "--deepspeed", "my.json", "--gpus", "8", "--gpu", "a100-80g")

    assert (alone.code, alone.out.splitlines()[-1]) == (0, "my.json: 1 warning")
    assert "my.json:1:35: warning[disk]: this machine cannot run it: csv_monitor.output_path = '/proc/no'" in alone.out
    assert (with_recipe.code, with_recipe.out.splitlines()[-1]) == (2, f"{TINY}: 1 error")
    assert "my.json:1:35: error[disk]: csv_monitor.output_path = '/proc/no'" in with_recipe.out
    assert (there.code, there.out.splitlines()[-1]) == (0, f"{TINY}: 1 warning")
    assert "on the machine that trains, which cannot be checked from here" in there.out


def test_a_run_that_cannot_fit_the_named_gpu_is_an_error(tuner: Tuner) -> None:
    result = tuner("check", "llama3_1_8b_instruct_full_alpaca_e1", "--deepspeed", "zero2", "--gpu", "t4")

    assert result.code == 2
    assert "does not fit" in result.out


def test_a_run_directory_is_checked_in_its_parts(tuner: Tuner, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", TINY, "zero2")

    right = tuner("check", run)
    (run / "deepspeed.json").write_text('{"zero_optimization": {"stage": 7}}')
    (run / "run.json").write_text("[]")
    wrong = tuner("check", run)

    assert (right.code, right.out) == (0, f"{run}: no problems\n")
    assert wrong.code == 2
    assert (
        f"{run}/deepspeed.json:1:24: error[bad-deepspeed-config]: zero_optimization.stage = 7 is not 0, 1, 2 or 3"
        in wrong.out
    )
    assert "run.json is not a JSON object" in wrong.out


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states.unlink(),
        lambda states: states.write_text("12"),
        lambda states: states.write_text("321"),
        lambda states: states.with_name("manifest.json").unlink(),
    ],
    ids=["missing", "cut", "flipped", "no manifest"],
)
def test_a_damaged_checkpoint_of_a_run_is_an_error(
    tuner: Tuner, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    run = make_run(tmp_path / "run", TINY, "zero2")
    for step in (1, 2):
        checkpoint = run / "checkpoints" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "states").write_text("123")
        checkpoints.seal(checkpoint, ManifestFacts(step=step))
    assert tuner("check", run).code == 0

    change(run / "checkpoints" / "checkpoint-1" / "states")
    result = tuner("check", run, "--json")

    assert result.code == 2
    assert [finding["where"] for finding in json.loads(result.out)["findings"]] == [f"{run}/checkpoints/checkpoint-1"]
    alone = {step: tuner("check", run / "checkpoints" / f"checkpoint-{step}", "--json") for step in (1, 2)}
    assert {step: result.code for step, result in alone.items()} == {1: 2, 2: 0}
    assert json.loads(alone[1].out)["findings"] == json.loads(result.out)["findings"]


def test_a_checkpoint_that_was_moved_with_its_manifest_is_checked_as_one(tuner: Tuner, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "states").write_text("123")
    checkpoints.seal(moved, ManifestFacts(step=7))
    assert tuner("check", moved).code == 0

    (moved / "states").unlink()

    assert tuner("check", moved).code == 2


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("tiny_ful_sample_e1", "Did you mean 'tiny_full_sample_e1'?"),
        ("deepspeed_zer2", "Did you mean 'deepspeed_zero2'?"),
        ("nothing.json", "there is no file 'nothing.json'"),
        ("accelerate.yaml", "there is no file 'accelerate.yaml'"),
        ("./nothing.py", "nothing.py"),
    ],
)
def test_a_name_that_means_nothing_is_a_finding(tuner: Tuner, name: str, told: str) -> None:
    result = tuner("check", name)

    assert result.code == 2
    assert told in result.out
    assert result.out.splitlines()[-1] == f"{name}: 1 error"


@pytest.mark.parametrize(
    "flags",
    [
        *(["--set", "lr=1"], ["--model", "x"], ["--deepspeed", "zero3"], ["--gpus", "2"]),
        *(["--trust-remote-code"], ["--seed", "0"], ["--seed", "1"], ["--epochs", "1"], ["--val-split", "0"]),
    ],
    ids=" ".join,
)
def test_options_of_a_recipe_beside_a_config_are_refused(tuner: Tuner, flags: list[str]) -> None:
    result = tuner("check", "zero2", *flags)

    assert result.code == 2
    assert f"{flags[0]} needs a recipe, and 'zero2' is a DeepSpeed config" in result.err


@pytest.mark.parametrize(
    ("place", "flags", "fix"),
    [
        ("run", ["--trust-remote-code"], "{}/recipe.py"),
        ("run/checkpoints/checkpoint-1", ["--data", "x"], "--model {}"),
    ],
)
def test_options_of_a_recipe_beside_a_run_and_its_checkpoint_are_refused_with_what_takes_them(
    tuner: Tuner, tmp_path: Path, place: str, flags: list[str], fix: str
) -> None:
    (make_run(tmp_path / "run", TINY, "zero2") / "checkpoints" / "checkpoint-1").mkdir(parents=True)

    result = tuner("check", tmp_path / place, *flags)

    assert (result.code, fix.format(tmp_path / place) in result.err) == (2, True)


def test_a_run_that_resumed_on_other_ranks_has_nothing_wrong(tuner: Tuner, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", TINY, "zero2")
    used = json.loads((run / "deepspeed.json").read_text())
    (run / "deepspeed.json").write_text(json.dumps({**used, "checkpoint": {"load_universal": True}}))

    done = tuner("check", run)

    assert (done.code, done.out) == (0, f"{run}: no problems\n")
