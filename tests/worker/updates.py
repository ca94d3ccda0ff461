"""Takes optimizer steps at stage 0 in 16 bits on one rank, as DeepSpeed does and at once.

`python -m tests.worker.updates bf16|fp16` prints both as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tuner.worker import compat, compat_update

NUM_STEPS, BAD = 6, 3
_READS = ("item", "tolist", "__bool__", "__float__", "__int__")


def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))


@contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Record what reads a tensor's value: on a GPU each waits for all kernels before it."""
    reads: list[str] = []
    real = {name: getattr(torch.Tensor, name) for name in _READS}

    def reading(name: str) -> Any:
        def read(*args: Any) -> Any:
            reads.append(name)
            return real[name](*args)

        return read

    for name in _READS:
        setattr(torch.Tensor, name, reading(name))
    try:
        yield reads
    finally:
        for name in _READS:
            setattr(torch.Tensor, name, real[name])


def steps(dtype: str, *, at_once: bool) -> dict[str, Any]:
    """Train; the gradients of one step are infinite. Return weights, norms, skipped steps and reads of the update."""
    llama = model().to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    optimizer = torch.optim.AdamW(
        [{"params": [*llama.parameters()], "weight_decay": 0.1}], lr=torch.tensor(1e-2).item(), fused=True
    )
    scale = {"initial_scale_power": 4, "loss_scale_window": 100, "hysteresis": 1} if dtype == "fp16" else {}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.5,
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        dtype: {"enabled": True, **scale},
    }
    engine, *_ = deepspeed.initialize(model=llama, optimizer=optimizer, config=config)
    if at_once:
        compat_update.step_at_once(engine)
        assert "step" in vars(engine.optimizer), "the engine is not of this kind"
    ids, taken, norms, num_reads = torch.arange(16).reshape(1, 16), [], [], 0
    for number in range(NUM_STEPS):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        if number == BAD:
            next(iter(llama.parameters())).grad[0, 0] = torch.inf
        with counted_reads() as reads:
            engine.step()
        num_reads = len(reads)
        taken.append(engine.was_step_applied())
        norms.append(float(engine.get_global_grad_norm()))
    states = engine.optimizer.optimizer.state
    return {
        "weights": torch.cat([master.detach().flatten() for master in engine.optimizer.fp32_groups[0]]).tolist(),
        "in_16_bits": torch.cat([weight.detach().float().flatten() for weight in llama.parameters()]).tolist(),
        "taken": taken,
        "norms": norms,
        "num_updates": float(next(iter(states.values()))["step"]),
        "scale": engine.optimizer.loss_scale,
        "reads": num_reads,
        "tensors": sum(1 for _ in llama.parameters()),
    }


if __name__ == "__main__":
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # a CPU computes it too, for this alone
    compat.build_no_collective()
    deepspeed.init_distributed("gloo", init_method=f"file://{sys.argv[2]}", rank=0, world_size=1)
    print(json.dumps([steps(sys.argv[1], at_once=at_once) for at_once in (False, True)]))
