"""What agents read (docs/skill/SKILL.md, docs/llms.txt) names only what there is: pages, flags, codes, JSON keys.

`tests/test_docs.py` runs the commands of these pages too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from tests import pages
from tests.cli.command import beside
from tests.launch.plans import TINY, ended_run
from tuner.cli import COMMANDS, tuner
from tuner.cli.help import Command
from tuner.recipes.recipe_file import read_part

SKILL = pages.ROOT / "docs/skill/SKILL.md"
TEXT = SKILL.read_text(encoding="utf-8")


def commands_with(flag: str) -> set[str]:
    """Return the commands that have an option."""
    return {name for name in COMMANDS if all(any(flag in param.opts for param in of.params) for of in below(name))}


def below(name: str) -> Iterator[click.Command]:
    """Yield a command, or those of a group."""
    command = tuner.get_command(click.Context(tuner), name)
    assert command
    yield from command.commands.values() if isinstance(command, click.Group) else (command,)


JSON_KEYS = {
    words.removeprefix("tuner "): re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", keys))
    for name in COMMANDS
    for command in below(name)
    if isinstance(command, Command)
    for words, keys in command.json_keys.items()
    if words.endswith("--json")
}
"""The arguments of a command -> the keys at the top of its JSON, as it says itself; in parentheses stand others."""


@pytest.mark.parametrize("page", [SKILL, pages.ROOT / "docs/llms.txt"], ids=["skill", "llms.txt"])
def test_what_agents_are_sent_to_is_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8"))

    assert len(links) > 5
    assert [link for link in links if not (page.parent / link).is_file()] == []


def test_every_flag_that_the_skill_names_is_one_of_a_command() -> None:
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", TEXT))

    assert {"--json", "--resume", "--deepspeed"} < flags
    assert {flag for flag in flags if not commands_with(flag)} == set()


def test_the_skill_has_the_exit_codes_and_the_commands_with_json() -> None:
    codes = (pages.ROOT / "docs/reference/exit-codes.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| (\d+(?: \+ n)?) \|", TEXT, re.M)

    assert named == [code.replace("`", "") for code in re.findall(r"^\| (`\d+`(?: \+ n)?) \|", codes, re.M)]
    assert {words.split()[0] for words in JSON_KEYS} | {"train"} == commands_with("--json") == {*COMMANDS}


def printed(words: str) -> Any:
    """Return the JSON that a command prints; of a list its first item."""
    stand_ins = {"RECIPE": TINY, "CODE": "bad-recipe", "SHELL": "bash", "FOLDER": "folder"}
    stand_ins |= dict.fromkeys(("RUN", "RUN_A", "RUN_B"), "work_dirs/run")
    stand_ins |= {"FILE": "rows.jsonl" if "dataset" in words else "mine.yaml", "NAME": "rtx4090"}
    arguments = [stand_ins.get(word, word) for word in words.split()]
    given = {word.partition("=")[0] for word in arguments}
    more = [word for word in beside(arguments[0]) if word.partition("=")[0] not in given]
    more += ["--method", "lora"] if arguments[1] == "--gpu" else []  # all methods take seconds
    result = CliRunner().invoke(tuner, [*arguments, *more])
    assert result.exit_code == 0, result.output
    value = json.loads(result.stdout)
    return value[0] if isinstance(value, list) else value


_NOT_TRIED = ("chat", "eval", "export", "serve", "smoke", "tune")
"""Commands that train, or load a model."""
_SLOW = ("check", "data", "doctor")
_TRIED = [
    pytest.param(words, marks=[pytest.mark.long] if words.split()[0] in _SLOW else [])
    for words in JSON_KEYS
    if words.split()[0] not in _NOT_TRIED
]


@pytest.mark.parametrize("words", _TRIED)
def test_the_json_of_a_command_has_the_keys_that_the_skill_names(words: str, here: Path) -> None:
    Path("mine.yaml").write_text("model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\ndataset: x/y\n")

    Path("rows.jsonl").write_text('{"prompt": "Why?", "response": "So."}\n')
    Path("folder").mkdir()
    Path("folder/config.json").write_text(json.dumps(read_part("models", "qwen3_8b").values["architecture"]))
    ended_run(Path("work_dirs/run"))

    found = printed(words)
    assert set(JSON_KEYS[words]) - set(found) == set()
    assert found["version"] == 1


@pytest.mark.long
def test_the_json_of_a_run_and_of_its_result_has_the_keys_that_the_skill_names(tmp_path: Path) -> None:
    argv = ["train", TINY, "--max-steps", "1", "--deepspeed", "none", "--json", "--work-dir", str(tmp_path / "run")]
    events = subprocess.run([sys.executable, "-m", "tuner", *argv], capture_output=True, text=True, check=True).stdout
    found = {line["event"]: line for line in map(json.loads, events.splitlines())}
    named = re.findall(r"`(started|step|validation|checkpoint|ended)` \(([^)]*)\)", TEXT)

    assert {name for name, _ in named} <= set(found)
    for name, keys in named:
        assert set(re.findall(r"`(\w+)`", keys)) - set(found[name]) == set(), name
    for words in ("eval RUN --json", "chat RUN --json", "runs --json"):
        place = str(tmp_path if words.startswith("runs") else tmp_path / "run")
        argv = [words.split()[0], place, "--json"]
        out = subprocess.run(
            [sys.executable, "-m", "tuner", *argv], input="Why?", capture_output=True, text=True, check=True
        )
        value = json.loads(out.stdout)
        assert set(JSON_KEYS[words]) - set(value[0] if isinstance(value, list) else value) == set(), words
