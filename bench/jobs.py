"""Makes what is trained: a model of random weights, rows, tuner's recipe, and the `Job` that tells others the same."""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.tools import Job
from tuner import assets
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine import hardware
from tuner.machine.topology import LaunchFlags
from tuner.recipes.names import identify

ACCUMULATION = 2
RECIPE = """
_base_ = "tiny_pretrain_{method}_custom_e1"
model = dict(path="{model}", attn_implementation="sdpa", use_liger_kernel=False)
train_dataloader = dict(batch_size={micro_batch}, dataset=dict(path="{rows}", max_length={row_tokens}, packing=False))
val_dataloader = None
optim_wrapper = dict(optimizer=dict(lr=1e-4), accumulative_counts={accumulation}, dtype="{dtype}")
param_scheduler = dict(type="constant", warmup_ratio=0.0)
train_cfg = dict(max_steps={steps}, gradient_checkpointing={recompute}, loss="{loss}")
checkpoint = dict(interval=100000)
log = dict(interval=10, num_samples=0)
"""
ADAPTER = ("r", "lora_alpha", "lora_dropout")
SMALL = {"hidden_size": 512, "num_hidden_layers": 8}
"""About 50M parameters, with its vocabulary."""
TINY = {"hidden_size": 64, "num_hidden_layers": 2}


@dataclass(frozen=True)
class Setting:
    """One line of a table."""

    ranks: int
    dtype: str
    method: str
    zero: int = 2
    micro_batch: int = 2
    row_tokens: int = 256
    recompute: bool = False
    loss: str = "auto"
    """How tuner computes its loss; `auto` differs between a CPU and a GPU."""
    preset: str | None = None
    """Another DeepSpeed preset than the plain one of the level."""

    def __str__(self) -> str:
        level = (self.preset or f"deepspeed_zero{self.zero}").removeprefix("deepspeed_zero").replace("_", " ")
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}, ZeRO-{level}, {self.dtype}, {self.method}"


def llama(hidden_size: int, num_hidden_layers: int) -> dict[str, Any]:
    """Return the architecture of a small Llama whose vocabulary grows with its width."""
    return {
        "model_type": "llama",
        "vocab_size": 64 * hidden_size,
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_hidden_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
    }


def of_catalog(name: str) -> dict[str, Any]:
    """Return the architecture of a model of the catalog, in the names of its config.json."""
    from tuner.recipes.loading import load

    architecture = load(f"{name}_full_custom_e1").config.architecture
    assert architecture is not None
    return {key: value for key, value in architecture.model_dump().items() if value is not None}


def make_model(folder: Path, architecture: dict[str, Any], device: str = "cpu", dtype: str = "fp32") -> Path:
    """Write a model with random weights and the package's small tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    values = dict(architecture)
    config = AutoConfig.for_model(values.pop("model_type"), **values, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    with torch.device(device):
        kind = torch.bfloat16 if dtype == "bf16" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=kind)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(assets.asset("package:tiny")).save_pretrained(folder)
    return folder


def make_rows(file: Path, row_tokens: int, num_rows: int = 512) -> Path:
    """Write texts of digits, each longer than a row."""
    draw = random.Random(0)
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(num_rows):
            text = " ".join(str(draw.randrange(10)) for _ in range(2 * row_tokens + 88))
            stream.write(json.dumps({"text": text}) + "\n")
    return file


def make_job(folder: Path, setting: Setting, steps: int, model: Path | None = None, **more: Any) -> Job:
    """Write a recipe of the setting, with a small model where none is given; `more` goes to the `Job` as it is."""
    model = model or make_model(folder / "model", llama(**SMALL))
    rows = make_rows(folder / "rows.jsonl", setting.row_tokens)
    recipe = folder / "recipe.py"
    sizes: dict[str, Any] = {"micro_batch": setting.micro_batch, "row_tokens": setting.row_tokens}
    sizes |= {"recompute": setting.recompute}
    values: dict[str, Any] = {"method": setting.method, "loss": setting.loss, "dtype": setting.dtype}
    values |= {"model": model, "rows": rows, "steps": steps}
    recipe.write_text(RECIPE.format(**values, **sizes, accumulation=ACCUMULATION), encoding="utf-8")
    made = resolved(recipe, setting, folder / "never")
    zero = folder / "zero.json"
    # Without the product of the others: on CPUs the Trainer reads the config at ZeRO-3 before it knows how many ranks
    # there are, and refuses the product (accelerate 1.15).
    zero.write_text(json.dumps({key: made.final.config[key] for key in made.final.config if key != "train_batch_size"}))
    adapter, config = made.recipe.config.adapter, made.final.config["zero_optimization"]
    return Job(
        model=str(model),
        rows=str(rows),
        recipe=str(recipe),
        preset=preset(setting),
        zero=str(zero),
        adapter={name: getattr(adapter, name) for name in ADAPTER} if adapter else {},
        ranks=setting.ranks,
        dtype=setting.dtype,
        method=setting.method,
        steps=steps,
        lr=made.recipe.config.optim_wrapper.optimizer.lr,
        accumulation=ACCUMULATION,
        offloads="offload_optimizer" in config,
        device="cuda" if made.hardware.gpus else "cpu",
        **sizes,
        **more,
    )


def preset(setting: Setting) -> str:
    return setting.preset or f"deepspeed_zero{setting.zero}"


def resolved(recipe: Path, setting: Setting, run: Path) -> ResolvedRun:
    """Return tuner's plan of a recipe on this machine, with no variable of this shell."""
    flags = LaunchFlags(nproc_per_node=setting.ranks)
    request = Request(identify(str(recipe)), deepspeed=preset(setting), flags=flags, work_dir=run, ignore_fit=True)
    here = hardware.detect(os.environ)
    return resolve_run(request, {"PATH": os.environ["PATH"]}, here, datetime.now().astimezone())
