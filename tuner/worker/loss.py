"""A training loss from whole logits, and whether TRL's head, a tile at a time, gives the same.

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
from trl.trainer.utils import FusedCausalLMOutput

from tuner.data.sample import IGNORED

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
