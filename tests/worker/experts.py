"""A mixture of experts as published code often has it, a list of modules, whose router sends each rank to other ones.

`torchrun --nproc-per-node 2 -m tests.worker.experts listed 0 2 3` trains a few steps at each of these ZeRO stages, and
rank 0 prints their losses and gradient norms as JSON. Another word than `listed` names a hybrid of `brought`: its ranks
have rows of one and of three samples.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

NUM_STEPS = 3


class Expert(nn.Module):
    """An MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(hidden).relu())
        return out


class Experts(nn.Module):
    """Runs expert `chosen`, and the first one too where it is not that: ranks run other ones, and not as many."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(width) for _ in range(num))
        self.chosen: int | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = self.chosen
        if chosen is None:
            chosen = 2 * dist.get_rank() if dist.is_initialized() else 0
        out: torch.Tensor = sum(self.experts[index](hidden) for index in {0, chosen})
        return out


class ListedConfig(LlamaConfig):  # type: ignore[misc]
    """Llama with experts."""

    model_type = "listed_experts"


class ListedForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """Llama whose MLPs are experts, each a module of its own."""

    config_class = ListedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = Experts(config.hidden_size, config.num_experts)
        self.post_init()


def make(vocab_size: int = 64, **more: Any) -> Any:
    """Return a small one of random weights."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    more["num_experts"] = 4
    torch.manual_seed(0)
    return ListedForCausalLM(ListedConfig(vocab_size=vocab_size, **shape, **more))


def write(folder: Path, tokenizer: Any) -> None:
    """Write one as its publisher would: with its code beside it."""
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    make(-(-len(tokenizer) // 64) * 64, **ids).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "modeling_listed.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    file = folder / "config.json"
    names = {"AutoConfig": "ListedConfig", "AutoModelForCausalLM": "ListedForCausalLM"}
    auto_map = {auto: f"modeling_listed.{name}" for auto, name in names.items()}
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), "auto_map": auto_map}))


def _hybrid(kind: str) -> Any:
    from transformers import AutoModelForCausalLM

    from tests.models.brought import brought
    from tuner.models.mixers import keep_samples_apart

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(brought(kind), experts_implementation="eager")
    keep_samples_apart(model)
    return model


def _trained(kind: str, stage: int) -> list[tuple[float, float]]:
    """Return the loss of both ranks, and the norm of the gradient, of each step."""
    import deepspeed

    from tuner.worker.experts import let_ranks_choose

    model = make() if kind == "listed" else _hybrid(kind)
    let_ranks_choose(model, stage)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    ids = torch.arange(8)[None] + dist.get_rank()
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]]) if kind != "listed" and dist.get_rank() else None
    found = []
    for _ in range(NUM_STEPS):
        loss = engine(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append((mean.item() / dist.get_world_size(), float(engine.get_global_grad_norm() or 0.0)))
    return found


def main() -> None:
    """Train the model and at the stages that the command line names."""
    import deepspeed

    from tuner.worker import compat

    compat.build_no_collective()
    deepspeed.init_distributed(dist_backend="gloo")
    kind, *stages = sys.argv[1:]
    found = {stage: _trained(kind, int(stage)) for stage in stages}
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
