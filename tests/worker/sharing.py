"""Two ranks that share the samples of small models: `python -m tests.worker.sharing KIND ...` prints a line for each.

With `KIND/4` the first layer has a window of 4 tokens.

A line holds how far the losses and the gradients of the two are from those of a rank alone, in parts of their size.
"""

from __future__ import annotations

import json
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing import start_processes

from bench.live import Live

IGNORED = -100
SAMPLES = (9, 4, 12, 2)
"""Tokens of each; together they are odd."""
ROUTER = 10.0
"""The weight of the loss that balances a router: enough to see its gradients beside those of the tokens."""
MOST_OF_A_PART = 0.85
"""Of two parts; attention has all tokens of a row, of half the heads."""


def batch(vocabulary: int) -> dict[str, Tensor]:
    """Return one row of all samples, as the collator lays them end to end."""
    torch.manual_seed(1)
    ids_BT = torch.randint(3, vocabulary, (1, sum(SAMPLES)))
    positions_BT = torch.cat([torch.arange(length) for length in SAMPLES])[None]
    return {"input_ids": ids_BT, "position_ids": positions_BT, "labels": ids_BT.masked_fill(positions_BT == 0, IGNORED)}


def gradients(model: Any, part: dict[str, Tensor], labels_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the tokens' losses, and the gradients of all weights in a row.

    The loss that balances a router is that of the whole row on each rank, and its gradients' mean is.
    """
    has_router = hasattr(model.config.get_text_config(), "router_aux_loss_coef")
    outputs = model(**part, use_cache=False, **({"output_router_logits": True} if has_router else {}))
    loss = F.cross_entropy(outputs.logits.flatten(0, 1).float(), labels_BT.flatten(), reduction="sum")
    if has_router and outputs.aux_loss is not None:
        loss = loss + ROUTER * outputs.aux_loss / (2 if "attention_mask" in part else 1)
    model.zero_grad()
    loss.backward()
    weights = [
        parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        for parameter in model.parameters()
    ]
    return loss.detach(), torch.cat([weight.flatten() for weight in weights])


def validation(model: Any, part: dict[str, Tensor], labels_BT: Tensor) -> tuple[Tensor, int]:
    """Return the sum of the tokens' losses in eval mode, and the bytes of the tensors that live at its peak."""
    with torch.no_grad(), Live() as live:
        before = live.now
        logits_BTV = model.eval()(**part, use_cache=False).logits
        loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), labels_BT.flatten(), reduction="sum")
    model.train()
    return loss, live.peak - before


def config_of(name: str) -> Any:
    """Return the config of a small model, with a window in its first layer if the name ends in its tokens."""
    from tests.fit.small import small
    from tuner.lab import shrink

    kind, _, window = name.partition("/")
    config = shrink.config_of(small(kind))
    if window:
        config.sliding_window, config.use_sliding_window, config.max_window_layers = int(window), True, 0
        if types := getattr(config, "layer_types", None):
            config.layer_types = ["sliding_attention", *types[1:]]
    return config


def distance(kind: str, rank: int) -> tuple[float, ...]:
    """Return how far two ranks are from one, in loss, in gradients and in the loss of a validation."""
    from deepspeed.runtime.sequence_parallel.parallel_state_sp import _release_sequence_parallel_groups
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers import AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.mixtral import modeling_mixtral

    from tuner.recipes.schema.architecture import VARLEN
    from tuner.worker.long_rows import RowPart

    torch.manual_seed(0)
    attention = VARLEN if kind.startswith("gpt_oss") else "sdpa"
    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation=attention).train()
    model.set_experts_implementation("eager")  # torch's kernel takes no such narrow ones
    whole = batch(model.config.get_text_config().vocab_size)
    alone = ALL_ATTENTION_FUNCTIONS[attention]
    modules = (modeling_mixtral, sys.modules[type(model).__module__])
    balance = {
        module: module.load_balancing_loss_func for module in modules if hasattr(module, "load_balancing_loss_func")
    }
    rows = {name: whole[name] for name in ("input_ids", "position_ids")}
    whole_labels_BT = F.pad(whole["labels"][:, 1:], (0, 1), value=IGNORED)
    expected = gradients(model, rows, whole_labels_BT)
    part, *_ = RowPart(rank, 2).of(whole)
    labels_BT = part.pop("shift_labels")
    validated, whole_bytes = validation(model, rows, whole_labels_BT)
    try:
        UlyssesSPAttentionHF.register_with_transformers(
            model_name_or_path=model, core_attn_implementation=attention, sequence_parallel_size=2, micro_batch_size=7
        )
        found = gradients(model, part, labels_BT)
        loss, part_bytes = validation(model, part, labels_BT)
        for tensor in (*found, loss):
            dist.all_reduce(tensor)
    finally:
        ALL_ATTENTION_FUNCTIONS[attention] = alone
        for module, alone in balance.items():
            module.load_balancing_loss_func = alone
        _release_sequence_parallel_groups()
    assert part_bytes < MOST_OF_A_PART * whole_bytes, f"{part_bytes} of {whole_bytes} bytes in a validation"
    pairs = zip((*found, loss), (*expected, validated), strict=True)
    return tuple(float((ours - other).norm() / other.norm()) for ours, other in pairs)


def meet(rank: int, meeting: str) -> None:
    """Join the other of two ranks."""
    import deepspeed

    import tuner.models.load  # noqa: F401  the types that are ours
    from tuner.worker import compat

    torch.set_num_threads(1)
    compat.build_no_collective()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    deepspeed.init_distributed("gloo")


def ranks(rank: int, kinds: list[str], meeting: str) -> None:
    from tuner import models
    from tuner.worker import compat

    meet(rank, meeting)
    models.attention.register()
    trainer = SimpleNamespace(accelerator=SimpleNamespace(), is_evaluating=True)
    compat.share_samples(trainer)
    for kind in kinds:
        try:
            answer: Any = distance(kind, rank)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:300]
        if rank == 0:
            print(json.dumps([kind, answer]), flush=True)
    dist.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        start_processes(ranks, (sys.argv[1:], f"{folder}/meeting"), 2, start_method="fork")
