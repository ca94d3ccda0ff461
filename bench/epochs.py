"""Whether three epochs, one epoch, or the best of three is right: LoRA at tuner's defaults on six small sets of rows.

    make real && python -m bench.epochs build/real

A plain PyTorch loop, one row a step, in fp32. Each set has rows to train on, rows to choose the best epoch by, and
other rows to measure the choice on. One line of JSON a run; `--full` trains all weights, with each rate of `--lr` and
`--rows-of-step` rows in a step.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.settings import Row, mean_loss, row_of, trained

ROOT = Path(__file__).parents[1]
NUM_TRAIN, NUM_VAL, NUM_TEST = 64, 12, 36
MAX_LENGTH = 160
Turns = list[dict[str, str]]


def conversation(question: str, answer: str) -> Turns:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def lines(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def orders() -> Iterator[Turns]:
    """Yield requests in plain words, answered by JSON of one form: a format to learn, not facts."""
    draw = random.Random(0)
    things = ("pens", "lamps", "chairs", "tents", "kettles", "scarves")
    cities = ("Oslo", "Lima", "Cairo", "Quito", "Perth")
    while True:
        thing, city, count, day = draw.choice(things), draw.choice(cities), draw.randint(2, 99), draw.randint(1, 28)
        question = draw.choice(
            (
                f"Please send {count} {thing} to our shop in {city} before May {day}.",
                f"We need {thing} in {city}: {count} of them, by the {day}th of May.",
                f"Order for {city}. {count} {thing}. Latest day: {day} May.",
            )
        )
        answer = {"item": thing[:-1], "quantity": count, "ship_to": city.upper(), "due": f"2026-05-{day:02}"}
        yield conversation(question, json.dumps(answer))


def sets(real: Path) -> dict[str, Iterator[Turns]]:
    """Return conversations by the name of their set."""
    files = {name: real / f"{name}.jsonl" for name in ("docs-135", "docs-1000", "short-10000")}
    files["sample"] = ROOT / "tuner/configs/assets/sample/train.jsonl"
    pairs = (conversation(row["prompt"], row["chosen"]) for row in lines(real / "pairs.jsonl"))
    of_files = {name: (row["messages"] for row in lines(file)) for name, file in files.items()}
    return {**of_files, "pairs": pairs, "orders": orders()}


def encoded(conversations: Iterator[Turns], tokenizer: Any, count: int) -> list[Row]:
    """Return the first `count` conversations that are short."""
    rows = (row_of(turns, tokenizer) for turns in conversations)
    return list(islice((row for row in rows if len(row[0]) <= MAX_LENGTH), count))


def losses_of(model: Any, parts: dict[str, list[Row]], epochs: int, lr: float, size: int) -> list[list[float]]:
    """Train `model` at the peak rate `lr` on `size` rows a step.

    Returns:
        The losses on the rows that choose and on those that measure, before and after each epoch.
    """
    orders = [random.sample(parts["train"], len(parts["train"])) for _ in range(epochs)]
    steps = [order[start : start + size] for order in orders for start in range(0, len(order), size)]

    def measured() -> list[float]:
        return [mean_loss(model, parts[name], autocast=False) for name in ("val", "test")]

    losses = [measured()]
    for number in trained(model, steps, lr, max(1, math.ceil(0.03 * len(steps))), autocast=False):
        if number % (len(steps) // epochs) == 0:
            losses.append(measured())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("real", type=Path)
    parser.add_argument("--only", nargs="*", help="names of sets")
    parser.add_argument("--epochs", type=int, nargs="*", default=[3, 1])
    parser.add_argument("--seeds", type=int, nargs="*", default=[42])
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--lr", type=float, nargs="*", default=[2e-4])
    parser.add_argument("--rows-of-step", type=int, default=1)
    parser.add_argument("--rows", type=int, default=NUM_TRAIN, help="to train on")
    options = parser.parse_args()
    folder = options.real / "smollm2"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for seed in options.seeds:
        for name, conversations in sets(options.real).items():
            if options.only and name not in options.only:
                continue
            rows = encoded(conversations, tokenizer, options.rows + NUM_VAL + NUM_TEST)
            random.Random(0).shuffle(rows)
            held_out = NUM_VAL + NUM_TEST
            parts = {"val": rows[:NUM_VAL], "test": rows[NUM_VAL:held_out], "train": rows[held_out:]}
            for epochs, lr in product(options.epochs, options.lr):
                torch.manual_seed(seed)
                random.seed(seed)
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
                if not options.full:
                    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
                losses = losses_of(model, parts, epochs, lr, options.rows_of_step)
                best = min(range(1, len(losses)), key=lambda epoch: losses[epoch][0])
                settings = {"lr": lr, "full": options.full, "rows_of_step": options.rows_of_step, "seed": seed}
                line = {"set": name, "rows": len(parts["train"]), "epochs": epochs, **settings}
                line |= {"before": losses[0][1], "last": losses[-1][1], "best": losses[best][1], "best_epoch": best}
                shown = {
                    key: round(value, 4) if isinstance(value, float) and key != "lr" else value
                    for key, value in line.items()
                }
                curves = {name: [round(loss[part], 4) for loss in losses] for part, name in enumerate(("val", "test"))}
                print(json.dumps(shown | curves), flush=True)


if __name__ == "__main__":
    main()
