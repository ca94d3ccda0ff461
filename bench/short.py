"""A step over short rows on a CPU: tokens a second and peak memory of tuner beside a plain PyTorch loop.

    python -m bench short [--real build/real] [--rounds 2]

Both train the model of `make real` with LoRA in fp32 on rows of docs-1000 in an order of its own, at the same
settings. The loop pads the rows of a batch; its packs are rows end to end with one causal mask, in which a sample
sees those before it (tuner keeps them apart). Tokens are those of rows, without padding. A figure is all tokens over
all seconds of the steps after the second one; memory is that of the largest process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.table import Table, arguments, failed, in_turns, summary
from bench.tools import ROOT

WARM_STEPS = 2
LR = 2e-4


@dataclass(frozen=True)
class Setting:
    """One line of the table: rows of a step, or tokens of a pack."""

    name: str
    batch: int
    pack_tokens: int = 0
    r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    steps: int = 12


SETTINGS = (
    Setting("8 short rows", batch=8),
    Setting("1 short row", batch=1, steps=40),
    Setting("a pack of 2,048 tokens", batch=1, pack_tokens=2048, steps=6),
    Setting("the same, r=64, dropout 0.1", 1, 2048, r=64, lora_alpha=16, lora_dropout=0.1, steps=6),
)


@dataclass(frozen=True)
class Speed:
    tokens: int
    seconds: float
    peak_bytes: int


def loop(setting: Setting, real: Path) -> list[tuple[int, float]]:
    """Train as people write it themselves; return the tokens and the seconds of each step."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real / "smollm2")
    lines = (real / "docs-1000.jsonl").read_text(encoding="utf-8").splitlines()
    texts = [tokenizer.apply_chat_template(json.loads(line)["messages"], tokenize=False) for line in lines]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    random.Random(0).shuffle(rows)
    model = AutoModelForCausalLM.from_pretrained(real / "smollm2", dtype=torch.float32)
    adapter = {"r": setting.r, "lora_alpha": setting.lora_alpha, "lora_dropout": setting.lora_dropout}
    model = get_peft_model(model, LoraConfig(**adapter, target_modules="all-linear", task_type="CAUSAL_LM"))
    optimizer = torch.optim.AdamW(
        (parameter for parameter in model.parameters() if parameter.requires_grad), lr=LR, fused=True
    )
    model.train()
    steps, at = [], 0
    for _ in range(setting.steps):
        if setting.pack_tokens:
            ids = []
            while len(ids) < setting.pack_tokens:
                ids, at = ids + rows[at], at + 1
            batch = [ids[: setting.pack_tokens]]
        else:
            batch, at = rows[at : at + setting.batch], at + setting.batch
        began = time.perf_counter()
        padded = tokenizer.pad({"input_ids": batch}, padding_side="right", return_tensors="pt")
        labels = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, -100)
        mask = {} if len(batch) == 1 else {"attention_mask": padded["attention_mask"]}
        loss = model(input_ids=padded["input_ids"], labels=labels, use_cache=False, **mask).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        steps.append((sum(map(len, batch)), time.perf_counter() - began))
    return steps


def tuner_command(setting: Setting, real: Path, run: Path) -> list[str]:
    pack = f"pack_length={setting.pack_tokens}" if setting.pack_tokens else "packing=False"
    values = [pack, f"global_batch_size={setting.batch}", f"r={setting.r}", f"lora_alpha={setting.lora_alpha}"]
    values += [f"lora_dropout={setting.lora_dropout}", f"max_steps={setting.steps}", "log.interval=1"]
    values += [f"lr={LR}", "log.num_samples=0"]
    where = ["--model", str(real / "smollm2"), "--data", str(real / "docs-1000.jsonl"), "--work-dir", str(run)]
    where += ["--val-split", "0"]  # the peer trains on all rows
    return [sys.executable, "-m", "tuner", "train", *where, *(part for value in values for part in ("--set", value))]


def tuner_steps(run: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = [line for line in lines if line.get("tokens_per_second")]
    before = [0, *(line["num_tokens"] for line in trained)]
    tokens = [line["num_tokens"] - start for line, start in zip(trained, before, strict=False)]
    return [(num, num / line["tokens_per_second"]) for num, line in zip(tokens, trained, strict=True)]


def measured(tool: str, setting: Setting, real: Path) -> list[Speed]:
    """Run a tool in a process of its own.

    Raises:
        Unmeasured: it failed.
    """
    with tempfile.TemporaryDirectory(prefix="short-") as folder:
        job = {"tool": tool, "setting": asdict(setting), "real": str(real), "run": str(Path(folder) / "run")}
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-m", "bench.short", "--job", json.dumps(job)], env=env, text=True, capture_output=True
        )
        if done.returncode:
            raise failed(tool, done.stdout + done.stderr)
        return [Speed(**json.loads(done.stdout.splitlines()[-1]))]


def child(job: dict[str, Any]) -> None:
    """Train, and print the speed as JSON."""
    setting, real, run = Setting(**job["setting"]), Path(job["real"]), Path(job["run"])
    if job["tool"] == "loop":
        steps, who = loop(setting, real), resource.RUSAGE_SELF
    else:
        subprocess.run(tuner_command(setting, real, run), check=True, stdout=sys.stderr)
        steps, who = tuner_steps(run), resource.RUSAGE_CHILDREN
    tokens, seconds = (sum(column) for column in zip(*steps[WARM_STEPS:], strict=True))
    speed = Speed(int(tokens), float(seconds), resource.getrusage(who).ru_maxrss * 1024)
    print(json.dumps(asdict(speed)))


def main() -> None:
    parser = arguments(__doc__, rounds=2)
    parser.add_argument("--real", type=Path, default=ROOT / "build" / "real", help="the folder of `make real`")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.job:
        child(json.loads(given.job))
        return
    table = Table("short", summary(__doc__) + f" Rounds: {given.rounds}.")
    for setting in SETTINGS:
        row: dict[str, Any] = {"a step": setting.name}
        speeds = partial(measured, setting=setting, real=given.real.absolute())
        of_tools = in_turns(("loop", "tuner"), given.rounds, speeds)
        rates = {}
        for tool, found in of_tools.items():
            if isinstance(found, str):
                row[f"{tool}, tokens/s"] = found
                continue
            rates[tool] = sum(turn.tokens for turn in found) / sum(turn.seconds for turn in found)
            row[f"{tool}, tokens/s"] = round(rates[tool])
            row[f"{tool}, GiB"] = round(max(turn.peak_bytes for turn in found) / 1024**3, 1)
        if len(rates) == 2:
            row["tuner / loop"] = round(rates["tuner"] / rates["loop"], 2)
        table.add(row)
    table.show(given.json)


if __name__ == "__main__":
    main()
