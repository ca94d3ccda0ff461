"""Whether a model's embedding has a row for each token of its tokenizer; the errors name both numbers and the fix.

It reads the small files of a folder. It loads no tokenizer and does not ask the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tuner.errors import Key, ModelError
from tuner.files import JsonObject, read_json_object, read_text

_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_KEY = "model.resize_embeddings"
TEACHER = "objective.teacher"
_SAME = f"Compare the tokens that both have, and the others sorted: {Key('objective.vocabulary_matching', 'hybrid')}."


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


def idle(specials: Mapping[str, int], named_tokens: object, chat_template: str) -> frozenset[str]:
    """Return the special tokens that neither the tokenizer's own names nor its chat template mention."""
    mentions = f"{named_tokens}{chat_template}"
    return frozenset(token for token in specials if token not in mentions)


def read_vocabulary(folder: Path, chat_template: str | None = None) -> Vocabulary | None:
    """Return the vocabulary in a folder, or None if its tokenizer.json is missing or not readable.

    Args:
        folder: The model's folder.
        chat_template: The recipe's chat template, if it names one.
    """
    try:
        tokenizer = read_json_object(folder / "tokenizer.json")
        words = tokenizer["model"]["vocab"]
        ids = words if isinstance(words, dict) else {token: id_ for id_, (token, _) in enumerate(words)}
        added = {token["content"]: int(token["id"]) for token in tokenizer.get("added_tokens") or ()}
        special = {
            token["content"]: int(token["id"]) for token in tokenizer.get("added_tokens") or () if token.get("special")
        }
        settings = read_json_object(folder / "tokenizer_config.json")
        for id_, token in (settings.get("added_tokens_decoder") or {}).items():
            added[token["content"]] = int(id_)
            special |= {token["content"]: int(id_)} if token.get("special") else {}
        added |= read_json_object(folder / "added_tokens.json")
        template = _template(folder, settings, chat_template)
        ids_by_token = {str(token): int(id_) for token, id_ in {**ids, **added}.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return None
    named_tokens = [settings.get(name) for name in _NAMED]
    for named in named_tokens:
        token = named.get("content") if isinstance(named, dict) else named
        if isinstance(token, str) and token not in ids_by_token:  # the library adds it
            ids_by_token[token] = max(ids_by_token.values(), default=-1) + 1
    return Vocabulary(ids_by_token, idle(special, named_tokens, template))


def _template(folder: Path, settings: JsonObject, override: str | None) -> str:
    file = folder / "chat_template.jinja"
    if override is not None:
        return override
    return read_text(file) if file.is_file() else str(settings.get("chat_template"))


def too_few_rows(token: str, id_: int, num_rows: int, where: str) -> ModelError:
    """Return the error for a model without an embedding row for a token."""
    problem = f"the tokenizer of {where!r} has ids up to {id_} ({token!r}), and the embedding has {num_rows} rows"
    fix = f"Use the tokenizer that belongs to the model, or add rows for the new tokens: {Key(_KEY, True)}."
    return ModelError(problem, where="model.path", fix=fix)


def untrained_rows(lacking: tuple[str, ...], *, adapter: bool) -> ModelError:
    """Return the error for new rows in modules that the recipe does not train."""
    problem = f"the new rows of {' and '.join(lacking)} would not be trained"
    if adapter:
        return ModelError(problem, where=_KEY, fix=f"Add to adapter.modules_to_save: {', '.join(lacking)}.")
    return ModelError(
        problem, where=_KEY, fix="Use a method that trains the whole model: train_cfg.trainable_layers=None."
    )


def untrained_head(objective: str, name: str) -> ModelError:
    """Return the error for an adapter on the output embeddings: the loss reads their weight past the adapter."""
    problem = f"an adapter on the output embeddings ({name}) would not be trained by {objective}"
    fix = f"Remove {name!r} from it; to train that layer whole: {Key('adapter.modules_to_save', [name])}."
    return ModelError(problem, where="adapter.target_modules", fix=fix)


def let_pad(tokenizer: Any, path: str) -> None:
    """Let a tokenizer without a padding token pad with its end token: what is padded is never trained.

    Raises:
        ModelError: it has neither, as one made of tokenizer.json alone.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token is None:
        problem = f"the tokenizer of {path!r} has no end token and no padding token"
        fix = "Name them in its tokenizer_config.json, as eos_token and pad_token."
        raise ModelError(problem, where="model.path", fix=fix)


def check_same(ids: Mapping[str, int], of_teacher: Mapping[str, int], path: str) -> None:
    """Check that no id stands for two tokens; a token that only one tokenizer has is allowed.

    Args:
        ids: The tokens of the model that is trained, with their ids.
        of_teacher: Those of its teacher.
        path: The teacher's.

    Raises:
        ModelError: an id stands for one token here and for another one there.
    """
    tokens = {id_: token for token, id_ in of_teacher.items()}
    for token, id_ in sorted(ids.items(), key=lambda entry: entry[1]):
        if (other := tokens.get(id_, token)) != token:
            problem = f"the tokenizer of the teacher {path!r} differs: id {id_} is {other!r} there and {token!r} here"
            raise ModelError(problem, where=TEACHER, fix=_SAME)


def not_spelled(path: str, where: str) -> ModelError:
    """Return the error for a tokenizer with tokens that cannot be compared with those of another one."""
    problem = f"it is not known which text the tokens of {path!r} stand for, so they cannot be compared with others"
    fix = "Use a model with a byte-level BPE (Llama 3, Qwen, SmolLM), or with SentencePiece's pieces (Gemma, Mistral)."
    return ModelError(problem, where=where, fix=fix)


def other_size(num_rows: int, of_teacher: int, path: str) -> ModelError:
    """Return the error for a teacher with another number of probabilities than the model that is trained."""
    problem = f"the teacher {path!r} has a vocabulary of {of_teacher:,} tokens, and the model one of {num_rows:,}"
    return ModelError(problem, where=TEACHER, fix=_SAME)
