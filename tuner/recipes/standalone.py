"""A recipe as the text of one commented file without any base, and values as the source of a recipe."""

from __future__ import annotations

import ast
import json
import keyword
from collections.abc import Iterator

from tuner.files import JsonObject, read_text
from tuner.recipes import catalog


def python_text(name: str, values: JsonObject, base: JsonObject, note: str) -> str:
    """Return a recipe as the text of one commented Python file.

    Args:
        values: The values of the recipe.
        base: The values of the base recipe.
        note: It follows the recipe's name in the docstring.
    """
    return flatten(read_text(catalog.BASE), _difference(base, values), f"{name}: one standalone recipe.{note}")


def yaml_text(name: str, values: JsonObject, note: str) -> str:
    """Return a recipe as the text of one YAML file, without comments."""
    import yaml  # type: ignore[import-untyped]  # PyYAML, which a recipe in Python does without

    text = yaml.safe_dump(_lists(values), sort_keys=False, allow_unicode=True, width=120)
    return f"# {name}: one standalone recipe.{note}\n{text}"


def _lists(value: object) -> object:
    """Return a value with lists in place of tuples, which YAML does not have."""
    if isinstance(value, dict):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, list | tuple) else value


def _difference(base: JsonObject, values: JsonObject) -> JsonObject:
    differing: JsonObject = {}
    for key, value in values.items():
        old = base.get(key, ...)
        if value != old:
            are_blocks = isinstance(value, dict) and isinstance(old, dict)
            differing[key] = _difference(old, value) if are_blocks else value
    return differing


def flatten(base: str, delta: JsonObject, header: str) -> str:
    """Return the text `base` with the values of `delta`, and with `header` as its docstring.

    Args:
        base: A recipe's text; its top-level values are literals and `dict(...)`.
        delta: Nested values; a key that a dict of the base lacks is added, and must be a plain word.
        header: One paragraph about the new file.
    """
    tree = ast.parse(base)
    assigned = ((node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign))
    nodes = {target.id: value for target, value in assigned if isinstance(target, ast.Name)}
    edits = [(_span(tree.body[0]), render_docstring(header))]
    for key in delta.keys() & nodes.keys():
        edits += _replaced(nodes[key], delta[key], 0)
    lines = base.encode().splitlines(keepends=True)
    for ((line, column), (end_line, end_column)), new in sorted(edits, reverse=True):
        kept, tail = lines[line - 1][:column], lines[end_line - 1][end_column:]
        lines[line - 1 : end_line] = [kept + new.encode() + tail]
    added = (f"\n{key} = {render(value, 0)}\n" for key, value in delta.items() if key not in nodes)
    return b"".join(lines).decode() + "".join(added)


def render(value: object, indent: int) -> str:
    """Return a value as recipe source; a dict or a list that is too long for a line gets one line for each item."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # every escape of JSON means the same in Python
    if isinstance(value, dict) and all(_is_word(key) for key in value):
        words = [f"{key}={render(item, indent + 4)}" for key, item in value.items()]
        start, end = "dict(", ")"
    elif isinstance(value, dict):
        words = [f"{render(key, 0)}: {render(item, indent + 4)}" for key, item in value.items()]
        start, end = "{", "}"
    elif isinstance(value, list | tuple) and value:
        words = [render(item, indent + 4) for item in value]
        start, end = ("[", "]") if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
    else:
        return repr(value)
    line = f"{start}{', '.join(words)}{end}"
    if len(line) + indent <= 90 and "\n" not in line:
        return line
    pad = " " * (indent + 4)
    return f"{start}\n" + "".join(f"{pad}{word},\n" for word in words) + " " * indent + end[-1]


def render_docstring(text: str) -> str:
    """Return `text` as a docstring; no text can end it early."""
    safe = text.replace("\\", "\\\\").replace('"', "'")
    return f'"""{safe}"""'


def _is_word(key: object) -> bool:
    # Python reads names beyond ASCII in a normal form of its own, and cannot pass `class` or `__debug__` as a word.
    if not isinstance(key, str):
        return False
    return key.isascii() and key.isidentifier() and not keyword.iskeyword(key) and not key.startswith("__")


_Span = tuple[tuple[int, int], tuple[int, int]]
"""Line, from 1, and column in bytes of the beginning and of the end."""


def _span(node: ast.stmt | ast.expr) -> _Span:
    assert node.end_lineno is not None and node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _replaced(node: ast.expr, value: object, indent: int) -> Iterator[tuple[_Span, str]]:
    """Yield the spans of a node that change for a value, each with its new text."""
    start, (end_line, end_column) = _span(node)
    if not (isinstance(value, dict) and isinstance(node, ast.Call)):
        yield _span(node), render(value, indent)
        return
    have = {keyword.arg: keyword.value for keyword in node.keywords}
    for key in value.keys() & have.keys():
        yield from _replaced(have[key], value[key], indent + 4)
    new = [f"{key}={render(item, indent + 4)}" for key, item in value.items() if key not in have]
    if new and end_line == start[0]:
        yield ((end_line, end_column - 1),) * 2, (", " if have else "") + ", ".join(new)
    elif new:
        yield ((end_line, 0),) * 2, "".join(" " * (indent + 4) + word + ",\n" for word in new)
