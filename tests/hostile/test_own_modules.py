"""A module is the user's own if it is in a folder of PYTHONPATH and no distribution brought it; all else is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.command import Tuner
from tests.cli.conftest import nothing_starts as nothing_starts
from tests.cli.conftest import tuner as tuner
from tuner.recipes import trust

pytestmark = pytest.mark.usefixtures("nothing_starts")
FUNCTION = "def read(row):\n    return str(row['a'])\n"


def recipe(module: str) -> None:
    dataset = f"dict(path='rows.jsonl', format='{module}:read')"
    text = f"_base_ = 'tiny_full_custom_e1'\ntrain_dataloader = dict(dataset={dataset})\n"
    Path("mine.py").write_text(text)
    Path("rows.jsonl").write_text('{"a": 1}\n')


def module(folder: Path, name: str = "rows_of_mine.py") -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(FUNCTION)
    return folder


def distribution(folder: Path, *files: str, **texts: str) -> None:
    info = folder / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for name, text in texts.items():
        (info / name.replace("__", ".")).write_text(text)


@pytest.fixture(autouse=True)
def no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


def named(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    """Name folders in PYTHONPATH, as a shell does before Python starts."""
    for folder in reversed(folders):
        monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, folders)))


def test_a_module_in_a_folder_of_pythonpath_is_the_users(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, module(tmp_path / "mine"))
    recipe("rows_of_mine")

    assert tuner("train", "./mine.py", "--dry-run").code == 0


WAYS = ("user site", "beside the recipe", "empty entry", "site-packages on PYTHONPATH", "egg", "editable", "missing")


@pytest.mark.parametrize("way", WAYS)
def test_every_other_module_needs_the_flag(
    tuner: Tuner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    folder = tmp_path / "code"
    match way:
        case "user site":  # pip install --user, Debian's dist-packages, .pth files
            monkeypatch.syspath_prepend(module(folder))
        case "beside the recipe":
            module(tmp_path)
        case "empty entry":  # PYTHONPATH=/x: is the working directory too
            monkeypatch.syspath_prepend(module(tmp_path))
            monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}")
        case "site-packages on PYTHONPATH":
            distribution(module(folder), "rows_of_mine.py", "acme-1.0.dist-info/RECORD")
            named(monkeypatch, folder)
        case "egg":
            module(folder)
            (folder / "acme.egg-info").mkdir()
            (folder / "acme.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
            (folder / "acme.egg-info" / "top_level.txt").write_text("rows_of_mine\n")
            named(monkeypatch, folder)
        case "editable":
            noted = {"url": module(folder).as_uri(), "dir_info": {"editable": True}}
            distribution(tmp_path / "site", direct_url__json=json.dumps(noted))
            monkeypatch.syspath_prepend(tmp_path / "site")
            named(monkeypatch, folder)
        case _:
            pass
    recipe("rows_of_mine")

    for command in (["train", "--dry-run"], ["data"], ["check"]):
        result = tuner(command[0], "./mine.py", *command[1:])

        assert result.code == 2, (way, command)
        assert "rows_of_mine:read" in result.out + result.err and "--allow-code" in result.out + result.err
    assert tuner("train", "./mine.py", "--dry-run", "--allow-code").code == 0
    typed = "train_dataloader.dataset.format=rows_of_mine:read"
    assert tuner("train", "./mine.py", "--dry-run", "--set", typed).code == 0


@pytest.mark.parametrize("name", ["click", "os.path", "xml.sax", "tuner.files", "sys", "builtins", "numpy.testing"])
def test_what_is_installed_or_pythons_own_says_where_it_is(name: str) -> None:
    assert trust.foreign_home(name)


def test_a_namespace_that_reaches_outside_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, module(tmp_path / "mine", "shared/rows.py"))
    assert trust.foreign_home("shared.rows") is None

    monkeypatch.syspath_prepend(module(tmp_path / "other", "shared/others.py"))

    assert trust.foreign_home("shared.rows")


def test_all_that_the_flag_allows_is_shown_at_once(tuner: Tuner) -> None:
    """Who adds the flag for one of them allows the others too."""
    recipe("subprocess")
    with Path("mine.py").open("a") as file:
        file.write("log = dict(notify='touch canary')\nmodel = dict(trust_remote_code=True)\n")

    result = tuner("train", "./mine.py", "--dry-run")

    assert result.code == 2
    for code in ("subprocess:read", "touch canary", "trust_remote_code"):
        assert code in result.err


@pytest.mark.parametrize("key", ["tools", "environment", "rewards"])
def test_a_tool_of_a_file_needs_the_flag(tuner: Tuner, tmp_path: Path, key: str) -> None:
    ran = tmp_path / "ran"
    Path("others.py").write_text(f"open({str(ran)!r}, 'w')\n")
    value = "'others.py:thing'" if key == "environment" else "['others.py:thing']"
    Path("mine.py").write_text(f"_base_ = 'tiny_grpo_full_custom_e1'\nobjective = dict({key}={value})\n")
    Path("rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "1"}], "answer": "1"}\n')

    for command in ("train", "check", "data"):
        result = tuner(command, "./mine.py", "--data", "rows.jsonl")

        assert result.code == 2 and not ran.exists(), command
        assert "others.py:thing" in result.out + result.err and "--allow-code" in result.out + result.err
    more = ("--dry-run", "--data", "rows.jsonl")
    assert tuner("train", "./mine.py", *more, "--allow-code").code == 0
    typed = ("--set", f"objective.{key}={value}")
    assert tuner("train", "tiny_grpo_full_custom_e1", *more, *typed).code == 0 and not ran.exists()
