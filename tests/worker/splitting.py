"""Two ranks that split the layers of small models: `python -m tests.worker.splitting KIND ...` prints a line for each.

With `KIND/lora` every linear layer has an adapter. With `KIND/1` there is one key-value head: rank 1 has no attention;
with `KIND/3` rank 0 has two of three. With `KIND/tied` the head's weight is that of the embeddings, with
`KIND/tied-lora` below an adapter on every linear layer; with `KIND/embed-lora` the embeddings have one too.
With `KIND/experts` they divide the experts, and each computes a row of its own; with `KIND/attention` LoRA on attention
alone is trained beside frozen experts.

A line holds how far the loss and the gradients of the two are from those of a rank alone, in parts of their size, and
how many weights rank 0 has.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing import start_processes

from tests.fit.small import small
from tests.worker.sharing import IGNORED, batch, config_of, meet
from tuner.recipes.schema.architecture import Architecture

GROUPED = {
    "deepseek_v2": {"n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "routed_scaling_factor": 2.0},
    "deepseek_v3": {"n_group": 4, "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.0},
}
"""Types whose experts stand in groups, of which a token takes some -> how."""


def of_experts(kind: str) -> Architecture:
    """Return a small architecture whose experts two ranks can divide, of a width that torch's kernel for them takes."""
    if kind == "mixtral":
        return small(kind, num_local_experts=4, intermediate_size=16)
    if kind in GROUPED:
        return small(
            kind, n_routed_experts=8, moe_intermediate_size=16, n_shared_experts=2, kv_lora_rank=16, qk_nope_head_dim=8
        )
    return small(kind, num_experts=4, moe_intermediate_size=16)


def model_of(name: str) -> Any:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from tuner.lab import shrink

    kind, _, way = name.partition("/")
    config = shrink.config_of(of_experts(kind)) if way in ("experts", "attention") else config_of(kind)
    if way.isdecimal():
        config.num_key_value_heads = int(way)
    if way.startswith("tied"):
        config.tie_word_embeddings = True
    config.update(GROUPED.get(kind, {}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().train()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    if way in ("lora", "tied-lora", "embed-lora", "attention"):
        named = {"attention": ["q_proj", "o_proj"], "embed-lora": ["q_proj", "down_proj", "embed_tokens"]}
        targets = named.get(way, "all-linear")
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM"))
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, std=0.05)
    return model


def backward(model: Any, engine: Any, row: int = 0) -> Tensor:
    """Return the loss of one row of packed samples; the gradients are there then."""
    text = model.config.get_text_config()
    whole = batch(text.vocab_size)
    whole["input_ids"] = whole["input_ids"].roll(5 * row, -1)
    labels_BT = F.pad(whole.pop("labels")[:, 1:], (0, 1), value=IGNORED)
    router = {"output_router_logits": True} if hasattr(text, "output_router_logits") else {}
    outputs = (engine or model)(**whole, **router, use_cache=False)
    loss = F.cross_entropy(outputs.logits.flatten(0, 1), labels_BT.flatten())
    if router and outputs.aux_loss is not None:
        loss = loss + outputs.aux_loss
    (engine.backward if engine else Tensor.backward)(loss)
    return loss.detach()


def distance(name: str) -> tuple[float, float, int]:
    """Return how far two ranks are from one, in loss and gradients, and the weights of this rank."""
    import deepspeed
    from deepspeed.checkpoint.constants import DS_AUTOTP_UC_META

    from tuner.worker import compat_tensor_parallel as split

    model, divides = model_of(name), name.endswith(("/experts", "/attention"))
    rows = range(2) if divides else (0,)
    expected = torch.stack([backward(model, None, row) for row in rows]).mean()
    gradients = {name: weight.grad / len(rows) for name, weight in model.named_parameters() if weight.requires_grad}
    model.zero_grad()
    names, trained = {*model.state_dict()}, [weight for weight in model.parameters() if weight.requires_grad]
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "steps_per_print": None}
    if divides:
        config["expert_parallel"] = {"enabled": True, "autoep_size": 2}
    else:
        config["tensor_parallel"] = {"autotp_size": 2, "vocab_parallel_lm_head": False}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=trained, optimizer=torch.optim.SGD(trained, lr=0.1), config=config
    )
    found = backward(model, engine, dist.get_rank() if divides else 0)
    if divides:
        if name.partition("/")[0] in GROUPED:
            gates = [module.router.gate for module in model.modules() if hasattr(module, "router")]
            logits = [gate(torch.ones(1, gate.in_features, dtype=torch.bfloat16)) for gate in gates]
            assert {each.dtype for each in logits} == {torch.float32}, "transformers' routers compute so"
        return _of_experts(engine, found, expected, gradients, names)
    owners = {id(weight): module for module in model.modules() for weight in module.parameters(recurse=False)}
    off = 0.0
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        grad, meta = weight.grad, getattr(weight, DS_AUTOTP_UC_META, {})
        if split.is_part(weight):
            grad = owners[id(weight)]._all_gather_shards(grad, meta["partition_sizes"], dim=meta["partition_dim"])
        off = max(off, float((grad - gradients[name]).norm() / gradients[name].norm().clamp(min=1e-6)))
    return abs(float(found / expected) - 1), off, sum(weight.numel() for weight in model.parameters())


def _of_experts(
    engine: Any, found: Tensor, expected: Tensor, gradients: dict[str, Tensor], names: set[str]
) -> tuple[float, float, int]:
    from tuner.worker import compat_expert_parallel

    num_weights = sum(weight.numel() for weight in engine.module.parameters())
    dist.all_reduce(found)
    for weight in engine.module.parameters():
        weight.data = torch.zeros_like(weight) if weight.grad is None else weight.grad
    whole, off = compat_expert_parallel.whole_weights(engine), 0.0
    least = 1e-4 * max(float(gradient.norm()) for gradient in gradients.values())  # of decays: 1e-6, and rounded
    if dist.get_rank() == 0:
        assert whole.keys() == names, whole.keys() ^ names
        for name, gradient in gradients.items():
            off = max(off, float((whole[name] - gradient).norm() / gradient.norm().clamp(min=least)))
    return abs(float(found / 2 / expected) - 1), off, num_weights


def ranks(rank: int, names: list[str], meeting: str) -> None:
    from tuner.worker import compat_expert_parallel, compat_tensor_parallel

    meet(rank, meeting)
    compat_tensor_parallel.prepare()
    compat_expert_parallel.prepare()
    for name in names:
        try:
            answer: Any = distance(name)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:300]
        answers: list[Any] = [None, None]
        dist.all_gather_object(answers, answer)
        if rank == 0:
            broken = [text for text in answers if isinstance(text, str)]
            worst = broken[0] if broken else [max(pair) for pair in zip(*answers, strict=True)]
            print(json.dumps([name, worst]), flush=True)
    dist.barrier()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        start_processes(ranks, (sys.argv[1:], f"{folder}/meeting"), 2, start_method="fork")
