"""A model's facts: the recipe's `architecture` block, in the words of config.json, and how one is read.

It opens one JSON file; the hub is never asked.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tuner.recipes.block import Block, PositiveInt


class Architecture(Block):
    """The model's facts in the words of its config.json."""

    model_type: str
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    tie_word_embeddings: bool
    max_position_embeddings: PositiveInt


def read_facts(folder: Path) -> dict[str, Any] | None:
    """Return the architecture block for a model folder, or None where config.json does not hold all of it."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(config, dict):
        return None
    config = {**config, **(config["text_config"] if isinstance(config.get("text_config"), dict) else {})}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    # transformers 4 left the key out where it was True (Gemma), and wrote every False.
    config.setdefault("tie_word_embeddings", True)
    config["num_key_value_heads"] = config.get("num_key_value_heads") or heads
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        config["head_dim"] = config.get("head_dim") or hidden // heads
    facts = {key: config.get(key) for key in Architecture.model_fields}
    return facts if all(value is not None for value in facts.values()) else None
