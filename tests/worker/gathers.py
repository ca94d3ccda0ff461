"""Counts the gathers of a training step at ZeRO-3, with and without a forward pass before the first one.

`python -m tests.worker.gathers` prints both as JSON.
"""

from __future__ import annotations

import json
import os
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero import partition_parameters
from transformers import LlamaConfig, LlamaForCausalLM

from tuner.worker import compat

NUM_STEPS = 4
LEVEL = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 20_000}


def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))


def gathers_per_step(*, validates_first: bool) -> list[int]:
    """Return the gathers of each training step."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": LEVEL,
    }
    engine, *_ = deepspeed.initialize(model=model(), config=config)
    real, num_gathers = partition_parameters._no_gather_coalesced, 0

    def counted(params: Any) -> Any:
        nonlocal num_gathers
        num_gathers += 1
        return real(params)

    partition_parameters._no_gather_coalesced = counted
    tokens, found = torch.arange(16).reshape(1, 16), []
    if validates_first:
        with torch.no_grad():
            engine.eval()
            engine(input_ids=tokens)
    engine.train()
    for _ in range(NUM_STEPS):
        num_gathers = 0
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        found.append(num_gathers)
    partition_parameters._no_gather_coalesced = real
    return found


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    compat.build_no_collective()
    deepspeed.init_distributed(dist_backend="gloo")
    compat.renew_releases()
    print(json.dumps([gathers_per_step(validates_first=first) for first in (False, True)]))
