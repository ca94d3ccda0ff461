"""Read YAML and JSON as data with line numbers; Hydra's `defaults` and `${...}` are replaced where a caller asks.

No tag builds an object, no alias expands without limit, and `1e-5` is a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tuner import paths
from tuner.errors import RecipeError, TunerError
from tuner.files import JsonObject, read_named_text
from tuner.recipes.merging import Keys, Kind, Layer, Merged, Place, line_of, lookup

if TYPE_CHECKING:
    import yaml  # type: ignore[import-untyped]

MAX_BYTES, MAX_DEPTH, MAX_VALUES = 1_000_000, 32, 20_000
_TOO_MUCH = f"more than {MAX_VALUES:,} values, or nested deeper than {MAX_DEPTH}: not a config"
_FIX = "Give a config of another tool."
_STANDARD = "tag:yaml.org,2002:"
# YAML 1.1, which PyYAML reads, takes a number without a point before its exponent for text: 1e-5, 5e8, 1.0e9.
_FLOAT = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+")


class Yaml(NamedTuple):
    """The mapping in a file, and the line of each key, from 1; indexes in a list count from 0."""

    values: JsonObject
    lines: dict[Keys, int]


def read_yaml(
    path: Path,
    name: str | None = None,
    *,
    may_be_empty: bool = False,
    error: type[TunerError] = RecipeError,
    fix: str = _FIX,
) -> Yaml:
    """Read a YAML or a JSON file that holds one mapping.

    Raises:
        TunerError: of the class `error`: it cannot be read, is not a mapping, builds objects, or is too large for a
            config.
    """
    shown = name or str(path)
    text = read_named_text(path, error, max_bytes=MAX_BYTES, fix=fix, name=shown)
    node, reader = _node(text, shown, error), _Reader(shown, error)
    if node is None and not may_be_empty:
        raise error("the file is empty", where=shown, fix=fix)
    values = reader.value(node, (), 0) if node else {}
    if not isinstance(values, dict):
        raise error("the file has no `key: value`", where=f"{shown}:1", fix=fix)
    return Yaml(values, reader.lines)


def _node(text: str, name: str, error: type[TunerError]) -> yaml.Node | None:
    import yaml

    try:
        # JSON may be indented by tabs, which YAML forbids; inside its texts they are written \t.
        return yaml.compose(text.replace("\t", "    ") if name.endswith(".json") else text, Loader=_loader())
    except yaml.YAMLError as reason:
        mark = getattr(reason, "problem_mark", None)
        problem = getattr(reason, "problem", None) or str(reason).split("\n")[0]
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise error(f"not valid YAML: {problem}", where=where) from None
    except RecursionError:
        raise error("not valid YAML: nested too deep", where=name) from None


@cache
def _loader() -> type[yaml.SafeLoader]:
    """Return a loader that ends where a file holds more than a config may: nested brackets take it quadratic time."""
    import yaml  # 30 ms, and most commands read no YAML

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        depth = num_nodes = 0

        def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node | None:
            self.depth, self.num_nodes = self.depth + 1, self.num_nodes + 1
            if self.depth > MAX_DEPTH + 1 or self.num_nodes > 2 * MAX_VALUES:  # a key is a node too
                raise yaml.MarkedYAMLError(problem=_TOO_MUCH, problem_mark=self.peek_event().start_mark)
            node: yaml.Node | None = super().compose_node(parent, index)
            self.depth -= 1
            return node

    return Loader


class _Reader:
    """Makes values of nodes; an alias is the same node again, so it counts as often as it is used."""

    def __init__(self, name: str, error: type[TunerError]) -> None:
        self.name, self.error, self.count = name, error, 0
        self.lines: dict[Keys, int] = {}
        import yaml

        self.yaml_error, self.scalars = yaml.YAMLError, yaml.constructor.SafeConstructor()

    def wrong(self, message: str, node: yaml.Node, fix: str | None = None) -> TunerError:
        return self.error(message, where=f"{self.name}:{node.start_mark.line + 1}", fix=fix)

    def value(self, node: yaml.Node, keys: Keys, depth: int) -> object:
        self.count += 1
        if self.count > MAX_VALUES or depth > MAX_DEPTH:
            raise self.wrong(_TOO_MUCH, node, "Check for an alias (*name) inside of its own anchor.")
        if not node.tag.startswith(_STANDARD) or node.tag.startswith(f"{_STANDARD}python/"):
            raise self.wrong(f"the tag {node.tag} builds an object", node, "Use plain values; nothing was run.")
        if node.id == "mapping":
            return self.mapping(node, keys, depth)
        if node.id == "sequence":
            self.lines |= {(*keys, str(at)): inner.start_mark.line + 1 for at, inner in enumerate(node.value)}
            return [self.value(inner, (*keys, str(at)), depth + 1) for at, inner in enumerate(node.value)]
        return self.scalar(node)

    def mapping(self, node: yaml.MappingNode, keys: Keys, depth: int) -> JsonObject:
        merged: JsonObject = {}
        own_values: JsonObject = {}
        for key_node, value_node in node.value:
            if key_node.tag == f"{_STANDARD}merge":
                below = self.value(value_node, keys, depth + 1)
                for mapping in below if isinstance(below, list) else [below]:
                    if not isinstance(mapping, dict):
                        raise self.wrong("<< needs a mapping, or a list of them", key_node)
                    merged |= {key: value for key, value in mapping.items() if key not in merged}
                continue
            if key_node.id != "scalar":
                raise self.wrong("a key that is not text", key_node)
            key = str(key_node.value)
            if key in own_values:
                raise self.wrong(f"the key {key!r} appears twice", key_node, "Keep one of the two.")
            self.lines[(*keys, key)] = key_node.start_mark.line + 1
            own_values[key] = self.value(value_node, (*keys, key), depth + 1)
        return merged | own_values

    def scalar(self, node: yaml.ScalarNode) -> object:
        if node.tag == f"{_STANDARD}str":
            return float(node.value) if node.style is None and _FLOAT.fullmatch(node.value) else node.value
        if node.tag in (f"{_STANDARD}timestamp", f"{_STANDARD}binary"):
            return node.value
        try:
            value = self.scalars.construct_object(node)
            str(value)  # Python writes no whole number of more than 4,300 digits, which hexadecimal digits can make
        except (ValueError, self.yaml_error) as reason:
            raise self.wrong(f"{node.value[:40]!r} is not a value: {str(reason).partition(';')[0]}", node) from None
        return value


DEFAULTS = "defaults"
_SELF = "_self_"
_AT_ROOT = ("_here_", "_global_")
_MAX_FILES = 64


def with_defaults(document: Yaml, folder: Path, name: str, error: type[TunerError]) -> Merged:
    """Return a file's values over those of the files in its `defaults`; `_self_` is the position of its own.

    Args:
        folder: The folder of the file; relative names start there.
        name: Its name in messages.

    Raises:
        TunerError: of the class `error`: a file outside of the allowed folders, or a wrong one.
    """
    result = Merged()
    # ROLL's examples name ../config/deepspeed_zero3; its tests name examples/config from below the working directory.
    homes = folder.resolve().parent, Path.cwd()
    for layer in _default_layers(_File(document, folder, name), homes, error, count()):
        result.lay(layer)
    return result


class _File(NamedTuple):
    document: Yaml
    folder: Path
    name: str

    def place(self, keys: Keys) -> Place:
        return Place(Kind.FILE, self.name, line_of(self.document.lines, keys))


def _default_layers(
    file: _File, homes: tuple[Path, ...], error: type[TunerError], counter: Iterator[int]
) -> Iterator[Layer]:
    own_values = {key: value for key, value in file.document.values.items() if key != DEFAULTS}
    defaults = file.document.values.get(DEFAULTS) or []
    if not isinstance(defaults, list):
        raise error(f"{DEFAULTS} is not a list of files", where=file.place((DEFAULTS,)))
    for number, entry in enumerate(defaults if _SELF in defaults else [*defaults, _SELF]):
        where = file.place((DEFAULTS, str(number)))
        if entry == _SELF:
            yield Layer(own_values, file.place)
        elif inner := _default_file(entry, file.folder, homes, error, where):
            if next(counter) == _MAX_FILES:
                raise error(f"more than {_MAX_FILES} nested base files", where=where, fix="Check for a cycle.")
            document = read_yaml(inner, may_be_empty=True, error=error)
            yield from _default_layers(_File(document, inner.parent, str(inner)), homes, error, counter)


def _default_file(
    entry: object, folder: Path, homes: tuple[Path, ...], error: type[TunerError], where: Place
) -> Path | None:
    """Return the file that an entry names, such as `../config/zero3@_here_`, or None if there is no such file."""
    if isinstance(entry, dict) and len(entry) == 1:
        group, option = next(iter(entry.items()))
        if group.startswith("override "):  # about Hydra itself
            return None
        group, at, package = group.partition("@")
        entry = f"{group}/{option}{at}{package}"
    if not isinstance(entry, str):
        raise error(f"{entry!r} is not a file name", where=where, fix="Use a name such as ../config/zero3@_here_.")
    name, _, package = entry.partition("@")
    path = folder / f"{name}.yaml"
    if not paths.is_file(path):
        return None
    if not any(home in path.resolve().parents for home in homes):
        fix = "Use a file below the parent folder or below the working directory."
        raise error(f"{name!r} is outside of the config's folders", where=where, fix=fix)
    if package not in _AT_ROOT and "/" in name:
        message = f"without @_here_, Hydra puts the values of {name!r} below its folder's name"
        raise error(f"{message}, where ${{...}} does not find them", where=where, fix=f"Use {name}@_here_.")
    return path


Wrong = Callable[[str, Keys, str], TunerError]
"""The message, the key and the fix -> the error to raise."""
_MAX_TEXT = 16_000
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")


def with_references(
    values: Mapping[str, object], wrong: Wrong, *, at: Keys = (), is_complete: bool = True
) -> tuple[Any, frozenset[str]]:
    """Return the value at a key with every `${a.b}` replaced by the value at a.b, and the top-level names used.

    Args:
        is_complete: The values are complete, so an unknown name is an error; otherwise the reference stays.

    Raises:
        TunerError: as `wrong` makes it: a cycle, an unknown name, or too many values.
    """
    resolver = _Resolver(values, wrong, is_complete)
    value = resolver.value(lookup(values, at), at, ())
    return value, frozenset(resolver.used)


class _Resolver:
    def __init__(self, values: Mapping[str, object], wrong: Wrong, is_complete: bool) -> None:
        self.values, self.wrong, self.is_complete, self.count = values, wrong, is_complete, 0
        self.used: set[str] = set()

    def value(self, value: object, keys: Keys, resolving: tuple[str, ...]) -> object:
        self.count += 1
        if self.count > MAX_VALUES or len(resolving) > MAX_DEPTH:
            raise self.wrong(f"the ${{...}} expand to more than {MAX_VALUES:,} values", keys, "Write them out.")
        if isinstance(value, dict):
            return {key: self.value(inner, (*keys, key), resolving) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.value(inner, (*keys, str(number)), resolving) for number, inner in enumerate(value)]
        return self.text(value, keys, resolving) if isinstance(value, str) else value

    def text(self, text: str, keys: Keys, resolving: tuple[str, ...]) -> object:
        if reference := _REFERENCE.fullmatch(text):
            return self.of(reference[1], keys, resolving)
        expanded = _REFERENCE.sub(lambda match: str(self.of(match[1], keys, resolving)), text)
        if len(expanded) > _MAX_TEXT:
            raise self.wrong(f"the ${{...}} expand to a text of {len(expanded):,} characters", keys, "Write it out.")
        return expanded

    def of(self, name: str, keys: Keys, resolving: tuple[str, ...]) -> object:
        kind, colon, rest = name.partition(":")
        if colon:  # a function of OmegaConf: of a variable, its default counts
            return rest.partition(",")[2].strip() if kind.strip() == "oc.env" and "," in rest else f"${{{name}}}"
        if name in resolving:
            circle = " -> ".join((*resolving, name))
            raise self.wrong(f"${{...}} in a cycle: {circle}", keys, "Write out one of the values.")
        value = lookup(self.values, name.split("."), ...)
        if value is ...:
            if not self.is_complete:
                return f"${{{name}}}"
            raise self.wrong(f"${{{name}}} is not defined in this file", keys, "Write out the value.")
        self.used.add(name.partition(".")[0])
        return self.value(value, keys, (*resolving, name))
