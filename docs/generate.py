"""Fills the site with what the code owns. MkDocs calls it as a hook (`mkdocs.yml`); nothing that it makes is committed.

The text between `<!-- generated: NAME -->` and `<!-- end -->` in a page is for readers of the source; the site has
`GENERATED[NAME]` there. The home pages are the two READMEs.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from tests.worker.families import METHODS, examples
from tuner.cli import COMMANDS, explain, parts, tuner
from tuner.data.formats import FORMATS
from tuner.data.sample import KINDS
from tuner.errors import TunerError
from tuner.machine.libraries import KERNELS, KERNELS_OF
from tuner.recipes import catalog
from tuner.recipes.architecture_constraints import KEEPS_APART
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.strict import Block, blocks_of
from tuner.recipes.xtuner_names import SPELLINGS

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
HOME = {"index.md": "README.md", "zh.md": "README_zh-CN.md"}
_SIGNAL = 128
_ByKey = dict[tuple[str, ...], str]
_MARK = re.compile(r"<!-- generated: (?P<name>[a-z -]+) -->\n.*?<!-- end -->", re.DOTALL)
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^):#]+)(?P<anchor>#[^)]*)?\)")
_PLAIN = {str: "text", int: "whole number", float: "number", bool: "`True` or `False`", Any: "any value", dict: "dict"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the home pages."""
    from mkdocs.structure.files import File  # the tests of the tables need no MkDocs

    for page, readme in HOME.items():
        files.append(File.generated(config, page, content=home((ROOT / readme).read_text(encoding="utf-8"))))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the text of a page with everything generated in its place."""
    return filled(markdown)


def filled(markdown: str) -> str:
    """Return the text of a page with everything generated in its place.

    Raises:
        KeyError: a page asks for what nothing here makes.
    """
    return _MARK.sub(lambda found: GENERATED[found["name"]](), markdown)


def home(readme: str) -> str:
    """Return a README as a page of the site: links lead to pages, and what is no page stays as text."""
    pages = {name: page for page, name in HOME.items()}

    def linked(found: re.Match[str]) -> str:
        target, text, anchor = found["target"], found["text"], found["anchor"] or ""
        page = pages.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        return f"[{text}]({page}{anchor})" if page else text

    return _LINK.sub(linked, readme).replace("](docs/images/", "](images/")


def _table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(_cell(cell) for cell in line)} |\n" for line in lines)


def _cell(cell: object) -> str:
    return str(cell).replace("|", "\\|").replace("\n", " ")


def _code(names: Iterable[object]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# Reference: commands, recipe keys, exit codes


def _commands() -> str:
    context = click.Context(tuner, info_name="tuner")
    known = ((name, tuner.get_command(context, name)) for name in COMMANDS)
    return "\n".join(_command(command, context, f"tuner {name}", 2) for name, command in known if command)


def _command(command: click.Command, above: click.Context, title: str, level: int) -> str:
    context = click.Context(command, parent=above, info_name=title.rpartition(" ")[2])
    told = inspect.cleandoc(command.help or "").replace("\b\n", "")
    usage = " ".join((context.command_path, *command.collect_usage_pieces(context)))
    lines = [f"{'#' * level} {title}", "", told, "", "```text", usage, "```", ""]
    records = (param.get_help_record(context) for param in command.get_params(context))
    lines += [f"- `{flags}`: {_text(text)}" for flags, text in filter(None, records) if text]
    if isinstance(command, click.Group):
        inner = ((name, command.get_command(context, name)) for name in command.list_commands(context))
        lines += ["", *(_command(one, context, f"{title} {name}", level + 1) for name, one in inner if one)]
    return "\n".join(lines) + "\n"


def _text(text: str) -> str:
    """Return what a terminal shows as Markdown that shows the same."""
    return re.sub(r"([\\`*_<|\[\]])", r"\\\1", text)


def _keys() -> str:
    defaults, notes = _base()
    sections = []
    for name, key in RecipeConfig.model_fields.items():
        sections += [f"## {name}", ""]
        blocks = blocks_of(key.annotation) if name not in ("architecture", "val_dataloader") else []
        if not blocks or (name,) in defaults:
            sections.append(_key_table([_row((name,), key, defaults, notes)]))
        elif notes[name,]:
            sections += [_text(notes[name,]), ""]
        if len(blocks) > 1:
            types = " or ".join(_type(block.model_fields["type"].annotation) for block in blocks)
            sections.append(_key_table([(f"`{name}.type`", types, defaults[name, "type"], "Which of those below.")]))
        for block in blocks:
            rows = [*_rows((name,), block, defaults, notes)]
            if len(blocks) > 1:
                rows = [row for row in rows if row[0] != f"`{name}.type`"]
                sections += [f"### {name}: {block.__name__.lower()}", "", inspect.cleandoc(block.__doc__ or ""), ""]
            sections.append(_key_table(rows) if rows else "")
    return "\n".join(sections)


def _key_table(rows: Iterable[Sequence[str]]) -> str:
    return _table(("key", "type", "default", "what it does"), rows)


def _rows(keys: tuple[str, ...], block: type[Block], defaults: _ByKey, notes: _ByKey) -> Iterator[Sequence[str]]:
    """Yield a row for each key of a block, and of the blocks in it."""
    own = _comments_of(block)
    for name, key in block.model_fields.items():
        inner = blocks_of(key.annotation)
        if inner and (*keys, name) not in defaults:
            yield from _rows((*keys, name), inner[0], defaults, notes)
        else:
            yield _row((*keys, name), key, defaults, {(*keys, name): own.get(name, "")} | notes)


def _row(keys: tuple[str, ...], key: FieldInfo, defaults: _ByKey, notes: _ByKey) -> Sequence[str]:
    default = defaults.get(keys) or ("required" if key.is_required() else f"`{key.default!r}`")
    return (f"`{'.'.join(keys)}`", _type(key.annotation, key.metadata), default, _text(notes.get(keys, "")))


def _type(annotation: Any, marks: Sequence[Any] = ()) -> str:
    """Return a type and its limits as people say them."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        key = FieldInfo.from_annotation(annotation)
        return _type(key.annotation, key.metadata)
    if marks:
        signs = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
        limits = [
            f"{sign} {getattr(mark, word)}" for word, sign in signs.items() for mark in marks if hasattr(mark, word)
        ]
        return f"{_type(annotation)} {', '.join(limits)}".strip()
    if origin is Literal:
        return ", ".join(f"`{one!r}`" for one in inner)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys("`None`" if one is NoneType else _type(one) for one in inner))
    if origin in (tuple, list):
        return f"list of {_type(inner[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return "dict"
    return _PLAIN[origin or annotation]


def _base() -> tuple[_ByKey, _ByKey]:
    """Return the default of each key in `configs/base.py`, and the comment above it."""
    source = (catalog.CONFIGS / "base.py").read_text(encoding="utf-8")
    defaults, notes = {}, {}

    def walk(keys: tuple[str, ...], node: ast.expr, line: int) -> None:
        notes[keys] = _comment_above(source, line)
        if isinstance(node, ast.Call):
            for word in node.keywords:
                walk((*keys, str(word.arg)), word.value, word.lineno)
        else:
            defaults[keys] = f"`{ast.unparse(node)}`"

    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            walk((statement.targets[0].id,), statement.value, statement.lineno)
    return defaults, notes


def _comments_of(block: type[Block]) -> dict[str, str]:
    """Return the comment above each key of a block, where the block itself stands."""
    source = inspect.getsource(block)
    (tree,) = ast.parse(source).body
    keys = (node for node in getattr(tree, "body", ()) if isinstance(node, ast.AnnAssign))
    return {node.target.id: _comment_above(source, node.lineno) for node in keys if isinstance(node.target, ast.Name)}


def _comment_above(source: str, line: int) -> str:
    above = source.splitlines()[: line - 1]
    comment = reversed([*takewhile(lambda text: text.lstrip().startswith("#"), reversed(above))])
    return " ".join(text.strip().removeprefix("#").strip() for text in comment)


def _exit_codes() -> str:
    """Return what each exit code means, with the errors that have it; those of signals are one row."""
    of_code: dict[int, list[str]] = defaultdict(list)
    for code, one in explain.explanations().items():
        of_code[min(one.exit_code, _SIGNAL)].append(f"[`{code}`](errors.md#{code})")
    means: dict[int, list[str]] = defaultdict(list)
    for error in _errors(TunerError):
        means[error.exit_code].append(inspect.cleandoc(error.__doc__ or "").splitlines()[0])
    told = {0: "Done.", **{code: " ".join(dict.fromkeys(lines)) for code, lines in sorted(means.items())}}
    rows = [(f"`{code}`", what, ", ".join(of_code[code])) for code, what in told.items()]
    last = (
        f"`{_SIGNAL}` + n",
        "Signal n killed a process: 137 is SIGKILL, 143 is SIGTERM.",
        ", ".join(of_code[_SIGNAL]),
    )
    return _table(("code", "what happened", "errors"), [*rows, last])


def _errors(error: type[TunerError]) -> Iterator[type[TunerError]]:
    yield error
    for one in error.__subclasses__():
        if one.__module__ == TunerError.__module__:
            yield from _errors(one)


# The catalog


def _models() -> str:
    rows = []
    for name in catalog.names("models"):
        count = parts.parameters(name)
        path = parts.values("models", name)["model"]["path"]
        rows.append((f"`{name}`", path, f"{count:,}" if count else "", catalog.summary("models", name)))
    return _table(("model", "path", "parameters", ""), rows)


def _families() -> str:
    rows = (
        (
            f"`{kind}`",
            f"`{part}`" if part else "a folder of yours",
            ", ".join(METHODS),
            "packed" if kind in KEEPS_APART else "padded",
            " ".join(KERNELS[name] for name in KERNELS_OF.get(kind, ())),
        )
        for kind, part in examples().items()
    )
    return _table(("model_type", "such as", "trained", "rows", "faster on GPUs with"), rows)


def _methods() -> str:
    return _table(
        ("method", ""), ((f"`{name}`", catalog.summary("methods", name)) for name in catalog.names("methods"))
    )


def _objectives() -> str:
    rows = (
        (f"`{name}`", catalog.summary("objectives", name), _code(_formats_for(name)))
        for name in catalog.names("objectives")
    )
    return _table(("objective", "", "row formats"), rows)


def _formats_for(objective: str) -> list[str]:
    return [name for name, known in FORMATS.items() if known.kind in KINDS[objective]]


def _datasets() -> str:
    rows = []
    for name in catalog.names("datasets"):
        blocks = [*parts.data_sets(name)]
        paths = dict.fromkeys(block["path"] for block in blocks if block.get("path"))
        formats = dict.fromkeys(block["format"] for block in blocks if block.get("format"))
        suits = [objective for objective in KINDS if formats and parts.suits(objective, name)]
        rows.append(
            (f"`{name}`", ", ".join(paths), _code(formats), ", ".join(suits), catalog.summary("datasets", name))
        )
    return _table(("data set", "path", "format", "for", ""), rows)


def _recipes() -> str:
    rows = (
        (f"`{name}`", f"`{parts.values('recipes', name)['_base_']}`", catalog.summary("recipes", name))
        for name in catalog.names("recipes")
    )
    return _table(("recipe", "builds on", ""), rows)


def _formats() -> str:
    rows = (
        (f"`{name}`", known.needs, ", ".join(objective for objective in KINDS if known.kind in KINDS[objective]))
        for name, known in FORMATS.items()
    )
    return _table(("format", "a row has", "for"), rows)


def _spellings() -> str:
    rows = ((_code(word.written.split(", ")), word.says) for word in SPELLINGS)
    return _table(("in the name", "what it means"), rows)


def _chat_templates() -> str:
    return _code(sorted(file.stem for file in (catalog.CONFIGS / "chat_templates").glob("*.jinja"))) + "\n"


GENERATED: dict[str, Callable[[], str]] = {
    "commands": _commands,
    "keys": _keys,
    "exit codes": _exit_codes,
    "errors": explain.markdown,
    "models": _models,
    "families": _families,
    "chat templates": _chat_templates,
    "methods": _methods,
    "objectives": _objectives,
    "datasets": _datasets,
    "recipes": _recipes,
    "formats": _formats,
    "spellings": _spellings,
}
"""Name -> what makes the text; a new one is a line here and its mark in a page."""
