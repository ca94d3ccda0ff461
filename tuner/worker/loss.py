"""How a training loss is computed where that decides the speed: from whole logits, and without waiting for metrics.

TRL's fused head saves memory and computes every logit twice; where the logits fit, holding them is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from trl import SFTTrainer
from trl.trainer.utils import FusedCausalLMOutput

from tuner.data.sample import IGNORED
from tuner.worker.progress import logs_step

_LOGGED = ("entropy", "is_top1")
_PROBED_TOKENS = 16
METRICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
"""What TRL's trainers measure on each token, beside its log-probability."""


def use_whole_logits(model: Any, metrics: Sequence[str]) -> None:
    """Let `model(..., labels=..., fused_lm_head=True)` return the same from logits that are held whole.

    Training and validation take this one path: at ZeRO-3 the head's weight is gathered by the hooks of its module here,
    and by TRL's head itself, and DeepSpeed 0.19 fails where both take turns ("Cannot partition a param in flight").

    Args:
        model: A causal language model that TRL's trainer has given its fused head.
        metrics: Those of `METRICS` that are read of training and of validation; each costs a pass over the logits.
    """
    chunked = model.forward
    lacks_aux_loss = False  # of a mixture of experts whose forward returns none (Llama 4): TRL's head works it out

    # generate() checks its arguments against the signature of the model's own forward.
    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, shift_labels: Any = None, **kwargs: Any
    ) -> Any:
        nonlocal lacks_aux_loss
        if not fused_lm_head or lacks_aux_loss:
            return chunked(*args, fused_lm_head=fused_lm_head, labels=labels, shift_labels=shift_labels, **kwargs)
        found = chunked(*args, **{**kwargs, "use_cache": False})
        aux_loss = getattr(found, "aux_loss", None)
        if aux_loss is None and kwargs.get("output_router_logits"):
            lacks_aux_loss = True
            return chunked(*args, fused_lm_head=True, labels=labels, shift_labels=shift_labels, **kwargs)
        # Labels move and logits do not: a shifted view of them would be copied whole.
        targets_BT = F.pad(labels[:, 1:], (0, 1), value=IGNORED) if shift_labels is None else shift_labels
        is_measured = torch.is_grad_enabled() or not self.training  # else it is the adapter's reference
        measured = of_logits(found.logits, targets_BT, metrics if is_measured else ())
        last = None if shift_labels is not None else -1
        is_trained_BT = targets_BT[:, :last] != IGNORED
        named = {name: value[:, :last].masked_fill(~is_trained_BT, 0) for name, value in measured.items()}
        return FusedCausalLMOutput(**named, label_mask=is_trained_BT, aux_loss=aux_loss)

    model.forward = MethodType(forward, model)


@torch.no_grad()  # type: ignore[untyped-decorator]
def tiles_give_its_logits(model: Any, call: Callable[..., Any]) -> bool:
    """Return whether TRL's head, a tile at a time, gives the log-probabilities of the model's own logits.

    TRL 1.16 multiplies by the head's weight and knows some scales and caps by their name in the config; it leaves out
    RecurrentGemma's `logits_soft_cap` and xLSTM's `output_logit_soft_cap`. Ranks call it together: at ZeRO-3 they
    gather the weights.

    Args:
        model: A causal language model that TRL's trainer has given its fused head.
        call: Its forward pass, through what it is wrapped in.
    """
    config = model.config.get_text_config()
    if isinstance(getattr(config, "logit_scale", None), str):  # MPT's, which TRL's head computes with as a number
        return False
    vocab_size = config.vocab_size
    ids_BT = torch.arange(1, vocab_size, max(1, vocab_size // _PROBED_TOKENS), device=model.device)[
        None, :_PROBED_TOKENS
    ]
    was_training = model.training
    model.eval()
    try:
        # The tiles come first: what DeepSpeed 0.19 has seen used in one pass it prefetches in the next, and then TRL's
        # head fails to gather its weight.
        tiled_BT = call(input_ids=ids_BT, labels=ids_BT, fused_lm_head=True).log_probs
        logits_BTV = call(input_ids=ids_BT, use_cache=False).logits
    finally:
        model.train(was_training)
    log_probs_BT = of_logits(logits_BTV, F.pad(ids_BT[:, 1:], (0, 1), value=IGNORED), ())["log_probs"][:, :-1]
    # Of the largest logit: bfloat16 has 8 bits, and TF32, which a GPU may take for fp32, 11.
    rtol = 2e-3 if logits_BTV.dtype == torch.float32 else 2e-2
    return bool(torch.allclose(tiled_BT, log_probs_BT, rtol=rtol, atol=rtol * float(logits_BTV.abs().max()) + 1e-5))


def of_logits(logits_BTV: Tensor, targets_BT: Tensor, metrics: Sequence[str]) -> dict[str, Tensor]:
    """Return each target's log-probability in fp32, 0 where ignored, and the metrics of its place; each [B, T]."""
    log_probs_BTV = logits_BTV.log_softmax(-1, dtype=torch.float32)
    losses = F.nll_loss(log_probs_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none", ignore_index=IGNORED)
    found = {"log_probs": -losses.view(targets_BT.shape)}
    with torch.no_grad():
        for name in metrics:
            found[name] = _metric(name, logits_BTV, log_probs_BTV, targets_BT)
    return found


def _metric(name: str, logits_BTV: Tensor, log_probs_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    if name == "entropy":
        return -log_probs_BTV.exp().mul_(log_probs_BTV).sum(-1)
    if name == "is_top1":
        return log_probs_BTV.argmax(-1) == targets_BT
    if name == "mean_logits":
        return logits_BTV.mean(-1, dtype=torch.float32)
    assert name == "log_sum_sq_probs", name
    return (2 * log_probs_BTV).logsumexp(-1)


class MeanOfTokens(SFTTrainer):  # type: ignore[misc]
    """TRL's SFT, whose training steps measure only where they are logged, without a collective a micro-batch.

    TRL 1.16 gathers four counts a micro-batch over all ranks and waits for them, for metrics that are logged later.
    """

    loss_is_scaled_for_ga = True  # transformers would not think so where ranks share samples

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.metrics: list[str] = []
        """What `use_whole_logits` measures, where it is in use."""
        self._sums: list[Tensor] = []

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the sum over trained tokens divided by their number in the step, of which ranks take the mean."""
        if not self.model.training:
            self.metrics[:] = _LOGGED
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        is_logged = self._logs_next_step()
        self.metrics[:] = _LOGGED if is_logged else ()
        more = {"output_router_logits": True} if self.aux_loss_enabled else {}
        outputs = model(**inputs, **more, use_cache=False, fused_lm_head=True)
        loss = -outputs.log_probs.sum() / num_items_in_batch.clamp(min=1) * self.args.world_size
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / self.current_gradient_accumulation_steps
        if is_logged:
            self._measure(outputs)
        return loss

    def _logs_next_step(self) -> bool:
        return logs_step(self.state.global_step + 1, self.args, self.state)

    def _measure(self, outputs: Any) -> None:
        aux_loss = outputs.aux_loss.detach() if self.aux_loss_enabled else outputs.log_probs.new_zeros(())
        counts = (outputs.entropy.detach(), outputs.is_top1, outputs.label_mask)
        self._sums.append(
            torch.stack([*(one.sum().float() for one in counts), aux_loss.float(), aux_loss.new_ones(())])
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the logged step measured, over all ranks."""
        if self._sums and self.model.training:
            sums = self.accelerator.reduce(torch.stack(self._sums).sum(0))
            entropy, num_right, num_tokens, aux_loss, num_batches = sums.tolist()
            measured = {"entropy": entropy / max(num_tokens, 1), "mean_token_accuracy": num_right / max(num_tokens, 1)}
            logs |= measured | ({"aux_loss": aux_loss / num_batches} if self.aux_loss_enabled else {})
            self._sums.clear()
        super().log(logs, start_time)
