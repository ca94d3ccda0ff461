"""How much memory `tuner export --merge` takes, by the size of the model: two models that differ in depth alone.

    python bench/export.py [FOLDER]

Each is a random Llama in bf16 with an adapter on every layer; a child process merges it, and its peak is measured over
that of one that only imported the same libraries. The target: below two shards and one layer, whatever its depth.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SHARD_MB = 200
LAYERS = (4, 14)
PEAK = """
import re, sys
from pathlib import Path
from tuner.results.export import Options, export
from tuner.results.source import find
if len(sys.argv) > 1:
    export(find(Path(sys.argv[1])), Path(sys.argv[2]), Options(merge=True, max_shard_bytes=int(sys.argv[3])))
# Not getrusage's: that of a child begins with its parent's.
print(int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024)
"""


def make(folder: Path, num_layers: int) -> int:
    """Write the base and its adapter, a layer a file; return the bytes of one layer."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5504, "num_attention_heads": 16, "vocab_size": 8192}
    config = LlamaConfig(num_hidden_layers=num_layers, **sizes, dtype=torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        adapted = get_peft_model(model, LoraConfig(r=64, target_modules="all-linear", task_type="CAUSAL_LM"))
    base, adapter = folder / "base", folder / "adapter"
    shapes = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).state_dict()
    weights_of_layer = {name: torch.randn(weight.shape).bfloat16() * 0.02 for name, weight in shapes.items()}
    parts = {"embed": {n: w for n, w in weights_of_layer.items() if ".layers." not in n}}
    layer = {n: w for n, w in weights_of_layer.items() if ".layers." in n}
    for i in range(num_layers):
        parts[str(i)] = {name.replace(".layers.0.", f".layers.{i}."): weight for name, weight in layer.items()}
    base.mkdir(parents=True)
    names = {}
    for part, tensors in parts.items():
        save_file(tensors, base / f"model-{part}.safetensors", metadata={"format": "pt"})
        names |= dict.fromkeys(tensors, f"model-{part}.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(base)
    weights = {
        name.replace(".default", ""): torch.randn(weight.shape) * 0.02
        for name, weight in adapted.state_dict().items()
        if "lora_" in name
    }
    adapted.peft_config["default"].base_model_name_or_path = str(base)
    adapter.mkdir()
    adapted.peft_config["default"].save_pretrained(adapter)
    save_file(weights, adapter / "adapter_model.safetensors")
    return sum(weight.nbytes for weight in layer.values())


def peak(*arguments: object) -> int:
    """Return the peak resident bytes of a child that merges, or of one that only imports."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *map(str, arguments)], check=True, capture_output=True, text=True
    )
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    where = sys.argv[1] if len(sys.argv) > 1 else None
    idle = peak()
    for num_layers in LAYERS:
        with tempfile.TemporaryDirectory(dir=where) as scratch:
            folder = Path(scratch)
            layer = make(folder, num_layers)
            size = sum(file.stat().st_size for file in (folder / "base").glob("*.safetensors"))
            over = peak(folder / "adapter", folder / "merged", SHARD_MB * 10**6) - idle
            bound = 2 * SHARD_MB * 10**6 + layer
            print(
                f"{size / 1e9:.2f} GB in {num_layers} layers of {layer / 1e6:.0f} MB, shards of {SHARD_MB} MB: "
                f"peak {over / 1e6:.0f} MB over {idle / 1e6:.0f} MB of the interpreter, bound {bound / 1e6:.0f} MB: "
                f"{'holds' if over < bound else 'BROKEN'}"
            )


if __name__ == "__main__":
    main()
