"""Counts what a step of tuner, and of a minimal loop, waits for and starts, in one process: `python -m ... FOLDER`.

It prints one line of JSON for each setting. What is counted, and how, says `bench.clock.bench_counts`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.worker.only_rank import made_run

CLOCK = Path(__file__).parents[2] / "bench" / "clock"
LEVELS = ("none", "zero2", "zero3")
FUSED = LEVELS[:2]
"""Where LoRA computes as one function."""
SETTINGS = [
    *((level, method, 2) for level in LEVELS for method in ("full", "lora")),
    ("none", "lora", 1),
    ("zero3", "lora", 1),
]
"""ZeRO's level, the method, and the layers of the model."""
_SETS = {
    "train_cfg.max_steps": 100,
    "train_cfg.loss": "chunked",
    "train_cfg.gradient_checkpointing": False,
    "model.attn_implementation": "sdpa",
    "train_dataloader.batch_size": 2,
    "train_dataloader.dataset.max_length": 32,
    "train_dataloader.dataset.max_rows": 16,
    "accumulative_counts": 2,
    "dtype": "bf16",
    "log.interval": 50,
    "val_dataloader": None,
}


class _Counted(Exception):
    """The step has been counted: the run ends here."""


def counts_of(level: str, method: str, model: Path, folder: Path) -> dict[str, int]:
    """Train three steps as a rank does, and return the counts of the third."""
    from tuner.worker import train
    from tuner.worker.guard import Guard

    _, run, rank = made_run(method, model, folder, level, _SETS)
    with contextlib.ExitStack() as at_the_end:
        built = train.build_rank(train.prepare_rank(run, rank, Guard(run, rank), at_the_end))
        built.trainer.add_callback(_callback())
        with contextlib.suppress(_Counted):
            train.train(built)
        return _result(built.trainer.model)


def counts_of_loop(model: Path, zero: Path) -> dict[str, int]:
    """Train LoRA with PEFT, transformers' loss and DeepSpeed alone; return the counts of the third step."""
    import deepspeed
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, LlamaForCausalLM

    config = json.loads(zero.read_text())
    base = LlamaForCausalLM(AutoConfig.from_pretrained(model)).to(torch.bfloat16)
    trained = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear"), autocast_adapter_dtype=False)
    weights = [weight for weight in trained.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, fused=True)
    engine, *_ = deepspeed.initialize(model=trained, optimizer=optimizer, config=config)
    for step in (1, 2, 3):
        for _ in range(config["gradient_accumulation_steps"]):
            ids = torch.arange(64).reshape(2, 32)
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()
        with contextlib.suppress(_Counted):
            _after(step)
    return _result(trained)


def _callback() -> Any:
    from transformers import TrainerCallback

    class CountThirdStep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _after(state.global_step)

    return CountThirdStep()


def _after(step: int) -> None:
    counted = import_module("bench_counts").counted
    if step == 1:
        counted.start()
    elif step == 2:
        counted.reset()
    else:
        counted.stop()
        raise _Counted


def _result(model: Any) -> dict[str, Any]:
    counted = import_module("bench_counts").counted
    return {
        "waits": dict(counted.waits),
        "operations": sum(counted.operations.values()),
        "trained": sum(weight.requires_grad for weight in model.parameters()),
    }


def main() -> None:
    import torch

    from bench.gpu_loss import as_on_a_gpu
    from bench.jobs import llama, make_model
    from tuner.worker.quiet import quiet_libraries

    torch.set_num_threads(1)
    quiet_libraries()
    sys.path.insert(0, str(CLOCK))
    counts = import_module("bench_counts")
    counts.as_on_a_gpu(import_module("deepspeed.accelerator.cpu_accelerator"))
    counts.collate_in_python(import_module("torch.utils.data._utils.fetch"))
    gc.freeze()  # accelerate looks for garbage, and the counts for tensors
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a rank prints is no answer
    folder = Path(sys.argv[1])
    models = {depth: make_model(folder / f"model-{depth}", llama(32, depth)) for depth in (1, 2)}
    with as_on_a_gpu():
        for level, method, depth in SETTINGS:
            run = folder / f"{level}-{method}-{depth}"
            print(json.dumps([run.name, counts_of(level, method, models[depth], run)]), file=answers)
        for level in LEVELS:
            zero = folder / f"{level}-lora-2" / "deepspeed.json"
            print(json.dumps([f"{level}-loop", counts_of_loop(models[2], zero)]), file=answers)
    os._exit(0)  # torch 2.13's gloo may abort in its destructors


if __name__ == "__main__":
    main()
