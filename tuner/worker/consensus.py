"""What all ranks agree on: every loss and gradient is a finite number, and whether to stop.

It costs one small all-reduce per step, per batch of a validation and per generation, two more per step that saves. In a
step it has no wait of its own: the sums are read before the update, when the backward pass has been started behind
them. Only if a number is not finite are the rows behind it looked up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NoReturn

import torch
import torch.distributed as dist
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tuner.data.text_encoder import TextEncoder
from tuner.errors import NotANumber
from tuner.runs.beats import Phase
from tuner.worker import compat
from tuner.worker.guard import Guard
from tuner.worker.trainer_types import Batch, BuiltTrainer

_EXCERPT_TOKENS, _EXCERPT = 48, 120
_FIX = "Check these rows, or lower the learning rate."


class Interrupted(Exception):
    """All ranks leave a validation or a generation, on request: the last whole step is the one to save."""


class RankConsensus(TrainerCallback):  # type: ignore[misc]
    """Ends a run before NaN or infinity reaches the weights, and stops all ranks at the same step on request.

    Losses are checked before the update of a step. DeepSpeed's norm checks the gradients: it skips the update if the
    norm is not finite. With fp16's dynamic loss scaling infinite gradients are normal, so there only the
    smallest scale ends a run.
    """

    interrupts = True
    """Whether a validation or a generation may be left; otherwise a stop waits for its end."""

    def __init__(self, trainer: BuiltTrainer, guard: Guard, encoder: TextEncoder) -> None:
        self.trainer, self.guard, self.encoder = trainer, guard, encoder
        self.stopped_at = 0
        """The step at which all ranks stop; 0 without a request."""
        self.random_after_step: tuple[torch.Tensor, ...] = ()
        """The states of the random numbers at the end of the last step; empty before the first one of this start."""
        self._losses: list[torch.Tensor] = []
        self._sums_of_step: LateNumbers | None = None
        self._loader: DataLoaderShard | None = None
        self._random: tuple[torch.Tensor, ...] = ()
        self._is_repeating = self._is_stop_agreed = False
        trainer.consensus = self

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, *_: object, **__: object) -> None:
        compat.check_gradients(self.trainer.deepspeed, self._end_by_gradient)
        self._check_before_update(self.trainer.deepspeed)
        # Before the first step there is nothing to save: a signal ends the rank at once.
        self.guard.can_stop_at_a_step = state.global_step > 0

    def on_epoch_begin(self, *_: object, **__: object) -> None:
        # Now: the data loader forks its processes next, and they ignore signals only if the rank can stop at a step.
        self.guard.can_stop_at_a_step |= not self.trainer.generates

    def on_step_begin(self, *_: object, train_dataloader: DataLoaderShard | None = None, **__: object) -> None:
        self._loader, self._losses = train_dataloader, []
        self._random = random_states()

    def on_pre_optimizer_step(self, *_: object, **__: object) -> None:
        # By now DeepSpeed has taken its step, or skipped it because of the gradient.
        engine = self.trainer.deepspeed
        if engine.was_step_applied():
            return
        if not engine.fp16_enabled():
            self._end_by_gradient()
        # Only stage 0 has this attribute; the scaler of the other stages raises by itself.
        scale = getattr(engine.optimizer, "loss_scale_config", None)
        if scale and scale.dynamic_loss_scale and scale.cur_scale <= scale.min_loss_scale:
            message = f"gradients are infinite at the smallest loss scale in step {self.guard.step}"
            raise NotANumber(message, rank=0, fix="Lower the learning rate, or train in bf16.")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        # A checkpoint has no completions: a run stops after all steps on those that were generated at once.
        if self._is_stop_agreed and state.global_step % self.trainer.steps_per_generation == 0:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True
            control.should_evaluate = False  # the resumed run does that first (callbacks.ValidateAtStart)
        self.random_after_step = random_states()
        if control.should_save or control.should_training_stop:
            self._check_weights(state.global_step)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        # A stop also leaves the loop over an epoch. If it is the end of one, the resumed run validates first.
        control.should_evaluate &= not self.stopped_at

    def on_prediction_step(self, *_: object, **__: object) -> None:
        self.leave_together()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object) -> None:
        if self._sum_now(self.guard.stop_requested)[0]:
            # The request came during the save: the run resumes from this checkpoint.
            self.stopped_at = state.global_step
            control.should_training_stop = True

    def leave_together(self) -> None:
        """Leave a validation, or a generation with its rewards, if any rank was asked to stop; every rank calls it.

        Raises:
            Interrupted: a rank was.
        """
        if self.interrupts and self.guard.can_stop_at_a_step and self._sum_now(self.guard.stop_requested)[0]:
            raise Interrupted

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether this rank was asked to leave a validation or a generation; `leave_together` does it."""
        return self.interrupts and self.guard.can_stop_at_a_step and self.guard.stop_requested

    def generating(self) -> AbstractContextManager[None]:
        """Return a context for completions and their rewards, with the time limit of a generation or a validation."""
        return self.guard.heart.within(Phase.VALIDATION if self.trainer.is_evaluating else Phase.GENERATION)

    def ends_generation(self, input_ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return for each row whether its generation ends now: a criterion for `generate`, after each token.

        It asks this rank alone, for the ranks generate different numbers of tokens; `leave_together` follows.
        """
        return torch.full((len(input_ids),), self.is_asked_to_stop, dtype=torch.bool, device=input_ids.device)

    def hear(self, loss: torch.Tensor) -> None:
        """Note the loss of a micro-batch; at the last one of a step, start to sum up the losses of all ranks."""
        if self._is_repeating:
            return
        self.guard.can_stop_at_a_step = True  # also of a trainer that generates: its first completions are there
        self._losses.append(loss.detach())
        if self.trainer.accelerator.sync_gradients:
            losses = self._heard()
            is_bad = (losses - losses).any()  # infinity less infinity is NaN, which counts as true
            self._sums_of_step = self._start_sum(is_bad, self.guard.stop_requested, self.trainer.num_tokens)

    def _check_before_update(self, engine: DeepSpeedEngine) -> None:
        step = engine.step

        def checked(*args: object, **options: object) -> None:
            self._check_losses()
            step(*args, **options)

        engine.step = checked

    def _check_losses(self) -> None:
        """Read what `hear` has summed up. A GPU has it by now, and works on the backward pass.

        Raises:
            NotANumber: a loss of the step is NaN or infinite, on any rank.
        """
        assert self._sums_of_step is not None, "a step has losses"
        bad, stops, tokens = self._sums_of_step.read()
        self._is_stop_agreed = bool(stops)
        self.trainer.state.num_input_tokens_seen += tokens
        if bad:
            self._end("loss is", self._heard().tolist(), self._losses_of)

    def _heard(self) -> torch.Tensor:
        return torch.stack(self._losses).flatten()

    def _sum_now(self, *counts: torch.Tensor | int) -> list[int]:
        """Return the sum of each number over all ranks; this rank waits for them."""
        return self._start_sum(*counts).read()

    def _start_sum(self, *counts: torch.Tensor | int) -> LateNumbers:
        """Start to sum each number over all ranks, and return the sums to be read later."""
        device = self.trainer.args.device
        on_host = [int(count) for count in counts if not isinstance(count, torch.Tensor)]
        on_device = iter(sent(on_host, device).unbind())
        numbers = torch.stack(
            [count.long() if isinstance(count, torch.Tensor) else next(on_device) for count in counts]
        )
        dist.all_reduce(numbers)
        return LateNumbers(numbers)

    def _end_by_gradient(self) -> None:
        """End the run because the gradient of this step is not finite; every rank calls it."""
        self._end("the gradient's norm is", self._gradient_norms(self.trainer.batches_of_step), self._gradient_norms)

    def _losses_of(self, batches: Sequence[Batch]) -> list[float]:
        """Return the loss of each batch; the ranks take part together."""
        trainer = self.trainer
        with self._repeating(), torch.no_grad():
            return [
                float(trainer.compute_loss(trainer.deepspeed, batch, num_items_in_batch=trainer.num_items_of_step))
                for batch in batches
            ]

    def _gradient_norms(self, batches: Sequence[Batch]) -> list[float]:
        """Return the sum of the norms of the gradients of each batch; the ranks take part together."""
        trainer, engine, norms, sums = self.trainer, self.trainer.deepspeed, [], []
        hooks = [
            parameter.register_hook(lambda gradient: norms.append(_norm(gradient)))
            for parameter in engine.module.parameters()
            if parameter.requires_grad
        ]
        engine.set_gradient_accumulation_boundary(is_boundary=False)
        with self._repeating():
            for batch in batches:
                loss = trainer.compute_loss(engine, dict(batch), num_items_in_batch=trainer.num_items_of_step)
                engine.backward(loss)
                sums.append(float(torch.stack(norms).sum()) if norms else 0.0)
                norms.clear()
        for hook in hooks:
            hook.remove()
        return sums

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        self._is_repeating = True
        set_random_states(self._random)
        with self.trainer.compute_loss_context_manager():
            yield

    def _rows(self, index: int) -> list[int]:
        """Return the rows of a micro-batch of this step, found by repeating the sampler's order.

        If the trainer generates, they are the rows with completions that were generated at once.
        """
        assert self._loader is not None, "set at the begin of the step"
        state, args, loader = self.trainer.state, self.trainer.args, self._loader
        per_epoch = -(-len(loader) // args.gradient_accumulation_steps)
        epoch, update = divmod(state.global_step, per_epoch)
        loader.set_epoch(epoch)
        place = update * args.gradient_accumulation_steps + index
        rows = next(rows for at, rows in enumerate(loader.batch_sampler) if at == place)
        return list(dict.fromkeys(row.row if self.trainer.generates else row for row in rows))

    def _each_alone(self, rows: Sequence[int]) -> list[Batch]:
        """Return the same number of batches on every rank: each of these rows alone, and then stand-ins."""
        assert self._loader is not None, "set at the begin of the step"
        size, loader = self.trainer.args.train_batch_size, self._loader
        alone = [loader.collate_fn([loader.dataset[row]]) for row in rows]
        alone += [loader.collate_fn([]) for _ in range(size - len(rows))]
        return [send_to_device(batch, self.trainer.args.device) for batch in alone]

    def _named(self, rows: Sequence[int], numbers: Sequence[float]) -> str:
        """Name the rows of a micro-batch, or those of them that are the cause by their own numbers, if known."""
        if not rows:
            return "no row: this rank had none in the epoch's last step"
        causes = [row for row, number in zip(rows, numbers, strict=False) if not math.isfinite(number)] or rows
        noun, which = ("row", "which") if len(causes) == 1 else ("rows", "the first of which")
        together = ", each of which alone gives a finite number" if causes is rows and numbers else ""
        listed = ", ".join(map(str, causes))
        where = "in the order of training" if self.trainer.stream else "of the prepared data"
        return f"{noun} {listed} {where}{together}, {which} begins {self._text(causes[0])!r}"

    def _text(self, row: int) -> str:
        ids = next(value for name, value in self.trainer.train_dataset[row].items() if name.endswith("ids"))
        return self.encoder.decode(list(ids[:_EXCERPT_TOKENS]))[:_EXCERPT]

    def _check_weights(self, step: int) -> None:
        """Refuse to save weights that are not finite although all gradients were."""
        trained = [weight for weight in self.trainer.model.parameters() if weight.requires_grad]
        weights = [getattr(weight, "ds_tensor", weight) for weight in trained]
        norms = torch.stack([_norm(weight).to(self.trainer.args.device) for weight in weights])
        if self._sum_now(~norms.isfinite().all())[0]:
            raise NotANumber(f"weights are non-finite after step {step}", rank=0, fix="Lower the learning rate.")

    def _end(
        self, quantity: str, numbers: Sequence[float], measure: Callable[[Sequence[Batch]], list[float]]
    ) -> NoReturn:
        """End the run by the first rank that has a number that is not finite; every rank calls it.

        Args:
            numbers: One for each micro-batch of this rank and step.
            measure: Returns these numbers for other batches.
        """
        bad = [index for index, number in enumerate(numbers) if not math.isfinite(number)]
        of_ranks: list[int | None] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, bad[0] if bad else None)
        rank, index = next(((rank, at) for rank, at in enumerate(of_ranks) if at is not None), (0, None))
        step = self.guard.step
        if index is None:
            # Each gradient is finite, and their sum is not; those of completions are not computed again.
            problem = f"the sum of all ranks' gradients is not finite in step {step}"
            raise NotANumber(problem, rank=0, fix=_FIX)
        rows = self._rows(index)
        is_known = self.trainer.generates or self.trainer.args.train_batch_size == 1
        of_rows = [] if is_known else measure(self._each_alone(rows))
        problems = [""] * dist.get_world_size()
        own_problem = (
            f"{quantity} {numbers[index]} in step {step} on rank {rank}, from {self._named(rows, of_rows)}"
            if rank == dist.get_rank()
            else ""
        )
        dist.all_gather_object(problems, own_problem)
        raise NotANumber(f"{problems[rank]}; no weight was updated", rank=rank, fix=_FIX)


def sent(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return numbers on a device without a wait for it."""
    kind = torch.device(device).type  # from memory that is not pinned, a copy to a device may read too late
    on_host = torch.tensor(numbers, dtype=torch.long, pin_memory=kind == "cuda")
    return on_host.to(device, non_blocking=kind in ("cuda", "cpu"))


class LateNumbers:
    """Integers that a device computes, on their way to Python: `read` waits for these alone, not for what follows."""

    def __init__(self, numbers: torch.Tensor) -> None:
        waits = numbers.device.type in ("cpu", "mps")  # MPS has no events
        self._event = None if waits else get_accelerator().Event()
        # torch puts a copy that does not block into pinned memory.
        self._numbers = numbers.to("cpu", non_blocking=not waits)
        if self._event is not None:
            self._event.record()

    def read(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers


def _norm(numbers: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm in one pass over the numbers; it is not finite if one of them is not."""
    return torch.linalg.vector_norm(numbers.detach(), dtype=torch.float32)


def random_states() -> tuple[torch.Tensor, ...]:
    """Return the states of the CPU's and the accelerator's random numbers, which dropout draws from."""
    accelerator = get_accelerator()
    accelerator_states = (accelerator.get_rng_state(),) if accelerator.device_name() != "cpu" else ()
    return (torch.get_rng_state(), *accelerator_states)


def set_random_states(states: tuple[torch.Tensor, ...]) -> None:
    torch.set_rng_state(states[0])
    if len(states) > 1:
        get_accelerator().set_rng_state(states[1])
