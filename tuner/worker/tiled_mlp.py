"""MLPs that are computed some tokens at a time, so that no more of a long row stands inside one than a tile.

Jacobs et al., ALST, 2025 (arXiv:2506.13996), section 3.1. DeepSpeed's TiledMLP takes the backward of each tile by
itself, with other dropout than in the forward; torch's checkpoints keep it, and are one graph for every ZeRO stage.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from tuner.errors import ModelError
from tuner.models.load import decoder_layers
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.long_context import KINDS, num_tiles


def tile(model: Any, config: RecipeConfig) -> None:
    """Let each layer's MLP of a model compute its tokens in tiles, as many on every rank: ZeRO-3 gathers with each.

    Raises:
        ModelError: it was not known before the model was loaded that its MLPs see more than one token.
    """
    text = model.config.get_text_config()
    if text.model_type not in KINDS:
        what = f"tiled_mlp is not tested with {text.model_type} models"
        raise ModelError(what, where="train_cfg.tiled_mlp", fix="Use --set tiled_mlp=False.")
    for layer in decoder_layers(model):
        layer.mlp.forward = partial(_in_tiles, layer.mlp.forward, num_tiles(config, text.hidden_size))


def _in_tiles(forward: Any, count: int, states_BTH: torch.Tensor) -> torch.Tensor:
    size, rest = divmod(states_BTH.shape[1], count)
    # tensor_split's gradient has the size of the whole for each tile.
    tiles = states_BTH.split([size + (at < rest) for at in range(count)], dim=1)
    return torch.cat([checkpoint(forward, one, use_reentrant=False) for one in tiles], dim=1)
