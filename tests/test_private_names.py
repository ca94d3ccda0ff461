"""No module touches a private name of a library but its room's `compat` modules, made for that."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_architecture import MODULES, tree_of

DOCUMENTED = {"_exit", "_asdict", "_fields", "_replace"}
"""Private by their spelling alone: os._exit, and methods and fields of every NamedTuple."""
BY_NAME = ("getattr", "setattr", "hasattr", "delattr")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.Module) -> set[str]:
    """Return what a module defines itself: functions, classes, variables, arguments, attributes of `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return found


def names_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that a piece of code asks of something else."""
    if isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (*str(node.module).split("."), *(alias.name for alias in node.names))
    elif isinstance(node, ast.Import):
        yield from (part for alias in node.names for part in alias.name.split("."))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_NAME:
        yield from (arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def private_names(tree: ast.Module) -> set[str]:
    asked = {name for node in ast.walk(tree) for name in names_of(node) if is_private(name)}
    return asked - own_names(tree) - DOCUMENTED


def test_private_names_of_libraries_are_touched_in_the_module_made_for_that() -> None:
    elsewhere = {path: private_names(tree_of(path)) for path in MODULES if not path.stem.startswith("compat")}

    assert {path: names for path, names in elsewhere.items() if names} == {}


def test_the_check_sees_each_way_to_a_private_name() -> None:
    foreign = "import a._b; from c._d import _e; x._f.g; getattr(x, '_h')"
    code = f"{foreign}; self._mine = 1; self._mine; os._exit(1); x.__dict__"

    assert private_names(ast.parse(code)) == {"_b", "_d", "_e", "_f", "_h"}
