"""Reads XTuner's and mmengine's Python configs as data, statement by statement, without running them.

It supports what such configs contain: imports, names set above, `dict(...)`, lists, arithmetic, comparisons, `if`, and
`with read_base()`. Anything else is an error with its line. An imported name becomes a `Name`.
"""

from __future__ import annotations

import ast
import copy
import operator
from collections.abc import Callable
from pathlib import Path

from tuner.errors import RecipeError
from tuner.files import read_named_text
from tuner.importers.document import Block, Document, Keys, Name, Value
from tuner.recipes.yaml_text import MAX_DEPTH, MAX_VALUES

MAX_BYTES, MAX_NUMBER, MAX_BASES = 200_000, 1e18, 8
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


def read(path: Path, name: str | None = None) -> Document:
    """Read a config.

    Raises:
        RecipeError: it cannot be read, is not valid Python, or contains more than data.
    """
    shown = name or str(path)
    reader = _Reader(path, shown, 0)
    reader.file()
    # Names that later values use are translated there; an unused name is reported.
    return Document(reader.values, shown, reader.lines, path.parent, used=frozenset(reader.used))


class _Reader:
    def __init__(self, path: Path, name: str, depth: int) -> None:
        self.path, self.name, self.depth = path, name, depth
        self.values: Block = {}
        self.imported: dict[str, Name] = {}
        self.lines: dict[Keys, int] = {}
        self.used: set[str] = set()
        self.count = 0

    def file(self) -> None:
        text = read_named_text(self.path, RecipeError, max_bytes=MAX_BYTES, fix="Give a config.", name=self.name)
        try:
            tree = ast.parse(text, self.name)
        except SyntaxError as error:
            raise RecipeError(f"not valid Python: {error.msg}", where=f"{self.name}:{error.lineno or 1}") from None
        except (ValueError, MemoryError, RecursionError):
            raise RecipeError("not valid Python: nested too deep", where=self.name) from None
        self.body(tree.body)

    def wrong(self, message: str, node: ast.AST) -> RecipeError:
        return RecipeError(message, where=f"{self.name}:{getattr(node, 'lineno', 1)}", fix=_FIX)

    def body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self.statement(statement)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Constant(value=str())) | ast.Pass():
                return
            case ast.Import(names=names):
                for one in names:
                    word = one.asname or one.name.partition(".")[0]
                    self.imported[word] = Name(one.name if one.asname else word)
            case ast.ImportFrom(module=module, names=names, level=0):
                for one in names:
                    self.imported[one.asname or one.name] = Name(f"{module}.{one.name}")
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
                raise self.wrong(f"`{self.shown(node)}` is not plain data", node)

    def base(self, node: ast.stmt) -> None:
        """Add the values of a base config."""
        if not isinstance(node, ast.ImportFrom):
            raise self.wrong(f"`{self.shown(node)}` below read_base() is not an import", node)
        if not node.level:
            raise self.wrong(f"the base {node.module!r} is a module, not a file next to this one", node)
        if self.depth == MAX_BASES:
            raise self.wrong(f"more than {MAX_BASES} nested base files", node)
        path = self.path.parent.joinpath(*[".."] * (node.level - 1), *(node.module or "").split("."))
        below = _Reader(path.with_suffix(".py"), str(path.with_suffix(".py")), self.depth + 1)
        below.file()
        self.values |= below.values
        self.imported |= below.imported
        self.used |= below.used

    def value(self, node: ast.expr, keys: Keys, depth: int) -> Value:
        self.count += 1
        if depth > MAX_DEPTH or self.count > MAX_VALUES:
            raise self.wrong("nested too deep, or too many values", node)
        match node:
            case ast.Constant(value=int() as value) if abs(value) > MAX_NUMBER:
                raise self.wrong("a number out of range", node)
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.Name(id=word):
                return self.variable(word, keys, node)
            case ast.Attribute(value=inner, attr=word):
                return self.attribute(inner, word, keys, depth, node)
            case ast.List(elts=items):
                return [self.value(item, (*keys, str(at)), depth + 1) for at, item in enumerate(items)]
            case ast.Tuple(elts=items):
                return tuple(self.value(item, (*keys, str(at)), depth + 1) for at, item in enumerate(items))
            case ast.Dict(keys=names, values=values) if all(isinstance(one, ast.Constant) for one in names):
                words = [str(one.value) for one in names if isinstance(one, ast.Constant)]
                return self.mapping(list(zip(words, values, strict=True)), keys, depth)
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words) if all(one.arg for one in words):
                return self.mapping([(str(one.arg), one.value) for one in words], keys, depth)
            case ast.Call(func=ast.Name(id=word), args=[argument], keywords=[]) if word in _CASTS:
                return self.cast(word, self.value(argument, keys, depth + 1), node)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self.operation(ast.Sub, 0, self.value(operand, keys, depth + 1), node)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self.value(operand, keys, depth + 1)
            case ast.BinOp(left=left, op=op, right=right):
                both = self.value(left, keys, depth + 1), self.value(right, keys, depth + 1)
                return self.operation(type(op), *both, node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.value(body if self.value(test, (), depth + 1) else orelse, keys, depth + 1)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARISONS:
                return self.comparison(type(op), left, right, depth, node)
        raise self.wrong(f"`{self.shown(node)}` is not plain data", node)

    def shown(self, node: ast.AST) -> str:
        return type(node).__name__ if isinstance(node, ast.stmt) else ast.dump(node)[:60]

    def variable(self, word: str, keys: Keys, node: ast.AST) -> Value:
        if word in self.values:
            self.used.add(word)
            for inner, line in [*self.lines.items()]:
                if inner[0] == word and len(inner) > 1:
                    self.lines.setdefault((*keys, *inner[1:]), line)
            return copy.deepcopy(self.values[word])
        if word in self.imported:
            return self.imported[word]
        raise self.wrong(f"`{word}` is not defined above", node)

    def attribute(self, inner: ast.expr, word: str, keys: Keys, depth: int, node: ast.AST) -> Value:
        owner = self.value(inner, keys, depth + 1)
        if isinstance(owner, Name):
            return Name(f"{owner.text}.{word}")
        if isinstance(owner, dict) and word in owner:
            return owner[word]
        raise self.wrong(f"`.{word}` of a value is not plain data", node)

    def mapping(self, pairs: list[tuple[str, ast.expr]], keys: Keys, depth: int) -> Block:
        block: Block = {}
        for word, value in pairs:
            self.lines[(*keys, word)] = value.lineno
            block[word] = self.value(value, (*keys, word), depth + 1)
        return block

    def cast(self, word: str, value: Value, node: ast.AST) -> Value:
        try:
            return _CASTS[word](value)
        except (TypeError, ValueError, OverflowError):
            raise self.wrong(f"{word}() of something that is not a number", node) from None

    def comparison(self, op: type[ast.cmpop], left: ast.expr, right: ast.expr, depth: int, node: ast.AST) -> bool:
        try:
            return _COMPARISONS[op](self.value(left, (), depth + 1), self.value(right, (), depth + 1))
        except TypeError:
            raise self.wrong("values that cannot be compared", node) from None

    def operation(self, op: type[ast.operator], left: Value, right: Value, node: ast.AST) -> Value:
        texts = isinstance(left, str) and isinstance(right, str) and op is ast.Add
        lists = isinstance(left, list) and isinstance(right, list) and op is ast.Add
        numbers = all(isinstance(one, int | float) for one in (left, right)) and op in _OPERATORS
        if op is ast.Pow and numbers and (abs(left) > MAX_NUMBER or abs(right) > MAX_DEPTH):
            numbers = False
        if not (texts or lists or numbers):
            raise self.wrong("arithmetic needs two numbers, two texts or two lists", node)
        try:
            result = _OPERATORS[op](left, right)
        except (ArithmeticError, ValueError):
            raise self.wrong("a sum without a result", node) from None
        if (numbers and not abs(result) <= MAX_NUMBER) or (not numbers and len(result) > MAX_VALUES):
            raise self.wrong("a result out of range", node)
        return result
