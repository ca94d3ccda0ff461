"""Images a second of tuner, TRL's SFTTrainer and LLaMA-Factory on the same rows, and how long tuner waits for pixels.

    python -m bench.images [--images 192] [--rounds 3]

A LLaVA with random weights reads JPEG files of 640 x 480 pixels: a CLIP tower of 224 pixels (256 tokens an image) and
an LLM, four layers each, hidden sizes 256. All train all weights in fp32 with the same batch, rows and learning rate.
LLaMA-Factory runs if bench/peers.sh has installed it. Rounds take turns; a rate leaves out the first two steps. Waiting
is the time in which a step asks for pixels that its threads have not made yet.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.table import Table, arguments, failed, in_turns, summary
from bench.tools import Command, environment, surroundings, ticks

ROOT = Path(__file__).parents[1]
BATCH, SKIPPED, LR = 4, 2, 1e-4
_TIMED = """
import importlib.abc, importlib.machinery, os, sys, time

class Timed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "tuner.data.image_batches":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        load = spec.loader.exec_module
        def loaded(module):
            load(module)
            pixels = module.PixelLoader.pixels
            log = open(os.environ["WAITS"], "a", buffering=1)
            def timed(self, batch):
                begin = time.perf_counter()
                try:
                    return pixels(self, batch)
                finally:
                    log.write(f"{time.perf_counter() - begin}\\n")
            module.PixelLoader.pixels = timed
        spec.loader.exec_module = loaded
        return spec

sys.meta_path.insert(0, Timed())
"""


def make_model(folder: Path) -> None:
    """Write the model, with the tokenizer and the processor of the package's small LLaVA."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    from tests.models import vision

    vision.make("llava", folder)
    small = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    shape = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = small["text_config"] | shape | {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 1024}
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**shape, image_size=224, patch_size=14, projection_dim=256),
        text_config=LlamaConfig(**{key: value for key, value in text.items() if key != "model_type"}),
        image_token_index=small["image_token_index"],
        image_seq_length=256,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    file = folder / "processor_config.json"
    processor = json.loads(file.read_text(encoding="utf-8")) | {"patch_size": 14}
    processor["image_processor"] |= {name: {"height": 224, "width": 224} for name in ("size", "crop_size")}
    file.write_text(json.dumps(processor), encoding="utf-8")


def make_rows(folder: Path, number: int) -> None:
    """Write the images, and a row with each."""
    import numpy as np
    import PIL.Image

    drawn = np.random.default_rng(0)
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as rows:
        for picture in range(number):
            coarse = PIL.Image.fromarray(drawn.integers(0, 255, (12, 16, 3), dtype=np.uint8))
            coarse.resize((640, 480), PIL.Image.Resampling.BICUBIC).save(folder / f"{picture}.jpg", quality=90)
            turns = [{"role": "user", "content": "<image>Which colors?"}, {"role": "assistant", "content": "Many."}]
            rows.write(json.dumps({"messages": turns, "images": [f"{picture}.jpg"]}) + "\n")


def tuner_trains(folder: Path) -> tuple[float, float]:
    """Return images a second, and the part of a step that waits for pixels."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        (Path(scratch) / "sitecustomize.py").write_text(_TIMED, encoding="utf-8")
        waits = Path(scratch) / "waits"
        path = os.pathsep.join((scratch, str(ROOT)))
        env = {**os.environ, "PYTHONPATH": path, "WAITS": str(waits), "TUNER_CACHE": str(folder / "cache")}
        sets = [f"global_batch_size={BATCH}", f"train_dataloader.batch_size={BATCH}", "log.num_samples=0"]
        sets += ["packing=False", "val_split=None", "train_cfg.gradient_checkpointing=False"]
        argv = [sys.executable, "-m", "tuner", "train", "--model", "model", "--data", "rows.jsonl", "--method", "full"]
        argv += ["--epochs", "1", "--lr", str(LR), "--work-dir", f"{scratch}/run"]
        argv += [word for setting in sets for word in ("--set", setting)]
        subprocess.run(argv, cwd=folder, env=env, check=True, stdout=sys.stderr)
        lines = [json.loads(line) for line in (Path(scratch) / "run/metrics.jsonl").read_text().splitlines()]
        steps = [line for line in lines if "tokens_per_second" in line]
        counts = [step["num_tokens"] - before["num_tokens"] for before, step in itertools.pairwise(steps)]
        seconds = [count / step["tokens_per_second"] for count, step in zip(counts, steps[1:], strict=True)]
        waited = [float(line) for line in waits.read_text().splitlines()]
    kept = seconds[SKIPPED:]
    return BATCH * len(kept) / sum(kept), sum(waited[-len(kept) :]) / sum(kept)


def trl_trains(folder: Path) -> None:
    """Train with TRL, and print images a second."""
    import torch
    from datasets import Dataset, Image, Sequence
    from transformers import AutoModelForImageTextToText, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    from tests.models import vision

    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    data = Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": row["messages"][0]["content"].removeprefix("<image>")}],
                "completion": row["messages"][1:],
                "images": [str(folder / name) for name in row["images"]],
            }
            for row in rows
        ]
    ).cast_column("images", Sequence(Image()))
    processor = vision.processor(folder / "model")
    parts = "{%- for part in m['content'] %}{{ part['text'] if part['type'] == 'text' else '<image>\n' }}{%- endfor %}"
    turn = (
        "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}" + parts + "{{ '<|im_end|>\n' }}{%- endfor %}"
    )
    processor.chat_template = turn + "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"

    ends = list[float]()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as scratch:
        settings = SFTConfig(
            output_dir=scratch,
            per_device_train_batch_size=BATCH,
            num_train_epochs=1,
            learning_rate=LR,
            max_length=None,
            gradient_checkpointing=False,
            bf16=False,
            save_strategy="no",
            report_to="none",
            dataloader_num_workers=2,
        )
        model = AutoModelForImageTextToText.from_pretrained(folder / "model", dtype=torch.float32)
        SFTTrainer(
            model=model, args=settings, train_dataset=data, processing_class=processor, callbacks=[Clock()]
        ).train()
    kept = ends[SKIPPED:]
    print(json.dumps(BATCH * (len(kept) - 1) / (kept[-1] - kept[0])))


def llamafactory_trains(folder: Path) -> float:
    """Return the images a second of LLaMA-Factory.

    Raises:
        Unmeasured: it is not installed, or it failed.
    """
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    rows = {"file_name": "rows.jsonl", "formatting": "sharegpt", "columns": columns, "tags": tags}
    (folder / "dataset_info.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        config = {
            **{"model_name_or_path": str(folder / "model"), "stage": "sft", "do_train": True, "template": "llava"},
            **{"finetuning_type": "full", "freeze_vision_tower": False, "freeze_multi_modal_projector": False},
            **{"dataset": "rows", "dataset_dir": str(folder), "media_dir": str(folder), "cutoff_len": 1024},
            **{"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1, "num_train_epochs": 1},
            **{"learning_rate": LR, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused"},
            **{"disable_gradient_checkpointing": True, "bf16": False, "use_cpu": True, "save_strategy": "no"},
            **{"output_dir": f"{scratch}/run", "report_to": "none", "dataloader_num_workers": 2},
        }
        file = Path(scratch) / "llamafactory.yaml"  # JSON is YAML, and its reader of JSON fails on any file
        file.write_text(json.dumps(config), encoding="utf-8")
        cli = environment("llamafactory") / "bin" / "llamafactory-cli"
        command = Command([str(cli), "train", str(file)], {})
        clock = Path(scratch) / "clock.jsonl"
        env = surroundings(command, 1, "llamafactory") | {"BENCH_CLOCK": str(clock)}
        done = subprocess.run(
            command.argv, cwd=scratch, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode or not clock.is_file():
            raise failed("llamafactory", done.stdout)
        ends = [tick.wall for tick in ticks(clock)][SKIPPED:]
    return BATCH * (len(ends) - 1) / (ends[-1] - ends[0])


def trl_rate(folder: Path) -> float:
    """Return the images a second of TRL, in a process of its own."""
    argv = [sys.executable, "-m", "bench.images", "--trl", str(folder)]
    done = subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Take turns, and print a table."""
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--trl", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.trl:
        trl_trains(given.trl)
        return
    table, waits = Table("images", summary(__doc__)), list[float]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        make_rows(folder, given.images)

        def of_tuner(folder: Path) -> float:
            rate, wait = tuner_trains(folder)
            waits.append(wait)
            return rate

        tools = {"tuner": of_tuner, "TRL, 2 workers": trl_rate, "LLaMA-Factory, 2 workers": llamafactory_trains}
        found = in_turns(tools, given.rounds, lambda tool: [tools[tool](folder)])
    rates = {tool: statistics.median(turns) for tool, turns in found.items() if not isinstance(turns, str)}
    for tool, turns in found.items():
        row: dict[str, Any] = {"": tool, "images a second": f"{rates[tool]:.2f}" if tool in rates else turns}
        if tool == "tuner":
            row["of a step waits for pixels"] = f"{statistics.median(waits):.1%}"
        elif tool in rates:
            row["tuner / it"] = f"{rates['tuner'] / rates[tool]:.2f}"
        table.add(row)
    table.show(given.json)


if __name__ == "__main__":
    main()
