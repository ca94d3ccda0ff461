"""How each objective is trained: one module each, `NAME_training.py`, found by the objective's name.

    training = training_of(NAME)       # the module dpo_training is imported; other objectives' libraries are not

What an objective is (the keys of its block and its facts) is in `recipes.schema.objectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import datasets
import torch
import transformers

from tuner.data.encoder import Row
from tuner.data.text_encoder import TextEncoder
from tuner.recipes.schema import RecipeConfig

Collate = Callable[[Sequence[Row]], dict[str, torch.Tensor]]


class Training:
    """How one objective is trained: TRL's trainer with tuner's changes, and what its constructor is given.

    Every trainer class mixes in `worker.trainers.TunerTrainer`, which keeps the promises that do not depend on the
    objective: which rows a rank gets, how the last step of an epoch is weighed, what a validation counts.
    """

    fixed_arguments: Mapping[str, Any] = MappingProxyType({"max_length": None})  # the rows are cut already
    """Arguments that a recipe does not choose."""
    logit_metrics: ClassVar[tuple[str, ...]] = ()
    """The metrics that the trainer reads if the loss is computed from whole logits; see `worker.loss`."""

    def __init__(
        self,
        trainer: type[Any],
        arguments_type: type[transformers.TrainingArguments],
        collate: Callable[..., dict[str, torch.Tensor]] | None = None,
        **fixed_arguments: object,
    ) -> None:
        """Name the classes.

        Args:
            trainer: A class with `TunerTrainer` and the trainer of TRL as its bases.
            collate: Makes a batch of rows and of the `pad_id`; None: TRL's own.
            fixed_arguments: Further ones.
        """
        self.trainer, self.arguments_type, self.collate = trainer, arguments_type, collate
        self.fixed_arguments = {**self.fixed_arguments, **fixed_arguments}

    def collator(self, config: RecipeConfig, pad_id: int) -> Collate | None:
        """Return the function that makes a batch of rows; None: TRL's own."""
        return self.collate and partial(self.collate, pad_id=pad_id)

    def constructor(self, config: RecipeConfig, folder: Path, encoder: TextEncoder) -> dict[str, Any]:
        """Return further arguments of the trainer's constructor; `folder` is the run directory.

        Raises:
            TunerError: something that they need cannot be loaded.
        """
        return {}

    def ordered(self, config: RecipeConfig, rows: datasets.Dataset) -> datasets.Dataset:
        """Return the training rows in the order that the trainer needs."""
        return rows

    def judged_before(self, config: RecipeConfig, rows: datasets.Dataset, micro_batch: int) -> datasets.Dataset:
        """Return rows that hold all that a reference needs which judges them before training, in other batches."""
        return rows

    def before(
        self, arguments: transformers.TrainingArguments, config: RecipeConfig, model: transformers.PreTrainedModel
    ) -> None:
        """Change the arguments for a model that is loaded, before the trainer is built.

        Raises:
            ModelError: the model cannot be trained so.
        """

    def after(self, built: Any, config: RecipeConfig) -> None:
        """Change the trainer after it is built."""

    def whole_logit_metrics(self, built: Any, config: RecipeConfig) -> Sequence[str]:
        """Return the metrics that are computed with whole logits; a list that the trainer changes is allowed."""
        return self.logit_metrics


def training_of(objective: str) -> Training:
    """Return how an objective of the schema is trained."""
    training: Training = import_module(f"{__name__}.{objective}_training").TRAINING
    return training
