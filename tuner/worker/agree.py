"""What all ranks agree on before each update: that every loss and gradient is a number, and whether to stop after it.

One small all-reduce a step carries both. It finds the rank and the rows; what is wrong with them it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback

from tuner.errors import NotANumber
from tuner.worker.guard import Guard

_EXCERPT_TOKENS, _EXCERPT = 48, 120
_FIX = "Look at these rows, or lower the learning rate."


@dataclass(frozen=True)
class _Found:
    """What is wrong on one rank."""

    what: str
    rows: str


class Agree(TrainerCallback):  # type: ignore[misc]
    """Ends a run before weights are spoilt, and a run that is asked to stop at the same step on every rank.

    DeepSpeed 0.19.8 takes a step with such gradients at stage 0 in fp32, and skips it without a word elsewhere. In fp16
    dynamic loss scaling makes infinite gradients ordinary, so only losses count there, and the smallest scale.
    """

    def __init__(self, trainer: Any, guard: Guard, tokenizer: Any) -> None:
        self.trainer, self.guard, self.tokenizer = trainer, guard, tokenizer
        self.stopped_at = 0
        """The step at which all stop; 0 while nobody asks for it."""
        self._losses: list[torch.Tensor] = []
        self._gradients: list[torch.Tensor] = []
        """The sum of the norms of each micro-batch's gradients on this rank, before they are averaged over ranks."""
        self._norms: list[torch.Tensor] = []
        self._loader: Any = None
        self._stops = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine = self.trainer.deepspeed
        engine.backward, engine.step = self._backward(engine.backward), self._step(engine)
        if not engine.fp16_enabled():
            for parameter in engine.module.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(self._note)
        self.guard.can_stop_at_a_step = True

    def on_step_begin(self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any) -> None:
        self._loader = train_dataloader
        self._losses, self._gradients = [], []

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
        if self._vote(torch.tensor(False, device=args.device))[1]:
            # Asked during the save: its checkpoint is the one to resume from.
            self.stopped_at = state.global_step
            control.should_training_stop = True

    def _note(self, gradient: torch.Tensor) -> None:
        self._norms.append(_norm(gradient))

    def _backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def noted(loss: torch.Tensor, *args: Any, **options: Any) -> Any:
            self._losses.append(loss.detach().float().reshape(()))
            result = backward(loss, *args, **options)
            self._gradients.append(torch.stack(self._norms).sum() if self._norms else loss.new_zeros(()).float())
            self._norms = []
            return result

        return noted

    def _step(self, engine: Any) -> Callable[..., Any]:
        step = engine.step

        def agreed(*args: Any, **options: Any) -> Any:
            numbers = torch.stack((torch.stack(self._losses), torch.stack(self._gradients)))
            bad, self._stops = self._vote(~numbers.isfinite().all())
            if bad:
                self._end(self._describe(numbers.cpu()))
            result = step(*args, **options)
            self._check_skipped(engine)
            return result

        return agreed

    def _vote(self, bad: torch.Tensor) -> tuple[bool, bool]:
        flags = torch.stack((bad, torch.tensor(self.guard.stop_requested, device=bad.device))).int()
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        first, second = flags.tolist()
        return bool(first), bool(second)

    def _describe(self, numbers: torch.Tensor) -> _Found | None:
        """Return what is wrong with this rank's first bad micro-batch, or None."""
        bad = [index for index, pair in enumerate(numbers.T) if not pair.isfinite().all()]
        if not bad:
            return None
        loss, gradient = numbers[:, bad[0]].tolist()
        where = f"in step {self.guard.step} on rank {dist.get_rank()}"
        is_loss = not numbers[0, bad[0]].isfinite()
        what = f"loss is {loss} {where}" if is_loss else f"the gradient's norm is {gradient} {where}"
        return _Found(what, self._rows(bad[0]))

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

    def _check_skipped(self, engine: Any) -> None:
        """End a run whose step DeepSpeed has skipped although each rank's own gradients are numbers."""
        optimizer = engine.optimizer
        if not getattr(optimizer, "overflow", False):
            return
        if not engine.fp16_enabled():
            raise NotANumber(f"the sum of all ranks' gradients is infinite in step {self.guard.step}", rank=0, fix=_FIX)
        scale = getattr(optimizer, "loss_scale_config", None)  # stage 0; the other stages' scaler ends by itself
        if scale and scale.dynamic_loss_scale and scale.cur_scale <= scale.min_loss_scale:
            what = f"gradients are infinite at the smallest loss scale in step {self.guard.step}"
            raise NotANumber(what, rank=0, fix="Lower the learning rate, or train in bf16.")

    def _check_weights(self, step: int) -> None:
        """Refuse to save weights that finite gradients have spoilt."""
        weights = [getattr(one, "ds_tensor", one) for one in self.trainer.model.parameters() if one.requires_grad]
        norms = [
            torch.linalg.vector_norm(one.detach(), dtype=torch.float32).to(self.trainer.args.device) for one in weights
        ]
        bad, _ = self._vote(~torch.stack(norms).isfinite().all())
        if bad:
            raise NotANumber(f"weights are no numbers after step {step}", rank=0, fix="Lower the learning rate.")

    @staticmethod
    def _end(found: _Found | None) -> None:
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        rank, first = next((rank, one) for rank, one in enumerate(everywhere) if one)
        raise NotANumber(f"{first.what}, from {first.rows}; no weight was changed by it", rank=rank, fix=_FIX)


def _norm(numbers: torch.Tensor) -> torch.Tensor:
    """Return the 2-norm: one pass over the numbers, and NaN or infinite where one of them is."""
    return torch.linalg.vector_norm(numbers.detach(), dtype=torch.float32)
