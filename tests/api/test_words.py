"""Errors in Python's words: an argument's name where the command line has a flag."""

from __future__ import annotations

import ast
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tuner
from tests.each import each
from tests.test_architecture import tree_of
from tuner import api, errors
from tuner.errors import Argument, DsKey, Key, Option, RecipeError, Text, options
from tuner.recipes.overrides import KEY_FLAGS
from tuner.recipes.recipe import Overrides

ROOT = Path(tuner.__file__).parent
COMMANDS_ALONE = ("cli", "lab")
"""The rooms that no call in Python reaches."""
_PARTS = ("where", "fix")


def arguments() -> set[str]:
    """Return every argument of the functions of `tuner`, and the overrides."""
    functions = [getattr(tuner, name) for name in api.__all__ if inspect.isfunction(getattr(tuner, name))]
    parameters = {name for function in functions for name in inspect.signature(function).parameters}
    of_keys = {flag[2:].replace("-", "_") for flag in KEY_FLAGS}
    return parameters | of_keys | set(inspect.signature(Overrides).parameters)


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield the name and the call of every function that is called by its name, outside the rooms of commands."""
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] not in COMMANDS_ALONE:
            for node in ast.walk(tree_of(path)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    yield node.func.id, node


def texts() -> Iterator[str]:
    """Yield every text with a blank in it, and every `where` and `fix`; `{}` stands for an expression in an f-string.

    The rooms of commands, and the module that writes the flags, are left out.
    """
    for path in ROOT.rglob("*.py"):
        if path.relative_to(ROOT).parts[0] in (*COMMANDS_ALONE, "errors.py"):
            continue
        tree = tree_of(path)
        places = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg in _PARTS}
        inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(tree):  # an f-string comes before its pieces
            if isinstance(node, ast.JoinedStr):
                inside |= set(map(id, node.values))
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
                text = node.value
            else:
                continue
            if " " in text or id(node) in places:
                yield text


@each(
    [
        (Option("val_split", 0.05), "--val-split 0.05", "val_split=0.05"),
        (Option("model", "./my model"), "--model './my model'", 'model="./my model"'),
        (Option("work_dir"), "--work-dir", "work_dir="),
        (Option("merge", True), "--merge", "merge=True"),
        (Option("format", "gguf"), "--as gguf", 'format="gguf"'),
        (Option("push", "OWNER/NAME"), "--push OWNER/NAME", "push=OWNER/NAME"),
        (Key("dtype", "fp16"), "--set dtype=fp16", 'dtype="fp16"'),
        (Key("quantization", None), "--set quantization=None", "quantization=None"),
        (Key("a.b.packing", False), "--set a.b.packing=False", 'a={"b": {"packing": False}}'),
        (Key("adapter", {"r": 64}), "--set 'adapter=dict(r=64)'", "adapter=dict(r=64)"),
        (Key("modules", ["head"]), "--set 'modules=[\"head\"]'", 'modules=["head"]'),
        (DsKey("zero.size", 1000), "--ds zero.size=1000", 'ds={"zero.size": 1000}'),
        (Argument("source"), "SOURCE", "source"),
        (
            options(Option("model", "BASE"), Option("adapter", "x")),
            "--model BASE --adapter x",
            'model=BASE, adapter="x"',
        ),
    ]
)
def test_an_option_is_typed_as_a_flag_and_called_as_an_argument(option: Option, typed: str, called: str) -> None:
    text = Text(f"Use {option}, or none.")

    assert (option, option.in_python) == (typed, called)
    assert (text, text.in_python) == (f"Use {typed}, or none.", f"Use {called}, or none.")


def test_the_wordings_of_an_error_survive_another_process_and_another_error() -> None:
    first = RecipeError("no rows", where=Option("data"), fix=f"Add {Option('data', 'FILE')}.")
    there = pickle.loads(pickle.dumps(first))  # noqa: S301
    second = RecipeError(f"again: {errors.marked(there.what)}", fix=f"{errors.marked(there.fix)} Or stop.")

    assert there.message == first.message == "--data: no rows. Add --data FILE."
    assert there.message.in_python == "data=: no rows. Add data=FILE."
    assert (second.fix, second.fix and second.fix.in_python) == ("Add --data FILE. Or stop.", "Add data=FILE. Or stop.")


def test_a_name_with_the_marks_of_an_option_is_shown_as_it_is() -> None:
    error = RecipeError("no file 'a\x0eb\x0fc\x0e'", fix=f"Give {Option('data', 'x' + chr(14))}.")

    assert "\x0e" not in error.message
    assert "\x0e" not in error.message.in_python
    assert r"'a\x0eb\x0fc\x0e'" in error.message, "nothing of a strange name is hidden"


def test_every_option_in_a_message_is_an_argument_of_a_call_in_python() -> None:
    named = {
        call.args[0].value for name, call in calls() if name == "Option" and isinstance(call.args[0], ast.Constant)
    }

    assert len(named) > 30
    assert named - arguments() == set()


def test_no_message_names_a_flag_of_python_s_arguments_in_plain_text() -> None:
    flags = {str(Option(name)) for name in arguments()} | {"--set", "--ds", "--cfg-options"}
    whole_commands = r"`[^`]*`|\b(?:tuner|hf|trl|srun|mpirun|vllm) [^:;,]*"

    written = {
        (flag, text)
        for text in texts()
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", re.sub(whole_commands, "", text))
        if flag in flags
    }

    assert written == set(), "write Option('epochs', 3) or Key('train_cfg.loss', 'whole'): see tuner.errors"


def test_an_error_of_a_call_names_arguments() -> None:
    with pytest.raises(tuner.TunerError) as caught:
        tuner.load_recipe("tiny_lora_sample_e1", model="./x", method="qlora")

    assert "--" not in str(caught.value)
    assert caught.value.where == "method="


def test_findings_name_arguments() -> None:
    (finding,) = tuner.check(adapter="package:tiny", model="package:tiny").findings[:1]

    assert "--" not in str(finding)
