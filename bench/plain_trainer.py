"""What most people run: `torchrun plain_trainer.py FOLDER STEPS INTERVAL`, the Trainer with DeepSpeed ZeRO-2.

A small Llama on two CPU ranks, resumed from the newest checkpoint-* folder by the Trainer's own `get_last_checkpoint`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

ZERO = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
}


class Record(TrainerCallback):  # type: ignore[misc]
    """Writes down each step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.get_rank() == 0:
            self.file.write_text("")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if dist.get_rank() == 0:
            with self.file.open("a") as stream:
                stream.write(json.dumps({"step": state.global_step}) + "\n")


def main() -> None:
    folder, steps, interval = Path(sys.argv[-3]), int(sys.argv[-2]), int(sys.argv[-1])
    deepspeed.ops.__compatible_ops__ = {}  # no C++ build of a collective, as in tuner
    deepspeed.init_distributed(dist_backend="gloo")
    set_seed(42)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=512, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4)
    )
    arguments = TrainingArguments(
        output_dir=str(folder),
        deepspeed=ZERO,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        max_steps=steps,
        save_steps=interval,
        save_total_limit=2,
        use_cpu=True,
        report_to="none",
        logging_steps=10,
        disable_tqdm=True,
    )
    ids = torch.randint(0, 512, (512, 128), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Record(folder / "steps.jsonl")])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)))
    trainer.save_model(str(folder / "final"))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


main()
