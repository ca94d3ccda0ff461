"""The process of one reward: it imports the function, and answers calls over a pipe until its parent ends.

A message is JSON in UTF-8. The first answer is {'place': 'file:line'} once the function is imported. Each call is
{'prompts': [...], 'completions': [...], ...}, with a list for each column, and its answer {'scores': VALUE}. Instead of
an answer there may be {'error': TEXT, 'where': PLACE, 'fix': TEXT, 'code': CODE}.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

from pydantic import TypeAdapter

from tuner.errors import RewardError, TunerError
from tuner.files import JsonObject
from tuner.machine import kernel
from tuner.recipes.schema.rewards import ModelReward, OwnReward, RewardBlock, Rewards
from tuner.rewards.built_in import Completion, Reward, Scores, built_in


def _function(block: RewardBlock) -> tuple[Reward, str]:
    if isinstance(block, OwnReward):
        return _own_function(block)
    if isinstance(block, ModelReward):
        from tuner.rewards.scoring_model import scoring_model  # torch

        return scoring_model(block), block.type
    return built_in(block), block.type


def _own_function(block: OwnReward) -> tuple[Reward, str]:
    """Return a function of the user's, which gets all columns or those that it names, and its place, `file:line`.

    Raises:
        RewardError: there is no such file, module or function, or importing it failed.
    """
    module_name, _, name = block.type.rpartition(":")
    try:
        module = _import_file(Path(block.file).absolute()) if block.file else importlib.import_module(module_name)
    except RewardError:
        raise
    except Exception as error:  # whatever the user's module raises
        problem = f"cannot import {module_name!r}: {type(error).__name__}: {error}"
        fix = None if block.file else "Install the package, or put its folder on PYTHONPATH."
        raise RewardError(problem, where=_line_of(error) or block.type, fix=fix) from error
    function = getattr(module, name, None)
    if not callable(function):
        near = ", ".join(one for one, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise RewardError(
            f"{module_name} has no function {name!r}", where="objective.rewards", fix=f"Its functions: {near}."
        )
    parameters = inspect.signature(function).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())

    def reward(
        *, prompts: Sequence[Completion], completions: Sequence[Completion], **columns: Sequence[object]
    ) -> Scores:
        values = {"prompts": prompts, "completions": completions, **columns}
        return function(**(values if takes_all else {key: values[key] for key in parameters if key in values}))  # type: ignore[no-any-return]

    return reward, _place_of(function, block.type)


def _import_file(file: Path) -> ModuleType:
    """Return the module of a file; it may import the files beside it."""
    if not file.is_file():
        raise RewardError(f"there is no file {str(file)!r}", where="objective.rewards", fix="Check the path.")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec and spec.loader, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.parent))
    spec.loader.exec_module(module)
    return module


def _place_of(function: object, name: str) -> str:
    """Return `file:line` of a function's definition, or its name if it has none."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code else name


def _line_of(error: BaseException) -> str | None:
    """Return `file:line` where the user's code failed: the innermost line outside installed packages and tuner."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).parent.parent)
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        frame
        for frame in frames
        if not frame.filename.startswith(("<", ours, sys.prefix, sys.base_prefix)) or "site-packages" in ours
    ]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else None


def _report(error: Exception) -> JsonObject:
    """Return the answer for an exception: its text, and the line of the user's code."""
    if isinstance(error, TunerError):
        return {"error": error.what, "where": error.where, "fix": error.fix, "code": error.code}
    return {"error": f"{type(error).__name__}: {error}", "where": _line_of(error), "fix": None, "code": None}


def main() -> None:
    """Import the reward of `argv`, and answer calls.

    Arguments: the reward as JSON, and the number of the pipe.
    """
    kernel.die_with_parent(signal.SIGKILL)  # also out of a regular expression that never ends
    text, number = sys.argv[1:]
    pipe = Connection(int(number))
    os.dup2(2, 1)  # what the user's function prints is not an answer
    try:
        (block,) = TypeAdapter(Rewards).validate_python([json.loads(text)])
        function, place = _function(block)
    except Exception as error:  # the parent reports it
        pipe.send_bytes(json.dumps(_report(error)).encode())
        return
    pipe.send_bytes(json.dumps({"place": place}).encode())
    while True:
        try:
            call = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            answer = {"scores": _plain(function(**call))}
        except Exception as error:  # whatever the user's function raises
            answer = _report(error)
        pipe.send_bytes(json.dumps(answer, default=repr).encode())


def _plain(scores: object) -> object:
    """Return the numbers of a tensor or an array as a list, and anything else as it is."""
    listed = scores.tolist() if hasattr(scores, "tolist") else scores
    if isinstance(listed, list | tuple):
        return [one.item() if hasattr(one, "item") else one for one in listed]
    return listed


if __name__ == "__main__":
    main()
