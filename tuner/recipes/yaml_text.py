"""YAML and JSON as data with line numbers: no tag builds an object, no alias explodes, `1e-5` is a number.

It knows no tool.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]

from tuner.errors import RecipeError, TunerError
from tuner.files import read_named_text
from tuner.recipes.origin import Keys

MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1_000_000, 32, 20_000
_FIX = "Give a config of another tool."
_STANDARD = "tag:yaml.org,2002:"
# YAML 1.1, which PyYAML reads, takes a number without a point before its exponent for text: 1e-5, 5e8, 1.0e9.
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class Yaml(NamedTuple):
    """The mapping that a file holds, and the line of each key, from 1; the place in a list counts from 0."""

    values: dict[str, Any]
    lines: dict[Keys, int]


def read(
    path: Path,
    name: str | None = None,
    *,
    may_be_empty: bool = False,
    error: type[TunerError] = RecipeError,
    fix: str = _FIX,
) -> Yaml:
    """Read a YAML or a JSON file that holds one mapping.

    Raises:
        TunerError: of the class `error`: it cannot be read, is no mapping, builds objects, or grows beyond what a
            config holds.
    """
    shown = name or str(path)
    text = read_named_text(path, error, max_bytes=MAX_BYTES, fix=fix, name=shown)
    node = _node(text, shown, error)
    if may_be_empty and node is None:
        return Yaml({}, {})
    lines: dict[Keys, int] = {}
    values = _Reader(shown, lines, error, fix).value(node, (), 0)
    if not isinstance(values, dict):
        raise error("the file has no `key: value`", where=f"{shown}:1", fix=fix)
    return Yaml(values, lines)


def _node(text: str, name: str, error: type[TunerError]) -> yaml.Node | None:
    try:
        # JSON may be indented by tabs, which YAML forbids; inside its texts they are written \t.
        return yaml.compose(text.replace("\t", "    ") if name.endswith(".json") else text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as reason:
        mark = getattr(reason, "problem_mark", None)
        problem = getattr(reason, "problem", None) or str(reason).split("\n")[0]
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise error(f"not valid YAML: {problem}", where=where) from None
    except RecursionError:
        raise error("not valid YAML: nested too deep", where=name) from None


class _Reader:
    """Values out of nodes; an alias is the same node again, so each is counted as often as it is used."""

    def __init__(self, name: str, lines: dict[Keys, int], error: type[TunerError], fix: str) -> None:
        self.name, self.lines, self.error, self.fix, self.count = name, lines, error, fix, 0
        self.scalars = yaml.constructor.SafeConstructor()

    def wrong(self, what: str, node: yaml.Node, fix: str | None = None) -> TunerError:
        return self.error(what, where=f"{self.name}:{node.start_mark.line + 1}", fix=fix)

    def value(self, node: yaml.Node | None, keys: Keys, depth: int) -> Any:
        if node is None:
            raise self.error("the file is empty", where=self.name, fix=self.fix)
        self.count += 1
        if self.count > MAX_VALUES or depth > MAX_DEPTH:
            what = f"more than {MAX_VALUES:,} values, or nested deeper than {MAX_DEPTH}: not a config"
            raise self.wrong(what, node, "Check for an alias (*name) inside of its own anchor.")
        if not node.tag.startswith(_STANDARD) or node.tag.startswith(f"{_STANDARD}python/"):
            raise self.wrong(f"the tag {node.tag} builds an object", node, "Use plain values; nothing was run.")
        if isinstance(node, yaml.MappingNode):
            return self.mapping(node, keys, depth)
        if isinstance(node, yaml.SequenceNode):
            for number, inner in enumerate(node.value):
                self.lines[(*keys, str(number))] = inner.start_mark.line + 1
            return [self.value(inner, (*keys, str(number)), depth + 1) for number, inner in enumerate(node.value)]
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, keys: Keys, depth: int) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_STANDARD}merge":
                below = self.value(value_node, keys, depth + 1)
                for one in below if isinstance(below, list) else [below]:
                    if not isinstance(one, dict):
                        raise self.wrong("<< needs a mapping, or a list of them", key_node)
                    merged |= {key: value for key, value in one.items() if key not in merged}
                continue
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is None:
                raise self.wrong("a key that is not text", key_node)
            if key in own:
                raise self.wrong(f"the key {key!r} appears twice", key_node, "Keep one of the two.")
            self.lines[(*keys, key)] = key_node.start_mark.line + 1
            own[key] = self.value(value_node, (*keys, key), depth + 1)
        return merged | own

    def scalar(self, node: yaml.ScalarNode) -> Any:
        if node.tag == f"{_STANDARD}str":
            return float(node.value) if node.style is None and _FLOAT.fullmatch(node.value) else node.value
        if node.tag in (f"{_STANDARD}timestamp", f"{_STANDARD}binary"):
            return node.value
        try:
            value = self.scalars.construct_object(node)
            str(value)  # Python writes no whole number of more than 4,300 digits, which hexadecimal digits can make
        except (ValueError, yaml.YAMLError) as reason:
            raise self.wrong(f"{node.value[:40]!r} is not a value: {str(reason).partition(';')[0]}", node) from None
        return value
