"""What all ranks agree on in each step: that every loss and gradient is a number, and whether to stop after it.

One small all-reduce a step carries it. Which rows a number came from is looked for only when something is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from transformers import TrainerCallback

from tuner.errors import NotANumber
from tuner.worker import compat
from tuner.worker.guard import Guard

_EXCERPT_TOKENS, _EXCERPT = 48, 120
_FIX = "Check these rows, or lower the learning rate."


class RankConsensus(TrainerCallback):  # type: ignore[misc]
    """Ends a run before weights are spoilt, and a run that is asked to stop at the same step on every rank.

    Losses are compared before a step's last backward pass; gradients by DeepSpeed's own norm, for which it skips the
    update. In fp16 dynamic loss scaling makes infinite gradients ordinary, so there only the smallest scale ends a run.
    """

    def __init__(self, trainer: Any, guard: Guard, tokenizer: Any) -> None:
        self.trainer, self.guard, self.tokenizer = trainer, guard, tokenizer
        self.stopped_at = 0
        """The step at which all stop; 0 while nobody asks for it."""
        self._losses: list[torch.Tensor] = []
        self._loader: Any = None
        self._random: tuple[torch.Tensor, ...] = ()
        self._is_repeating = self._stops = False
        trainer.consensus = self

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        compat.check_gradients(self.trainer.deepspeed, self._end_by_gradient)
        self.guard.can_stop_at_a_step = True

    def on_step_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self._loader, self._losses = train_dataloader, []
        self._random = random_states()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # DeepSpeed has taken its step by now, or has skipped it for its gradient.
        engine = self.trainer.deepspeed
        if engine.was_step_applied():
            return
        if not engine.fp16_enabled():
            self._end_by_gradient()
        scale = getattr(engine.optimizer, "loss_scale_config", None)  # stage 0; the other stages' scaler ends by itself
        if scale and scale.dynamic_loss_scale and scale.cur_scale <= scale.min_loss_scale:
            what = f"gradients are infinite at the smallest loss scale in step {self.guard.step}"
            raise NotANumber(what, rank=0, fix="Lower the learning rate, or train in bf16.")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._stops:
            self.stopped_at = state.global_step
            control.should_save = control.should_training_stop = True
        if control.should_save or control.should_training_stop:
            self._check_weights(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A stop ends the loop over an epoch too: that is no epoch's end, and who stops has no time to validate.
        control.should_evaluate &= not self.stopped_at

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._sums(False, self.guard.stop_requested)[1]:
            # Asked during the save: its checkpoint is the one to resume from.
            self.stopped_at = state.global_step
            control.should_training_stop = True

    def hear(self, loss: torch.Tensor) -> None:
        """Note a micro-batch's loss; at a step's last one, let all ranks agree.

        Raises:
            NotANumber: a loss of the step is none, on any rank.
        """
        if self._is_repeating:
            return
        self._losses.append(loss.detach().float().reshape(()))
        if not self.trainer.accelerator.sync_gradients:
            return
        losses = torch.stack(self._losses)
        bad, stops, tokens = self._sums(~losses.isfinite().all(), self.guard.stop_requested, self.trainer.num_tokens)
        self._stops = bool(stops)
        self.trainer.state.num_input_tokens_seen += tokens
        if bad:
            self._end(self._describe_loss(losses.tolist()))

    def _sums(self, *counts: Any) -> list[int]:
        """Return the sums of numbers over all ranks."""
        device = self.trainer.args.device
        numbers = torch.stack([torch.as_tensor(one, device=device).long() for one in counts])
        dist.all_reduce(numbers)
        return [int(one) for one in numbers.tolist()]

    def _describe_loss(self, losses: list[float]) -> str | None:
        """Return what is wrong with this rank's first bad micro-batch, or None."""
        bad = [(index, loss) for index, loss in enumerate(losses) if not math.isfinite(loss)]
        if not bad:
            return None
        index, loss = bad[0]
        return f"loss is {loss} in step {self.guard.step} on rank {dist.get_rank()}, from {self._rows(index)}"

    def _end_by_gradient(self) -> None:
        """End the run for the gradient of this step, which is no number; every rank calls it."""
        for index, norm in enumerate(self._gradient_norms()):
            if not math.isfinite(norm):
                what = f"the gradient's norm is {norm} in step {self.guard.step} on rank {dist.get_rank()}"
                self._end(f"{what}, from {self._rows(index)}")
        self._end(None)

    def _gradient_norms(self) -> list[float]:
        """Return the sum of the parameters' norms for each micro-batch of this step, taken through the model again."""
        trainer, engine, norms, sums = self.trainer, self.trainer.deepspeed, [], []
        for parameter in engine.module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: norms.append(_norm(gradient)))
        engine.set_gradient_accumulation_boundary(is_boundary=False)
        with self._repeating():
            for batch in trainer.batches_of_step:
                loss = trainer.compute_loss(engine, dict(batch), num_items_in_batch=trainer.num_items_of_step)
                engine.backward(loss)
                sums.append(float(torch.stack(norms).sum()) if norms else 0.0)
                norms.clear()
        return sums

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        self._is_repeating = True
        set_random_states(self._random)
        with self.trainer.compute_loss_context_manager():
            yield

    def _rows(self, index: int) -> str:
        """Return which rows the micro-batch of this step is made of: worked out again, as the sampler did."""
        state, args, loader = self.trainer.state, self.trainer.args, self._loader
        per_epoch = -(-len(loader) // args.gradient_accumulation_steps)
        epoch, update = divmod(state.global_step, per_epoch)
        loader.set_epoch(epoch)
        place = update * args.gradient_accumulation_steps + index
        rows = next(rows for at, rows in enumerate(loader.batch_sampler) if at == place)
        if not rows:
            return "no row: this rank had none in the epoch's last step"
        named = "row" if len(rows) == 1 else "rows"
        numbers = ", ".join(map(str, rows))
        return f"{named} {numbers} of the prepared data, the first of which begins {self._text(rows[0])!r}"

    def _text(self, row: int) -> str:
        ids = next(value for name, value in self.trainer.train_dataset[row].items() if name.endswith("ids"))
        return str(self.tokenizer.decode(list(ids[:_EXCERPT_TOKENS])))[:_EXCERPT]

    def _check_weights(self, step: int) -> None:
        """Refuse to save weights that finite gradients have spoilt."""
        weights = [getattr(one, "ds_tensor", one) for one in self.trainer.model.parameters() if one.requires_grad]
        norms = torch.stack([_norm(one).to(self.trainer.args.device) for one in weights])
        if self._sums(~norms.isfinite().all())[0]:
            raise NotANumber(f"weights are non-finite after step {step}", rank=0, fix="Lower the learning rate.")

    def _end(self, found: str | None) -> None:
        """End the run with what the first rank has `found` that found anything; every rank calls it."""
        everywhere: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        for rank, one in enumerate(everywhere):
            if one:
                raise NotANumber(f"{one}; no weight was updated", rank=rank, fix=_FIX)
        # Each micro-batch has one on its own, and their sum has none.
        raise NotANumber(f"the sum of all ranks' gradients is infinite in step {self.guard.step}", rank=0, fix=_FIX)


def _norm(numbers: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm: one pass over the numbers, and NaN or infinite where one of them is."""
    return torch.linalg.vector_norm(numbers.detach(), dtype=torch.float32)


def random_states() -> tuple[torch.Tensor, ...]:
    """Return what dropout draws from: the states of the CPU's and of the accelerator's random numbers."""
    accelerator = get_accelerator()
    own = (accelerator.get_rng_state(),) if accelerator.device_name() != "cpu" else ()
    return (torch.get_rng_state(), *own)


def set_random_states(states: tuple[torch.Tensor, ...]) -> None:
    """Let dropout draw what it would have drawn when `random_states` returned these."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        get_accelerator().set_rng_state(states[1])
