"""Daily knobs as options, in the spellings of Hugging Face too; several data sets; --help in groups."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest

from tests.cli.command import Tuner
from tuner import cli
from tuner.cli.options import OF_KEYS, plain_name
from tuner.recipes.overrides import KEY_FLAGS

TINY = "tiny_lora_sample_e1"
TRAINED = "train_dataloader.dataset"

pytestmark = pytest.mark.usefixtures("nothing_starts")


def origin(tuner: Tuner, key: str, *arguments: object, recipe: str = TINY) -> tuple[str, str]:
    """Return the value and the origin that `tuner show` prints for a key."""
    result = tuner("show", recipe, *arguments)
    assert result.code == 0, result.err
    (line,) = [line for line in result.out.splitlines() if line.startswith(f"{key} = ")]
    value, _, told = line.partition("#")
    return value.partition("=")[2].strip(), told.strip()


def batch(tuner: Tuner, *arguments: object, recipe: str = TINY) -> dict[str, Any]:
    result = tuner("train", recipe, "--dry-run", "--json", *arguments)
    assert result.code == 0, result.err
    found: dict[str, Any] = json.loads(result.out)["batch"]
    return found


def test_each_option_sets_its_key_and_is_its_origin(tuner: Tuner) -> None:
    values = {"--report-to": "tensorboard", "--lr": "3e-05", "--push": "me/mine"}
    shown = {"--report-to": "('tensorboard',)", "--push": "'me/mine'"}
    for flag, key in KEY_FLAGS.items():
        given = values.get(flag, "7")
        value, told = origin(tuner, key, flag, given)
        assert value == shown.get(flag, given), flag
        assert told.startswith(f"{flag} {given}"), flag


def test_show_names_the_option_of_each_key_that_has_one(tuner: Tuner) -> None:
    shown = tuner("show", TINY).out.splitlines()

    for flag, key in {**KEY_FLAGS, "--epochs": "train_cfg.max_epochs", "--seed": "randomness.seed"}.items():
        (line,) = [line for line in shown if line.startswith(f"{key} = ")]
        assert line.endswith(f" ({flag})"), line


def test_the_options_of_the_command_line_are_those_that_recipes_know() -> None:
    assert [plain_name(name) for name in OF_KEYS] == [*KEY_FLAGS]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (["--learning-rate", "1e-5"], ["--lr", "1e-5"]),
        (["--learning_rate=1e-5"], ["--lr", "1e-5"]),
        (["--num_train_epochs", "2"], ["--epochs", "2"]),
        (["--save_steps", "5"], ["--save-every", "5"]),
        (["--lora_r", "4"], ["--lora-rank", "4"]),
        (["--per_device_train_batch_size", "4"], ["--set", "train_dataloader.batch_size=4"]),
        (["--gradient-accumulation-steps", "2"], ["--set", "accumulative_counts=2"]),
        (["--sample_packing", "--seed", "3"], ["--set", "train_dataloader.dataset.packing=True", "--seed", "3"]),
        (["--max_grad_norm=0.5"], ["--set", "max_norm=0.5"]),
    ],
)
def test_spellings_of_hugging_face_mean_the_same(tuner: Tuner, theirs: list[str], ours: list[str]) -> None:
    values = [json.loads(tuner("show", TINY, "--json", *words).out)["recipe"] for words in (theirs, ours)]

    assert values[0] == values[1]
    assert values[0] != json.loads(tuner("show", TINY, "--json").out)["recipe"]


def test_output_dir_is_the_run_directory(tuner: Tuner, tmp_path: Path) -> None:
    result = tuner("train", TINY, "--dry-run", "--json", "--output_dir", "here")

    assert json.loads(result.out)["run_directory"].endswith("here")


def test_a_wrong_value_names_the_option(tuner: Tuner) -> None:
    result = tuner("show", TINY, "--lr", "fast")

    assert result.code == 2 and "--lr fast: " in result.err


def test_the_global_batch_is_what_batch_size_says_also_over_a_recipes_own_split(tuner: Tuner) -> None:
    xtuners = batch(tuner, "--batch-size", "8", recipe="internlm2_chat_7b_qlora_oasst1_e3")

    assert xtuners["global_batch"] == 8
    assert batch(tuner, "--batch-size", "6")["global_batch"] == 6


def test_max_steps_changes_nothing_but_the_steps(tuner: Tuner) -> None:
    whole, short = batch(tuner), batch(tuner, "--max-steps", "2")

    assert short["steps"] == 2
    assert {key: short[key] for key in ("global_batch", "samples")} == {
        key: whole[key] for key in ("global_batch", "samples")
    }


def test_half_an_epoch_is_half_of_its_steps_rounded_up(tuner: Tuner) -> None:
    sets = ("--set", "train_dataloader.dataset.packing=False", "--batch-size", "1")
    whole, half = (batch(tuner, *sets, "--epochs", number) for number in ("1", "0.5"))

    assert half["steps"] == -(-whole["steps"] // 2)
    assert (whole["epochs"], half["epochs"]) == (1, 0.5)


# --data


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for number, file in enumerate(made, 1):
        row = {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}
        file.write_text(f"{json.dumps(row)}\n" * 10 * number)
    return made


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    ("given", "rows"),
    [
        (["--data", "a.jsonl", "--data", "b.jsonl"], 30),
        (["--data", "a.jsonl,b.jsonl"], 30),
        (["--data", "a.jsonl,b.jsonl:0.5"], 20),
        (["--data", "a.jsonl:2"], 20),
        (["--data", "a.jsonl", "--data", "b.jsonl:0.1"], 12),
    ],
)
def test_several_data_sets_are_trained_on_by_their_weights(tuner: Tuner, given: list[str], rows: int) -> None:
    assert batch(tuner, *given)["rows"] == rows


def test_a_file_keeps_a_name_with_commas_and_colons(tuner: Tuner, files: list[Path]) -> None:
    files[0].rename(files[0].with_name("x,y:0.5"))

    assert origin(tuner, f"{TRAINED}.path", "--data", "x,y:0.5")[0] == "'x,y:0.5'"


@pytest.mark.usefixtures("files")
def test_a_mixture_names_the_options_as_its_origin(tuner: Tuner) -> None:
    value, told = origin(tuner, f"{TRAINED}.mixture", "--data", "a.jsonl", "--data", "b.jsonl")

    assert "a.jsonl" in value and "b.jsonl" in value
    assert told.startswith("--data a.jsonl --data b.jsonl")


# --help


@pytest.mark.parametrize("name", [*cli.COMMANDS])
def test_every_help_has_its_options_once_and_fits_the_terminal(tuner: Tuner, name: str) -> None:
    command = cli.tuner.get_command(click.Context(cli.tuner), name)
    assert command is not None
    shown = tuner(name, "--help").out
    options = shown[max(0, shown.find("Examples:")) :]
    for param in command.params:
        if isinstance(param, click.Option) and not param.hidden:
            assert len(re.findall(rf"^  {param.opts[0]}\b(?!-)", options, re.MULTILINE)) == 1, param.opts
    assert "RANGE" not in shown and "x>" not in shown and "x<" not in shown


def test_the_help_of_train_begins_with_examples_and_the_model(tuner: Tuner) -> None:
    shown = tuner("train", "--help").out

    headings = [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert headings[:3] == ["Examples", "Model and data", "Training"]
    assert sum(line.strip().startswith("tuner train") for line in shown.splitlines()) == 3
    assert shown.index("--model") < shown.index("--deepspeed PRESET")


def test_the_examples_of_every_help_are_its_command_and_its_options() -> None:
    for name in cli.COMMANDS:
        command = cli.tuner.get_command(click.Context(cli.tuner), name)
        assert command is not None
        options = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        for example in getattr(command, "examples", ()):
            _, found, words = example.partition(f"tuner {name}")
            assert found, example
            assert {word for word in words.split() if word.startswith("-")} <= options, example
