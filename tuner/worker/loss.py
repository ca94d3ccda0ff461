"""The training loss from whole logits, and the check that TRL's head, which computes logits in tiles, agrees.

TRL's fused head saves memory and computes every logit twice; if the logits fit into memory, keeping them is faster.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from tuner.data.sample import IGNORED

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

_PROBED_TOKENS = 16
METRICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
"""The metrics that TRL's trainers compute for each token beside its log-probability."""


def use_whole_logits(model: PreTrainedModel, metrics: Sequence[str]) -> None:
    """Let `model(..., labels=..., fused_lm_head=True)` return the same values, computed from whole logits.

    Training and validation both use it: at ZeRO-3 hooks of the module gather the weight of the head here, while TRL's
    head gathers it itself, and DeepSpeed 0.19 fails if both alternate ("Cannot partition a param in flight").

    Args:
        metrics: The names from `METRICS` that the trainer reads; each costs a pass over the logits.
    """
    chunked = model.forward
    lacks_aux_loss = False  # Llama 4's forward returns no loss of its router: TRL's head computes it

    # generate() checks its arguments against the signature of the model's own forward.
    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel,
        *args: object,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **kwargs: object,
    ) -> ModelOutput:
        nonlocal lacks_aux_loss
        if not fused_lm_head or lacks_aux_loss:
            return chunked(*args, fused_lm_head=fused_lm_head, labels=labels, shift_labels=shift_labels, **kwargs)
        outputs = chunked(*args, **{**kwargs, "use_cache": False})
        aux_loss = getattr(outputs, "aux_loss", None)
        if aux_loss is None and kwargs.get("output_router_logits"):
            lacks_aux_loss = True
            return chunked(*args, fused_lm_head=True, labels=labels, shift_labels=shift_labels, **kwargs)
        # The labels are shifted, not the logits: a shifted view of the logits would be copied whole.
        targets_BT = shift_labels
        if targets_BT is None:
            assert labels is not None, "TRL passes one of the two"
            targets_BT = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
        is_measured = torch.is_grad_enabled() or not self.training  # else the adapter's reference is computed
        values = of_logits(outputs.logits, targets_BT, metrics if is_measured else ())
        last = None if shift_labels is not None else -1
        is_trained_BT = targets_BT[:, :last] != IGNORED
        trained = {name: value[:, :last].masked_fill(~is_trained_BT, 0) for name, value in values.items()}
        return FusedCausalLMOutput(**trained, label_mask=is_trained_BT, aux_loss=aux_loss)

    model.forward = MethodType(forward, model)


@torch.no_grad()  # type: ignore[untyped-decorator]
def tiles_give_its_logits(model: PreTrainedModel, call: Callable[..., Any]) -> bool:
    """Return whether TRL's head, which computes in tiles, gives the log-probabilities of the model's own logits.

    TRL 1.16 multiplies by the weight of the head and knows some scales and caps by their names in the config; it leaves
    out RecurrentGemma's `logits_soft_cap` and xLSTM's `output_logit_soft_cap`. All ranks call it together, because
    ZeRO-3 gathers weights.

    Args:
        call: The forward pass of the model, or of the engine around it.
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
        # The tiles come first: DeepSpeed 0.19 prefetches in a pass what the pass before used, and then TRL's head
        # cannot gather its weight.
        tiled_BT = call(input_ids=ids_BT, labels=ids_BT, fused_lm_head=True).log_probs
        logits_BTV = call(input_ids=ids_BT, use_cache=False).logits
    finally:
        model.train(was_training)
    log_probs_BT = of_logits(logits_BTV, F.pad(ids_BT[:, 1:], (0, 1), value=IGNORED), ())["log_probs"][:, :-1]
    # Relative to the largest logit: bfloat16 has 8 bits; TF32, which a GPU may use for fp32, has 11.
    rtol = 2e-3 if logits_BTV.dtype == torch.float32 else 2e-2
    return bool(torch.allclose(tiled_BT, log_probs_BT, rtol=rtol, atol=rtol * float(logits_BTV.abs().max()) + 1e-5))


def of_logits(logits_BTV: Tensor, targets_BT: Tensor, metrics: Sequence[str]) -> dict[str, Tensor]:
    """Return the log-probability of each target in fp32 (0 if ignored) and the metrics of its position; each [B, T]."""
    log_probs_BTV = logits_BTV.log_softmax(-1, dtype=torch.float32)
    losses = F.nll_loss(log_probs_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none", ignore_index=IGNORED)
    values = {"log_probs": -losses.view(targets_BT.shape)}
    with torch.no_grad():
        for name in metrics:
            values[name] = _metric(name, logits_BTV, log_probs_BTV, targets_BT)
    return values


def _metric(name: str, logits_BTV: Tensor, log_probs_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    if name == "entropy":
        return -log_probs_BTV.exp().mul_(log_probs_BTV).sum(-1)
    if name == "is_top1":
        return log_probs_BTV.argmax(-1) == targets_BT
    if name == "mean_logits":
        return logits_BTV.mean(-1, dtype=torch.float32)
    assert name == "log_sum_sq_probs", name
    return (2 * log_probs_BTV).logsumexp(-1)
