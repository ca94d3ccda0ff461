"""What training a mixture of experts needs: gradients for experts that no token chose, and a balanced router."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.nn import functional as collectives
from torch.func import functional_call
from transformers import PreTrainedModel
from transformers.models.mixtral import modeling_mixtral

from tuner.errors import Key, ModelError
from tuner.machine.libraries import replaced
from tuner.models.mixers import mixers

_COEFFICIENT = "router_aux_loss_coef"
_BALANCING_LOSS = "load_balancing_loss_func"


def let_ranks_choose(model: PreTrainedModel, stage: int) -> None:
    """Let the ranks of ZeRO run different modules: experts of their own tokens, or a mixer for each sample of a row.

    ZeRO-3 gathers weights module by module: ranks that run different modules wait for each other, or take each other's
    weights. Stages 1 and 2 add gradients in the order in which they arrive: if one rank skips an expert, ranks silently
    mix gradients of different experts (DeepSpeed 0.19.8: loss 7.354, not 7.336, after one update). In transformers 5.24
    the experts of a layer are one module and need nothing; remote code often has a list of modules.
    """
    owners = _owners_of_experts(model)
    gathered_whole = {type(module) for module in (*owners, *mixers(model))}
    if stage == 3 and gathered_whole:
        set_z3_leaf_modules(model, list(gathered_whole))
    if stage in (1, 2):
        for owner in owners:
            owner.forward = partial(_with_all_gradients, _Forward(owner))


def _owners_of_experts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of a layer that may choose among a list of modules.

    In transformers' own models a list of experts has the length that the config states (other lists of Zamba2 and
    LongCat always run whole). Remote code can give that number any name, so there every list in a layer counts.
    """
    config = model.config.get_text_config().to_dict()
    counts = {number for key, number in config.items() if "expert" in key and isinstance(number, int) and number > 1}
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    in_layers = [name for name in lists if any(name.startswith(f"{outer}.") for outer in lists)]
    owners = {name.rpartition(".")[0]: len(lists[name]) for name in in_layers if len(lists[name]) > 1}
    return [
        owner
        for owner, number in ((model.get_submodule(name), number) for name, number in owners.items())
        if number in counts or not type(owner).__module__.startswith("transformers.models.")
    ]


class _Forward(nn.Module):  # type: ignore[misc]
    """The forward pass of a module without its hooks, which already run around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.compute = module, module.forward

    def forward(self, *args: object, **kwargs: object) -> object:
        return self.compute(*args, **kwargs)


class _Together(torch.autograd.Function):  # type: ignore[misc]
    """The identity on weights; it makes all their gradients arrive together, with zeros for unused weights."""

    @staticmethod
    def forward(ctx: FunctionCtx, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _with_all_gradients(inner: _Forward, *args: object, **kwargs: object) -> object:
    trained = {name: weight for name, weight in inner.named_parameters() if weight.requires_grad}
    if not trained or not torch.is_grad_enabled():
        return inner.compute(*args, **kwargs)
    together = _Together.apply(*trained.values())
    return functional_call(inner, dict(zip(trained, together, strict=True)), args, kwargs)


@contextmanager
def balanced(model: PreTrainedModel, coefficient: float | None) -> Iterator[None]:
    """Let a trainer of TRL that is built inside add the loss that balances the router, if the model has this loss.

    TRL 1.16 reads the model's config when a trainer is built, and the SFT trainer writes into it. Afterwards the config
    is restored: it is saved with the weights, and a model that generates needs no logits of the router.

    Args:
        model: Any model, a mixture of experts or not.
        coefficient: The factor of the loss; None takes the model's own, and 0 adds no loss.

    Raises:
        ModelError: the recipe sets a coefficient, and the model has no such loss.
    """
    config = model.config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        if coefficient:
            message = f"model.{_COEFFICIENT} = {coefficient}, but {config.model_type} has no router loss"
            raise ModelError(
                message, where=f"model.{_COEFFICIENT}", fix=f"Remove it: {Key(f'model.{_COEFFICIENT}', None)}."
            )
        yield
        return
    used = (getattr(config, _COEFFICIENT, None) or 0.0) if coefficient is None else coefficient
    # This setting alone makes ORPO's trainer ask for the loss; Llama 4's forward returns no such loss.
    asks = used > 0 and hasattr(model, _COEFFICIENT)
    with replaced(config, router_aux_loss_coef=used, output_router_logits=asks):
        yield


def balance_whole_rows(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Let ranks that share rows balance the router over all tokens of a row, as one rank does, not over their part.

    The model's own forward calls the function of its module, and `loss.compute_once` that of Mixtral.
    """
    for module in (modeling_mixtral, sys.modules[type(model).__module__]):
        if hasattr(module, _BALANCING_LOSS):
            setattr(module, _BALANCING_LOSS, partial(_balancing_loss, group))


def _balancing_loss(
    group: dist.ProcessGroup,
    router_logits: tuple[Tensor, ...],
    num_experts: int,
    num_chosen: int,
    attention_mask: Tensor,
) -> Tensor:
    """Return transformers' loss that balances a router, of the tokens of all ranks of a group; each rank takes part.

    Fedus et al., Switch Transformer, 2021 (arXiv:2101.03961), equations 4 to 6.

    Args:
        router_logits: Of each layer, [T, experts]; T tokens of this rank.
        attention_mask: Which of them are no padding: T values.
    """
    is_token_T = attention_mask.flatten().float()
    sums_2E = is_token_T.new_zeros(2, num_experts)
    for logits_TE in router_logits:
        probs_TE = logits_TE.softmax(-1)
        chosen_TE = torch.zeros_like(probs_TE).scatter(1, probs_TE.topk(num_chosen).indices, 1.0)
        sums_2E = sums_2E + torch.stack([is_token_T @ chosen_TE.float(), is_token_T @ probs_TE.float()])
    sums_2E = collectives.all_reduce(sums_2E, group=group)
    num_tokens = sums_2E[0].sum() / num_chosen  # each counts once for each layer
    return num_experts * (sums_2E[0] * sums_2E[1]).sum() / num_tokens**2
