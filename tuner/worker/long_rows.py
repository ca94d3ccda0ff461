"""How a model computes rows that hold many tokens.

    in tiles     MLPs that compute some tokens at a time
    shared       one row over several ranks (DeepSpeed's Ulysses): which part of a batch each rank has

`models.attention` computes their samples one by one; `compat` holds what tuner changes in libraries for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel, TrainingArguments

from tuner.data.layouts import WEIGHTS
from tuner.data.sample import IGNORED
from tuner.models.load import decoder_layers
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.architecture import VARLEN
from tuner.recipes.schema.long_context import num_tiles, refuse_tiles
from tuner.worker import compat
from tuner.worker.noise import LENGTHS

# In tiles


def tile_mlps(model: PreTrainedModel, config: RecipeConfig) -> None:
    """Let the MLP of each layer compute its tokens in tiles, so that only one tile of a long row is in memory.

    Jacobs et al., ALST, 2025 (arXiv:2506.13996), section 3.1. DeepSpeed's TiledMLP computes the backward pass of each
    tile on its own, with other dropout than in the forward pass; torch's checkpoints keep the dropout, and are one
    graph at every ZeRO stage. The number of tiles is the same on every rank, because ZeRO-3 gathers weights for each.

    Raises:
        ModelError: it is not known that the MLPs of this kind of model compute each token alone.
    """
    text = model.config.get_text_config()
    refuse_tiles(config, text.model_type)
    for layer in decoder_layers(model):
        layer.mlp.forward = partial(_in_tiles, layer.mlp.forward, num_tiles(config, text.hidden_size))


def _in_tiles(forward: Callable[[Tensor], Tensor], count: int, states_BTH: Tensor) -> Tensor:
    size, rest = divmod(states_BTH.shape[1], count)
    # tensor_split would keep a gradient of the whole size for each tile.
    tiles = states_BTH.split([size + (at < rest) for at in range(count)], dim=1)
    return torch.cat([checkpoint(forward, tile_BTH, use_reentrant=False) for tile_BTH in tiles], dim=1)


# Shared


def shared_by_ranks(config: RecipeConfig, num_ranks: int, model: PreTrainedModel) -> ParallelismConfig:
    """Return accelerate's configuration for groups of ranks that share samples; the groups are data parallel."""
    attention, size = compat.attention_of(model), config.train_cfg.sequence_parallel_size
    attention = "sdpa" if attention == VARLEN else attention  # accelerate knows no attention of ours
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=attention)
    return ParallelismConfig(
        sp_backend="deepspeed", sp_size=size, dp_replicate_size=num_ranks // size, sp_handler=handler
    )


@dataclass(frozen=True)
class RowPart:
    """A rank's part of the tokens of a row: part `index` of `size` equal parts."""

    index: int
    size: int

    def of(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int, int]:
        """Return this rank's part of samples that lie end to end, [1, T], its number of tokens, and of trained tokens.

        T is padded to a multiple of `size`. `shift_labels` are the labels of the next token, which may belong to
        another rank; `token_weights` are theirs. `attention_mask`, [1, 1, 1, T / size], tells tokens from padding.
        """
        length = batch["input_ids"].shape[1]
        lacking = -length % self.size
        padded = {
            "input_ids": F.pad(batch["input_ids"], (0, lacking)),
            # Padding is a separate sample, to which no other attends.
            "position_ids": torch.cat([batch["position_ids"], torch.arange(lacking)[None]], dim=1),
            "shift_labels": F.pad(batch["labels"][:, 1:], (0, 1 + lacking), value=IGNORED),
        }
        if WEIGHTS in batch:
            padded[WEIGHTS] = F.pad(batch[WEIGHTS][:, 1:], (0, 1 + lacking))
        if LENGTHS in batch:
            padded[LENGTHS] = F.pad(batch[LENGTHS], (0, lacking))
        width = (length + lacking) // self.size
        start = self.index * width
        part = {name: rows_BT[:, start : start + width].contiguous() for name, rows_BT in padded.items()}
        num_trained = int((part["shift_labels"] != IGNORED).sum())
        # transformers makes no mask if it gets one with four dimensions, and Ulysses drops that one, so that the loss
        # that balances a router is all that reads it. A mask of this rank's tokens alone would be wrong, and a mask of
        # all pairs is too large.
        part["attention_mask"] = (torch.arange(start, start + width) < length)[None, None, None]
        return part, max(0, min(length - start, width)), num_trained


WHOLE = RowPart(0, 1)
"""The part of a rank that computes whole rows."""


def part_of(arguments: TrainingArguments) -> RowPart:
    """Return the part of each row that this rank computes."""
    config = arguments.parallelism_config
    return RowPart(arguments.process_index % config.sp_size, config.sp_size) if config else WHOLE
