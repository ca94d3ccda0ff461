"""Rewards score completions; one that fails, hangs or returns no number costs its completion only, up to a share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from pydantic import TypeAdapter

from tests.each import each
from tuner.errors import RewardError
from tuner.recipes.schema.rewards import Rewards
from tuner.rewards import RewardFunction, leftovers, reward_functions
from tuner.rewards.reward_function import TrialRow, trial_mistakes

OWN = """
import os, time

def length(completions, **columns):
    print("printed")
    return [-float(len(one)) for one in completions]

def of_answer(completions, answer):
    return [float(one == right) for one, right in zip(completions, answer)]

def raises(completions, **_):
    if "bad" in completions:
        raise KeyError("bad")
    return [1.0 for one in completions]

def hangs(completions, **_):
    while "bad" in completions:
        pass
    return [1.0 for one in completions]

def dies(completions, **_):
    if "bad" in completions:
        os._exit(3)
    return [1.0 for one in completions]

def not_a_number(completions, **_):
    return [float("nan") if one == "bad" else None if one == "" else 1 for one in completions]

def too_short(completions, **_):
    return [1.0]

def of_scalar(completions, **_):
    return 1.0

def constant(completions, **_):
    return [0.5 for one in completions]

def too_large(completions, **_):
    return [10**400 if one == "bad" else 1 for one in completions]

def exits(completions, **_):
    if "bad" in completions:
        raise SystemExit("no key")
    return [1.0 for one in completions]

def forks(completions, **_):
    parent = os.getpid()
    os.fork()
    if os.getpid() == parent:
        time.sleep(0.5)
    return [float(len(one)) if os.getpid() == parent else 0.0 for one in completions]
"""


BLOCKS = TypeAdapter(Rewards)


def _functions(folder: Path, *rewards: Any) -> list[RewardFunction]:
    return reward_functions(BLOCKS.validate_python(list(rewards)), folder=folder)


def _own(folder: Path, name: str, **keys: object) -> dict[str, object]:
    file = folder / "my_rewards.py"
    file.write_text(OWN)
    return {"type": f"{file}:{name}", **keys}


def _score(reward: Any, completions: list[Any], **columns: list[Any]) -> Any:
    (function,) = _functions(Path("/nowhere"), reward)
    try:
        return function(["Question"] * len(completions), completions, **columns)
    finally:
        function.close()


@each(
    (
        ("exact", ["4", " 4", "5"], [1, 1, 0]),
        ({"type": "exact", "ignore_case": True, "column": "word"}, ["YES", "no", "yes"], [1, 0, 1]),
        ("contains", ["It is 4.", "It is 5.", ""], [1, 0, 0]),
        ({"type": "contains", "text": "</think>"}, ["a</think>b", "a", "4"], [1, 0, 0]),
        ({"type": "format", "pattern": "<a>.*</a>"}, ["<a>1\n2</a>", "x<a></a>", "\n<a></a> "], [1, 0, 1]),
        ({"type": "length", "target": 4}, ["1234", "12", "1" * 20], [0, -0.5, -1]),
        ("json", ['{"a": 1}', "```json\n[1]\n```", "{"], [1, 1, 0]),
        (
            {"type": "json", "json_schema": {"required": ["a"], "type": "object"}},
            ['{"a": 1}', '{"b": 1}', "1"],
            [1, 0, 0],
        ),
    )
)
def test_a_built_in_reward_scores_texts(reward: Any, completions: list[str], scores: list[float]) -> None:
    assert _score(reward, completions, answer=["4"] * 3, word=["yes"] * 3) == scores


def test_math_compares_numbers_and_expressions() -> None:
    cases = [
        ("The sum is 12.", "12", 1),
        (r"So \boxed{\frac{1}{2}}", "0.5", 1),
        ("The answer is 1,234", "1234", 1),
        (r"$x = 3$", "3", 1),
        ("The answer is 13", "12", 0),
        ("", "12", 0),
        ("it is 72", "48 + 24 = 72\n#### 72", 1),
        ("7", "no expression", None),
    ]
    completions = [[{"role": "assistant", "content": text}] for text, _, _ in cases]
    assert _score("math", completions, answer=[right for _, right, _ in cases]) == [score for _, _, score in cases]


def test_an_own_function_gets_the_columns_that_it_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    first, second = _functions(tmp_path, _own(tmp_path, "length"), _own(tmp_path, "of_answer", weight=2))
    assert first(["p"] * 2, ["ab", ""], answer=["a", "b"], trainer_state=object()) == [-2.0, 0.0]
    assert second(["p"] * 2, ["a", "b"], answer=["a", "a"], level=[1, 2]) == [1.0, 0.0]
    assert (first.__name__, second.__name__, second.weight) == ("length", "of_answer", 2)
    assert capfd.readouterr().out == "", "what it prints would break the JSON of a command"
    first.close(), second.close()


def test_two_rewards_of_one_name_are_told_apart(tmp_path: Path) -> None:
    names = [function.__name__ for function in _functions(tmp_path, "length", _own(tmp_path, "length"), "exact")]
    assert names == ["length", "length_2", "exact"]


@each(
    (
        ("raises", "KeyError: 'bad'", 13),
        ("hangs", "took more than 1 s", 16),
        ("dies", "exit code 3", 21),
        ("not_a_number", "nan, which is no finite number", 26),
        ("too_large", "000, which is no finite number", 38),
        ("exits", "SystemExit: no key", 43),
    )
)
def test_a_failure_costs_its_completion_alone_and_is_listed(name: str, problem: str, line: int) -> None:
    folder = Path(tempfile.mkdtemp())
    (reward,) = _functions(folder, _own(folder, name, timeout=1 if name == "hangs" else 10))
    assert reward(["p"] * 3, ["good", "bad", "fine"]) == [1.0, None, 1.0]
    (listed,) = map(json.loads, (folder / "reward_failures.jsonl").read_text().splitlines())
    assert problem in listed["problem"] and listed["completion"] == "bad"
    assert listed["where"] == f"{folder}/my_rewards.py:{line}"
    reward.close()


def test_a_fork_of_a_function_that_returns_too_answers_no_call(tmp_path: Path) -> None:
    (reward,) = _functions(tmp_path, _own(tmp_path, "forks"))
    assert [reward(["p"], [completion]) for completion in ("a", "ab", "abc")] == [[1.0], [2.0], [3.0]]
    reward.close()


def test_none_is_no_opinion_and_no_failure(tmp_path: Path) -> None:
    (reward,) = _functions(tmp_path, _own(tmp_path, "not_a_number"))
    assert reward(["p"] * 2, ["", "x"]) == [None, 1.0]
    assert not (tmp_path / "reward_failures.jsonl").exists()
    reward.close()


def test_a_run_ends_above_the_share_of_failures(tmp_path: Path) -> None:
    (reward,) = _functions(tmp_path, _own(tmp_path, "raises", max_failures=0.02))
    reward(["p"] * 4, ["bad", "a", "b", "bad"])
    with pytest.raises(RewardError, match="'raises' failed on 3 of the last") as raised:
        reward(["p"] * 2, ["bad", "bad"])
    assert raised.value.where == f"{tmp_path}/my_rewards.py:13"
    reward.close()


def test_a_pattern_without_end_is_ended(tmp_path: Path) -> None:
    (reward,) = _functions(tmp_path, {"type": "format", "pattern": "(a+)+b", "timeout": 1})
    began = time.monotonic()
    assert reward(["p"] * 2, ["a" * 60, "ab"]) == [None, 1.0]
    assert time.monotonic() - began < 60
    reward.close()


ROWS = [TrialRow("1 + 1 = ", {"answer": "2"}), TrialRow("2 + 2 = ", {"answer": "4"})]


def _mistakes(*rewards: Any, rows: list[TrialRow] = ROWS) -> list[str]:
    return [mistake.message for mistake in trial_mistakes(BLOCKS.validate_python(list(rewards)), rows)]


def test_good_rewards_pass_the_trial(tmp_path: Path) -> None:
    good = ("math", "exact", {"type": "format", "pattern": "x"}, _own(tmp_path, "length"), _own(tmp_path, "of_answer"))
    assert _mistakes(*good) == []
    chats = [TrialRow([{"role": "user", "content": "1 + 1"}], {"answer": "2"})]
    assert _mistakes("math", "exact", rows=chats) == []
    other = [TrialRow(row.prompt, {"ground_truth": row.columns["answer"]}) for row in ROWS]
    assert _mistakes({"type": "math", "column": "ground_truth"}, {"type": "length", "target": 20}, rows=other) == []
    assert _mistakes(_own(tmp_path, "constant", trial=False)) == []


def test_the_trial_names_the_line_of_each_mistake(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(30)\ndef f(completions):\n    return [0.0]\n")
    (tmp_path / "broken.py").write_text("import os\ndef f(:\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(2)\n")
    names = ("too_short", "of_scalar", "constant", "absent")
    slow = {"type": f"{tmp_path}/slow.py:f", "timeout": 1}
    broken = {"type": f"{tmp_path}/broken.py:f", "timeout": 10}
    script = {"type": f"{tmp_path}/script.py:f", "timeout": 10}
    no_column = {"type": "exact", "column": "solution"}
    found = _mistakes(*(_own(tmp_path, name) for name in names), slow, broken, script, no_column)
    file = f"{tmp_path}/my_rewards.py"
    expected = (
        (f"{file}:29", "1 numbers for 4 completions"),
        (f"{file}:32", "float, not a list of numbers"),
        (f"{file}:35", "is 0.5 for every right answer"),
        ("objective.rewards", "has no function 'absent'"),
        (f"{tmp_path}/slow.py:f", "importing it took more than 1 s"),
        (f"{tmp_path}/broken.py:2", "SyntaxError"),
        (f"{tmp_path}/script.py:2", "SystemExit: 2"),
        ("objective.rewards", "no column 'solution'"),
    )
    assert len(found) == len(expected)
    for message, (where, problem) in zip(found, expected, strict=True):
        assert message.startswith(f"{where}: ") and problem in message


def test_a_batch_may_be_larger_than_a_pipe_holds(tmp_path: Path) -> None:
    (reward,) = _functions(tmp_path, _own(tmp_path, "length"))
    assert reward(["p"] * 8, ["x" * 500_000] * 8) == [-500_000.0] * 8
    reward.close()


PARENT = """
import sys
from pathlib import Path
from tuner.recipes.schema.rewards import FormatReward
from tuner.rewards import reward_functions

(reward,) = reward_functions([FormatReward(type="format", pattern="(a+)+b", timeout=100.0)], folder=Path("."))
reward(["p"], ["ab"])
print(reward._isolated._process.pid, flush=True)
reward(["p"], ["a" * 60])
"""


STARTS = """
import subprocess
def starts(completions):
    started = subprocess.Popen(["sleep", "600"])
    return [started.pid for _ in completions]
"""
RANK = """
import os, sys
from pathlib import Path
from tuner.recipes.schema.rewards import OwnReward
from tuner.rewards import reward_functions

(reward,) = reward_functions([OwnReward(type="starts.py:starts")], folder=Path("."))
print(int(reward(["p"], ["x"])[0]), flush=True)
os._exit(0)
"""


def test_what_a_function_has_started_ends_after_its_rank(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text(STARTS)
    with subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as rank:
        assert rank.stdout
        started = psutil.Process(int(rank.stdout.readline()))

    _, alive = psutil.wait_procs([started], timeout=10)
    assert not alive


def test_a_forked_process_writes_into_no_file_that_has_the_number_of_the_pipe(tmp_path: Path) -> None:
    leftovers.watch(2**22)  # no process has this number
    leftovers.forget(2**22)
    assert leftovers._process and leftovers._process.stdin
    number = leftovers._process.stdin.fileno()
    if (pid := os.fork()) == 0:
        os.dup2(os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY), number)
        leftovers.forget(2**22)
        os._exit(0)
    os.waitpid(pid, 0)

    assert (tmp_path / "other").read_text() == ""


def test_a_reward_ends_with_its_rank_even_inside_a_pattern_without_end(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as parent:
        assert parent.stdout
        process = psutil.Process(int(parent.stdout.readline()))
        before_s = process.cpu_times().user
        while process.cpu_times().user < before_s + 0.3:  # it is inside the pattern
            time.sleep(0.05)
        parent.kill()

    _, alive = psutil.wait_procs([process], timeout=10)
    assert not alive
