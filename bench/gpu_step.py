"""What each kernel is worth, in one process without a tool: a forward and backward pass with it and without, updates.

    python -m bench.gpu_step 1b|8b|8b8 full|lora [--from NUMBER]

One line of JSON a variant, at once; --from goes on behind one after which CUDA answers no more. 8b8 has the width of
8B and eight layers. The model is made on the GPU, from the catalog's architecture with random weights in bf16; a row
has 2,048 tokens, and packed rows have eight samples each. `enqueued_ms` is what Python takes to start all kernels: near
`ms`, the GPU waits for Python. BENCH_DEVICE=cpu tries the code with the catalog's `tiny`; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from bench.jobs import of_catalog
from tuner.models import attention, fused_lora
from tuner.recipes.schema.architecture import VARLEN
from tuner.worker import compat, compat_update, loss

ON_CPU = os.environ.get("BENCH_DEVICE") == "cpu"
DEVICE = "cpu" if ON_CPU else "cuda"
SIZES = {"1b": "llama3_2_1b", "8b": "llama3_8b", "8b8": "llama3_8b"}
ROWS = {"1b": (4, 8), "8b": (1, 4), "8b8": (2, 4)}
"""The rows of a micro-batch: few, for recomputation and whole logits, and more."""
TOKENS, SAMPLES, REPEATS = (64 if ON_CPU else 2048), 8, 5
NUMBERS = itertools.count()
"""Of the variants, in their order."""
ADAPTER = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


@dataclass(frozen=True)
class Variant:
    """One way to compute a micro-batch."""

    name: str
    rows: int
    attn: str = "sdpa"
    samples: int = 1
    """Of each row."""
    head: str = "chunks"
    """`whole`: transformers' loss from all logits; `chunks`: TRL's head; `once`: tuner's, each logit once."""
    recompute: bool = False


def build(size: str, method: str, *, liger: bool) -> Any:
    values = of_catalog("tiny" if ON_CPU else SIZES[size])
    if size == "8b8" and not ON_CPU:
        values["num_hidden_layers"] = 8
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    if liger:
        from transformers.integrations import apply_liger_kernel

        apply_liger_kernel(model, {"cross_entropy": False, "fused_linear_cross_entropy": False})
    add_fused_lm_head(model)
    model = get_peft_model(model, ADAPTER, autocast_adapter_dtype=False) if method == "lora" else model
    return model.train()


def batch_of(model: Any, variant: Variant) -> dict[str, Any]:
    """Return rows side by side, or end to end where attention knows the lengths of samples."""
    ids = torch.randint(0, model.config.vocab_size, (variant.rows, TOKENS), device=DEVICE)
    length = TOKENS // variant.samples
    if variant.attn == VARLEN:
        count = variant.rows * variant.samples
        starts = torch.arange(count + 1, device=DEVICE, dtype=torch.int32) * length
        positions = torch.arange(length, device=DEVICE).repeat(count)[None]
        return {
            "input_ids": ids.view(1, -1),
            "position_ids": positions,
            "cu_seq_lens_q": starts,
            "max_length_q": length,
        }
    if variant.samples == 1:
        return {"input_ids": ids}
    positions = torch.arange(length, device=DEVICE).repeat(variant.samples)
    return {"input_ids": ids, "position_ids": positions.expand(variant.rows, -1)}


def measure(model: Any, variant: Variant) -> dict[str, Any]:
    """Return the milliseconds of a forward and backward pass, and what it needed of memory."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation(variant.attn)
    base.gradient_checkpointing_enable({"use_reentrant": False}) if variant.recompute else (
        base.gradient_checkpointing_disable()
    )
    if variant.recompute:
        base.enable_input_require_grads()
    batch = batch_of(model, variant)
    ids = batch["input_ids"]
    batch |= {"labels": ids, "use_cache": False} | ({} if variant.head == "whole" else {"fused_lm_head": True})
    batch |= {"num_trained": ids.numel() - len(ids)} if variant.head == "once" else {}

    def step() -> None:
        model(**batch).loss.backward()

    seconds, enqueued = timed(step)
    model.zero_grad()
    num_tokens = variant.rows * TOKENS
    found = {"ms": 1e3 * seconds, "enqueued_ms": 1e3 * enqueued, "tokens_s": num_tokens / seconds}
    return found | ({} if ON_CPU else {"peak_gb": torch.cuda.max_memory_allocated() / 1e9})


def timed(step: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a step, and those that Python takes to start it."""
    for _ in range(2):
        step()
    wait()
    if not ON_CPU:
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for _ in range(REPEATS):
        step()
    enqueued = time.perf_counter() - began
    wait()
    return (time.perf_counter() - began) / REPEATS, enqueued / REPEATS


def wait() -> None:
    if not ON_CPU:
        torch.cuda.synchronize()


def update(model: Any, *, at_once: bool) -> dict[str, Any]:
    """Return the milliseconds of the update of DeepSpeed's stage 0, as it is or as tuner takes it."""
    import deepspeed

    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, fused=True)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "bf16": {"enabled": True}}
    config |= {"zero_optimization": {"stage": 0}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if at_once:
        compat_update.step_at_once(engine)

    def step() -> None:
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        engine.allreduce_gradients()
        engine.optimizer.step()

    seconds, enqueued = timed(step)
    engine.destroy()
    for hook in (engine.module_forward_pre_hook, engine.module_forward_post_hook):
        hook.remove()  # they hold the engine, with the optimizer's states
    return {"ms": 1e3 * seconds, "enqueued_ms": 1e3 * enqueued, "tensors": len(weights)}


def variants(size: str, *, liger: bool) -> Iterator[Variant]:
    few, more = ROWS[size]
    packed = Variant("packed, attention by sample", more, VARLEN, SAMPLES)
    if liger:
        yield replace(packed, name="Liger, packed, attention by sample")
        yield Variant("Liger, recomputation", more, recompute=True)
        yield Variant("Liger", more)
        return
    yield Variant("recomputation, whole logits", few, head="whole", recompute=True)
    yield Variant("whole logits", few, head="whole")
    yield Variant("chunks", few)
    yield Variant("chunks, more rows", more)
    yield Variant("packed, mask", more, samples=SAMPLES)
    yield packed
    yield Variant("one sample a row, attention by sample", more, VARLEN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("method", choices=("full", "lora"))
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="NUMBER", help="of the first variant")
    given = parser.parse_args()
    attention.register()
    for liger in (False, True) if find_spec("liger_kernel") else (False,):
        try_all(given.size, given.method, given.first, liger=liger)


def try_all(size: str, method: str, first: int, *, liger: bool) -> None:
    """Print a line for each variant of a model, from the first one on."""
    model, show = build(size, method, liger=liger), partial(print_line, first)
    for variant in variants(size, liger=liger):
        show(variant.name, partial(measure, model, variant), asdict(variant))
    more = [replace(variant, head="once") for variant in variants(size, liger=liger) if variant.rows == ROWS[size][1]]
    loss.compute_once(model.get_base_model() if method == "lora" else model, [])
    for variant in more:
        show(f"{variant.name}, each logit once", partial(measure, model, variant), asdict(variant))
    if method == "lora":
        fused_lora.fuse(model)
        for variant in more:
            show(f"{variant.name}, LoRA as one function", partial(measure, model, variant), asdict(variant))
    if not liger and (size, method) != ("8b", "full"):
        one_rank()
        for at_once in (False, True):
            show("update at once" if at_once else "update", partial(update, model, at_once=at_once), {})
    if method == "full" and not ON_CPU:
        for layer in model.model.layers:
            layer.compile()
        variant = next(variant for variant in more if variant.attn == "sdpa" and variant.samples == 1)
        show(f"{variant.name}, compiled layers", partial(measure, model, variant), asdict(variant))


def print_line(first: int, name: str, find: Callable[[], dict[str, Any]], facts: dict[str, Any]) -> None:
    if next(NUMBERS) < first:
        return
    try:
        found = find()
    except Exception as error:  # what one variant lacks does not stop the others
        found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in found.items()}
    print(json.dumps(facts | {"name": name} | rounded), flush=True)
    gc.collect()
    torch.cuda.empty_cache()


def one_rank() -> None:
    import deepspeed

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    if ON_CPU:
        compat.build_no_collective()
    deepspeed.init_distributed("gloo" if ON_CPU else "nccl")


if __name__ == "__main__":
    main()
