"""Which chat templates TRL reads calls of tools from: those that it knows by their text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl
from trl.chat_template_utils import add_response_schema, get_training_chat_template, is_chat_template_prefix_preserving

from tuner.assets import split_defaults
from tuner.errors import Key, ModelError
from tuner.files import read_text
from tuner.machine.libraries import replaced

_FOLDER = Path(trl.__file__).parent / "chat_templates"
_OF_TRAINING = "_training"


@contextmanager
def plain(tokenizer: Any) -> Iterator[str]:
    """Take the recipe's values out of a chat template while TRL, which knows it by its text, looks at it; yield them.

    They are the lines of `assets.with_defaults`.
    """
    full_template = tokenizer.chat_template
    lines, template = split_defaults(full_template) if isinstance(full_template, str) else ("", full_template)
    with replaced(tokenizer, chat_template=template):
        yield lines


def refuse_unknown(template: object, response_template: object = None) -> None:
    """Refuse a chat template in which TRL cannot find the calls that the model writes.

    Args:
        response_template: The tokenizer's own description of what the model writes, if it has one.

    Raises:
        ModelError: it names the templates that work.
    """
    if response_template is not None or _is_known(template):
        return
    raise _refusal("TRL cannot read calls of tools from this chat template")


def refuse_changing(tokenizer: Any) -> None:
    """Refuse a chat template that writes a call otherwise once its result follows; TRL has its own for some models.

    Raises:
        ModelError: it names the templates that work.
    """
    try:
        if is_chat_template_prefix_preserving(tokenizer):
            return
        get_training_chat_template(tokenizer)
    except Exception as error:  # a template is a program, and TRL knows of no other
        raise _refusal("this chat template writes a call otherwise, or fails, once its result follows") from error


def _refusal(problem: str) -> ModelError:
    near = Key("model.chat_template", str(_FOLDER / "qwen3.jinja"))
    fix = f"Use a model that has one of them, or train with one, such as {near}."
    return ModelError(f"{problem}; those that work: {', '.join(known())}", where="model.chat_template", fix=fix)


@cache
def known() -> tuple[str, ...]:
    """Return the names of the templates of TRL in which it finds calls."""
    files = sorted(_FOLDER.glob("*.jinja"))
    return tuple(file.stem for file in files if not file.stem.endswith(_OF_TRAINING) and _is_known(read_text(file)))


def _is_known(template: object) -> bool:
    template = split_defaults(template)[1] if isinstance(template, str) else template
    try:
        add_response_schema(SimpleNamespace(chat_template=template))
    except ValueError:
        return False
    return True
