"""What training a mixture of experts needs beside any other model: gradients for experts that nobody chose, and a
router that is kept balanced.

It computes no loss; transformers has the one that balances, and TRL's trainers add it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from deepspeed.utils import set_z3_leaf_modules
from torch import Tensor, nn
from torch.func import functional_call

from tuner.errors import ModelError

_COEFFICIENT = "router_aux_loss_coef"


def let_ranks_choose(model: Any, stage: int) -> None:
    """Let the ranks of ZeRO send their tokens to different experts, where experts are modules of their own.

    ZeRO-3 gathers weights module by module, and ranks that run other modules wait for each other, or take each other's
    weights. Stages 1 and 2 add up gradients in the order in which they come, so an expert that one rank skips makes
    ranks mix gradients of different experts without a word (DeepSpeed 0.19.8: loss 7.354, not 7.336, after one update).
    In transformers 5.23 the experts of a layer are one module and need nothing; code of a model's own often has a list.

    Args:
        model: With its adapter.
        stage: Of ZeRO.
    """
    owners = _owners_of_experts(model)
    if stage == 3 and owners:
        set_z3_leaf_modules(model, list({type(owner) for owner in owners}))
    if stage in (1, 2):
        for owner in owners:
            owner.forward = partial(_with_all_gradients, _Forward(owner))


def _owners_of_experts(model: Any) -> list[nn.Module]:
    """Return the modules that may choose among a list of others in a layer.

    In transformers' own models a list of experts is as long as the config says (Zamba2's and LongCat's others all run);
    other code has any name for that number, and a list that always runs whole may be taken for one that does not.
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
    """A module's own forward without its hooks, which run around it already."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.compute = module, module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(*args, **kwargs)


class _Together(torch.autograd.Function):  # type: ignore[misc]
    """Weights as they are, whose gradients come all at once: zeros for one that was not used."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def _with_all_gradients(inner: _Forward, *args: Any, **kwargs: Any) -> Any:
    trained = {name: weight for name, weight in inner.named_parameters() if weight.requires_grad}
    if not trained or not torch.is_grad_enabled():
        return inner.compute(*args, **kwargs)
    together = _Together.apply(*trained.values())
    return functional_call(inner, dict(zip(trained, together, strict=True)), args, kwargs)


@contextmanager
def balanced(model: Any, coefficient: float | None) -> Iterator[None]:
    """Let a trainer of TRL that is made inside add the loss that balances the router, where the model has one.

    TRL 1.16 reads the model's config when a trainer is made, and SFT's writes into it what it uses. Afterwards it is as
    it was: it is saved with the weights, and whoever loads them to generate wants no router's logits.

    Args:
        model: A mixture of experts or not.
        coefficient: By which the loss is multiplied; None: the model's own. 0: it is not added.

    Raises:
        ModelError: a coefficient is given for a model that has no such loss.
    """
    config = model.config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        if coefficient:
            what = f"model.{_COEFFICIENT} = {coefficient}, but {config.model_type} has no router loss"
            raise ModelError(what, where=f"model.{_COEFFICIENT}", fix=f"Remove it: --set model.{_COEFFICIENT}=None.")
        yield
        return
    asked, own = config.output_router_logits, getattr(config, _COEFFICIENT, None)
    used = (own or 0.0) if coefficient is None else coefficient
    setattr(config, _COEFFICIENT, used)
    # ORPO's trainer asks for the loss by this alone, of a forward that may return none (Llama 4's).
    config.output_router_logits = used > 0 and hasattr(model, _COEFFICIENT)
    try:
        yield
    finally:
        config.output_router_logits = asked
        if own is not None:
            setattr(config, _COEFFICIENT, own)
        elif not used:
            delattr(config, _COEFFICIENT)
