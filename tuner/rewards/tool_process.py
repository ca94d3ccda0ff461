"""The user's tools, or one environment, in a process of its own: `IsolatedTools` calls them, `main` is what it runs.

Calls, each with its answer:

    {'do': 'describe'}                                    {'tools': [JSON schema ...], 'scores': whether it has a score}
    {'do': 'reset', 'row': {...}}                         {'result': TEXT or None}, of an environment
    {'do': 'call', 'name': NAME, 'arguments': {...}}      {'result': TEXT}
    {'do': 'score'}                                       {'score': NUMBER or None}, of an environment
    {'do': 'close'}                                       {}
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

from tuner.errors import ToolError
from tuner.files import JsonObject
from tuner.recipes.schema.tools import Tools
from tuner.rewards.isolated_process import Answers, Isolated, loaded, place_of, serve, taken_by

LOADING_S = 120.0
"""Seconds to import the user's file, which may import large libraries, and to describe its functions."""
_MAX_CHARACTERS = 200_000
"""Of a result on its way to the rank, which cuts it to tokens."""
_NO_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Methods of an environment that tuner calls; the model may call its other public ones."""
_FIX = (
    "Write type hints, and a docstring in Google's style with 'Args:' and a line for each argument: "
    "https://huggingface.co/docs/transformers/chat_extras"
)


class IsolatedTools(Isolated):
    """The tools of a recipe in one process, or one object of its environment in a process of its own."""

    def __init__(self, block: Tools, *, environment: bool) -> None:
        names = [block.environment] if environment else [*block.tools]
        document: JsonObject = {"names": names, "environment": environment}
        limits = {"timeout_s": block.tool_timeout, "start_s": max(LOADING_S, block.tool_timeout)}
        super().__init__(__name__, document, str(names[0]), **limits, error=ToolError)


def _served(document: JsonObject) -> tuple[Answers, str]:
    names, key = document["names"], f"objective.{'environment' if document['environment'] else 'tools'}"
    objects = [loaded(name, key, ToolError) for name in names]
    if not document["environment"]:
        functions = dict(zip((name.rpartition(":")[2] for name in names), objects, strict=True))
        return _Served(functions).answer, place_of(objects[0], names[0])
    environment = objects[0]()
    reset = getattr(environment, "reset", None)
    if not callable(reset):
        fix = "Write `def reset(self, **row)`, which begins a new game; it may return a text for the prompt."
        raise ToolError(f"{names[0]} has no method reset", where=key, fix=fix)
    public = inspect.getmembers(type(environment), inspect.isfunction)
    methods = {
        name: getattr(environment, name) for name, _ in public if not name.startswith("_") and name not in _NO_TOOLS
    }
    return _Served(methods, environment).answer, place_of(reset, names[0])


class _Served:
    """Functions that answer calls."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], environment: Any = None) -> None:
        self.functions, self.environment = functions, environment

    def answer(self, call: JsonObject) -> JsonObject:
        match call["do"]:
            case "describe":
                return {
                    "tools": [_schema(*name_and_function) for name_and_function in self.functions.items()],
                    "scores": self._has("get_reward"),
                }
            case "call":
                result = _awaited(self.functions[call["name"]](**call["arguments"]))
                if result is None:
                    raise ValueError("it returned None, and a tool returns a result")
                return {"result": _text(result)}
            case "reset":
                shown = _awaited(self.environment.reset(**taken_by(self.environment.reset, call["row"])))
                return {"result": None if shown is None else _text(shown)}
            case "score":
                score = _awaited(self.environment.get_reward())
                return {"score": score.item() if hasattr(score, "item") else score}
            case "close":
                if self._has("close"):
                    self.environment.close()
                return {}
        raise AssertionError(call)

    def _has(self, name: str) -> bool:
        return callable(getattr(self.environment, name, None))


def _awaited(result: Any) -> Any:
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _text(result: object) -> str:
    """Return what the model reads: a text as it is, other values as JSON."""
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError):
            result = str(result)
    return result[:_MAX_CHARACTERS]


def _schema(name: str, function: Callable[..., Any]) -> JsonObject:
    """Return the JSON schema of a function, which the chat template describes to the model."""
    from transformers.utils import get_json_schema  # seconds, and calls do not need it

    where = place_of(function, name)
    try:
        schema: JsonObject = get_json_schema(function)
    except Exception as error:  # of transformers, of a hint that cannot be resolved, of JSON in 'choices'
        problem = f"the tool {name!r} cannot be described to the model: {error}"
        raise ToolError(problem, where=where, fix=_FIX) from error
    if not schema["function"].get("description"):
        raise ToolError(f"the docstring of the tool {name!r} says nothing", where=where, fix=_FIX)
    schema["function"]["name"] = name
    return schema


def main() -> None:
    serve(_served)
