"""Other tools' words for a recipe's keys, which aliases.toml lists: those of XTuner, Hugging Face, PEFT and others.

It rewrites one word and its value; whether the result is a recipe's, `overrides` and the schema decide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from tuner.errors import did_you_mean

Meaning = TypeVar("Meaning")


class Alias(NamedTuple):
    """One word of another tool: a key of a recipe, a flag that does the same, or what to do instead."""

    key: str | None = None
    values: Mapping[str, str] = MappingProxyType({})
    """Pattern of the whole value, in any case -> how it is written here; any other value stays as it is."""
    instead: str | None = None
    """What to do where there is no key, or where no pattern of `values` fits."""
    flag: str | None = None

    def value(self, text: str) -> str | None:
        """Return a value as it is written here, or None where it has no counterpart."""
        for pattern, ours in self.values.items():
            if found := re.fullmatch(pattern, text.strip(), re.IGNORECASE):
                return found.expand(ours)
        return None if self.instead else text


_TABLE = Path(__file__).with_suffix(".toml")
_PATHS = {"--model": "model.path", "--data": "train_dataloader.dataset.path"}


def by_word(groups: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """Return a table that says for several words at once what they mean as one that says it for each."""
    return {word: meaning for words, meaning in groups.items() for word in words.split()}


@cache
def table() -> Mapping[str, Alias]:
    """Return what each word means."""
    import tomllib  # 2 ms, and most commands hold no other tool's word

    found = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    rows = found["values"]
    return by_word(
        {
            **{words: Alias(flag=flag) for flag, words in found["flags"].items()},
            **{words: Alias(key) for key, words in found["same"].items()},
            **{words: Alias(instead=instead) for instead, words in found["instead"].items()},
            **{
                words: Alias(row["key"], row.get("ours") or rows[row["like"]]["ours"], row.get("instead"))
                for words, row in rows.items()
            },
        }
    )


_BLOCKS = ("training_args.", "model_args.", "data_args.", "peft_config.", "model.llm.", "model.lora.", "lora.")
"""Under which blocks other tools keep these words; `model.lora.r` is their `r`."""
_PATH = r"(?!dict\(|\{|none$|null$).+"
_BLOCK_HERE = {
    "model": _PATH,
    "dataset": _PATH,
    "optimizer": r"(?:paged_)?adamw?(?:_\w+)?|sgd|rmsprop|lion",
    "adapter": "[qd]?lora",
}
"""Words that are a block here, and another tool's where the value is as this pattern says."""


def find(key: str, value: str = "") -> Alias | None:
    """Return what a word of another tool means, or None where it is none: a recipe's own key, or an unknown one."""
    word = bare(key)
    theirs = _BLOCK_HERE.get(word)
    return None if theirs and not re.fullmatch(theirs, value.strip(), re.IGNORECASE) else table().get(word)


def bare(key: str) -> str:
    """Return a key without the block that another tool keeps it in."""
    block = next((block for block in _BLOCKS if key.startswith(block)), "")
    return key.removeprefix(block).replace("-", "_")


def note(key: str, value: str, where: str) -> str | None:
    """Return the line that says what a word is called here, or None where it is called so here too."""
    alias = find(key, value)
    ours = alias and (alias.flag or alias.key)
    return f"{key} is called {ours} in tuner ({where})." if ours and ours.split(".")[-1] != key.split(".")[-1] else None


def key_hint(key: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown key in a recipe file, where the `known` ones may stand."""
    known = list(known)
    return _hint(key) or did_you_mean(key, known) or f"Known: {', '.join(known)}."


def _hint(key: str) -> str:
    alias = table().get(bare(key), Alias())
    ours = _PATHS[alias.flag] if alias.flag else alias.key
    return f"It is called {ours} in tuner." if ours else alias.instead or ""
