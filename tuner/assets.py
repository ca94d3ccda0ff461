"""The files that ship with the package: the catalog's folder, the small model and its rows, the chat templates."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
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
