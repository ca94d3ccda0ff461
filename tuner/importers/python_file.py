"""Reads XTuner's and mmengine's Python configs as data, statement by statement, without running them.

Beside what a recipe may hold it knows imports, names of blocks, arithmetic of texts and lists, comparisons, `if`, and
`with read_base()`. Anything else is an error with its line. An imported name becomes a `PythonName`.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable
from pathlib import Path

from tuner.errors import RecipeError
from tuner.files import read_named_text
from tuner.importers.document import ForeignConfig, Keys, PythonName, Value
from tuner.recipes.recipe_file import MAX_DEPTH, MAX_NUMBER, Reader, parse
from tuner.recipes.yaml_text import MAX_VALUES

MAX_BYTES, MAX_BASES = 200_000, 8
_OPERATORS: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Value, Value], bool]] = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_CASTS: dict[str, Callable[[Value], Value]] = {"int": int, "float": float}
_FIX = "It is only read as data and never run: write out the value."


def read_python_file(path: Path) -> ForeignConfig:
    """Read a config.

    Raises:
        RecipeError: it cannot be read, is not valid Python, or contains more than data.
    """
    config = _Config(path, 0)
    # Names that later values use are translated there; an unused name is reported.
    return ForeignConfig(config.values, str(path), config.lines, path.parent, used=frozenset(config.used))


class _Config(Reader):
    def __init__(self, path: Path, depth: int) -> None:
        name = str(path)
        text = read_named_text(path, RecipeError, max_bytes=MAX_BYTES, fix="Give a config.", name=name)
        super().__init__(name, text)
        self.path, self.depth = path, depth
        self.imported: dict[str, PythonName] = {}
        self.body(parse(text, name, takes_escapes=True).body)

    def refuse(self, message: str, node: ast.AST, fix: str = _FIX) -> RecipeError:
        return super().refuse(message, node, fix)

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt, *, first: bool = False) -> None:
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                return
            case ast.Import(names=names):
                for alias in names:
                    word = alias.asname or alias.name.partition(".")[0]
                    self.imported[word] = PythonName(alias.name if alias.asname else word)
            case ast.ImportFrom(module=module, names=names, level=0):
                for alias in names:
                    self.imported[alias.asname or alias.name] = PythonName(f"{module}.{alias.name}")
            case ast.Assign(targets=[ast.Name(id=key)], value=value):
                self.lines[(key,)] = node.lineno
                self.values[key] = self.value(value, (key,), 0)
            case ast.AugAssign(target=ast.Name(id=key), op=op, value=value) if key in self.values:
                self.values[key] = self.operation(type(op), self.values[key], self.value(value, (key,), 0), node)
            case ast.If(test=test, body=body, orelse=orelse):
                self.body(body if self.value(test, (), 0) else orelse)
            case ast.With(items=[ast.withitem(context_expr=ast.Call(func=ast.Name(id="read_base")))], body=body):
                for inner in body:
                    self.base(inner)
            case _:
                raise self.refuse(f"`{type(node).__name__}` is not data", node)

    def base(self, node: ast.stmt) -> None:
        """Add the values of a base config."""
        if not isinstance(node, ast.ImportFrom):
            raise self.refuse(f"`{type(node).__name__}` below read_base() is not an import", node)
        if not node.level:
            raise self.refuse(f"the base {node.module!r} is a module, not a file next to this one", node)
        if self.depth == MAX_BASES:
            raise self.refuse(f"more than {MAX_BASES} nested base files", node)
        path = self.path.parent.joinpath(*[".."] * (node.level - 1), *(node.module or "").split("."))
        below = _Config(path.with_suffix(".py"), self.depth + 1)
        self.values |= below.values
        self.imported |= below.imported
        self.used |= below.used

    def value(self, node: ast.expr, keys: Keys, depth: int) -> Value:
        match node:
            case ast.Name(id=word):
                return self.named(word, keys, node)
            case ast.Attribute(value=inner, attr=word):
                return self.attribute(self.value(inner, keys, depth + 1), word, node)
            case ast.Call(func=ast.Name(id=word), args=[argument], keywords=[]) if word in _CASTS:
                return self.cast(word, self.value(argument, keys, depth + 1), node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.value(operand, keys, depth + 1)
            case ast.BinOp(left=left, op=op, right=right):
                both = self.value(left, keys, depth + 1), self.value(right, keys, depth + 1)
                return self.operation(type(op), *both, node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self.value(test, (), depth + 1) else orelse, keys, depth + 1)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return self.comparison(type(op), left, right, depth, node)
        return super().value(node, keys, depth)

    def named(self, word: str, keys: Keys, node: ast.AST) -> Value:
        """Return a copy of the value that a name above stands for, with its lines."""
        if word in self.values:
            self.used.add(word)
            for inner, line in [*self.lines.items()]:
                if inner[0] == word and len(inner) > 1:
                    self.lines.setdefault((*keys, *inner[1:]), line)
            return copy.deepcopy(self.values[word])
        if word in self.imported:
            return self.imported[word]
        raise self.refuse(f"`{word}` is not defined above", node)

    def attribute(self, owner: Value, word: str, node: ast.AST) -> Value:
        if isinstance(owner, PythonName):
            return PythonName(f"{owner.text}.{word}")
        if isinstance(owner, dict) and word in owner:
            return owner[word]
        raise self.refuse(f"`.{word}` of a value is not data", node)

    def cast(self, word: str, value: Value, node: ast.AST) -> Value:
        try:
            return _CASTS[word](value)
        except (TypeError, ValueError, OverflowError):
            raise self.refuse(f"{word}() of something that is not a number", node) from None

    def comparison(self, op: type[ast.cmpop], left: ast.expr, right: ast.expr, depth: int, node: ast.AST) -> bool:
        try:
            return _COMPARISONS[op](self.value(left, (), depth + 1), self.value(right, (), depth + 1))
        except TypeError:
            raise self.refuse("values that cannot be compared", node) from None

    def operation(self, op: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value:
        texts = isinstance(left, str) and isinstance(right, str) and op is ast.Add
        lists = isinstance(left, list) and isinstance(right, list) and op is ast.Add
        numbers = all(isinstance(operand, int | float) for operand in (left, right)) and op in _OPERATORS
        if op is ast.Pow and numbers and (abs(left) > MAX_NUMBER or abs(right) > MAX_DEPTH):
            numbers = False
        if not (texts or lists or numbers):
            raise self.refuse("arithmetic needs two numbers, two texts or two lists", node)
        try:
            result = _OPERATORS[op](left, right)
        except (ArithmeticError, ValueError):
            raise self.refuse("a sum without a result", node) from None
        if (numbers and not abs(result) <= MAX_NUMBER) or (not numbers and len(result) > MAX_VALUES):
            raise self.refuse("a result out of range", node)
        return result
