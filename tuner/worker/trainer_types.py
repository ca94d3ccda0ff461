"""What this room uses of a built trainer: types alone, nothing is made here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from datasets import Dataset
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch import Tensor
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler

EngineOptimizer = Any
"""The optimizer inside DeepSpeed's engine: torch's own, or a wrapper of DeepSpeed; the wrappers share no base class."""
Attention = Callable[..., tuple["Tensor", "Tensor | None"]]
"""A function of transformers that computes attention: module, query, key, value, mask, and options by name."""


class Consensus(Protocol):
    """Hears the loss of each micro-batch, and lets all ranks stop together: `consensus.RankConsensus`."""

    def hear(self, loss: Tensor) -> None: ...

    def stop_together(self) -> None: ...

    def ends_generation(self, input_ids: Tensor, *_: object, **__: object) -> Tensor: ...


class BuiltTrainer(Protocol):
    """TRL's trainer of an objective with the hooks that `trainers` adds."""

    # transformers' Trainer
    model: PreTrainedModel
    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    accelerator: Accelerator
    optimizer: torch.optim.Optimizer
    lr_scheduler: LambdaLR
    train_dataset: Dataset
    eval_dataset: Dataset | None
    deepspeed: DeepSpeedEngine
    model_wrapped: DeepSpeedEngine
    get_sp_size: Callable[[], int]

    def train(self, *, resume_from_checkpoint: str | None) -> object: ...
    def evaluate(self, eval_dataset: Dataset) -> object: ...
    def add_callback(self, callback: TrainerCallback) -> None: ...
    def compute_loss(self, model: DeepSpeedEngine, inputs: dict[str, Any], *, num_items_in_batch: object) -> Tensor: ...
    def compute_loss_context_manager(self) -> AbstractContextManager[object]: ...

    # trainers.CheckpointHooks
    write_checkpoint: Callable[[Callable[[], None]], None] | None
    load_states: Callable[[Callable[[], None]], None] | None
    load_random_states: Callable[[Callable[[str], None]], None] | None
    saves_model: bool

    def save_last_step(self) -> None: ...
    def set_random_states_of(self, checkpoint: str) -> None: ...

    # trainers.TunerTrainer
    on_schedule_made: Callable[[LambdaLR, torch.optim.Optimizer], None] | None
    consensus: Consensus | None
    measure_answers: Callable[[PreTrainedModel, int], dict[str, float]] | None
    is_evaluating: bool
    batches_of_step: list[dict[str, Any]]
    num_items_of_step: Tensor | None
    num_tokens: int
    generates: bool
    steps_per_generation: int
