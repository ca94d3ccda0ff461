"""`tuner show`, `copy`, `--help`, and the process around them."""

from __future__ import annotations

import gc
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest

from tests.cli.command import Tuner
from tuner import __version__, cli
from tuner.recipes import loading

TINY = "tiny_full_sample_e1"

pytestmark = pytest.mark.usefixtures("nothing_starts")


# copy


def test_a_copy_trains_to_the_same_values(tuner: Tuner, tmp_path: Path) -> None:
    result = tuner("copy", TINY)

    assert result.out == f"Wrote {TINY}.py. Next: tuner train ./{TINY}.py\n"
    assert loading.load(str(tmp_path / f"{TINY}.py")).values == loading.load(TINY).values
    assert "# The gradient's 2-norm" in (tmp_path / f"{TINY}.py").read_text()


@pytest.mark.parametrize("dest", ["mine.py", "a folder", "größe/mine.py"])
def test_a_copy_goes_where_it_is_told_with_the_overrides(tuner: Tuner, tmp_path: Path, dest: str) -> None:
    (tmp_path / "a folder").mkdir()
    (tmp_path / "größe").mkdir()

    result = tuner("copy", TINY, dest, "--set", "lr=0.5")

    assert result.code == 0, result.err
    (written,) = tmp_path.rglob("*.py")
    assert written == tmp_path / (dest if dest.endswith(".py") else f"{dest}/{TINY}.py")
    assert loading.load(str(written)).config.optim_wrapper.optimizer.lr == 0.5


@pytest.mark.parametrize(("dest", "told"), [("mine.txt", "does not end in .py"), ("no/folder/x.py", "no folder")])
def test_a_dest_that_is_no_recipe_is_refused(tuner: Tuner, tmp_path: Path, dest: str, told: str) -> None:
    result = tuner("copy", TINY, dest)

    assert result.code == 2
    assert told in result.err
    assert list(tmp_path.iterdir()) == []


# The process


def test_h_is_short_for_help(tuner: Tuner) -> None:
    assert tuner("-h").out == tuner("--help").out


def test_the_version_is_the_packages_and_the_libraries_follow(tuner: Tuner) -> None:
    first, *others = tuner("--version").out.splitlines()

    assert first == f"tuner, version {__version__}"
    told = dict(line.split()[:2] for line in others)
    assert told["python"] == sys.version.split()[0]
    assert {name: told[name] for name in ("torch", "deepspeed", "transformers", "trl", "peft", "accelerate")} == {
        name: metadata.version(name) for name in ("torch", "deepspeed", "transformers", "trl", "peft", "accelerate")
    }


def test_a_commands_imports_are_not_searched_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    imports: list[str] = []
    monkeypatch.setattr(cli, "import_module", lambda name: imports.append(f"{name} {gc.isenabled()}") or cli)
    monkeypatch.delitem(sys.modules, "tuner.cli.explain", raising=False)
    monkeypatch.setattr(cli, "command", click.Command("explain"), raising=False)

    cli.tuner.get_command(click.Context(cli.tuner), "explain")

    assert imports == ["tuner.cli.explain False"]
    assert gc.isenabled()


def _run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_module_is_the_command(tmp_path: Path) -> None:
    done = _run("-m", "tuner", "train", "tiny_ful_sample_e1", folder=tmp_path)

    assert done.returncode == 2
    assert [line.split(": ")[0] for line in done.stderr.splitlines()] == ["error[bad-recipe]", "More"]
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", ["list", "list --json", f"show {TINY}", f"train {TINY} --dry-run"])
def test_a_reader_that_stops_reading_is_no_error(tmp_path: Path, arguments: str) -> None:
    command = f"set -o pipefail; '{sys.executable}' -m tuner {arguments} | head -c 1"

    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)

    assert len(done.stdout) == 1
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr
