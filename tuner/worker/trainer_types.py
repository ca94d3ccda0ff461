"""What this room uses of a trainer, and the hooks that `trainers` adds, with their defaults. Nothing is made here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tuner.data.stream import Stream
from tuner.worker.noise import EmbeddingNoise
from tuner.worker.pixels import ImageReader

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from datasets import Dataset
    from deepspeed.runtime.engine import DeepSpeedEngine
    from torch import Tensor
    from torch.optim.lr_scheduler import LambdaLR
    from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler
else:
    Trainer = object

EngineOptimizer = Any
"""The optimizer inside DeepSpeed's engine: torch's own, or a wrapper of DeepSpeed; the wrappers share no base class."""
Batch = dict[str, Any]
"""What a collator makes of rows: tensors by their names, and `Counts`."""
Attention = Callable[..., tuple["Tensor", "Tensor | None"]]
"""A function of transformers that computes attention: module, query, key, value, mask, and options by name."""


class Consensus(Protocol):
    """Hears the loss of each micro-batch, and lets all ranks stop together: `consensus.RankConsensus`."""

    def hear(self, loss: Tensor) -> None: ...

    @property
    def is_asked_to_stop(self) -> bool: ...

    def leave_together(self) -> None: ...

    def generating(self) -> AbstractContextManager[None]: ...

    def ends_generation(self, input_ids: Tensor, *_: object, **__: object) -> Tensor: ...


class Measures(Protocol):
    """Measures the parts of a step: `pace.Pace`."""

    def measured(self, part: Literal["data", "forward", "waiting"]) -> AbstractContextManager[None]: ...


class BuiltTrainer:
    """A trainer of an objective: TRL's, with the hooks that `trainers` mixes in."""

    # transformers' Trainer
    model: PreTrainedModel
    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    callback_handler: CallbackHandler
    accelerator: Accelerator
    optimizer: torch.optim.Optimizer
    optimizer_cls_and_kwargs: tuple[Callable[..., Any], dict[str, Any]]
    lr_scheduler: LambdaLR
    train_dataset: Dataset
    eval_dataset: Dataset | None
    data_collator: Callable[[Any], Batch]
    deepspeed: DeepSpeedEngine
    model_wrapped: DeepSpeedEngine
    get_sp_size: Callable[[], int]
    get_tp_size: Callable[[], int]

    if TYPE_CHECKING:

        def train(self, *, resume_from_checkpoint: str | None) -> object: ...
        def evaluate(self, eval_dataset: Dataset | None = None) -> dict[str, float]: ...
        def add_callback(self, callback: TrainerCallback) -> None: ...
        def remove_callback(self, callback: type[TrainerCallback]) -> None: ...
        def compute_loss(self, model: DeepSpeedEngine, inputs: Batch, *, num_items_in_batch: object) -> Tensor: ...
        def compute_loss_context_manager(self) -> AbstractContextManager[object]: ...
        def save_last_step(self) -> None: ...
        def set_random_states_of(self, checkpoint: str) -> None: ...

    # checkpoints: each hook gets a function that does what the Trainer itself would do
    write_checkpoint: Callable[[Callable[[], None]], None] | None = None
    load_states: Callable[[Callable[[], None]], None] | None = None
    """Called after DeepSpeed has loaded its own states, before the first step."""
    load_random_states: Callable[[Callable[[str], None]], None] | None = None
    """Called with a function that takes the checkpoint's folder."""
    saves_model = True
    # schedule
    on_schedule_made: Callable[[LambdaLR, torch.optim.Optimizer], None] | None = None
    """Called with the schedule and its optimizer before a checkpoint is loaded; the engine may not be ready yet."""
    # rows
    weighs_rows = True
    """Whether `compute_loss` returns a mean over rows."""
    rows_of_batch: int | None = None
    """The rows of the micro-batch in training, 0 for a stand-in."""
    trained_of_batch: int | None = None
    """The tokens of the micro-batch that carry loss, as its collator counted them; None if it did not."""
    rows_of_ranks: Tensor | None = None
    """The same of all ranks, while they compute on a micro-batch of a step that is not full."""
    rows_of_step: int | Tensor
    batches_of_step: list[Batch]
    items_of_step: Tensor | None = None
    """The tokens of the step that carry loss, on all ranks, by their weight; of pairs, those that add likelihood."""
    num_items_of_step: Tensor | None
    """What the Trainer hands to each loss of the step, to divide by: `items_of_step`; None for a mean over rows."""
    num_tokens: int
    stream: Stream | None = None
    """Where the rows come from, if they are read while the run trains."""
    images: ImageReader | None = None
    """Gives batches their pixels, if the model reads images."""
    # loss
    noise: EmbeddingNoise | None = None
    """Adds noise to the embeddings of training, if the recipe asks for it."""
    consensus: Consensus | None = None
    # time
    pace: Measures | None = None
    """Measures steps, in a run of several ranks."""
    # validation
    aux_loss_enabled = False
    is_evaluating = False
    generates = False
    """Whether a step begins with completions that the model generates."""
    measure_answers: Callable[[PreTrainedModel, int], dict[str, float]] | None = None
    """With `log.generate`: takes the model and its step, returns metrics of its answers (worker.answer_metrics)."""

    @property
    def steps_per_generation(self) -> int:
        """The optimizer steps that are taken on completions that were generated at once."""
        return 1


class MixedIn(BuiltTrainer, Trainer):  # type: ignore[misc]
    """The base of classes that are mixed into a trainer of TRL, which comes behind them."""
