"""Takes optimizer steps at stage 0 in 16 bits, as DeepSpeed does and at once.

`torchrun -m tests.worker.updates bf16|fp16` prints both as JSON, of each rank.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from bench.clock.bench_counts import counted
from tuner.worker import compat, compat_update

NUM_STEPS, BAD = 6, 3


def model() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape))


def steps(dtype: str, *, at_once: bool) -> dict[str, Any]:
    """Train each rank on rows of its own; the gradients of one step are infinite.

    At once they are infinite on the last rank alone. Return weights, norms, skipped steps and reads of the update.
    """
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
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    ids, taken, norms = torch.arange(rank, rank + 16).reshape(1, 16), [], []
    for number in range(NUM_STEPS):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        if number == BAD and (not at_once or rank == num_ranks - 1):
            next(iter(llama.parameters())).grad[0, 0] = torch.inf
        counted.reset()
        counted.start()
        engine.step()
        counted.stop()
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
        "waits": dict(counted.waits),
        "tensors": sum(1 for _ in llama.parameters()),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # a CPU computes it too, for this alone
    compat.build_no_collective()
    deepspeed.init_distributed("gloo")
    found = [steps(sys.argv[1], at_once=at_once) for at_once in (False, True)]
    print(f"{json.dumps(found)}\n", end="", flush=True)  # in one piece, beside those of other ranks
    dist.barrier()
