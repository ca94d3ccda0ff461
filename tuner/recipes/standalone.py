"""A recipe as the text of one commented file without any base, and values as the source of a recipe."""

from __future__ import annotations

import ast
import json
import keyword

from tuner.files import JsonObject, read_text
from tuner.recipes import catalog


def python_text(name: str, values: JsonObject, base: JsonObject, note: str) -> str:
    """Return a recipe as the text of one commented Python file.

    Args:
        values: The values of the recipe.
        base: The values of the base recipe.
        note: It follows the recipe's name in the docstring.
    """
    text = read_text(catalog.BASE)
    return flatten(text, _difference(base, values), f"{name}: one standalone recipe.{note}")


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
        if isinstance(value, dict) and isinstance(old, dict):
            inner = _difference(old, value)
            if inner:
                differing[key] = inner
        elif value != old:
            differing[key] = value
    return differing


def flatten(base: str, delta: JsonObject, header: str) -> str:
    """Return the text `base` with the values of `delta`, and with `header` as its docstring.

    Args:
        base: A recipe's text; its top-level values are literals and `dict(...)`.
        delta: Nested values; a key that a dict of the base lacks is added, and must be a plain word.
        header: One paragraph about the new file.
    """
    edits: list[tuple[int, int, str]] = []
    tree = ast.parse(base)
    text = _Text(base)
    tail = ""
    assigned = ((node.targets[0], node.value) for node in tree.body if isinstance(node, ast.Assign))
    nodes = {target.id: value for target, value in assigned if isinstance(target, ast.Name)}
    for key, value in delta.items():
        if key in nodes:
            _replace(nodes[key], value, 0, text, edits)
        else:
            tail += f"\n{key} = {render(value, 0)}\n"
    docstring = tree.body[0]
    edits.append((*text.span(docstring), render_docstring(header)))
    return text.edited(edits) + tail


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


class _Text:
    def __init__(self, text: str) -> None:
        self.raw = text.encode()
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line.encode()))

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def edited(self, edits: list[tuple[int, int, str]]) -> str:
        raw = self.raw
        for start, end, new in sorted(edits, reverse=True):
            raw = raw[:start] + new.encode() + raw[end:]
        return raw.decode()


def _is_word(key: object) -> bool:
    # Python reads names beyond ASCII in a normal form of its own, and cannot pass `class` or `__debug__` as a word.
    if not isinstance(key, str):
        return False
    return key.isascii() and key.isidentifier() and not keyword.iskeyword(key) and not key.startswith("__")


def _replace(node: ast.expr, value: object, indent: int, text: _Text, edits: list[tuple[int, int, str]]) -> None:
    if not (isinstance(value, dict) and isinstance(node, ast.Call)):
        edits.append((*text.span(node), render(value, indent)))
        return
    have = {keyword.arg: keyword.value for keyword in node.keywords}
    new = {key: item for key, item in value.items() if key not in have}
    for key in value.keys() - new.keys():
        _replace(have[key], value[key], indent + 4, text, edits)
    if not new:
        return
    words = [f"{key}={render(item, indent + 4)}" for key, item in new.items()]
    end = text.span(node)[1] - 1
    if node.end_lineno == node.lineno:
        edits.append((end, end, (", " if have else "") + ", ".join(words)))
    else:
        assert node.end_lineno is not None
        line_start = text.at(node.end_lineno, 0)
        edits.append((line_start, line_start, "".join(" " * (indent + 4) + word + ",\n" for word in words)))
