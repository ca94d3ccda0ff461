"""The pages in docs/ are true: tables are current, examples are read as they stand, commands work."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.docs import recipes
from tuner.cli import tuner
from tuner.data import formats
from tuner.recipes import catalog
from tuner.recipes.loading import load

PAGE = recipes.TARGET.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RECIPES = [example for example in EXAMPLES if "_base_" in example]
PARTS = [example for example in EXAMPLES if example.startswith('"""') and example not in RECIPES]
PAGES = [PAGE, *(recipes.TARGET.with_name(name).read_text(encoding="utf-8") for name in ("plan.md", "long-context.md"))]
COMMANDS = [line for page in PAGES for line in re.findall(r"^(tuner .*?)(?: +#.*)?$", page, re.MULTILINE)]
_SHOWN = re.compile(r"```sh\n(tuner [^\n]*)\n```\n\n```text\n([^`]*)```")
SHOWN = [pair for page in PAGES for pair in _SHOWN.findall(page)]


@pytest.fixture(autouse=True)
def in_a_folder_with_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}\n'
    )
    monkeypatch.chdir(tmp_path)


def test_the_tables_are_current() -> None:
    is_current = recipes.render(PAGE) == PAGE

    assert is_current, "python -m tests.docs.recipes --write"


def test_every_part_is_in_a_table() -> None:
    for kind in catalog.KINDS:
        for name in catalog.names(kind):
            assert f"\n| `{name}` |" in PAGE, name


def test_there_are_examples_of_everything() -> None:
    assert (len(RECIPES), len(PARTS), len(EXAMPLES)) == (4, 2, 7)
    assert len(COMMANDS) >= 17
    assert len(SHOWN) == 5


@pytest.mark.parametrize("example", RECIPES)
def test_an_example_of_a_recipe_loads(example: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(example)

    load("./mine.py")


@pytest.mark.parametrize("example", PARTS)
def test_an_example_of_a_part_fits_the_schema(example: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f'{example}\n_base_ = "tiny_lora_custom_e1"\n')

    load("./mine.py")


def test_the_example_of_a_row_function_makes_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (example for example in EXAMPLES if "def my_function" in example)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_module.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)

    made = formats.read("my_package.my_module:my_function", {"title": "Why?", "body": "So."}, "rows.jsonl:1")

    assert made == formats.Chat([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}])


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_works(line: str) -> None:
    result = CliRunner().invoke(tuner, shlex.split(line)[1:])

    assert result.exit_code == 0, result.exception


@pytest.mark.parametrize(("line", "shown"), SHOWN)
def test_a_command_prints_what_stands_below_it(line: str, shown: str) -> None:
    result = CliRunner().invoke(tuner, shlex.split(line)[1:])
    printed = "\n".join(text.rstrip() for text in result.output.splitlines())

    assert shown in f"{printed}\n"
