"""The longest rows that fit at each ZeRO level, for every number of ranks that may share them.

It asks `estimate` for one length after the other; it prints nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from tuner.fit import advice
from tuner.fit.levels import LEVELS, Machines
from tuner.fit.sequence_parallel import sizes
from tuner.recipes.schema import RecipeConfig, Split
from tuner.recipes.schema.architecture import Architecture
from tuner.recipes.schema.long_context import KINDS

UNIT = 1024
_MOST_UNITS = 1 << 15
"""2^25 tokens: no more are looked for."""
SETTINGS = ("tiled_mlp", "activation_offloading")


@dataclass(frozen=True)
class Longest:
    """The most tokens of a row that fit, in whole `UNIT`s; 0: not even one fits."""

    level: str
    sequence_parallel_size: int
    tokens: int


def longest(config: RecipeConfig, architecture: Architecture, machines: Machines) -> list[Longest]:
    """Return the longest row at each level for each size that the ranks and the heads divide by.

    One row a micro-batch, recomputed, with flash attention and the loss in chunks: each needs the least memory. Tiled
    MLPs and offloaded activations are as the recipe has them.
    """
    shares = config.objective.facts.packs and architecture.model_type in KINDS
    each = sizes(architecture, machines.world_size) if shares else [1]
    return [
        Longest(level, size, _tokens(config, architecture, machines, level, size)) for level in LEVELS for size in each
    ]


def with_everything(config: RecipeConfig) -> RecipeConfig:
    """Return the recipe with tiled MLPs and offloaded activations."""
    return config.with_values({f"train_cfg.{key}": True for key in SETTINGS})


def _tokens(config: RecipeConfig, architecture: Architecture, machines: Machines, level: str, size: int) -> int:
    def lacks(units: int) -> bool:
        return not advice.fit(_of_length(config, units * UNIT, size), architecture, machines, level).fits

    return bisect_right(range(1, _MOST_UNITS + 1), 0, key=lacks) * UNIT


def _of_length(config: RecipeConfig, tokens: int, size: int) -> RecipeConfig:
    changed = config.with_values(
        {
            "train_dataloader.dataset.max_length": tokens,
            "train_cfg.sequence_parallel_size": size,
            "train_cfg.loss": "chunked",
            "model.attn_implementation": "flash_attention_2",
        }
    )
    return changed.with_split(Split(1, 2, recompute=True))  # it fits then with any accumulation
