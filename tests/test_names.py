"""A variable's name says what it holds."""

from __future__ import annotations

import ast
import re

from tests.pages import ROOT

SAYS_NOTHING = {"one"}
FOLDERS = ("tuner", "bench", "docs", "tests")
_MAY_BIND = re.compile(rf"\b({'|'.join(SAYS_NOTHING)})( in |\)?, \w+\)? in |:|\)?\s*:?=)")
"""Parsing all files takes three seconds."""


def bound(tree: ast.AST) -> set[str]:
    """Return the names of all variables and arguments."""
    nodes = list(ast.walk(tree))
    variables = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return variables | {node.arg for node in nodes if isinstance(node, ast.arg)}


def test_no_variable_has_a_name_that_says_nothing() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py") if "configs" not in file.parts]
    texts = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}
    found = {file: bound(ast.parse(text)) & SAYS_NOTHING for file, text in texts.items() if _MAY_BIND.search(text)}

    assert {file: names for file, names in found.items() if names} == {}
    assert len(texts) > 900
