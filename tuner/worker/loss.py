"""The loss of tokens without TRL's second pass over the logits: in tiles of them, or from all of them at once.

TRL's fused head saves memory and computes every logit twice, because the loss of each token may get its own gradient.
A sum over tokens gets one, which can multiply the result later: `compute_once` computes gradients with the logits. If
the logits fit into memory, keeping them also works for other losses: `use_whole_logits`. `tiles_give_its_logits`
compares TRL's tiles with the model's own logits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import repeat
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.models.mixtral import modeling_mixtral
from transformers.utils import ModelOutput
from trl.trainer.utils import FusedCausalLMOutput

from tuner.data.sample import IGNORED
from tuner.worker import compat_loss
from tuner.worker.compat_loss import Scales

_PROBED_TOKENS = 16
_LOGITS_ON_CPU = 2**23
"""In a tile on a CPU: of 2**20 to 2**25 the fastest for 49,152 words, with 1,024 tokens of width 576."""
METRICS = ("entropy", "mean_logits", "is_top1", "log_sum_sq_probs")
"""The metrics that TRL's trainers compute for each token in addition to its log-probability."""


def use_whole_logits(model: PreTrainedModel, metrics: Sequence[str]) -> None:
    """Let `model(..., labels=..., fused_lm_head=True)` return the same values, computed from whole logits.

    Its `loss` is the sum of the tokens' losses; `by_probability` is that of `compute_once`.

    Training and validation both use it: at ZeRO-3 hooks of the module gather the weight of the head here, while TRL's
    head gathers it itself, and DeepSpeed 0.19 fails if both alternate ("Cannot partition a param in flight").

    Args:
        metrics: The names from `METRICS` that the trainer reads; each costs a pass over the logits.
    """
    before = model.forward  # with TRL's head, or that of `compute_once`
    lacks_aux_loss = False  # Llama 4's forward returns no loss of its router: TRL's head computes it

    # generate() checks its arguments against the signature of the model's own forward.
    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel,
        *args: object,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_trained: int | None = None,
        token_weights: Tensor | None = None,
        by_probability: bool = False,
        **kwargs: object,
    ) -> ModelOutput:
        nonlocal lacks_aux_loss
        # Only the head of `compute_once` takes them.
        of_head = ({"by_probability": True} if by_probability else {}) | (
            {} if token_weights is None else {"token_weights": token_weights}
        )
        if not fused_lm_head or lacks_aux_loss:
            targets = {"labels": labels, "shift_labels": shift_labels}
            return before(*args, fused_lm_head=fused_lm_head, **targets, **of_head, **kwargs)
        outputs = before(*args, **{**kwargs, "use_cache": False})
        aux_loss = getattr(outputs, "aux_loss", None)
        if aux_loss is None and kwargs.get("output_router_logits"):
            lacks_aux_loss = True
            return before(*args, fused_lm_head=True, labels=labels, shift_labels=shift_labels, **of_head, **kwargs)
        targets_BT = next_labels(labels, shift_labels)
        is_measured = torch.is_grad_enabled() or not self.training  # else the adapter's reference is computed
        values = of_logits(outputs.logits, targets_BT, metrics if is_measured else ())
        last = None if shift_labels is not None else -1  # nothing follows the last token of `labels`
        is_trained_BT = targets_BT[:, :last] != IGNORED
        trained = {name: value[:, :last].masked_fill(~is_trained_BT, 0) for name, value in values.items()}
        weights_BT = _of_targets(token_weights, labels)
        total = _total(trained["log_probs"], weights_BT, by_probability=by_probability)
        return FusedCausalLMOutput(loss=total, **trained, label_mask=is_trained_BT, aux_loss=aux_loss)

    model.forward = MethodType(forward, model)


def compute_once(model: PreTrainedModel, metrics: Sequence[str]) -> None:
    """Let `model(..., labels=..., fused_lm_head=True)` return the sum of its tokens' losses, from logits in tiles.

    It has the values of TRL's head, which TRL's trainer has put into the model, but only `loss` has a gradient: that of
    -(token_weights * log_probs).sum(). `num_trained` is the number of labels that carry loss, if the host knows it;
    `token_weights` are those of `labels` or `shift_labels`, in fp32, or None for 1. With `by_probability` the gradient
    of each token is times its probability, as in dynamic fine-tuning (Wu et al., 2025, arXiv:2508.05629), and the loss
    stays the same. A compiled graph keeps TRL's own function.

    Args:
        metrics: 'entropy', 'is_top1', or both: what the trainer reads; each costs a pass over the logits. Without one,
            training returns no values of single tokens.
    """
    before, scales, text = model.forward, compat_loss.scales_of(model), model.config.get_text_config()

    # generate() checks its arguments against the signature of the model's own forward.
    @functools.wraps(type(model).forward)
    def forward(
        self: PreTrainedModel,
        *args: object,
        fused_lm_head: bool = False,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        num_trained: int | None = None,
        token_weights: Tensor | None = None,
        by_probability: bool = False,
        **kwargs: Any,
    ) -> ModelOutput:
        if not fused_lm_head or torch.compiler.is_compiling():
            outputs = before(*args, fused_lm_head=fused_lm_head, labels=labels, shift_labels=shift_labels, **kwargs)
            if fused_lm_head:
                weights_BT = _of_targets(token_weights, labels)
                outputs.loss = _total(outputs.log_probs, weights_BT, by_probability=by_probability)
            return outputs
        if getattr(text, "output_router_logits", False):
            kwargs.setdefault("output_router_logits", True)
        states = self.base_model(*args, **{**kwargs, "use_cache": False})
        targets_BT = next_labels(labels, shift_labels)
        places_N = _places(targets_BT, num_trained)
        weights_N = torch.ones(len(places_N), device=places_N.device)
        if token_weights is not None:
            weights_N = (token_weights if labels is None else F.pad(token_weights[:, 1:], (0, 1))).flatten()[places_N]
        head = self.get_output_embeddings()
        with compat_loss.gathered(head.weight, head.bias):
            total, *of_tokens = _SumOfTokens.apply(
                states.last_hidden_state.flatten(0, 1),
                head.weight,
                head.bias,
                places_N,
                targets_BT.flatten()[places_N],
                weights_N,
                scales,
                tuple(metrics),
                torch.is_grad_enabled(),
                by_probability,
            )
        aux_loss = None
        if kwargs.get("output_router_logits"):
            counts = text.num_experts, text.num_experts_per_tok
            mask = kwargs.get("attention_mask")
            aux_loss = modeling_mixtral.load_balancing_loss_func(states.router_logits, *counts, mask)
        if self.training and not metrics:
            return FusedCausalLMOutput(loss=total, aux_loss=aux_loss)
        last = None if shift_labels is not None else -1  # nothing follows the last token of `labels`
        values = {
            name: value_N.new_zeros(targets_BT.numel())
            .index_copy_(0, places_N, value_N)
            .view(targets_BT.shape)[:, :last]
            for name, value_N in zip(("log_probs", *metrics), of_tokens, strict=True)
        }
        is_trained_BT = (targets_BT != IGNORED)[:, :last]
        return FusedCausalLMOutput(loss=total, **values, label_mask=is_trained_BT, aux_loss=aux_loss)

    model.forward = MethodType(forward, model)


def _of_targets(token_weights_BT: Tensor | None, labels_BT: Tensor | None) -> Tensor | None:
    """Return the weights of a head's log-probabilities; those of `labels` are shifted, of `shift_labels` (None) not."""
    return token_weights_BT if token_weights_BT is None or labels_BT is None else token_weights_BT[:, 1:]


def _total(log_probs_BT: Tensor, weights_BT: Tensor | None, *, by_probability: bool) -> Tensor:
    """Return -(weights * log_probs).sum(), with dynamic fine-tuning's gradient if it is `by_probability`."""
    total = -(log_probs_BT if weights_BT is None else weights_BT * log_probs_BT).sum()
    if not by_probability:
        return total
    probs_BT = log_probs_BT.detach().exp()
    weighed = -((probs_BT if weights_BT is None else weights_BT * probs_BT) * log_probs_BT).sum()
    return total.detach() + weighed - weighed.detach()


def next_labels(labels_BT: Tensor | None, shift_labels_BT: Tensor | None) -> Tensor:
    """Return for each token the label of the next one. The labels are shifted: to shift the states would copy them."""
    if shift_labels_BT is not None:
        return shift_labels_BT
    assert labels_BT is not None, "TRL passes one of the two"
    return F.pad(labels_BT[:, 1:], (0, 1), value=IGNORED)


def _places(targets_BT: Tensor, num_trained: int | None) -> Tensor:
    """Return the places of the tokens that have a target, in their order.

    Args:
        num_trained: Their number, where the host knows it: then it does not wait for the device.
    """
    is_ignored = (targets_BT == IGNORED).flatten()
    if num_trained is None:
        return (~is_ignored).nonzero()[:, 0]
    return is_ignored.to(torch.uint8).argsort(stable=True)[:num_trained]


# In tiles


class _SumOfTokens(torch.autograd.Function):  # type: ignore[misc]
    """-(weights * log-probabilities).sum() of tokens. The gradients are computed together with the logits.

    M tokens, of which N have a target; H their width, V words. All logits of some tokens are in memory at a time, and
    become their own gradients in place. Gradients are summed up in fp32, as in TRL's head, and the gradient of the sum
    multiplies them in the backward pass. Source of this order: Hsu et al., Liger Kernel, 2024 (arXiv:2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        places_N: Tensor,
        targets_N: Tensor,
        weights_N: Tensor,
        scales: Scales,
        metrics: Sequence[str],
        needs_gradients: bool,
        by_probability: bool = False,
    ) -> tuple[Tensor, ...]:
        device, num_trained, (vocab_size, width) = hidden_MH.device, len(places_N), weight_VH.shape
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else hidden_MH.dtype

        def sums(shape: Sequence[int], argument: int) -> Tensor | None:
            needed = needs_gradients and ctx.needs_input_grad[argument]
            return torch.zeros(shape, dtype=torch.float32, device=device) if needed else None

        of_hidden_NH, of_weight_VH, of_bias_V = (
            sums((num_trained, width), 0),
            sums((vocab_size, width), 1),
            sums((vocab_size,), 2),
        )
        size = max(1, min(num_trained, tile_tokens(device, vocab_size, 0 if of_weight_VH is None else width)))
        tiles_NV = torch.empty(size, vocab_size, dtype=dtype, device=device)
        head_VH, fold = weight_VH.to(dtype), compat_loss.fold if compat_loss.has_kernels(device) else _fold
        head_HV, of_each_tile = head_VH.t(), list[dict[str, Tensor]]()
        of_tokens = (places_N, targets_N, weights_N if needs_gradients else None, of_hidden_NH)
        has_one_tile = size == num_trained  # no slice then: each is an operation of its own
        of_tiles = (
            repeat(None) if rows is None else (rows,) if has_one_tile else rows.split(size) for rows in of_tokens
        )
        for places, targets, weights, sums_NH in zip(*of_tiles, strict=False) if num_trained else ():
            inputs_NH = hidden_MH.index_select(0, places).to(dtype)
            tile_NV = tiles_NV[: len(inputs_NH)]
            torch.mm(inputs_NH, head_HV, out=tile_NV)
            if bias_V is not None:
                tile_NV += bias_V.to(dtype)
            of_each_tile.append(fold(tile_NV, targets, weights, scales, metrics, by_probability=by_probability))
            if sums_NH is not None:
                compat_loss.add_product(sums_NH, tile_NV, head_VH, is_only_product=True)
            if of_weight_VH is not None:
                compat_loss.add_product(of_weight_VH, tile_NV.t(), inputs_NH, is_only_product=has_one_tile)
            if of_bias_V is not None:
                of_bias_V += tile_NV.sum(0, dtype=torch.float32)
        ctx.gradients = [of_hidden_NH, of_weight_VH, of_bias_V]
        ctx.dtypes = [hidden_MH.dtype, weight_VH.dtype, None if bias_V is None else bias_V.dtype]
        ctx.save_for_backward(places_N)
        ctx.num_tokens = len(hidden_MH)
        values = [
            torch.cat([of_tile[name] for of_tile in of_each_tile])
            if of_each_tile
            else torch.zeros(0, dtype=torch.bool if name == "is_top1" else torch.float32, device=device)
            for name in ("log_probs", *metrics)
        ]
        ctx.mark_non_differentiable(*values)
        return (-(weights_N * values[0]).sum(), *values)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_sum: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this loss are gone after its first backward pass")
        (places_N,), sums, ctx.gradients = ctx.saved_tensors, ctx.gradients[::-1], None
        scaled = []
        for dtype in ctx.dtypes:
            gradient = sums.pop()
            if gradient is not None:
                # The sum in fp32 goes before the next one is copied.
                out = gradient if dtype == gradient.dtype else torch.empty_like(gradient, dtype=dtype)
                gradient = torch.mul(gradient, of_sum, out=out)
            scaled.append(gradient)
        if scaled[0] is not None:
            of_hidden_MH = scaled[0].new_zeros(ctx.num_tokens, scaled[0].shape[1])
            scaled[0] = of_hidden_MH.index_copy_(0, places_N, scaled[0])
        return *scaled, None, None, None, None, None, None, None


def tile_tokens(device: torch.device, vocab_size: int, trained_width: int) -> int:
    """Return how many tokens have their logits in memory at a time.

    Args:
        trained_width: The width of the head's inputs if its weight is trained, or 0. Each tile adds to the gradient of
            the whole weight: with this number of tokens the additions take little time beside the products, and the
            tile takes no more memory than the 16-bit copy of that gradient in the backward pass.
    """
    is_cpu = device.type == "cpu" and not compat_loss.has_kernels(device)
    max_logits = _LOGITS_ON_CPU if is_cpu else compat_loss.most_logits()
    return max(max_logits // vocab_size, trained_width)


def _fold(
    tile_NV: Tensor,
    targets_N: Tensor,
    weights_N: Tensor | None,
    scales: Scales,
    metrics: Sequence[str],
    *,
    by_probability: bool = False,
) -> dict[str, Tensor]:
    """Compute what `compat_loss.fold` does on devices without its kernels."""
    logits_NV = tile_NV.float()
    if scales.scale != 1:
        logits_NV = logits_NV * scales.scale
    capped_NV = logits_NV if scales.cap is None else (logits_NV / scales.cap).tanh_().mul_(scales.cap)
    log_probs_NV = capped_NV.log_softmax(-1)
    values = {"log_probs": log_probs_NV.gather(-1, targets_N[:, None])[:, 0]}
    if "is_top1" in metrics:
        values["is_top1"] = log_probs_NV.argmax(-1) == targets_N
    if "entropy" in metrics:
        values["entropy"] = _metric("entropy", capped_NV, log_probs_NV, targets_N)
    if weights_N is not None:
        weights_N = weights_N * values["log_probs"].exp() if by_probability else weights_N
        probs_NV = log_probs_NV.exp_()
        probs_NV.scatter_add_(-1, targets_N[:, None], probs_NV.new_full((len(targets_N), 1), -1.0))
        factors_N = weights_N * scales.scale
        if scales.cap is not None:
            probs_NV.mul_(1 - (capped_NV / scales.cap).square_())
        torch.mul(probs_NV, factors_N[:, None], out=probs_NV)
        tile_NV.copy_(probs_NV)
    return values


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
    if not logits_BTV.isfinite().all():
        return True  # nothing can be compared; the first step ends the run and says why
    log_probs_BT = of_logits(logits_BTV, next_labels(ids_BT, None), ())["log_probs"][:, :-1]
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
