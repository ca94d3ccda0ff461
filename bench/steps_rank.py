"""What `bench.steps` times: one rank of the loop or of the Trainer, or tuner with a clock among its callbacks."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

_PROFILED_STEP = 4


class Clock:
    """The wall's and the processor's seconds at the end of each step, and one step's operations, of rank 0."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self.operations: dict[str, int] = {}
        self._profiler: Any = None

    def tick(self) -> None:
        self.times.append((time.perf_counter(), time.process_time()))
        if "BENCH_OPERATIONS" in os.environ:
            self._profile()

    def _profile(self) -> None:
        from torch.profiler import profile

        if len(self.times) == _PROFILED_STEP - 1:
            self._profiler = profile()
            self._profiler.start()
        elif len(self.times) == _PROFILED_STEP:
            self._profiler.stop()
            self.operations = {one.key: one.count for one in self._profiler.key_averages()}

    def write(self) -> None:
        if int(os.environ.get("RANK", "0")) == 0:
            Path(os.environ["BENCH_TIMES"]).write_text(json.dumps(self.times))
            if "BENCH_OPERATIONS" in os.environ:
                Path(os.environ["BENCH_OPERATIONS"]).write_text(json.dumps(self.operations))

    def callback(self) -> Any:
        from transformers import TrainerCallback

        clock = self

        class Ticks(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                clock.tick()

            def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                clock.write()

        return Ticks()


def make_inputs(folder: Path, *, layers: int = 8, width: int = 512) -> tuple[Path, Path]:
    """Write a Llama with random weights and the package's small tokenizer, and rows longer than any that is trained."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from tuner.recipes import catalog

    model, rows = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64 * width,
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
        )
        LlamaForCausalLM(config).save_pretrained(model)
        AutoTokenizer.from_pretrained(catalog.asset("package:tiny")).save_pretrained(model)
        draw = random.Random(0)
        words = [" ".join(str(draw.randrange(10)) for _ in range(600)) for _ in range(512)]
        rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in words), encoding="utf-8")
    return model, rows


def _parts(recipe: Path, run: Path) -> tuple[Any, Any, dict[str, Any], Any]:
    """Return the recipe's values, the model, the DeepSpeed config that tuner would give it, and the prepared rows."""
    from datetime import datetime

    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tuner.data.prepare import prepare
    from tuner.launch.resolve import resolve_run
    from tuner.launch.run import Request
    from tuner.machine import hardware
    from tuner.machine.topology import LaunchFlags

    flags = LaunchFlags(nproc_per_node=int(os.environ["WORLD_SIZE"]))
    request = Request(str(recipe), deepspeed="zero2", flags=flags, work_dir=run)
    environ = {"PATH": os.environ["PATH"]}
    made = resolve_run(request, environ, hardware.detect({"CUDA_VISIBLE_DEVICES": ""}), datetime.now().astimezone())
    config = made.recipe.config
    dtype = torch.bfloat16 if made.precision.dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=dtype)
    if config.adapter:
        names = {"r", "lora_alpha", "lora_dropout", "target_modules"}
        adapter = LoraConfig(**config.adapter.model_dump(include=names), task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    rows = prepare(config.train_dataloader.dataset, tokenizer, objective=config.objective.type).dataset
    return config, model, made.final.config, rows.select_columns(["input_ids", "labels"]).with_format("torch")


def loop(recipe: Path, run: Path) -> None:
    """Train as DeepSpeed's own getting-started page does."""
    import deepspeed
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    config, model, zero, rows = _parts(recipe, run)
    optim = config.optim_wrapper.optimizer
    trained = [one for one in model.parameters() if one.requires_grad]
    adam = torch.optim.AdamW(trained, lr=optim.lr, weight_decay=optim.weight_decay, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=zero)
    batches = DataLoader(rows, batch_size=config.train_dataloader.batch_size, sampler=DistributedSampler(rows))
    clock = Clock()
    engine.train()
    for number, batch in enumerate(batches, 1):
        engine.backward(engine(**batch, use_cache=False).loss)
        engine.step()
        if number % zero["gradient_accumulation_steps"] == 0:
            clock.tick()
        if len(clock.times) == config.train_cfg.max_steps:
            break
    clock.write()


def trainer(recipe: Path, run: Path) -> None:
    """Train with the Trainer at its defaults."""
    from transformers import Trainer, TrainingArguments

    config, model, zero, rows = _parts(recipe, run)
    clock = Clock()
    arguments = TrainingArguments(
        output_dir=str(run.parent / "trainer"),  # the run directory itself must be free for every rank that looks
        deepspeed=zero,
        per_device_train_batch_size=config.train_dataloader.batch_size,
        gradient_accumulation_steps=config.optim_wrapper.accumulative_counts,
        learning_rate=config.optim_wrapper.optimizer.lr,
        lr_scheduler_type="constant",
        max_grad_norm=zero["gradient_clipping"],
        bf16=zero["bf16"]["enabled"],
        max_steps=config.train_cfg.max_steps,
        logging_steps=config.log.interval,
        save_strategy="no",
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[clock.callback()]).train()


def _tuner_rank() -> None:
    from tuner.worker.guard import Guard

    def timed() -> None:
        from tuner.worker import train

        original = train._callbacks
        train._callbacks = lambda *given: (*original(*given), Clock().callback())  # type: ignore

    finish = Guard.finish
    # Only once the rank's signals and output are taken: a rank imports nothing heavy before that.
    Guard.finish = lambda guard, work: finish(guard, lambda: (timed(), work())[1])  # type: ignore
    import_module("tuner.worker.__main__")


def main() -> None:
    if sys.argv[1] in ("loop", "trainer"):
        import deepspeed
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__ = {}  # no C++ build of a collective, as in tuner
        deepspeed.init_distributed(dist_backend="gloo")
        {"loop": loop, "trainer": trainer}[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
        import torch.distributed as dist

        dist.barrier()
        os._exit(0)
    if "RANK" in os.environ:
        return _tuner_rank()
    from tuner.cli import main as command_line
    from tuner.launch import render

    render.WORKER = "bench.steps_rank"
    return command_line()


if __name__ == "__main__":
    main()
