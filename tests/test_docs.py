"""README and docs are true: commands work, examples are read as they stand, tables hold everything."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from docs import generate, transcripts
from tests import pages
from tuner.cli import COMMANDS, runs, tuner
from tuner.data import formats
from tuner.recipes import catalog
from tuner.recipes.loading import load
from tuner.recipes.schema import schema_keys
from tuner.zero.presets import RUNGS

pytestmark = pytest.mark.usefixtures("here")

TEXTS = {str(page.relative_to(pages.ROOT)): page.read_text(encoding="utf-8") for page in pages.PAGES}
WITH_COMMANDS = [name for name, text in TEXTS.items() if pages.commands(text)]
EXAMPLES = [example for text in TEXTS.values() for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
RECIPES = [example for example in EXAMPLES if "_base_" in example]
IN_YAML = [text for page in TEXTS.values() for text in re.findall(r"```yaml\n(.*?)```", page, re.S) if "_base_" in text]
PARTS = [example for example in EXAMPLES if example.startswith('"""') and example not in RECIPES]
_SHOWN = re.compile(r"<!-- printed[^\n]* by: (tuner plan [^\n]*) -->\n\n```text\n([^`]*)```")
SHOWN = [
    (line, shown)
    for text in TEXTS.values()
    for line, shown in _SHOWN.findall(text)
    if not re.search("--data|--model|;", line) and "\n...\n" not in shown
]
"""Plans that need no file, and what a page shows of them."""


@pytest.mark.parametrize("page", WITH_COMMANDS)
def test_the_commands_of_a_page_work_in_their_order(page: str, tmp_path: Path) -> None:
    pages.lay_out(tmp_path, TEXTS[page])
    shown = pages.commands(TEXTS[page])

    wrong = {f"{before}tuner {words}": why for before, words in shown if (why := pages.failure(before, words))}

    assert wrong == {}


def flags_of(option: click.Parameter) -> list[str]:
    return [*option.opts, *option.secondary_opts]


def test_a_command_within_a_text_exists_with_its_options() -> None:
    context = click.Context(tuner)
    wrong = []
    for page, text in TEXTS.items():
        for name, rest in re.findall(r"`(?:[A-Z_]+=\S+ )*tuner ([a-z]+)\b([^`]*)`", text):
            command = tuner.get_command(context, name)
            of_parts = getattr(command, "commands", {}).values()  # `tuner new model`
            known = {
                flag
                for known_command in (command, *of_parts)
                if known_command
                for option in known_command.params
                for flag in flags_of(option)
            }
            unknown = {flag for flag in re.findall(r"(?<!\S)--?[a-z][\w-]*", rest) if flag not in {"--help", *known}}
            if not command or unknown:
                wrong.append((page, name, unknown))

    assert wrong == []


def test_the_pages_show_every_command_and_enough_of_everything() -> None:
    shown = [words for text in TEXTS.values() for _, words in pages.commands(text)]

    assert set(COMMANDS) <= {words.split()[0] for words in shown}
    assert len(shown) > 150
    assert len(RECIPES) >= 4
    assert len(PARTS) >= 2
    assert len(SHOWN) >= 6


def pages_to_write() -> list[str]:
    return [str(page.relative_to(pages.ROOT)) for page, _ in generate.outdated()]


@pytest.mark.long
def test_the_committed_pages_show_what_commands_print_today() -> None:
    assert pages_to_write() == [], f"Run: {generate.COMMAND}"


def test_the_committed_pages_hold_what_the_code_says_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "filled", lambda text, **_: text)

    assert pages_to_write() == [], f"Run: {generate.COMMAND}"


def test_a_page_that_is_not_what_the_code_says_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcripts, "filled", lambda text, **_: text)
    table = generate.GENERATED["methods"]
    monkeypatch.setitem(generate.GENERATED, "methods", table._replace(text=lambda: "| other |\n"))

    looked_at = [pages.ROOT / "docs" / name for name in ("plan.md", "recipes.md")]
    assert [page.name for page, _ in generate.outdated(looked_at)] == ["recipes.md"]


def test_a_value_of_a_preset_without_a_reason_is_told_before_any_page_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reasons.toml").touch()
    monkeypatch.setattr(generate, "REASONS", tmp_path / "reasons.toml")
    monkeypatch.setattr(generate, "outdated", lambda *_, **__: pytest.fail("pages are made"))

    with pytest.raises(ValueError, match=r"offload_optimizer\.device"):
        generate.main()


RECORDED_RUNS = re.compile(r"<!-- recorded by: [^\n]*tuner runs[^\n]* -->\n(.*?)<!-- end -->", re.DOTALL)


def test_recorded_lists_of_runs_have_columns_of_today_alone() -> None:
    blocks = [block for text in TEXTS.values() for block in RECORDED_RUNS.findall(text)]
    heads = {tuple(re.split("  +", line)) for block in blocks for line in block.splitlines() if line.startswith("run ")}

    titles = ("run", "state", *(column.title for column in runs._COLUMNS), "outcome")
    # A column without a figure is left out.
    assert heads and all(head == tuple(title for title in titles if title in head) for head in heads)


def test_what_is_written_into_a_page_while_it_is_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, texts = tmp_path / "page.md", []
    page.write_text("first\n", encoding="utf-8")

    def filled(text: str, **_: bool) -> str:
        texts.append(text)
        page.write_text("edited\n", encoding="utf-8")
        return f"{text}made\n"

    monkeypatch.setattr(transcripts, "filled", filled)

    assert [*generate.outdated([page])] == [(page, "edited\nmade\n")]
    assert texts == ["first\n", "edited\n"]


def test_every_reference_page_says_that_it_is_generated_and_from_which_file() -> None:
    for name, text in TEXTS.items():
        if name.startswith("docs/reference/"):
            assert "\n*Generated from " in text[:400], name
            assert "<!-- generated: " in text, name
    for name in generate.GENERATED:
        assert any(f"<!-- generated: {name} from " in text for text in TEXTS.values()), name


def test_every_part_command_and_key_is_on_a_generated_page() -> None:
    parts, commands, keys = (
        TEXTS[f"docs/{name}.md"] for name in ("reference/parts", "reference/commands", "reference/keys")
    )
    recipes = TEXTS["docs/recipes.md"]

    for kind in catalog.KINDS:
        for name in catalog.names(kind):
            assert f"\n| `{name}` |" in parts + recipes, name
    for name in COMMANDS:
        assert f"\n## tuner {name}\n" in commands, name
    for key in schema_keys():
        of_config_json = "architecture" in key or "teacher_architecture" in key
        inside = of_config_json or key[0] == "val_dataloader" or key[:3] == ("train_dataloader", "dataset", "mixture")
        assert inside or f"`{'.'.join(key)}" in keys, key


def test_every_key_says_what_it_does() -> None:
    rows = re.findall(r"^\| (`[\w.]+`) \|.*\|([^|]*)\|$", TEXTS["docs/reference/keys.md"], re.MULTILINE)

    assert len(rows) > 80
    assert [key for key, what in rows if not what.strip()] == []


@pytest.mark.parametrize(
    ("file", "text"),
    [
        *(("mine.py", example) for example in RECIPES),
        *(("mine.yaml", example) for example in IN_YAML),
        *(("mine.py", f'{example}\n_base_ = "tiny_lora_custom_e1"\n') for example in PARTS),
    ],
)
def test_an_example_of_a_recipe_or_a_part_loads(file: str, text: str, tmp_path: Path) -> None:
    pages.lay_out(tmp_path, "")
    (tmp_path / file).write_text(text)

    load(f"./{file}")


def test_the_example_of_a_row_function_makes_a_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (example for example in EXAMPLES if "def my_function" in example)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "my_module.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)

    made = formats.read_sample("my_package.my_module:my_function", {"title": "Why?", "body": "So."}, "rows.jsonl:1")

    assert made == formats.Chat([{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}])


@pytest.mark.parametrize(("line", "shown"), SHOWN)
def test_a_command_prints_what_stands_below_it(line: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")  # as the pages are made

    result = CliRunner().invoke(tuner, shlex.split(line)[1:])
    printed = "\n".join(text.rstrip() for text in result.output.splitlines())

    assert shown in f"{printed}\n", f"Run: {generate.COMMAND}"


@pytest.mark.parametrize("preset", RUNGS)
def test_the_docs_say_when_to_take_each_level_of_auto(preset: str) -> None:
    assert f"| `{preset}` |" in TEXTS["docs/deepspeed-values.md"]
