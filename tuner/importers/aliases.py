"""Other tools' words for a recipe's keys, which aliases.toml lists: those of XTuner, Hugging Face, PEFT and others.

It rewrites one word and its value; `overrides` and the schema check the result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from tuner.errors import did_you_mean
from tuner.files import read_text
from tuner.optimizers import OPTIMIZERS

Meaning = TypeVar("Meaning")


class Alias(NamedTuple):
    """One word of another tool: a key of a recipe, a flag that does the same, or what to do instead."""

    key: str | None = None
    values: Mapping[str, str] = MappingProxyType({})
    """Pattern of the whole value, in any case -> how it is written here; any other value stays as it is."""
    instead: str | None = None
    """What to do if tuner has no such key, or if no pattern of `values` matches."""
    flag: str | None = None

    def value(self, text: str) -> str | None:
        """Return the value in tuner's words, or None if tuner has no such value."""
        for pattern, our_value in self.values.items():
            if match := re.fullmatch(pattern, text.strip(), re.IGNORECASE):
                return match.expand(our_value)
        return None if self.instead else text


_TABLE = Path(__file__).with_suffix(".toml")
_PATHS = {"--model": "model.path", "--data": "train_dataloader.dataset.path"}


def by_word(groups: Mapping[str, Meaning]) -> dict[str, Meaning]:
    """Return a table with one key for each word of the keys, which hold several words each."""
    return {word: meaning for words, meaning in groups.items() for word in words.split()}


@cache
def _groups() -> Mapping[str, Any]:
    import tomllib  # 2 ms, and most commands hold no other tool's word

    return tomllib.loads(read_text(_TABLE))


def instead_of_objective(name: str) -> str | None:
    """Return what to use if tuner has no objective with another tool's name; None for other names."""
    return by_word({words: instead for instead, words in _groups()["objectives"].items()}).get(name)


def _ours(row: Mapping[str, Any]) -> Mapping[str, str]:
    """Return how the values of a row are written here; an optimizer's own name is a word for it."""
    names = OPTIMIZERS if row["key"] == "optim_wrapper.optimizer.type" else ()
    return {**row.get("ours", {}), **{re.escape(name): name for name in names}} if "like" not in row else {}


@cache
def table() -> Mapping[str, Alias]:
    """Return the meaning of each word."""
    groups = _groups()
    rows = groups["values"]
    return by_word(
        {
            **{words: Alias(flag=flag) for flag, words in groups["flags"].items()},
            **{words: Alias(key) for key, words in groups["same"].items()},
            **{words: Alias(instead=instead) for instead, words in groups["instead"].items()},
            **{
                words: Alias(row["key"], _ours(row) or _ours(rows[row["like"]]), row.get("instead"))
                for words, row in rows.items()
            },
        }
    )


_BLOCKS = ("training_args.", "model_args.", "data_args.", "peft_config.", "model.llm.", "model.lora.", "lora.")
"""The blocks in which other tools keep these words; `model.lora.r` is their `r`."""
_PATH = r"(?!dict\(|\{|none$|null$).+"
_BLOCK_HERE = {
    "model": _PATH,
    "dataset": _PATH,
    "optimizer": "|".join((r"(?:paged_)?adamw?(?:_\w+)?", *map(re.escape, OPTIMIZERS))),
    "adapter": "[qd]?lora",
}
"""Words that name a block here, and another tool's key if the value matches the pattern."""


def find(key: str, value: str = "") -> Alias | None:
    """Return the meaning of another tool's word; None for a recipe's own key and for an unknown word."""
    word = bare(key)
    pattern = _BLOCK_HERE.get(word)
    return None if pattern and not re.fullmatch(pattern, value.strip(), re.IGNORECASE) else table().get(word)


def bare(key: str) -> str:
    """Return a key without the block in which another tool keeps it."""
    block = next((block for block in _BLOCKS if key.startswith(block)), "")
    return key.removeprefix(block).replace("-", "_")


def key_hint(key: str, known: Iterable[str]) -> str:
    """Return what to write instead of an unknown key of a recipe file; `known` are the keys of its block."""
    known, alias = list(known), table().get(bare(key), Alias())
    our_key = _PATHS[alias.flag] if alias.flag else alias.key
    hint = f"It is called {our_key} in tuner." if our_key else alias.instead
    return hint or did_you_mean(key, known) or f"Known: {', '.join(known)}."
