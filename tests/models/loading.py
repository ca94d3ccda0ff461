"""The memory of a process while it loads a mixture of experts in 4 bits.

`python -m tests.models.loading FOLDER KIND` writes a random model of a model_type, whose file has a tensor for each
expert or fused ones, loads it in a process of its own, and prints as JSON what that held, in bytes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

NUM_LAYERS, NUM_EXPERTS, HIDDEN, WIDTH = 6, 64, 256, 256


def _anonymous_bytes() -> int:
    """Return the memory of this process without what it maps from files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def write(folder: Path, kind: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    width = "moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"
    number = "num_experts" if kind == "qwen3_moe" else "num_local_experts"
    shape = {"num_hidden_layers": NUM_LAYERS, number: NUM_EXPERTS, "hidden_size": HIDDEN, width: WIDTH}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128}
    config = AutoConfig.for_model(kind, **shape, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def load(folder: Path) -> dict[str, int]:
    import bitsandbytes.functional
    import torch

    from tuner.models.compat_experts import packed_in
    from tuner.models.load import load_model
    from tuner.recipes.loading import load as load_recipe

    quantize = bitsandbytes.functional.quantize_4bit
    held: list[int] = []
    sizes: list[int] = []

    def quantize_and_note(weight: torch.Tensor, **settings: object) -> object:
        held.append(_anonymous_bytes())
        found = quantize(weight, **settings)
        held.append(_anonymous_bytes())
        sizes.append(weight.nbytes * (weight.ndim == 3))
        return found

    bitsandbytes.functional.quantize_4bit = quantize_and_note
    config = load_recipe("tiny_qlora_sample_e1").config
    config = config.with_values({"train_cfg.gradient_checkpointing": True, "adapter.target_modules": ("q_proj",)})
    model = load_model(config, str(folder), torch.bfloat16, "cpu", shards=False)
    packed = sum(experts.weight.nbytes for experts in packed_in(model))
    # Libraries are imported until the first tensor is quantized, and the rest of the model is read besides.
    return {"grown": max(held) - held[0], "largest": max(sizes), "in_16_bits": sum(sizes), "packed": packed}


def main() -> None:
    folder, *kinds = sys.argv[1:]
    if kinds:
        write(Path(folder), *kinds)
        # Large pieces of memory are given back when they are freed: what is left is held.
        environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "tests.models.loading", folder], check=True, env=environ)
    else:
        print(json.dumps(load(Path(folder))))


if __name__ == "__main__":
    main()
