"""What people write themselves: a minimal `deepspeed.initialize` loop, and the plain Trainer; one rank of either.

    torchrun --nproc-per-node N bench/by_hand.py loop|trainer JOB.json

It knows nothing of tuner. JOB.json is a `bench.tools.Job`, with the Trainer's `arguments`; each rank trains on rows of
equal length, reads them itself, and ends without the libraries' teardown, which torch 2.13's gloo does not survive
reliably.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import bench_clock  # on PYTHONPATH, with the hook that watches other tools
import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer


def model_of(job: dict[str, Any]) -> Any:
    """Load the model in the job's type, in 4 bits for QLoRA, with an adapter where the method has one."""
    dtype = torch.bfloat16 if job["dtype"] == "bf16" else torch.float32
    options: dict[str, Any] = {"dtype": dtype}
    if job["method"] == "qlora":
        from transformers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
        )
        options["device_map"] = {"": torch.cuda.current_device() if job["device"] == "cuda" else "cpu"}
    model = AutoModelForCausalLM.from_pretrained(job["model"], **options)
    if job["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if job["method"] == "full":
        return model
    from peft import LoraConfig, get_peft_model

    adapter = LoraConfig(**job["adapter"], target_modules="all-linear", task_type="CAUSAL_LM")
    return get_peft_model(model, adapter, autocast_adapter_dtype=False)


def rows_of(job: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """Tokenize the texts, each cut to `row_tokens`."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    with Path(job["rows"]).open(encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    found = tokenizer(texts, truncation=True, max_length=job["row_tokens"])["input_ids"]
    return [{"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)} for ids in found]


def loop(job: dict[str, Any]) -> None:
    """Train as DeepSpeed's own getting-started page does."""
    from torch.utils.data import DataLoader, DistributedSampler

    zero, model, rows = json.loads(Path(job["zero"]).read_text()), model_of(job), rows_of(job)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if job["offloads"]:
        optimizer: Any = deepspeed.ops.adam.DeepSpeedCPUAdam(trained, lr=job["lr"])
    else:
        optimizer = torch.optim.AdamW(trained, lr=job["lr"], weight_decay=0.0, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=zero)
    sampler = DistributedSampler(rows)
    batches = DataLoader(rows, batch_size=job["micro_batch"], sampler=sampler)
    engine.train()
    steps = 0
    while True:
        for number, batch in enumerate(batches, 1):
            moved = {name: tensor.to(engine.device) for name, tensor in batch.items()}
            engine.backward(engine(**moved, use_cache=False).loss)
            engine.step()
            if number % job["accumulation"]:
                continue
            bench_clock.tick()
            steps += 1
            if job["save_every"] and steps % job["save_every"] == 0:
                engine.save_checkpoint(job["out"], tag=f"checkpoint-{steps}")
            if steps == job["steps"]:
                return


def trainer(job: dict[str, Any]) -> None:
    """Train with the Trainer at its defaults but for the settings that must be equal."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(**job["arguments"])
    Trainer(model=model_of(job), args=arguments, train_dataset=rows_of(job)).train()


def main() -> None:
    job = json.loads(Path(sys.argv[2]).read_text())
    if job["device"] == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # no C++ build of a collective, as in tuner
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed(dist_backend="gloo" if job["device"] == "cpu" else "nccl")
    {"loop": loop, "trainer": trainer}[sys.argv[1]](job)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
