"""Calls of tools: each failure is a result that the model reads and a line in tool_failures.jsonl, and ends no run."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trl

from tests.data.conftest import make_tokenizer
from tests.each import each
from tests.refused import refused
from tuner.errors import ModelError, ToolError
from tuner.recipes.schema.objectives.grpo import Grpo
from tuner.rewards import isolated_process
from tuner.rewards.built_in import text_of
from tuner.rewards.isolated_process import CallFailure
from tuner.rewards.tool_calls import Rollouts, ToolFailure, calls_in, described
from tuner.rewards.tool_process import IsolatedTools
from tuner.rewards.tool_templates import known, refuse_changing, refuse_unknown

TOOLS = '''
import os, sys, time

def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b

async def later(text: str) -> dict:
    """Says it later.

    Args:
        text: What to say.
    """
    return {"said": text}

def fails(how: str):
    """Fails.

    Args:
        how: In which way.
    """
    if how == "raises":
        raise KeyError("no such page")
    if how == "exits":
        sys.exit(3)
    if how == "hangs":
        time.sleep(60)
    if how == "dies":
        os.kill(os.getpid(), 9)
'''
GAME = '''
import time
from pathlib import Path

class Game:
    def __init__(self):
        self.log = []

    def reset(self, answer):
        self.steps, self.answer = 0, answer
        return f" (guess up to {answer})"

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.
        """
        self.steps += 1
        if number < 0:
            time.sleep(60)
        return f"step {self.steps}: {'right' if number == self.answer else 'wrong'}"

    def get_reward(self):
        return 1.0 / self.steps if self.steps else None

    def close(self):
        Path(__file__).with_name("closed").open("a").write("x")

    def _hidden(self):
        """No tool."""
'''


def block(folder: Path, *, game: bool = False, names: tuple[str, ...] = ("add", "later", "fails"), **keys: Any) -> Grpo:
    (folder / "my_tools.py").write_text(TOOLS)
    (folder / "my_game.py").write_text(GAME)
    tools = [f"{folder}/my_tools.py:{name}" for name in names]
    environment = f"{folder}/my_game.py:Game" if game else None
    rewards = ["environment" if game else "length"]
    return Grpo.model_validate(
        {"type": "grpo", "rewards": rewards, "tools": tools, "environment": environment, "tool_timeout": 1.0, **keys}
    )


@contextmanager
def rollouts(made: Grpo, folder: Path, shorten: Callable[[str], str] = str) -> Iterator[Rollouts]:
    calls = Rollouts(made, described(made).schemas, folder / "tool_failures.jsonl", shorten)
    try:
        yield calls
    finally:
        calls.close()


def listed(folder: Path) -> list[dict[str, Any]]:
    file = folder / "tool_failures.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_tool_is_described_by_its_hints_and_its_docstring(tmp_path: Path) -> None:
    made = block(tmp_path, game=True)

    schemas, scores = described(made, {"answer": 3})

    assert [schema["function"]["name"] for schema in schemas] == ["add", "later", "fails", "guess"] and scores
    assert schemas[0]["function"]["parameters"]["properties"]["b"] == {
        "type": "integer",
        "description": "The second number.",
    }


@each(
    [
        ("def bad(a: int):\n    return a", "no docstring"),
        ("def bad(a):\n    '''Does.\n\n    Args:\n        a: A number.\n    '''", "missing a type hint"),
        ("def bad(a: int):\n    '''Does.'''", "no description for the argument 'a'"),
        ("def bad(a: 'Unknown'):\n    '''Does.\n\n    Args:\n        a: A number.\n    '''", "Unknown"),
    ]
)
def test_a_function_that_cannot_be_described_is_refused_with_its_file_and_line(source: str, problem: str) -> None:
    folder = Path(tempfile.mkdtemp())
    made = block(folder, names=("bad",))
    (folder / "my_tools.py").write_text(source)

    with refused(ToolError, "my_tools.py:1", problem, repr("bad")):
        described(made)


@each(
    [
        ("raises", "no such page"),
        ("exits", "SystemExit: 3"),
        ("hangs", "more than 1 s"),
        ("dies", "SIGKILL"),
        ("returns nothing", "returned None"),
    ]
)
def test_a_failure_of_any_kind_is_a_result_and_a_line_and_the_next_call_works(how: str, problem: str) -> None:
    folder = Path(tempfile.mkdtemp())
    with rollouts(block(folder), folder) as calls:
        calls.begin([{}])
        table = calls.table(0)

        with pytest.raises(ToolFailure, match=problem):
            table["fails"](how=how)
        assert table["add"](a=2, b=3) == "5"

    [line] = listed(folder)
    assert (line["tool"], json.loads(line["arguments"])) == ("fails", {"how": how}) and problem in line["problem"]


def test_unknown_tools_wrong_arguments_and_too_many_calls_fail_and_are_listed(tmp_path: Path) -> None:
    with rollouts(block(tmp_path, max_calls=3), tmp_path) as calls:
        calls.begin([{}, {}])
        table = calls.table(0)
        assert "anything" in table, "TRL would answer it by itself, and nothing would list that"
        for name, arguments in [("search", {"q": "x"}), ("add", {"a": 1}), ("add", {"a": 1, "b": 2, "name": "x"})]:
            with pytest.raises(ToolFailure):
                table[name](**arguments)
        with pytest.raises(ToolFailure, match="only 3 calls"):
            table["add"](a=1, b=2)
        assert calls.table(1)["later"](text="é") == '{"said": "é"}', "a completion has calls of its own"

    assert [line["tool"] for line in listed(tmp_path)] == ["search", "add", "add", "add"]


def test_tools_that_cannot_be_loaded_again_fail_and_are_listed(tmp_path: Path) -> None:
    with rollouts(block(tmp_path), tmp_path) as calls:
        calls.begin([{}])
        (tmp_path / "my_tools.py").write_text("wrong(")
        with pytest.raises(ToolFailure, match="SyntaxError"):
            calls.table(0)["add"](a=1, b=2)

    assert [line["tool"] for line in listed(tmp_path)] == ["add"]


def test_a_process_that_reads_no_more_blocks_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolated_process, "_IN_PIPE_S", 0.2)
    tools = IsolatedTools(block(tmp_path), environment=False)
    tools.start()
    assert tools._process
    os.kill(tools._process.pid, signal.SIGSTOP)

    with pytest.raises(CallFailure, match="SIGKILL"):
        tools({"do": "call", "name": "add", "arguments": {"a": "1" * 10_000_000, "b": 2}})


def test_a_run_that_is_asked_to_stop_calls_no_more_tools(tmp_path: Path) -> None:
    with rollouts(block(tmp_path, tool_timeout=100.0), tmp_path) as calls:
        calls.begin([{}])
        calls.is_asked_to_stop = lambda: True
        with pytest.raises(ToolFailure):
            calls.table(0)["fails"](how="hangs")

    assert not listed(tmp_path)


def test_a_time_limit_may_be_longer_than_any_run(tmp_path: Path) -> None:
    tools = IsolatedTools(block(tmp_path, tool_timeout=1e9), environment=False)

    assert tools({"do": "call", "name": "add", "arguments": {"a": 1, "b": 2}}) == {"result": "3"}
    tools.end()


def test_a_file_of_failures_that_is_full_says_so_and_grows_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolated_process, "_MAX_LISTED", 300)
    with rollouts(block(tmp_path, max_calls=50), tmp_path) as calls:
        calls.begin([{}])
        for _ in range(50):
            with pytest.raises(ToolFailure):
                calls.table(0)["x" * 5000](a="y" * 5000)

    first, last = listed(tmp_path)
    assert first["tool"].startswith("xx") and len(first["arguments"]) == 2000 and "full" in last["problem"]


def test_each_completion_has_an_environment_and_one_that_hangs_ends_no_other(tmp_path: Path) -> None:
    with rollouts(block(tmp_path, game=True), tmp_path) as calls:
        assert calls.begin([{"answer": 3}, {"answer": 4}]) == [" (guess up to 3)", " (guess up to 4)"]
        first, second = calls.table(0), calls.table(1)
        assert first["guess"](number=1) == "step 1: wrong" and second["guess"](number=4) == "step 1: right"
        with pytest.raises(ToolFailure, match="more than 1 s"):
            first["guess"](number=-1)
        with pytest.raises(ToolFailure, match="the environment is gone"):
            first["guess"](number=3)
        gone, score = calls.scores()
        assert isinstance(gone, CallFailure) and score == 1.0
        assert calls.begin([{"answer": 3}, {"answer": 4}])[0] == " (guess up to 3)", "a new game has a new process"
        assert first["guess"](number=3) == "step 1: right" and calls.scores() == [1.0, None]

    assert (tmp_path / "closed").read_text() == "xx"


def test_an_environment_that_cannot_begin_with_the_first_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match="first row"):
        described(block(tmp_path, game=True), {"question": "?"})


def test_the_reward_of_an_environment_needs_an_environment_with_a_score(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"objective\.environment"):
        Grpo.model_validate({"type": "grpo", "rewards": ["environment"]})
    made = block(tmp_path, game=True)
    (tmp_path / "my_game.py").write_text(GAME.replace("get_reward", "_reward"))
    with pytest.raises(ToolError, match="get_reward"):
        described(made)


def test_the_templates_that_work_are_trls() -> None:
    assert {"qwen3", "llama3_1", "gptoss"} <= set(known()) and not {"phi3", "gemma3", "qwen3_training"} & set(known())
    with pytest.raises(ModelError, match="qwen2_5, qwen3"):
        refuse_unknown("{{ messages }}")
    refuse_unknown("{{ messages }}", {"the tokenizer's": "own"})


def test_a_template_that_writes_a_call_otherwise_once_its_result_follows_is_refused() -> None:
    qwen3 = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    refuse_changing(make_tokenizer(qwen3))  # TRL has another for it
    refuse_changing(make_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"))
    with pytest.raises(ModelError, match="qwen2_5, qwen3"):
        refuse_changing(make_tokenizer("{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"))


def test_the_calls_of_a_completion_are_told_with_their_results() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "arguments": {"a": 1}}}

    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call("one"), call("two")]},
        {"role": "tool", "name": "one", "content": "1"},
        {"role": "tool", "name": "two", "content": "2"},
        {"role": "assistant", "content": "", "tool_calls": [call("three")]},
    ]

    told = [(each["tool"], each["result"]) for each in calls_in(messages)]

    assert told == [("one", "1"), ("two", "2"), ("three", None)]


def test_a_completion_that_ends_with_a_result_has_no_answer() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": []}

    assert text_of([called, {"role": "tool", "name": "add", "content": "3"}]) == ""
    assert text_of([called, {"role": "tool", "name": "add", "content": "3"}, {"role": "assistant", "content": "3"}])
