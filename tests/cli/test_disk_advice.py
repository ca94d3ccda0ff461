"""Advice about a full disk names only options that the command has which shows it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click

from tuner import cli
from tuner.errors import Option

ROOT = Path(__file__).parents[2] / "tuner"
SHOWN_BY = {"launch": "train", "worker": "train", "runs": "train", "cli/eval.py": "eval", "cli/export.py": "export"}
"""The command that shows the advice of a room; what all commands may show names no option."""


def _advice() -> Iterator[tuple[str, str]]:
    """Yield each text about a disk that names an option, with the file in which it stands."""
    for file in sorted(ROOT.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "DiskError" not in text and "disk_errors" not in text:
            continue
        tree = ast.parse(text)
        for block in [tree, *(node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))]:
            calls = list(_calls(block))
            names = {node.id for call in calls for node in ast.walk(call) if isinstance(node, ast.Name)}
            nodes = block.body if isinstance(block, ast.Module) else ast.walk(block)
            values = [node.value for node in nodes if isinstance(node, ast.Assign) and _names(node) & names]
            for node in (node for written in (*calls, *values) for node in ast.walk(written)):
                if text := _option(node):
                    yield file.relative_to(ROOT).as_posix(), text


def _option(node: ast.AST) -> str | None:
    """Return a text or an option that names a flag."""
    if isinstance(node, ast.Constant) and "--" in str(node.value):
        return str(node.value)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return None
    first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    return str(Option(str(first))) if node.func.id == "Option" else f"--set {first}" if node.func.id == "Key" else None


def _names(node: ast.Assign) -> set[str]:
    return {to.id for to in node.targets if isinstance(to, ast.Name)}


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("DiskError", "disk_errors")
        ):
            yield node


def test_the_options_in_advice_about_a_disk_exist() -> None:
    advice = sorted(set(_advice()))

    assert any("--set checkpoint.max_keep_ckpts" in text for _, text in advice)
    for file, text in advice:
        command = next((name for start, name in SHOWN_BY.items() if file.startswith(start)), None)
        assert command is not None, f"every command may show {text!r}: name a variable or the command"
        found = cli.tuner.get_command(click.Context(cli.tuner), command)
        assert found is not None
        known = {name for parameter in found.params for name in parameter.opts}
        assert set(re.findall(r"--[a-z][a-z-]*", text)) <= known, (file, text)
