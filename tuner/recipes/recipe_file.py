"""Read a recipe file, or a part of the catalog, as data: a subset of Python that is evaluated without being run.

The subset is `name = value` with literals, `dict(...)`, names bound to scalars above, and + - * / // of numbers.
mmengine reads the same file to the same value. Nothing here knows which keys a recipe has.
"""

from __future__ import annotations

import ast
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tuner import assets
from tuner.errors import Option, RecipeError, did_you_mean
from tuner.files import JsonObject, is_writable, read_named_text
from tuner.recipes import catalog
from tuner.recipes.merging import Keys, Kind, Place, line_of

YAML = (".yaml", ".yml")
DOCUMENTS = (*YAML, ".json")
SUFFIXES = (".py", *DOCUMENTS)
"""The suffixes of recipe files; `document_file` reads those in YAML and JSON."""
MAX_BYTES, MAX_DEPTH, MAX_NODES, MAX_TEXT, MAX_NUMBER = 64_000, 32, 10_000, 16_000, 1e18
_OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_DATA_ONLY = f"A recipe is data. Read the file: {Option('allow_code', True)} runs its code (through mmengine)."


class RecipeFile(NamedTuple):
    """The values of one file, in file order, and the line on which each key stands."""

    name: str
    values: JsonObject
    lines: dict[Keys, int]
    helpers: frozenset[str] = frozenset()
    """Top-level scalars that a later expression uses; any other name that is not a recipe's key is a typo."""
    kind: Kind = Kind.FILE

    def place(self, keys: Keys) -> Place:
        """Return the place of a key, or of the innermost block around it that has a line."""
        return Place(self.kind, self.name, line_of(self.lines, keys))

    def where(self, keys: Keys) -> str:
        """Return the same place as text: `file:line`."""
        return str(self.place(keys))


def read_file(path: Path, name: str | None = None, kind: Kind = Kind.FILE) -> RecipeFile:
    """Read a recipe file.

    Args:
        path: The file.
        name: Its name in messages, if not its path.
        kind: The kind of place that it is.

    Raises:
        RecipeError: the file is missing, too large or not UTF-8, or holds something other than data.
    """
    shown, fix = name or str(path), "Give a recipe's name or a .py file."
    text = read_named_text(path, RecipeError, max_bytes=MAX_BYTES, fix=fix, name=shown)
    return read_text(text, shown)._replace(kind=kind)


def read_text(text: str, name: str) -> RecipeFile:
    """Read a recipe's text; `name` is its name in messages.

    Raises:
        RecipeError: the text is not valid Python, or holds something other than data.
    """
    reader = Reader(name, text)
    for index, statement in enumerate(parse(text, name).body):
        reader.statement(statement, first=index == 0)
    return RecipeFile(name, reader.values, reader.lines, frozenset(reader.used))


def read_value(text: str, name: str) -> object:
    """Read one value written as in a recipe.

    Raises:
        RecipeError: `text` is not one value of the subset.
    """
    tree = parse(text.strip(), name, "eval")
    return Reader(name, text.strip()).value(tree.body, (), 0)


def parse(text: str, name: str, mode: Literal["exec", "eval"] = "exec", *, takes_escapes: bool = False) -> Any:
    """Return the syntax tree of a text; `takes_escapes`: unknown escapes stay as they are.

    Raises:
        RecipeError: it is not valid Python.
    """
    try:
        with warnings.catch_warnings():
            # An unknown escape such as "\." is only a warning today; it is refused so that its meaning cannot change.
            warnings.simplefilter("ignore" if takes_escapes else "error")
            return ast.parse(text, name, mode)
    except SyntaxError as error:
        raise RecipeError(f"not valid Python: {error.msg}", where=f"{name}:{error.lineno or 1}") from None
    except (ValueError, MemoryError, RecursionError) as error:
        raise RecipeError(f"not valid Python: {str(error) or 'nested too deep'}", where=name) from None


def wrong_scalar(value: object) -> tuple[str, str] | None:
    """Return what is wrong with a value that the schema does not check, and what to do; None if it is right."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"a text longer than {MAX_TEXT} characters", "Put it into a file of its own."
    if isinstance(value, str) and not is_writable(value):
        return "a text with a NUL or half a surrogate pair", "Use text that is valid UTF-8."
    if isinstance(value, int | float) and not -MAX_NUMBER <= value <= MAX_NUMBER:
        shown = f"{value:g}" if isinstance(value, float) else "a whole number"
        return f"{shown} is out of range", f"Use a number between -{MAX_NUMBER:g} and {MAX_NUMBER:g}."
    return None


class Reader:
    """Evaluates the syntax tree of a recipe; `importers.python_file` extends it to other tools' configs."""

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text
        self.values: JsonObject = {}
        self.lines: dict[Keys, int] = {}
        self.used: set[str] = set()
        self.nodes = 0

    def refuse(self, message: str, node: ast.AST, fix: str = _DATA_ONLY) -> RecipeError:
        return RecipeError(message, where=f"{self.name}:{getattr(node, 'lineno', 1)}", fix=fix)

    def shown(self, node: ast.AST) -> str:
        # Not ast.unparse: it recurses, and a chain of 400 attributes ends it.
        return (ast.get_source_segment(self.text, node) or type(node).__name__).split("\n")[0][:60]

    def statement(self, node: ast.stmt, *, first: bool) -> None:
        match node:
            case ast.Expr(value=ast.Constant(value=str())) if first:
                return
            case ast.Assign(targets=[ast.Name(id=key)], value=value):
                if key in self.values:
                    raise self.refuse(f"{key!r} is assigned twice", node, "Keep one of the two lines.")
                if key.startswith("__") or key == "dict":
                    raise self.refuse(f"{key!r} is not a valid name in a recipe", node)
                self.lines[(key,)] = node.lineno
                self.values[key] = self.value(value, (key,), 0)
            case _:
                kind = type(node).__name__.lower()
                raise self.refuse(f"a recipe may only contain `name = value`, and this is {kind!r}", node)

    def value(self, node: ast.expr, keys: Keys, depth: int) -> Any:
        self.nodes += 1
        if depth > MAX_DEPTH:
            raise self.refuse(f"nested deeper than {MAX_DEPTH}", node)
        if self.nodes > MAX_NODES:
            raise self.refuse(f"more than {MAX_NODES} values", node)
        match node:
            case ast.Constant(value=constant):
                return self.constant(constant, node)
            case ast.Name(id=name):
                return self.variable(name, node)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
                number = self.number(operand, keys, depth)
                return -number if isinstance(sign, ast.USub) else number
            case ast.BinOp(op=op) if type(op) in _OPERATORS:
                return self.arithmetic(node, keys, depth)
            case ast.List(elts=items):
                return [self.value(item, (*keys, str(at)), depth + 1) for at, item in enumerate(items)]
            case ast.Tuple(elts=items):
                return tuple(self.value(item, (*keys, str(at)), depth + 1) for at, item in enumerate(items))
            case ast.Dict(keys=names, values=values):
                return self.mapping(list(zip(names, values, strict=True)), node, keys, depth)
            case ast.Call(func=ast.Name(id="dict"), args=[], keywords=words):
                # None stands for `**`, as in ast.Dict.
                key_nodes = (ast.copy_location(ast.Constant(word.arg), word) if word.arg else None for word in words)
                return self.mapping([*zip(key_nodes, (word.value for word in words), strict=True)], node, keys, depth)
        raise self.refuse(f"`{self.shown(node)}` is not data", node)

    def constant(self, value: Any, node: ast.AST) -> Any:
        if not isinstance(value, bool | str | int | float | None):
            raise self.refuse(f"`{self.shown(node)}` is not data that a recipe may contain", node)
        if wrong := wrong_scalar(value):
            raise self.refuse(wrong[0], node, wrong[1])
        return value

    def variable(self, name: str, node: ast.AST) -> object:
        if name not in self.values:
            raise self.refuse(f"`{name}` is not data: no such name is defined above", node)
        if isinstance(self.values[name], list | tuple | dict):
            raise self.refuse(f"`{name}` is not a scalar, so it cannot be used again", node)
        self.used.add(name)
        return self.values[name]

    def number(self, node: ast.expr, keys: Keys, depth: int) -> float:
        value = self.value(node, keys, depth + 1)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(f"arithmetic needs numbers, not {type(value).__name__}", node)
        return value

    def arithmetic(self, node: ast.BinOp, keys: Keys, depth: int) -> Any:
        left, right = self.number(node.left, keys, depth), self.number(node.right, keys, depth)
        try:
            return self.constant(_OPERATORS[type(node.op)](left, right), node)
        except ZeroDivisionError:
            raise self.refuse("division by zero", node, "Use a divisor other than 0.") from None

    def mapping(
        self, pairs: Sequence[tuple[ast.expr | None, ast.expr]], node: ast.AST, keys: Keys, depth: int
    ) -> JsonObject:
        result: JsonObject = {}
        for name_node, value_node in pairs:
            if name_node is None:
                raise self.refuse("`**` is not data", node)
            if not isinstance(name_node, ast.Constant) or not isinstance(name_node.value, str):
                raise self.refuse(f"`{self.shown(name_node)}` is not a text key", name_node)
            name = self.constant(name_node.value, value_node)
            if name in result:
                raise self.refuse(f"the key {name!r} appears twice", name_node, "Keep one of the two.")
            self.lines[(*keys, name)] = value_node.lineno
            result[name] = self.value(value_node, (*keys, name), depth + 1)
        return result


def read_part(kind: str, name: str) -> RecipeFile:
    """Read a part of one of `catalog.KINDS`.

    `architecture` of a model part may build on that of another one: it is the name of that part, or `dict(_base_=...)`
    with this name and the facts that differ. Its `vision_config` may be the name of the part that has the same tower.

    Raises:
        RecipeError: there is no such part, its file is not data, or `architecture` builds on a part without facts of
            its own.
    """
    return _with_facts(_read_named(kind, name), (name,))


def _with_facts(part: RecipeFile, names: tuple[str, ...]) -> RecipeFile:
    """Return a part with the facts that its `architecture` builds on; `names` are its own and those of parts above."""
    written = part.values.get("architecture")
    architecture: JsonObject = {**written} if isinstance(written, dict) else {"_base_": written}
    tower, base = architecture.get("vision_config"), architecture.pop("_base_", None)
    if isinstance(tower, str):
        architecture["vision_config"] = _shared_facts(part, tower, names).get("vision_config")
    if isinstance(base, str):
        architecture = _shared_facts(part, base, names) | architecture
    elif not isinstance(tower, str):
        return part
    return part._replace(values={**part.values, "architecture": architecture})


def _shared_facts(part: RecipeFile, owner: str, names: tuple[str, ...]) -> JsonObject:
    """Return the facts of the model part that another part names."""
    where, known = part.where(("architecture",)), catalog.names("models")
    if owner not in known:
        raise RecipeError(f"no model {owner!r} to share facts with", where=where, fix=did_you_mean(owner, known))
    # A part of the package means the package's own.
    file, is_ours = assets.CONFIGS / "models" / f"{owner}.py", part.kind is Kind.PACKAGE
    holder = _read_once(file, None, Kind.PACKAGE) if is_ours else _read_named("models", owner)
    shared = None if owner in names else _with_facts(holder, (*names, owner)).values.get("architecture")
    if not isinstance(shared, dict):
        raise RecipeError(f"model {owner!r} has no facts of its own", where=where, fix="Give the part that holds them.")
    return shared


def _read_named(kind: str, name: str) -> RecipeFile:
    file = catalog.part_file(kind, name)
    read = _read_once if file.folder.kind is Kind.PACKAGE else read_file
    return read(file.path, file.shown, file.folder.kind)


@cache
def _read_once(path: Path, shown: str | None, kind: Kind) -> RecipeFile:
    """Read a file of the package, which does not change. All callers share its values: do not change them."""
    return read_file(path, shown, kind)
