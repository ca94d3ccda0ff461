"""Counts the weights of 4-bit experts that ZeRO-3 has gathered at once, in a training step of a model of six layers.

`python -m tests.worker.packed` prints the most of the forward and of the backward pass, and the loss, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from transformers import AutoConfig, AutoModelForCausalLM

from tuner.models.compat_experts import packed_in
from tuner.models.load import load_model
from tuner.recipes.loading import load
from tuner.recipes.recipe import Overrides
from tuner.worker import compat

NUM_LAYERS = 6
SHAPE = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "num_experts_per_tok": 2, "n_shared_experts": 1}
SHAPE |= {"n_routed_experts": 4, "moe_intermediate_size": 64, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1}
LEVEL = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}


def model() -> Any:
    folder = Path(mkdtemp())
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("glm4_moe", **SHAPE)).save_pretrained(folder)
    pairs = [("--set", pair) for pair in ("adapter.r=4", "gradient_checkpointing=True")]
    config = load("tiny_qlora_sample_e1", Overrides(pairs=pairs)).config
    made = load_model(config, str(folder), torch.float32, "cpu", shards=True)
    made.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    return made


def most_gathered(*, spares: bool) -> dict[str, float]:
    """Return the most gathered weights of experts of each pass, and the loss of the second step."""
    trained = model()
    compat.know_moved_weights(trained)
    if spares:
        compat.unpack_in_forward_alone(trained)
    weights = [packed.weight for packed in packed_in(trained)]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {**LEVEL, "stage3_prefetch_bucket_size": 0},
    }
    of_adapter = [weight for weight in trained.parameters() if weight.requires_grad]
    engine, *_ = deepspeed.initialize(model=trained, config=config, model_parameters=of_adapter)
    release, most, passing = PartitionedParameterCoordinator.release_sub_module, {"forward": 0.0}, "forward"

    def counting(*args: Any, **options: Any) -> Any:
        number = sum(weight.ds_status == ZeroParamStatus.AVAILABLE for weight in weights)
        most[passing] = max(most.get(passing, 0), number)
        return release(*args, **options)

    PartitionedParameterCoordinator.release_sub_module = counting
    tokens = torch.arange(16).reshape(1, 16)
    for _ in range(2):
        passing = "forward"
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        passing = "backward"
        engine.backward(loss)
        engine.step()
    PartitionedParameterCoordinator.release_sub_module = release
    return {**most, "loss": float(loss)}


if __name__ == "__main__":
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    compat.build_no_collective()
    deepspeed.init_distributed(dist_backend="gloo")
    print(json.dumps([most_gathered(spares=spares) for spares in (False, True)]), file=sys.stdout)
