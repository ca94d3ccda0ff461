"""Whether a model's embedding has a row for every token that its tokenizer can give: both numbers, and what to do.

It reads a folder's small files, without the tokenizer itself, and asks no hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tuner.errors import ModelError
from tuner.files import read_json_object

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_KEY = "model.resize_embeddings"


class Vocabulary(NamedTuple):
    """A tokenizer's tokens with their ids; `idle`: special ones that are in no chat template and that it never adds.

    The tokenizer of Gemma 3's text model holds one for images that way, past the last row.
    """

    ids: Mapping[str, int]
    idle: frozenset[str]

    @property
    def last(self) -> tuple[str, int] | None:
        """Return the token with the largest id, and the id, of those that text can become."""
        used = ((id_, token) for token, id_ in self.ids.items() if token not in self.idle)
        id_, token = max(used, default=(-1, ""))
        return (token, id_) if token else None


def idle(specials: Mapping[str, int], named: object, chat_template: str) -> frozenset[str]:
    """Return the special tokens that neither the tokenizer's own names nor its chat template mention."""
    told = f"{named}{chat_template}"
    return frozenset(token for token in specials if token not in told)


def read(folder: Path, chat_template: str | None = None) -> Vocabulary | None:
    """Return the vocabulary in a folder, or None where it has no tokenizer.json, or one that is not readable.

    Args:
        folder: Of the model.
        chat_template: The text of the recipe's, where it names one.
    """
    try:
        made = read_json_object(folder / "tokenizer.json")
        words = made["model"]["vocab"]
        ids = dict(words) if isinstance(words, dict) else {token: id_ for id_, (token, _) in enumerate(words)}
        added = {one["content"]: int(one["id"]) for one in made.get("added_tokens") or ()}
        special = {one["content"]: int(one["id"]) for one in made.get("added_tokens") or () if one.get("special")}
        settings = read_json_object(folder / "tokenizer_config.json")
        for id_, one in (settings.get("added_tokens_decoder") or {}).items():
            added[one["content"]] = int(id_)
            special |= {one["content"]: int(id_)} if one.get("special") else {}
        added |= read_json_object(folder / "added_tokens.json")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    named = [settings.get(name) for name in _NAMED]
    return Vocabulary({**ids, **added}, idle(special, named, _template(folder, settings, chat_template)))


def _template(folder: Path, settings: Mapping[str, Any], asked: str | None) -> str:
    file = folder / "chat_template.jinja"
    if asked is not None:
        return asked
    return file.read_text(encoding="utf-8") if file.is_file() else str(settings.get("chat_template"))


def too_few_rows(token: str, id_: int, num_rows: int, where: str) -> ModelError:
    """Return the refusal of a model whose embedding has no row for a token."""
    what = f"the tokenizer of {where!r} has ids up to {id_} ({token!r}), and the embedding has {num_rows} rows"
    fix = f"Use the tokenizer that belongs to the model, or add rows for the new tokens: --set {_KEY}=true."
    return ModelError(what, where="model.path", fix=fix)


def untrained_rows(lacking: tuple[str, ...], *, adapter: bool) -> ModelError:
    """Return the refusal of new rows in modules that the recipe leaves as they are."""
    what = f"the new rows of {' and '.join(lacking)} would not be trained"
    if adapter:
        return ModelError(what, where=_KEY, fix=f"Add to adapter.modules_to_save: {', '.join(lacking)}.")
    return ModelError(
        what, where=_KEY, fix="Use a method that trains the whole model: train_cfg.trainable_layers=None."
    )
