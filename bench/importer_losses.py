"""Does an imported config train as it does in its own tool? The losses of the first steps, side by side.

    python -m bench importer_losses [--real build/real] [--steps 20] [--tool llamafactory axolotl]

Each config has the values of one of the tool's examples, and the model and docs-135 of `make real`. The tool trains
it, and `tuner train CONFIG.yaml` trains the same file: the same seed and rows, fp32 on a CPU, not packed, without
dropout. A step's loss is that before its update.

Its last condition has the same loss in both. The model's chat template has its newline before each turn instead of
behind it: LLaMA-Factory trains all that follows an answer. A step of Axolotl is one micro-batch: it weighs several
alike, however many tokens of each are trained.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.fine_tuning import OWN, TOOLS, Task, in_fp32
from bench.learn import FIRST_SEED, MODEL, tiny, took
from bench.table import Table, Unmeasured, arguments, summary
from bench.tools import NAMES, ROOT, Command, surroundings

ROWS = "docs-135"
EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    # examples/train_lora/llama3_lora_sft.yaml, with each step's loss in the log.
    "llamafactory": {
        "lora_rank": 8, "lora_target": "all", "cutoff_len": 2048, "max_samples": 1000, "logging_steps": 1,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "learning_rate": 1e-4,
        "lr_scheduler_type": "cosine",
    },
    # examples/llama-3/lora-1b.yml, without its packing, dropout and 8-bit Adam. Axolotl shuffles rows before the
    # Trainer does, unless it is asked not to.
    "axolotl": {
        "sequence_len": 2048, "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "logging_steps": 1,
        "lora_target_modules": ["gate_proj", "down_proj", "up_proj", "q_proj", "v_proj", "k_proj", "o_proj"],
        "gradient_accumulation_steps": 2, "micro_batch_size": 2, "optimizer": "adamw_torch", "weight_decay": 0.0,
        "lr_scheduler": "cosine", "learning_rate": 2e-4, "shuffle_merged_datasets": False,
    },
}  # fmt: skip
WARM_UP: Mapping[str, Mapping[str, Any]] = {"llamafactory": {"warmup_ratio": 0.1}, "axolotl": {"warmup_steps": 10}}
ONE_MICRO_BATCH: Mapping[str, Mapping[str, Any]] = {
    "llamafactory": {},
    "axolotl": {"gradient_accumulation_steps": 1, "micro_batch_size": 4},
}
WARM, PLAIN, SAME_LOSS = "as the example", "without warm-up", "without warm-up, the same loss"
CONDITIONS = (WARM, PLAIN, SAME_LOSS)


def command(tool: str, condition: str, real: Path, steps: int, folder: Path) -> Command:
    """Write the config as train.yaml into a folder; return the tool's own command for it."""
    changes = {**EXAMPLES[tool], **WARM_UP[tool], "max_steps": steps}
    changes |= {} if condition == WARM else dict.fromkeys(WARM_UP[tool], 0)
    model = in_fp32(real / MODEL, folder / "model")
    if condition == SAME_LOSS:
        changes |= ONE_MICRO_BATCH[tool]
        end_with_the_last_turn(model)
    words = {name: json.dumps(value) for name, value in changes.items()}
    return TOOLS[tool](Task(model, real / f"{ROWS}.jsonl", 3, "lora", OWN, FIRST_SEED, True, words), folder).command


def end_with_the_last_turn(model: Path) -> None:
    """Give a model ChatML with its newline between turns alone, and none behind the last one."""
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>{% endif %}"
        "{% for message in messages %}{% if not loop.first or message['role'] != 'system' %}{{ '\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\n<|im_start|>assistant\n' }}{% endif %}",
        encoding="utf-8",
    )


def of_tool(tool: str, asked: Command, folder: Path) -> list[float]:
    """Train with the tool itself; return each step's loss.

    Raises:
        Unmeasured: it failed.
    """
    env = surroundings(asked, 1, tool)
    took(asked.argv, env, folder)
    (state,) = sorted(folder.glob("run/**/trainer_state.json"))[-1:]
    return [line["loss"] for line in json.loads(state.read_text())["log_history"] if "loss" in line]


def of_tuner(folder: Path) -> list[float]:
    """Train the folder's train.yaml with tuner; return each step's loss.

    Raises:
        Unmeasured: it failed.
    """
    argv = [sys.executable, "-m", "tuner", "train", str(folder / "train.yaml"), "--work-dir", str(folder / "tuner")]
    asked = Command([*argv, "--ignore-fit"], {"PYTHONPATH": str(ROOT)})
    took(asked.argv, surroundings(asked, 1, "tuner"), folder)
    lines = (folder / "tuner" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def row(tool: str, condition: str, theirs: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """Return one line of the table: some losses of both, and the largest difference with the step that has it."""
    apart = [abs(loss - other) for loss, other in zip(theirs, ours, strict=True)]
    most = max(apart)
    shown = {f"step {step}": f"{theirs[step - 1]:.4f} / {ours[step - 1]:.4f}" for step in (1, 2, 10, 20)
             if step <= len(apart)}  # fmt: skip
    return {"config of": NAMES[tool], "condition": condition, **shown,
            "largest difference": f"{most:.4f} (step {apart.index(most) + 1})"}  # fmt: skip


def main() -> None:
    parser = arguments(__doc__, rounds=1, has_tiny=True)
    parser.add_argument("--real", type=Path, default=ROOT / "build" / "real", metavar="FOLDER", help="of `make real`")
    parser.add_argument("--tool", nargs="+", choices=EXAMPLES, default=list(EXAMPLES))
    parser.add_argument("--condition", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    table = Table("importer_losses", f"{summary(__doc__)} Losses: the tool's / tuner's.")
    for tool in options.tool:
        for condition in options.condition:
            print(f"importer_losses: {tool}, {condition}", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory(prefix=f"{tool}-", ignore_cleanup_errors=True) as scratch:
                table.add(measured(tool, condition, options, Path(scratch)))
    table.show(options.json)


def measured(tool: str, condition: str, options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Return the line of one tool's config, or why it has none."""
    real, folder = options.real, scratch / "cell"
    if options.tiny:
        (scratch / "real").mkdir()
        real = tiny(scratch / "real")
    folder.mkdir()
    try:
        theirs = of_tool(tool, command(tool, condition, real, options.steps, folder), folder)
        ours = of_tuner(folder)
        print(json.dumps({tool: theirs, "tuner": ours}), file=sys.stderr, flush=True)
        return row(tool, condition, theirs, ours)
    except Unmeasured as reason:
        return {"config of": NAMES[tool], "condition": condition, "step 1": str(reason)}


if __name__ == "__main__":
    main()
