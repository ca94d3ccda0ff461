"""A variable's name says what it holds."""

from __future__ import annotations

import ast
import re

from tests.pages import ROOT

SAYS_NOTHING = {"one"}
SAYS_LITTLE = SAYS_NOTHING | {"each", "facts", "here", "most", "ours", "own", "some", "theirs", "there", "whole"}
_BINDS = r"\b({names})( in |\)?, \w+\)? in |:|\)?\s*,.*=|\)?\s*:?=|,|\))"
"""Parsing all files takes three seconds."""


def bound(tree: ast.AST) -> set[str]:
    """Return the names of all variables and arguments; a field of a class has its class beside it."""
    nodes = list(ast.walk(tree))
    of_classes = [line for node in nodes if isinstance(node, ast.ClassDef) for line in node.body]
    fields = {id(line.target) for line in of_classes if isinstance(line, ast.AnnAssign)}
    names = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    variables = {name.id for name in names if id(name) not in fields}
    return variables | {node.arg for node in nodes if isinstance(node, ast.arg)}


def test_no_variable_has_a_name_that_says_nothing() -> None:
    found, num_files = dict[str, set[str]](), 0
    for folder in ("tuner", "bench", "docs", "tests"):
        names = SAYS_LITTLE if folder == "tuner" else SAYS_NOTHING
        may_bind = re.compile(_BINDS.format(names="|".join(names)))
        files = [file for file in (ROOT / folder).rglob("*.py") if "configs" not in file.parts]
        texts = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}
        found |= {file: bound(ast.parse(text)) & names for file, text in texts.items() if may_bind.search(text)}
        num_files += len(files)

    assert {file: names for file, names in found.items() if names} == {}
    assert num_files > 900
