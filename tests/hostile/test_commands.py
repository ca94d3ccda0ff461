"""Every command refuses a bad name in one message; nothing outside is read as code, overwritten or made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from tests.cli.command import ACT, Tuner, of_recipes, of_results, parameters
from tests.cli.conftest import LAUNCHER
from tests.cli.conftest import nothing_starts as nothing_starts
from tests.cli.conftest import tuner as tuner
from tests.e2e.warm import Ended, warm
from tests.launch.plans import written_run
from tests.tiny_model import tiny
from tuner import assets, cli
from tuner.cli.models import Place
from tuner.cli.say import say_table

TINY = "tiny_full_sample_e1"
NAMES = (
    "../../../etc/passwd",
    "/etc/passwd",
    "../x.py",
    "line\nbreak",
    "\x1b]0;title\x07",
    "x" * 5_000,
    "ｔｉｎｙ_full_sample_e1",
    "tіny_full_sample_e1",  # a Cyrillic i
    "$(touch canary)",
    "a.json/../b.json",
    "~nobody/x",
    "",
)
COMMANDS = {
    **of_recipes(),
    "show --diff": ["show", TINY, "--diff=@"],
    "plan --gpu": ["plan", TINY, "--gpus=1", "--gpu=@"],
    "data --data": ["data", TINY, "--data=@"],
    "train --deepspeed": ["train", TINY, "--dry-run", "--deepspeed=@"],
    "train --model": ["train", TINY, "--dry-run", "--model=./@"],
    "train --resume": ["train", TINY, "--dry-run", "--resume=@"],
    "train chat_template": ["train", TINY, "--dry-run", "--set=model.chat_template=@", "--set=max_steps=0"],
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put back what `tuner smoke` and `tuner data` tell libraries by variables."""
    for name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR", "HF_HUB_OFFLINE", "WANDB_MODE"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.mark.usefixtures("nothing_starts", "environment")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_is_none_is_refused_by_every_command(tuner: Tuner, command: str, tmp_path: Path) -> None:
    for name in NAMES if command != "plan --gpu" else NAMES[:-1]:  # there, no name is the machine here
        result = tuner(*(word.replace("@", name) for word in COMMANDS[command]))

        assert result.code == 2, (name, result.out, result.err)
        assert "Traceback" not in result.err
        assert "\x1b" not in result.out + result.err
        assert list(tmp_path.iterdir()) == [], name


def paths_of_commands() -> Iterator[tuple[str, str]]:
    """Yield each argument and option of a command that names a file or a folder, with the command."""
    for command in cli.COMMANDS:
        for name, parameter in parameters(command).items():
            if isinstance(parameter.type, click.Path):
                yield command, name


def words_for(command: str, name: str, path: str) -> list[str]:
    """Return a call of a command in which one argument or option is a path."""
    words = [command]
    for parameter in parameters(command).values():
        if parameter.name == name:
            words.append(f"{parameter.opts[0]}={path}" if isinstance(parameter, click.Option) else path)
        elif isinstance(parameter, click.Argument) and parameter.required:
            words.append(path if isinstance(parameter.type, Place) else TINY)
    return words


@pytest.mark.usefixtures("nothing_starts", "environment")
@pytest.mark.parametrize(("command", "name"), paths_of_commands())
def test_a_path_that_no_file_can_have_is_one_message(tuner: Tuner, command: str, name: str) -> None:
    result = tuner(*words_for(command, name, "x" * 300))

    assert result.code in (2, 74), (result.out, result.err)
    assert "Traceback" not in result.err


CONTROLS = "\x1b]0;title\x07\u202e"


def test_control_characters_in_a_table_reach_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    say_table([("run", "loss"), (CONTROLS, "1.0")])

    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.usefixtures("nothing_starts")
def test_control_characters_of_names_reach_no_terminal(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / CONTROLS).mkdir()
    mine = f"./{CONTROLS}/{CONTROLS}.py"
    Path(mine).write_text(f"_base_ = '{TINY}'\nlog = dict(interval=3)\n")
    run = tmp_path / CONTROLS / "run"

    looks = [[word.replace("@", str(run)) for word in words] for words in of_results().values()]
    looks = [words for words in looks if words[0] not in ("chat", "eval", "serve")]  # which load models
    for arguments in (
        ["show", mine],
        ["show", mine, "--diff", TINY],
        ["show", mine, "--deepspeed", "zero2"],
        ["show", run],
        ["check", mine],
        ["plan", mine, "--gpus=1", "--gpu=h100"],
        ["copy", mine, tmp_path / CONTROLS / "copied.py"],
        ["train", mine, "--dry-run"],
        ["submit", mine, "--dry-run", "--gpus-per-node=0"],
        ["runs", tmp_path],
        ["runs", tmp_path, "--json"],
        ["clean", tmp_path],
        *looks,
        *([*words, "--json"] for words in looks),
    ):
        if not run.exists():  # at first, and after a command that moves it
            written_run(tmp_path / "run").path.rename(run)
        result = tuner(*arguments)

        assert "Traceback" not in result.err, result.err
        assert not set(CONTROLS) & {"\x1b", "\x07", "\u202e"} & set(result.out + result.err), arguments


@pytest.mark.parametrize(
    "there", ["a file", "a link to a file", "a link to nothing", "a pipe", "a folder of that name"]
)
def test_copy_writes_over_nothing(tuner: Tuner, there: str, tmp_path: Path) -> None:
    kept = tmp_path / "kept.txt"
    kept.write_text("mine")
    dest = tmp_path / "mine.py"
    match there:
        case "a file":
            dest.write_text("mine")
        case "a link to a file":
            dest.symlink_to(kept)
        case "a link to nothing":
            dest.symlink_to(tmp_path / "elsewhere.py")
        case "a pipe":
            os.mkfifo(dest)
        case _:
            dest.mkdir()
            (dest / f"{TINY}.py").write_text("mine")

    result = tuner("copy", TINY, dest)

    assert result.code == 2
    assert "nothing was overwritten" in result.err
    assert kept.read_text() == "mine"
    assert not (tmp_path / "elsewhere.py").exists()


def test_a_pipe_is_waited_for_by_no_command(tuner: Tuner) -> None:
    for name in ("pipe.py", "pipe.json", "pipe.jsonl"):
        os.mkfifo(name)

    for arguments in (["show", "./pipe.py"], ["check", "./pipe.json"], ["train", TINY, "--data", "pipe.jsonl"]):
        assert tuner(*arguments).code == 2


def hostile_model(folder: Path) -> Path:
    """Return a copy of the tiny model whose config and tokenizer ask for code of their own."""
    shutil.copytree(tiny(), folder)
    for name, classes in (
        ("config.json", {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}),
    ):
        facts = json.loads((folder / name).read_text(encoding="utf-8"))
        (folder / name).write_text(json.dumps({**facts, "auto_map": classes}), encoding="utf-8")
    (folder / "evil.py").write_text(f"open({str(folder.parent / 'canary')!r}, 'w').close()\n")
    return folder


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("command", sorted(of_recipes().keys() - {"smoke", "tune"}))  # which train
def test_a_model_that_brings_code_does_not_get_to_run_it(tuner: Tuner, command: str, tmp_path: Path) -> None:
    model = hostile_model(tmp_path / "model")

    result = tuner(*(word.replace("@", TINY) for word in of_recipes()[command]), "--model", model)

    assert result.code == 0, result.err
    assert not (tmp_path / "canary").exists()


FUNCTION = """
_base_ = "tiny_full_custom_e1"
train_dataloader = dict(dataset=dict(path="rows.jsonl", format="subprocess:Popen"))
"""


@pytest.mark.usefixtures("nothing_starts", "environment")
@pytest.mark.parametrize("command", ACT)
def test_a_function_of_an_installed_package_is_no_row_function(tuner: Tuner, command: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    # Popen takes the keys of a dict for a command line.
    (tmp_path / "rows.jsonl").write_text('{"touch": 1, "canary": 2}\n')

    result = tuner(*(word.replace("@", "./mine.py") for word in of_recipes()[command]))

    assert result.code == 2
    assert "'subprocess:Popen' refers to code of an installed package" in result.out + result.err
    assert "--allow-code" in result.out + result.err
    assert not (tmp_path / "canary").exists()


@pytest.mark.usefixtures("nothing_starts", "environment")
@pytest.mark.parametrize("command", ["train", "check"])
def test_a_command_that_a_recipe_names_runs_only_where_the_user_allows_it(
    tuner: Tuner, command: str, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(f"_base_ = '{TINY}'\nlog = dict(notify='touch canary')\n")

    result = tuner(command, "./mine.py")

    assert result.code == 2
    assert "log.notify = 'touch canary' names a command" in result.out + result.err
    assert "mine.py:2" in result.out + result.err and "--allow-code" in result.out + result.err
    assert tuner("train", "./mine.py", "--dry-run", "--allow-code").code == 0
    assert tuner("train", "./mine.py", "--dry-run", "--set", "notify=true").code == 0, "what is typed is the user's"
    assert not (tmp_path / "canary").exists()


@pytest.mark.usefixtures("nothing_starts")
def test_a_base_whose_path_reads_like_a_flag_is_a_file_all_the_same(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "--set x").mkdir()
    (tmp_path / "--set x" / "base.py").write_text(FUNCTION)
    (tmp_path / "mine.py").write_text("_base_ = '--set x/base.py'\n")
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')

    result = tuner("train", "mine.py", "--dry-run")

    assert result.code == 2, result.out
    assert "'subprocess:Popen' refers to code of an installed package" in result.err
    assert "--set x/base.py:3" in result.err


@pytest.mark.usefixtures("nothing_starts")
def test_a_function_that_the_user_names_is_the_users(tuner: Tuner, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FUNCTION)
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n')

    assert tuner("train", "./mine.py", "--dry-run", "--allow-code").code == 0
    assert tuner("train", "./mine.py", "--dry-run", "--set", "train_dataloader.dataset.format=a.b:c").code == 0
    assert tuner("show", "./mine.py").code == 0


PLANTED = ("json", "torch", "click", "difflib", "deepspeed", "datasets", "pydantic", "sitecustomize", "typing")
INSTALLED = [str(Path(sys.executable).with_name("tuner"))]


def clean(**more: str) -> dict[str, str]:
    """Return this process's environment as a shell's: this checkout is the installed package."""
    env = {key: value for key, value in os.environ.items() if key not in LAUNCHER}
    return env | {"PYTHONPATH": str(assets.PACKAGE.parent)} | more


@pytest.mark.parametrize("start", [[sys.executable, "-m", "tuner"], INSTALLED], ids=["-m", "script"])
def test_modules_in_the_working_directory_are_not_imported(start: list[str], tmp_path: Path) -> None:
    if not Path(start[0]).exists():
        pytest.skip("the package is not installed as a script")
    for name in PLANTED:
        (tmp_path / f"{name}.py").write_text("open('canary', 'w')\nraise SystemExit('planted')\n")

    done = subprocess.run(
        [*start, "train", TINY, "--dry-run"], cwd=tmp_path, env=clean(), capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"{name}.py" for name in PLANTED)


_IN_PYTHON = [sys.executable, "-c", "from tuner.cli import main; main()"]
_AS_MODULE = [sys.executable, "-m", "tuner"]


@pytest.mark.parametrize(
    ("entries", "start"),
    [
        ("{checkout}:", _IN_PYTHON),
        ("{checkout}:", _AS_MODULE),
        (":{checkout}", _AS_MODULE),
        ("{checkout}::/nonexistent", _IN_PYTHON),
    ],
)
def test_an_empty_entry_of_pythonpath_brings_in_no_library_of_the_working_directory(
    entries: str, start: list[str], tmp_path: Path
) -> None:
    """`export PYTHONPATH=$PYTHONPATH:/my/modules` makes one, and Python takes it for the working directory."""
    for name in ("click", "torch", "pydantic", "yaml", "datasets"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('canary', 'w')\nraise SystemExit('planted')\n")
    environment = clean(PYTHONPATH=entries.format(checkout=assets.PACKAGE.parent))

    done = subprocess.run(
        [*start, "train", TINY, "--dry-run"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "canary").exists()


ENVIRONMENTS: dict[str, tuple[dict[str, str | None], int]] = {
    "a command as a count": ({"NPROC_PER_NODE": "8; touch canary"}, 2),
    "a digit that is none": ({"NNODES": "²"}, 2),
    "an address with a command": ({"NNODES": "2", "NODE_RANK": "0", "ADDR": "$(touch canary)"}, 0),
    "junk of Slurm": ({"SLURM_STEP_ID": "\u0663", "SLURM_PROCID": "x", "SLURM_STEP_NUM_TASKS": "²"}, 0),
    "no HOME": ({"HOME": None}, 0),
    "a HOME that is not there": ({"HOME": "/nonexistent"}, 0),
    "an HF_HOME that cannot be written": ({"HF_HOME": "/proc/nowhere"}, 0),
    "no TMPDIR": ({"TMPDIR": "/nonexistent"}, 0),
    "an empty PATH": ({"PATH": ""}, 0),
    "no PATH": ({"PATH": None}, 0),
    "no locale": ({"LANG": "C", "LC_ALL": "C"}, 0),
    "no locale, and none in its place": ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, 2),
    "an ASCII terminal": ({"PYTHONIOENCODING": "ascii", "TERM": "\x1b[2J", "COLUMNS": "x"}, 0),
    "GPUs that are none": ({"CUDA_VISIBLE_DEVICES": "x,-1,99999999999999999999"}, 0),
}


READ_AT_A_START = ("HOME", "HF_HOME", "LC_ALL", "PYTHONIOENCODING")
"""What Python or a library reads before a command begins: such an environment starts a process of its own."""


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_no_environment_ends_in_a_traceback(name: str, tmp_path: Path) -> None:
    changes, code = ENVIRONMENTS[name]
    env = {key: value for key, value in (clean() | changes).items() if value is not None}
    (tmp_path / "größe_雪.py").write_text(f'_base_ = "{TINY}"\n', encoding="utf-8")
    words = ["train", "./größe_雪.py", "--dry-run"]

    done: Ended | subprocess.CompletedProcess[str]
    if changes.keys() & READ_AT_A_START:
        argv = [sys.executable, "-m", "tuner", *words]
        options: Any = {"encoding": "utf-8", "errors": "replace", "timeout": 60}
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, **options)
    else:
        done = warm().run(words, cwd=tmp_path, env=env)

    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["größe_雪.py"]
