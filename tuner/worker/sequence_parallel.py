"""One sample over several ranks (DeepSpeed's Ulysses): which part of a batch each has, and attention over all of it.

Ranks of a group hold the same rows, each of them its part of the tokens. What libraries do otherwise is in `compat`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DeepSpeedSequenceParallelConfig
from torch import Tensor
from transformers import TrainingArguments

from tuner.data.sample import IGNORED
from tuner.errors import ModelError
from tuner.recipes.schema import RecipeConfig
from tuner.recipes.schema.long_context import KINDS, SHARED_BY, forgets_window
from tuner.worker import compat


def configured(config: RecipeConfig, num_ranks: int, model: Any) -> ParallelismConfig:
    """Return what accelerate is told: groups of ranks that share samples, data parallel among each other.

    Raises:
        ModelError: the model was not known before it was loaded, and cannot be trained so.
    """
    facts, size = model.config.get_text_config(), config.train_cfg.sequence_parallel_size
    attention = compat.attention_of(model)
    if facts.model_type not in KINDS:
        what = f"sequence parallelism over {size} ranks is not tested with {facts.model_type} models"
        raise ModelError(what, where=SHARED_BY, fix="Set it to 1.")
    if problem := forgets_window(config, facts.to_dict(), attention):
        raise problem
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation=attention)
    return ParallelismConfig(
        sp_backend="deepspeed", sp_size=size, dp_replicate_size=num_ranks // size, sp_handler=handler
    )


@dataclass(frozen=True)
class Share:
    """A rank's part of the tokens of a row: the `index`-th of `size` equal ones."""

    index: int
    size: int

    def of(self, batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], int, int]:
        """Return this rank's part of rows that lie end to end, [1, T], its tokens, and those that carry loss.

        What T lacks of a multiple of `size` is padded. `shift_labels` are the labels of the next token, which may be
        another rank's.
        """
        length = batch["input_ids"].shape[1]
        lacking = -length % self.size
        whole = {
            "input_ids": F.pad(batch["input_ids"], (0, lacking)),
            # Padding is a sample of its own, which no other attends to.
            "position_ids": torch.cat([batch["position_ids"], torch.arange(lacking)[None]], dim=1),
            "shift_labels": F.pad(batch["labels"][:, 1:], (0, 1 + lacking), value=IGNORED),
        }
        width = (length + lacking) // self.size
        start = self.index * width
        part = {name: rows_BT[:, start : start + width].contiguous() for name, rows_BT in whole.items()}
        num_trained = int((part["shift_labels"] != IGNORED).sum())
        # transformers makes no mask of its own beside one in four dimensions, and Ulysses leaves that one out: of a
        # rank's tokens alone it would be wrong, and one of all pairs has no room.
        part["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool)
        return part, max(0, min(length - start, width)), num_trained


WHOLE = Share(0, 1)
"""The part of a rank that shares its rows with no other."""


def share_of(arguments: TrainingArguments) -> Share:
    """Return the part of each row that this rank computes."""
    config = arguments.parallelism_config
    return Share(arguments.process_index % config.sp_size, config.sp_size) if config else WHOLE
