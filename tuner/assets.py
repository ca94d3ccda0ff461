"""The files that ship with the package: the catalog's folder, the small model and its rows, the chat templates."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tuner.errors import RecipeError, did_you_mean
from tuner.files import read_named_text

PACKAGE = Path(__file__).parent
CONFIGS = PACKAGE / "configs"
ASSET = "package:"
"""Prefix of a path below configs/assets, such as 'package:sample/train.jsonl'."""
TEMPLATES = "chat_templates"
"""The folder of a catalog that holds chat templates."""
WORKER = "tuner.worker"
"""The module that a rank is, as its command line names it."""
_JINJA = ("{{", "{%")
"""Every chat template holds one of these, and no name of a template does."""
_GENERATION_MARK = r"\{%([-+]?)\s*(?:end)?generation\s*([-+]?)%\}"
MAX_BYTES = 1_000_000
"""The largest file of a catalog that is read as text."""


def asset(path: str) -> str:
    """Return the file that a `package:` path means; any other path as it is.

    Raises:
        RecipeError: the package ships no such file.
    """
    if not path.startswith(ASSET):
        return path
    inside = path.removeprefix(ASSET)
    file = CONFIGS / "assets" / inside
    if ".." in file.parts or Path(inside).is_absolute() or not os.path.exists(file):  # noqa: PTH110 (no error for a long name)
        raise RecipeError(f"{path!r} is not part of the package", where=CONFIGS / "assets")
    return str(file)


def template_files() -> dict[str, Path]:
    """Return the chat templates of the package by name."""
    return {file.stem: file for file in sorted((CONFIGS / TEMPLATES).glob("*.jinja"))}


def chat_template(name: str, known: Mapping[str, Path] | None = None) -> str:
    """Return the text of a chat template.

    Args:
        name: A template's name, a path that ends in .jinja, or the text of a template itself.
        known: The files of the named templates. None: the package's.

    Raises:
        RecipeError: there is no such template, or its file is not UTF-8.
    """
    if not name.endswith(".jinja") and any(mark in name for mark in _JINJA):
        return name
    files = template_files() if known is None else known
    path = Path(name) if name.endswith(".jinja") else files.get(name)
    if path is None or not os.path.isfile(path):  # noqa: PTH113 (no error for a long name)
        raise RecipeError(
            f"no chat template {name!r}",
            where="model.chat_template",
            fix=f"{did_you_mean(name, files)} Known: {', '.join(files)}, or a path to a .jinja file.".strip(),
        )
    return read_named_text(path, RecipeError, max_bytes=MAX_BYTES, fix="Name another template.", name=str(path))


def without_generation_marks(template: str) -> str:
    """Return a chat template without its `{% generation %}` marks, which few readers except transformers know.

    The result renders the same text: a comment replaces each mark, so that white space is stripped as before.
    """
    return re.sub(_GENERATION_MARK, r"{#\1 \2#}", template)


_DEFAULT = r"\{%- if \w+ is not defined %\}\{% set (\w+) = [^\n]* %\}\{% endif %\}\n"
"""A line of `with_defaults`."""
_RESERVED = ("messages", "tools", "documents", "conversations", "chat_template", "tokenize")


def is_reserved(name: str) -> bool:
    """Return whether a name of a chat template has its value from the conversation, the tokenizer or transformers."""
    return name in _RESERVED or name.startswith(("add_", "continue_", "return_")) or name.endswith("_token")


def with_defaults(template: str, values: Mapping[str, bool | float | str | None] | None) -> str:
    """Return a chat template in which names have these values unless a caller gives others: a line for each before it.

    A name with None has the template's own value. Every reader of the template so has them: training, `tuner chat`, a
    server of the result, llama.cpp.
    """
    before, rest = split_defaults(template)
    lines = {match[1]: match[0] for match in re.finditer(_DEFAULT, before)}
    for name, value in (values or {}).items():
        if value is None:
            lines.pop(name, None)
            continue
        # As in JSON, except for text that Jinja's strings hold as it is.
        literal = json.dumps(value, ensure_ascii=False)
        lines[name] = f"{{%- if {name} is not defined %}}{{% set {name} = {literal} %}}{{% endif %}}\n"
    return "".join(lines.values()) + rest


def split_defaults(template: str) -> tuple[str, str]:
    """Return the lines of `with_defaults` in a chat template, and what follows them."""
    match = re.match(f"(?:{_DEFAULT})*", template)
    assert match is not None, "no line fits too"
    return match[0], template[match.end() :]


def check_defaults(template: str | None, values: Mapping[str, object] | None) -> None:
    """Refuse values for names that a chat template does not use: nothing else would tell a misspelt one.

    Raises:
        RecipeError: it uses one of them not, or has it otherwise; or there is no template.
    """
    if not values:
        return
    where = "model.chat_template_kwargs"
    if template is None:
        raise RecipeError("the model has no chat template that could use them", where=where, fix="Use None.")
    known_names = names_in(template)
    for name in values:
        if is_reserved(name):
            raise RecipeError(f"{name!r} has its value from the conversation or the tokenizer", where=where)
        if known_names is not None and name not in known_names:
            usable = f"It uses {', '.join(known_names)}." if known_names else "It uses no such name: use None."
            fix = f"{did_you_mean(name, known_names)} {usable}".strip()
            raise RecipeError(f"the chat template does not use {name!r}", where=where, fix=fix)


@cache
def names_in(template: str) -> tuple[str, ...] | None:
    """Return the variables that a caller of a chat template may set; None if Jinja cannot read it."""
    from jinja2 import TemplateError, meta  # 30 ms, for the templates that are looked into
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        variables = meta.find_undeclared_variables(environment.parse(without_generation_marks(template)))
    except (TemplateError, RecursionError):
        return None
    functions = ("raise_exception", "strftime_now")
    return tuple(sorted(name for name in variables if name not in functions and not is_reserved(name)))


def with_image_parts(template: str, token: str) -> str:
    """Return the chat template of an LLM for conversations with content in parts: an image becomes `token`, on a line.

    `without_image_parts` returns the LLM's own.
    """
    return _IMAGE_PARTS.replace(_TOKEN, token) + template


def without_image_parts(template: str) -> str:
    """Return the chat template of the LLM in a template of `with_image_parts`; any other template as it is."""
    start, end = _IMAGE_PARTS.splitlines(keepends=True)[0], _IMAGE_PARTS.splitlines(keepends=True)[-1]
    return template.partition(end)[2] if template.startswith(start) and end in template else template


_TOKEN = "IMAGE"  # noqa: S105
_IMAGE_PARTS = """\
{#- Images of a LLaVA: each part of a content becomes text. -#}
{%- set joined = namespace(turns=[]) -%}
{%- for turn in messages -%}
{%- if turn['content'] is iterable and turn['content'] is not string -%}
{%- set content = namespace(text='') -%}
{%- for part in turn['content'] -%}
{%- set content.text = content.text + (part['text'] if part['type'] == 'text' else 'IMAGE\\n') -%}
{%- endfor -%}
{%- set joined.turns = joined.turns + [dict(turn, content=content.text)] -%}
{%- else -%}
{%- set joined.turns = joined.turns + [turn] -%}
{%- endif -%}
{%- endfor -%}
{%- set messages = joined.turns -%}
"""
