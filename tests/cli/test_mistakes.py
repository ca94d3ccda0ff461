"""Each mistake ends in one message with the value, the place and what to do; nothing starts, nothing is written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import Tuner, of_results
from tests.cli.made_runs import make_run
from tuner.cli import main
from tuner.errors import RecipeError
from tuner.machine import libraries

TINY = "tiny_full_sample_e1"
ROW = '{"text": "one"}'

pytestmark = pytest.mark.usefixtures("nothing_starts")


# What is typed; the exit code; what the message must hold.
USAGE: dict[str, tuple[list[str], tuple[str, ...]]] = {
    "unknown recipe": (
        ["tiny_ful_sample_e1"],
        ("'tiny_ful_sample_e1'", "Did you mean 'tiny_full_sample_e1'?", "tuner list"),
    ),
    "only one part": (["tiny"], ("'tiny' is a model", "tuner train --model package:tiny --data FILE")),
    "unknown tracker": (
        [TINY, "--set", "trackers=wanbd"],
        ("'wanbd'", "--set trackers=wanbd", "Did you mean 'wandb'?"),
    ),
    "a filter without a hostfile": ([TINY, "--include", "a"], ("--include without --hostfile",)),
    "a node beside a hostfile": ([TINY, "--hostfile", "h", "--node-rank", "1"], ("--node-rank=1 with --hostfile",)),
    "spares without a hostfile": ([TINY, "--spare-nodes", "1"], ("--spare-nodes without --hostfile",)),
    "no model": ([TINY, "--model", "./no model"], ("'./no model'", "model.path", "Check the path")),
    "no data": (
        [TINY, "--data", "./no data.jsonl"],
        ("'./no data.jsonl'", "train_dataloader.dataset.path", "Check the path"),
    ),
    "no path at all": (["tiny_full_custom_e1"], ("no data set is given", "--data FILE")),
    "checkpoint too long": ([TINY, "--resume", "x" * 300], ("--resume", "checkpoint-STEP")),
    "grace without end": ([TINY, "--grace", "inf"], ("inf is not a finite number", "--grace")),
    "stray argument": ([TINY, "extra"], ("'extra'", "--set KEY=VALUE")),
    "stray pair": ([TINY, "lr=1"], ("'lr=1'", "--set KEY=VALUE")),
    "unknown flag": ([TINY, "--deepsped", "zero2"], ("--deepsped", "--deepspeed")),
    "flag without a value": ([TINY, "--deepspeed"], ("--deepspeed", "tuner train --help")),
    "no recipe": ([], ("--model", "--data")),
    "no epochs": ([TINY, "--epochs", "0"], ("--epochs: 0 is not above 0.",)),
    "a push": ([TINY, "--push-to-hub"], ("push", "Name the repository: --push OWNER/NAME")),
    "a push as a key": ([TINY, "--set", "push_to_hub=True"], ("push", "Name the repository: --push OWNER/NAME")),
    "no owner": (["Qwen3-0.6B"], ("tuner train --model Qwen/Qwen3-0.6B --data FILE",)),
    "no recipe file": (["config.yaml"], ("there is no file 'config.yaml'",)),
}


def _assert_told(tuner: Tuner, arguments: list[str], told: tuple[str, ...], code: int = 2) -> None:
    before = sorted(Path().rglob("*"))

    result = tuner("train", *arguments)

    assert result.code == code, result.err
    assert len(result.messages) == 1, result.err
    assert "Traceback" not in result.out + result.err
    for part in told:
        assert part in result.err
    assert result.out == ""
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["train", "dry-run"])
@pytest.mark.parametrize("name", USAGE)
def test_a_wrong_command_line_is_told_once(tuner: Tuner, name: str, dry_run: list[str]) -> None:
    arguments, told = USAGE[name]
    if name == "flag without a value":
        dry_run = []

    _assert_told(tuner, [*dry_run, *arguments], told)


@pytest.mark.parametrize("name", ["qwen3-8b", "Qwen3-8B", "QWEN3_8B", "qwen3_8b", "qwen3.8b"])
def test_a_models_name_in_any_spelling_is_told_with_its_hub_id(tuner: Tuner, name: str) -> None:
    told = (f"'{name}' is a model", "tuner train --model Qwen/Qwen3-8B --data my.jsonl", "qwen3_8b_lora_alpaca_e3")

    _assert_told(tuner, [name, "--data", "my.jsonl"], told)


@pytest.mark.parametrize("words", of_results().values(), ids=of_results())
def test_a_source_that_does_not_exist_is_told_without_asking_the_hub(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    make_run(Path("work_dirs/mine/20260101"), TINY, "none")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("the hub was asked"))

    for name in ("./nothere", "nothere", "work_dirs/mine/nothere"):
        result = tuner(*(word.replace("@", name) for word in words))

        assert result.code == 2
        assert f"'{name}' does not exist" in result.err
        assert len(result.messages) == 1


@pytest.mark.parametrize("words", of_results().values(), ids=of_results())
def test_a_recipes_folder_means_its_newest_run(tuner: Tuner, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # chat asks for a prompt then
    for number, time in enumerate(("20260101", "20260102", "20260103")):
        make_run(Path(f"work_dirs/mine/{time}"), TINY, "none")
        os.utime(f"work_dirs/mine/{time}/run.json", (number, 2 - number))

    result = tuner(*(word.replace("@", "work_dirs/mine") for word in words))

    assert "work_dirs/mine holds runs: taking the newest, work_dirs/mine/20260101." in result.err


VARIABLES: dict[str, tuple[dict[str, str], list[str], tuple[str, ...]]] = {
    "flag and variable": (
        {"NPROC_PER_NODE": "4"},
        ["--nproc-per-node", "2"],
        ("--nproc-per-node=2", "NPROC_PER_NODE=4", "Keep one"),
    ),
    "a word": ({"NPROC_PER_NODE": "gpu"}, [], ("'gpu'", "NPROC_PER_NODE", "whole number")),
}


@pytest.mark.parametrize("name", VARIABLES)
def test_a_wrong_environment_is_told_once(tuner: Tuner, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    variables, arguments, told = VARIABLES[name]
    for key, value in variables.items():
        monkeypatch.setenv(key, value)

    _assert_told(tuner, [TINY, *arguments], told)


# The file that is there, and its text; what is typed; what the message must hold.
FILES: list[tuple[str, str, str, tuple[str, ...]]] = [
    ("data.jsonl", "", f"{TINY} --data data.jsonl", ("'data.jsonl'", "empty", "at least one row")),
    ("data.jsonl", "{}", f"{TINY} --data ./dta.jsonl", ("'./dta.jsonl'", "data.jsonl")),
    ("folder/x", "", f"{TINY} --model ./folder", ("'./folder'", "config.json")),
    ("model.bin", "", f"{TINY} --model ./model.bin", ("'./model.bin'", "not a folder")),
    ("my.json/x", "", f"{TINY} --deepspeed my.json", ("'my.json'", "directory")),
    ("my.jsonl", ROW, "my.jsonl", ("'my.jsonl' is a data file", "tuner train --model MODEL --data my.jsonl")),
    ("rows/a.jsonl", ROW, "./rows", ("'./rows' holds data and no model", "--model MODEL --data ./rows")),
    ("configs/mine.yaml", "a: 1", "configs/mien.yaml", ("no file 'configs/mien.yaml'", "Did you mean 'mine.yaml'?")),
    (
        *("my.jsonl", ROW, "--model Qwen3-0.6B --data my.jsonl --dry-run"),
        ("'Qwen3-0.6B' has no owner", "Did you mean Qwen/Qwen3-0.6B?"),
    ),
    (
        *("my.jsonl", ROW, "tiny_full_custom_e1 --data my.jsonl --set num_samples=4 --dry-run"),
        ("log.num_samples = 4", "Add --val-split 0.05"),
    ),
]


@pytest.mark.parametrize(("file", "text", "typed", "told"), FILES, ids=[typed for _, _, typed, _ in FILES])
def test_a_wrong_file_is_told_once(tuner: Tuner, file: str, text: str, typed: str, told: tuple[str, ...]) -> None:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(text)

    _assert_told(tuner, typed.split(), told)


def test_what_this_machine_cannot_do_and_an_old_library_are_3_before_anything_starts(
    tuner: Tuner, monkeypatch: pytest.MonkeyPatch
) -> None:
    _assert_told(tuner, [TINY, "--set", "dtype=fp16"], ("fp16", "optim_wrapper.dtype", "--set dtype=fp32"), code=3)
    monkeypatch.setitem(libraries.MINIMUM, "torch", "999")

    _assert_told(tuner, [TINY], ("older than 999", "pip install 'torch>=999'"), code=3)


def test_an_unknown_command_names_the_nearest(tuner: Tuner) -> None:
    result = tuner("trian", TINY)

    assert result.code == 2
    assert "Did you mean 'train'?" in result.err
    assert len(result.messages) == 1


def test_debug_shows_where_a_mistake_was_found(tuner: Tuner) -> None:
    with pytest.raises(RecipeError):
        tuner("train", "tiny_ful_sample_e1", "--debug")


def test_a_bug_of_ours_keeps_its_traceback(tuner: Tuner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.launch.resolve.resolve_start", lambda *_: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        tuner("train", TINY)


def test_output_that_finds_no_room_is_one_line_and_code_74() -> None:
    with Path("/dev/full").open("w") as full:
        argv = [sys.executable, "-m", "tuner", "list"]
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, text=True)

    assert done.returncode == 74
    assert done.stderr == "error[disk]: cannot write the standard output: No space left on device. Free space.\n"


@pytest.mark.parametrize("name", [None, "/data/run/final/config.json"])
def test_a_file_that_finds_no_room_is_not_told_as_the_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str | None
) -> None:
    def full(prog_name: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    monkeypatch.setattr("tuner.cli.tuner", full)

    with pytest.raises(SystemExit) as caught:
        main()

    told = capsys.readouterr().err
    assert caught.value.code == 74
    assert "standard output" not in told and (name or "a file") in told


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        (("./model", "rows.jsonl"), "--model ./model --data rows.jsonl"),
        (("rows.jsonl", "./model"), "--model ./model --data rows.jsonl"),
        (("tiny_full_sample_e1", "rows.jsonl"), "tuner train tiny_full_sample_e1 --data rows.jsonl"),
        (("--model", "rows.jsonl", "--data", "./model"), "--model ./model --data rows.jsonl"),
        (("--model", "rows.csv", "--data", "owner/name"), "--model owner/name --data rows.csv"),
    ],
)
def test_a_model_and_data_in_each_others_places_are_told_the_right_ones(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], suggested: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "llama"}')
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    Path("rows.csv").write_text("text\na\n")

    result = tuner("train", *words, "--dry-run")

    assert result.code in (2, 3)
    assert suggested in result.err
