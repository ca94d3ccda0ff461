"""Imports a reward function of the user's, and names the line of its code where it failed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tuner.errors import RewardError
from tuner.recipes.schema.rewards import OwnReward
from tuner.rewards.built_in import Completion, Reward, Scores


def own_function(block: OwnReward) -> tuple[Reward, str]:
    """Return a function of the user's, which gets all columns or those that it names, and its place, `file:line`.

    Raises:
        RewardError: there is no such file, module or function, or importing it failed.
    """
    module_name, _, name = block.type.rpartition(":")
    try:
        module = _module(Path(block.file).absolute()) if block.file else importlib.import_module(module_name)
    except RewardError:
        raise
    except Exception as error:  # whatever the user's module raises
        problem = f"cannot import {module_name!r}: {type(error).__name__}: {error}"
        fix = None if block.file else "Install the package, or put its folder on PYTHONPATH."
        raise RewardError(problem, where=line_of(error) or block.type, fix=fix) from error
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

    return reward, place_of(function, block.type)


def _module(file: Path) -> ModuleType:
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


def place_of(function: object, name: str) -> str:
    """Return `file:line` of a function's definition, or its name if it has none."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return f"{code.co_filename}:{code.co_firstlineno}" if code else name


def line_of(error: BaseException) -> str | None:
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
