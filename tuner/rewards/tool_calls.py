"""What the model's calls of tools become: results, or failures that it reads as `{'error': ...}` and that are listed.

A failure of any kind ends no run: an exception, a process that ends or takes too long, a result that is None, a tool
that does not exist, wrong arguments. When the process of an environment has ended, the next `reset` starts a new one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tuner.errors import Key, ToolError, TunerError
from tuner.files import JsonObject
from tuner.recipes.schema.rewards import rewards_of
from tuner.recipes.schema.tools import Tools
from tuner.rewards.isolated_process import CallFailure, list_failure
from tuner.rewards.tool_process import LOADING_S, IsolatedTools

ENVIRONMENT = "environment"
"""The reward that an environment gives."""


class Description(NamedTuple):
    """What the model is told of its tools, a JSON schema of each, and whether the environment has a score."""

    schemas: list[JsonObject]
    scores: bool


def described(block: Tools, row: Mapping[str, Any] | None = None) -> Description:
    """Return what the model is told of its tools: a schema of each function, and of each method of an environment.

    Their code is imported in processes that end then.

    Args:
        row: A row on which the environment's `reset` is tried; None: it is not.

    Raises:
        ToolError: a function cannot be imported or described, or `reset` fails.
        MachineError: a library is not installed.
    """
    schemas: list[JsonObject] = []
    scores = False
    for is_environment in (False, True):
        if not (block.environment if is_environment else block.tools):
            continue
        process = IsolatedTools(block, environment=is_environment)
        try:
            process.start()
            answer = _described(process)
            schemas += answer["tools"]
            if is_environment:
                scores = answer["scores"]
                if row is not None:
                    _try(process, row, scores)
        finally:
            process.end()
    names = [schema["function"]["name"] for schema in schemas]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        fix = "Give each its own name: the model calls a tool by it."
        raise ToolError(f"several tools have the name {twice[0]!r}", where="objective.tools", fix=fix)
    if any(reward.type == ENVIRONMENT for reward in rewards_of(block)) and not scores:
        problem = f"the reward 'environment' needs the method get_reward, which {block.environment} does not have"
        raise ToolError(problem, where="objective.rewards", fix="Write `def get_reward(self)`, which returns a number.")
    return Description(schemas, scores)


def _described(process: IsolatedTools) -> JsonObject:
    try:
        return process({"do": "describe"}, LOADING_S)  # it imports transformers
    except CallFailure as failure:
        raise ToolError(failure.problem, where=failure.where, fix=failure.fix) from failure


def _try(process: IsolatedTools, row: Mapping[str, Any], scores: bool) -> None:
    """Begin a game with a row, and ask for its reward: what fails now fails in each completion."""
    try:
        process({"do": "reset", "row": row})
        score = process({"do": "score"})["score"] if scores else 0.0
        process({"do": "close"})
    except CallFailure as failure:
        problem = f"the environment failed on the first row: {failure.problem}"
        fix = f"Correct it; `reset` gets the columns of the row by name. For slow code: {Key('tool_timeout', 60)}."
        raise ToolError(problem, where=failure.where, fix=fix) from failure
    if score is not None and not isinstance(score, int | float):
        fix = "Return a number, or None for no opinion."
        raise ToolError(f"get_reward returned {score!r}, which is no number", where=process.place, fix=fix)


class ToolFailure(Exception):
    """A call that failed; its text is what the model reads."""


class Rollouts:
    """The tools of the completions that a rank writes at once."""

    def __init__(
        self, block: Tools, schemas: Sequence[JsonObject], failures: Path, shorten: Callable[[str], str]
    ) -> None:
        """Start nothing.

        Args:
            schemas: Of its tools, as `described` returns them.
            failures: Where failed calls are listed.
            shorten: Cuts a text to `max_result_tokens`.
        """
        self.block, self.schemas, self._failures, self._shorten = block, schemas, failures, shorten
        self.names = [schema["function"]["name"] for schema in schemas]
        self._functions = {name.rpartition(":")[2] for name in block.tools}
        self._tools = IsolatedTools(block, environment=False) if block.tools else None
        self._environments: list[IsolatedTools] = []
        self._are_over: list[str] = []
        """Why the environment of a completion is gone; empty: it is there."""
        self._num_calls: list[int] = []
        self.is_asked_to_stop: Callable[[], bool] = lambda: False
        """Whether the run leaves these completions: each call that hangs would take as long as a stop may take."""

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Begin a completion for each row; return what the environments add to their prompts.

        Raises:
            ToolError: the environment cannot be loaded.
        """
        self._num_calls = [0] * len(rows)
        if not self.block.environment:
            return [None] * len(rows)
        lacking = range(len(self._environments), len(rows))
        self._environments += [IsolatedTools(self.block, environment=True) for _ in lacking]
        self._are_over = [""] * len(rows)
        for process in self._environments[: len(rows)]:
            process.spawn()
        return [self._reset(index, row) for index, row in enumerate(rows)]

    def _reset(self, index: int, row: Mapping[str, Any]) -> str | None:
        process = self._environments[index]
        try:
            shown = process({"do": "reset", "row": row})["result"]
        except CallFailure as failure:
            process.end()
            self._are_over[index] = f"the environment could not begin: {failure.problem}"
            self._list("reset", {}, failure)
            return None
        return None if shown is None else self._shorten(shown)

    def table(self, index: int) -> Mapping[str, Callable[..., str]]:
        """Return the functions of a completion by name; also a name that does not exist has one, which fails."""
        return _Table(self.names, partial(self._call, index))

    def _call(self, index: int, name: str, /, **arguments: Any) -> str:
        if self.is_asked_to_stop():
            raise ToolFailure("the run stops")  # nobody reads it
        try:
            return self._shorten(self._result(index, name, arguments))
        except TunerError as error:  # a file that was changed since the start may not load again
            failure = CallFailure(str(error.what), str(error.where or name))
        except CallFailure as error:
            failure = error
        self._list(name, arguments, failure)
        raise ToolFailure(self._shorten(failure.problem)) from failure

    def _result(self, index: int, name: str, arguments: Mapping[str, Any]) -> str:
        self._num_calls[index] += 1
        if self._num_calls[index] > self.block.max_calls:
            raise CallFailure(f"only {self.block.max_calls} calls are allowed", "objective.max_calls")
        if name not in self.names:
            tool_names = ", ".join(self.names) or "none"
            raise CallFailure(f"there is no tool {name!r}; the tools are: {tool_names}", name)
        if name in self._functions:
            assert self._tools is not None, "the tool was described"
            return str(self._tools({"do": "call", "name": name, "arguments": arguments})["result"])
        if self._are_over[index]:
            raise CallFailure(self._are_over[index], str(self.block.environment))
        process = self._environments[index]
        try:
            return str(process({"do": "call", "name": name, "arguments": arguments})["result"])
        except CallFailure as failure:
            if not process.is_running:
                self._are_over[index] = f"the environment is gone: {failure.problem}"
            raise

    def list_wrong(self, name: str, arguments: object) -> None:
        """List a call with arguments that are no object of JSON: it reached no tool."""
        self._list(name, arguments, CallFailure("the arguments are no JSON object", name))

    def _list(self, name: str, arguments: object, failure: CallFailure) -> None:
        arguments_text = json.dumps(arguments, default=str, ensure_ascii=False)
        list_failure(self._failures, {"tool": name}, failure, arguments=arguments_text)

    def scores(self, _: object = None) -> list[float | CallFailure | None]:
        """Return what `get_reward` of each environment returns; of one that is gone, why."""
        return [self._score(index) for index in range(len(self._are_over))]

    def _score(self, index: int) -> float | CallFailure | None:
        if self._are_over[index]:
            return CallFailure(self._are_over[index], str(self.block.environment))
        try:
            return self._environments[index]({"do": "score"})["score"]  # type: ignore[no-any-return]
        except CallFailure as failure:
            return failure

    def close(self) -> None:
        for process in self._environments:
            if process.is_running:
                with suppress(CallFailure):
                    process({"do": "close"})
            process.end()
        if self._tools:
            self._tools.end()


class _Table(dict[str, Callable[..., str]]):
    """Functions by name. Every name has one: TRL answers a name that is not there by itself, and nothing lists that."""

    def __init__(self, names: Sequence[str], call: Callable[..., str]) -> None:
        super().__init__({name: partial(call, name) for name in names})
        self._call = call

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str)

    def __missing__(self, name: str) -> Callable[..., str]:
        return partial(self._call, name)


def calls_in(completion: object) -> Iterator[JsonObject]:
    """Yield the calls of a completion: `tool`, `arguments`, and `result`, which is None where the completion ended."""
    messages = completion if isinstance(completion, list) else []
    for at, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        results = iter([reply["content"] for reply in messages[at + 1 :][: len(calls)] if reply["role"] == "tool"])
        for call in calls:
            function = call.get("function", call)
            yield {"tool": function["name"], "arguments": function["arguments"], "result": next(results, None)}
