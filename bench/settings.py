"""What one setting of LoRA changes: a plain PyTorch loop on a real model, without tuner.

    python -m bench.settings --model FOLDER --train rows.jsonl --val held-out.jsonl [--tokens 128] [--lr 2e-4] ...

Rows are {"messages": [...]}, whose last turn is the answer; the loss is the mean over the answers' tokens. A step takes
whole rows until they have `--tokens` tokens. bf16 under autocast; adapters in fp32. One line of JSON a run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

IGNORED = -100
Row = tuple[list[int], list[int]]
"""Ids and labels."""


def row_of(turns: list[dict[str, str]], tokenizer: Any) -> Row:
    """Return a conversation, of which the answer of the last turn is trained."""
    ids = tokenizer.apply_chat_template(turns, return_dict=False)
    prompt = tokenizer.apply_chat_template(turns[:-1], add_generation_prompt=True, return_dict=False)
    return ids, [IGNORED] * len(prompt) + ids[len(prompt) :]


def encoded(file: Path, tokenizer: Any, max_length: int = 2048) -> list[Row]:
    lines = file.read_text(encoding="utf-8").splitlines()
    cut = ([part[:max_length] for part in row_of(json.loads(line)["messages"], tokenizer)] for line in lines)
    return [(ids, labels) for ids, labels in cut if any(label != IGNORED for label in labels)]


def steps_of(rows: list[Row], num_tokens: int, epochs: int) -> list[list[Row]]:
    """Return the rows of each step: shuffled anew in each epoch, filled until a step has `num_tokens` tokens."""
    steps: list[list[Row]] = []
    for _ in range(epochs):
        order, step = random.sample(rows, len(rows)), list[Row]()
        for row in order:
            step.append(row)
            if sum(len(ids) for ids, _ in step) >= num_tokens:
                steps.append(step)
                step = []
        steps += [step] if step else []
    return steps


def padded_batches(rows: list[Row], num_tokens: int) -> Iterator[list[Row]]:
    """Yield the rows, similar lengths together, in batches of at most `num_tokens` tokens with their padding."""
    batch: list[Row] = []
    for row in sorted(rows, key=lambda row: len(row[0])):
        if batch and (len(batch) + 1) * len(row[0]) > num_tokens:
            yield batch
            batch = []
        batch.append(row)
    yield batch


def summed_loss(model: Any, rows: list[Row], *, autocast: bool = True) -> tuple[torch.Tensor, int]:
    """Return the sum of the losses of the answers' tokens, and their number; without `autocast` in the model's type."""
    ids_BT = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    labels_BT = pad_sequence([torch.tensor(labels) for _, labels in rows], batch_first=True, padding_value=IGNORED)
    targets_BT = labels_BT[:, 1:]
    is_trained_BT = targets_BT != IGNORED
    causal = model.get_base_model() if hasattr(model, "get_base_model") else model
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        hidden_BTD = causal.model(ids_BT).last_hidden_state[:, :-1]
        logits_NV = causal.lm_head(hidden_BTD[is_trained_BT])
    loss = F.cross_entropy(logits_NV.float(), targets_BT[is_trained_BT], reduction="sum")
    return loss, int(is_trained_BT.sum())


@torch.no_grad()
def mean_loss(model: Any, rows: list[Row], *, autocast: bool = True) -> float:
    model.eval()
    measured = [summed_loss(model, batch, autocast=autocast) for batch in padded_batches(rows, 2048)]
    model.train()
    return float(sum(loss for loss, _ in measured)) / sum(count for _, count in measured)


def trained(model: Any, steps: list[list[Row]], lr: float, warmup: int, *, autocast: bool = True) -> Iterator[int]:
    """Take the steps, with the rate a cosine from its peak `lr` after `warmup` of them; yield how many are taken."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=lr, weight_decay=0.0, fused=True)
    for number, rows in enumerate(steps):
        course = math.cos(math.pi * (number - warmup) / max(1, len(steps) - warmup)) / 2 + 0.5
        optimizer.param_groups[0]["lr"] = lr * ((number + 1) / warmup if number < warmup else course)
        count = sum(label != IGNORED for _, labels in rows for label in labels[1:])
        for batch in padded_batches(rows, 1024):
            (summed_loss(model, batch, autocast=autocast)[0] / count).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield number + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "train", "val"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--alpha", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--warmup", type=float, default=0.03, help="share of the steps")
    parser.add_argument("--full", action="store_true", help="train all weights")
    options = parser.parse_args()

    torch.manual_seed(42)
    random.seed(42)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    train, val = encoded(options.train, tokenizer), encoded(options.val, tokenizer)
    dtype = torch.float32 if options.full else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    if not options.full:
        shape = {"r": options.r, "lora_alpha": options.alpha, "lora_dropout": options.dropout}
        model = get_peft_model(model, LoraConfig(**shape, target_modules="all-linear"))
    plan = steps_of(train, options.tokens, options.epochs)

    before, started = mean_loss(model, val), time.process_time()
    for _ in trained(model, plan, options.lr, max(1, round(options.warmup * len(plan)))):
        pass
    spent = time.process_time() - started
    shown = {key: value for key, value in vars(options).items() if key not in ("model", "train", "val")}
    facts = {"rows": len(train), "tokens_an_epoch": sum(len(ids) for ids, _ in train), "steps": len(plan)}
    losses = {"before": round(before, 4), "after": round(mean_loss(model, val), 4)}
    print(json.dumps({**shown, **facts, **losses, "cpu_s": round(spent)}))


if __name__ == "__main__":
    main()
