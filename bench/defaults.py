"""Each tool with its own defaults, on the same model, chats and epochs: what a first command gives.

    python -m bench defaults [--rows 4418] [--epochs 3] [--rounds 3]

The model is the catalog's `tiny` with random weights; the rows are chats that ship with the package. Only what a tool
does not run without is set, and the table lists it; methods, learning rates and batches are the tools' own, and differ.
Loss is one ruler for all: the mean over the answers' tokens of chats that nobody trained on, by transformers, in fp32.
The tokens are those of the rows in the chat template, once an epoch, whatever a tool makes of them.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.jobs import make_model, of_catalog
from bench.table import Spent, Table, Unmeasured, arguments, in_turns, median, spent
from bench.tools import CLOCK, NAMES, ROOT, Command, environment, surroundings, ticks
from tuner import assets
from tuner.machine import hardware


@dataclass(frozen=True)
class Task:
    """What everybody is given."""

    model: Path
    data: Path
    """A folder that holds train.jsonl, of {"messages": [...]}, alone."""
    epochs: int
    cpu: bool


@dataclass(frozen=True)
class Asked:
    """A tool's command, where its result will be, and what was set beyond model, data, epochs and a place for it."""

    command: Command
    result: Path
    beside: str


@dataclass
class Found:
    """All rounds of one tool."""

    whole: list[Spent] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    """Seconds from the first step's end to the last's, scaled to all steps."""
    losses: list[float] = field(default_factory=list)
    steps: int = 0
    beside: str = ""


def tuner(task: Task, folder: Path) -> Asked:
    given = ["--model", task.model, "--data", task.data / "train.jsonl", "--val-split", 0, "--epochs", task.epochs]
    argv = [sys.executable, "-m", "tuner", "train", *map(str, given), "--work-dir", str(folder / "run")]
    command = Command(argv, {"PYTHONPATH": os.pathsep.join((str(CLOCK), str(ROOT)))})
    return Asked(command, folder / "run" / "final", "nothing")


def trl(task: Task, folder: Path) -> Asked:
    flags = ["--model_name_or_path", task.model, "--dataset_name", task.data, "--num_train_epochs", task.epochs]
    flags += ["--output_dir", folder / "run"]
    # Its default of bf16 is refused without a GPU unless the CPU is asked for.
    flags += ["--use_cpu", "true"] if task.cpu else []
    argv = [str(environment("trl") / "bin" / "trl"), "sft", *map(str, flags)]
    return Asked(Command(argv, {}), folder / "run", "`--use_cpu true`" if task.cpu else "nothing")


def llamafactory(task: Task, folder: Path) -> Asked:
    home = folder / "data"
    home.mkdir()
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns, train = {"messages": "messages"}, str(task.data / "train.jsonl")
    info = {"file_name": train, "formatting": "sharegpt", "columns": columns, "tags": tags | {"system_tag": "system"}}
    (home / "dataset_info.json").write_text(json.dumps({"chats": info}))
    config = {"model_name_or_path": str(task.model), "dataset": "chats", "num_train_epochs": task.epochs}
    config |= {"output_dir": str(folder / "run"), "dataset_dir": str(home), "stage": "sft", "do_train": True}
    config |= {"template": "chatml"}
    file = folder / "train.yaml"
    file.write_text(json.dumps(config))
    argv = [str(environment("llamafactory") / "bin" / "llamafactory-cli"), "train", str(file)]
    return Asked(Command(argv, {}), folder / "run", "`dataset_info.json`, `stage`, `do_train`, `template: chatml`")


def axolotl(task: Task, folder: Path) -> Asked:
    data = {"path": str(task.data / "train.jsonl"), "ds_type": "json", "type": "chat_template"}
    config: dict[str, Any] = {"base_model": str(task.model), "datasets": [data], "num_epochs": task.epochs}
    config |= {"output_dir": str(folder / "run"), "dataset_prepared_path": str(folder / "prepared")}
    # It has no default for these and does not start without them.
    needed = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "learning_rate": 2e-4, "sequence_len": 2048}
    needed |= {"bf16": False} if task.cpu else {}  # else it loads weights in fp16, and multiplies them with fp32
    file = folder / "train.yaml"
    file.write_text(json.dumps(config | needed))  # JSON is YAML
    beside = ", ".join(f"`{name}: {json.dumps(value)}`" for name, value in needed.items())
    argv = [str(environment("axolotl") / "bin" / "axolotl"), "train", str(file)]
    return Asked(Command(argv, {"AXOLOTL_DO_NOT_TRACK": "1"}), folder / "run", beside)


PEERS: dict[str, Callable[[Task, Path], Asked]] = {
    "trl": trl, "llamafactory": llamafactory, "axolotl": axolotl, "tuner": tuner,
}  # fmt: skip


def trained(tool: str, task: Task, held_out: Path, found: Found) -> list[Found]:
    """Train with one tool, and add what it took and how well its result answers."""
    with tempfile.TemporaryDirectory(prefix=f"{tool}-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        asked, clock = PEERS[tool](task, folder), folder / "clock.jsonl"
        env = surroundings(asked.command, 1, tool) | {"BENCH_CLOCK": str(clock)}
        took = spent(asked.command.argv, env=env, cwd=folder)
        if not clock.is_file():
            raise Unmeasured("it ended well, but took no step")
        steps = ticks(clock)
        found.whole.append(took)
        found.training.append((steps[-1].wall - steps[0].wall) * len(steps) / max(1, len(steps) - 1))
        found.losses.append(score(asked.result, held_out))
        found.steps, found.beside = len(steps), asked.beside
    return []


def score(result: Path, held_out: Path) -> float:
    """Return the mean loss of the answers' tokens, each row alone."""
    import torch
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM

    is_adapter = (result / "adapter_config.json").is_file()
    loader = AutoPeftModelForCausalLM if is_adapter else AutoModelForCausalLM
    model = loader.from_pretrained(result, dtype=torch.float32).eval()
    total, count = 0.0, 0
    for ids, is_answer in encoded(held_out):
        row = torch.tensor([ids])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(row).logits[0, :-1], row[0, 1:], reduction="none")
        wanted = torch.tensor(is_answer[1:], dtype=torch.bool)
        total, count = total + float(losses[wanted].sum()), count + int(wanted.sum())
    return total / count


def encoded(file: Path) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of each chat, and which are an answer's, by transformers and the tokenizer's own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.asset("package:tiny"))
    found = []
    for line in file.read_text(encoding="utf-8").splitlines():
        rendered = tokenizer.apply_chat_template(
            json.loads(line)["messages"], return_dict=True, return_assistant_tokens_mask=True
        )
        found.append((rendered["input_ids"], rendered["assistant_masks"]))
    return found


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--rows", type=int, default=4418, help="the first of the shipped ones; %(default)s is all")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--tiny", action="store_true", help="300 rows, once: to try the measurement itself")
    given = parser.parse_args()
    num_rows, epochs = (300, 1) if given.tiny else (given.rows, given.epochs)
    with tempfile.TemporaryDirectory(prefix="defaults-") as scratch:
        data = Path(scratch) / "data"
        data.mkdir()
        with Path(assets.asset("package:sample/train.jsonl")).open(encoding="utf-8") as lines:
            (data / "train.jsonl").write_text("".join(itertools.islice(lines, num_rows)), encoding="utf-8")
        held_out = Path(assets.asset("package:sample/validation.jsonl"))
        model = make_model(Path(scratch) / "model", of_catalog("tiny"))
        task = Task(model, data, epochs, not hardware.detect({}).gpus)
        gathered: dict[str, Found] = {name: Found() for name in given.peers}
        told = in_turns(given.peers, given.rounds, lambda tool: trained(tool, task, held_out, gathered[tool]))
        tokens = epochs * sum(len(ids) for ids, _ in encoded(data / "train.jsonl"))
        before = score(model, held_out)
    what = (__doc__ or "").split("\n\n")[2].replace("\n", " ").strip()
    what += f" Rows: {num_rows:,}, {tokens:,} tokens in {epochs} epochs; the loss before training: {before:.3f}."
    rows = [row(name, gathered[name], told[name], tokens) for name in given.peers]
    Table("defaults", f"{what} Medians of {given.rounds}; seconds of the wall (cpu).", rows).show(given.json)


def row(name: str, found: Found, told: list[Any] | str, tokens: int) -> dict[str, Any]:
    if isinstance(told, str):
        return {"tool": NAMES[name], "the whole command, s": told}
    return {
        "tool": NAMES[name],
        "the whole command, s": median(found.whole),
        "training, s / 1,000 tokens": statistics.median(found.training) / tokens * 1000,
        "steps": found.steps,
        "loss of answers held out": f"{statistics.median(found.losses):.3f}",
        "what had to be set": found.beside,
    }


if __name__ == "__main__":
    main()
