"""Memory that `tuner plan` predicts beside what real ranks hold: sizes x {full, lora, qlora} x the five presets.

    python bench/memory.py [--all] [--size NAME] [--method NAME] [--preset NAME] [--dtype bf16]
    python bench/memory.py --objectives        # each objective, full and lora, rows long enough to be seen
    python bench/memory.py --long              # rows of 4,096 tokens: shared by ranks, MLPs in tiles

It makes models of random weights and trains them through tuner's own worker, on every visible GPU, else on two CPU
ranks. Reach on a CPU: weights, gradients and optimizer states of every rank exact at the end of backward (the larger of
two micro-batches), and the peak of all live storages over a step; docs/plan.md says what the last bytes are. Reach on
GPUs: the allocator's peak over a step within 10 %, 5 % in the median. The predicted peak is without CUDA's context and
fragmentation; on a CPU, GPU and host are one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from bench import jobs
from bench.table import processor
from tuner import assets
from tuner.fit.estimate import peak
from tuner.fit.levels import Costs, Peak
from tuner.launch import render, supervise
from tuner.launch.resolve import resolve_run
from tuner.launch.resolved_run import Request, ResolvedRun
from tuner.machine import hardware
from tuner.machine.hardware import Hardware
from tuner.machine.topology import LaunchFlags
from tuner.recipes import catalog
from tuner.recipes.names import identify
from tuner.recipes.recipe import Overrides
from tuner.runs import creation
from tuner.worker.quiet import quiet_libraries

RANK = Path(__file__).with_name("memory_rank.py")
METHODS = ("full", "lora", "qlora")
KINDS = ("weights", "gradients", "optimizer_states")
COLUMNS = (
    *("model", "method", "preset", "dtype", *(kind.replace("_", " ") for kind in KINDS)),
    *("off by, bytes", "else alive", "peak", "off by"),
)
CPU_RANKS = 2
# hidden, intermediate, layers, heads, key-value heads, vocabulary, tied
SIZES = {
    "5M": (256, 704, 4, 4, 2, 4096, False),
    "19M": (384, 1280, 7, 6, 2, 8192, False),
    "36M": (256, 704, 4, 4, 2, 65536, False),
    "88M": (768, 2048, 10, 12, 4, 16384, False),
    "1B": (2048, 8192, 16, 32, 8, 128256, True),
    "3B": (3072, 8192, 28, 24, 8, 128256, True),
    "8B": (4096, 14336, 32, 32, 8, 128256, False),
}
ON_CPU, ON_GPU = ("5M", "19M", "88M"), ("1B", "3B", "8B")
TOKENS = {False: 64, True: 2048}
"""Length of a row on a CPU, on a GPU."""
OBJECTIVES = ("sft", "dpo", "kto", "orpo", "reward")
LONGER = 512
"""Of the rows of `--objectives` on a CPU."""
LONGEST = 4096
"""Of the rows of `--long`."""


@dataclass(frozen=True)
class Case:
    """One training to measure."""

    size: str
    method: str
    preset: str
    dtype: str
    objective: str = "pretrain"
    tokens: int | None = None
    """Of a row; None: as many as `TOKENS` says."""
    sets: tuple[tuple[str, object], ...] = ()
    """What else the recipe says."""


@dataclass(frozen=True)
class Found:
    """Bytes of one rank by kind, GPU and host together; and the peak of a step, on the GPU where there is one."""

    predicted: dict[str, float]
    measured: dict[str, int]
    predicted_peak: float
    measured_peak: int

    @property
    def off_by(self) -> float:
        return sum(self.measured[kind] - self.predicted[kind] for kind in KINDS)

    @property
    def peak_off(self) -> float:
        """By how much the prediction is off, as a part of what was measured."""
        return self.predicted_peak / self.measured_peak - 1


def make_model(folder: Path, size: str, device: str) -> Path:
    """Save a Llama of random bf16 weights with the tokenizer of the package's tiny model; return its folder."""
    import torch

    hidden, inner, layers, heads, groups, vocabulary, tied = SIZES[size]
    shape = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": groups, "tie_word_embeddings": tied}
    shape |= {"model_type": "llama", "max_position_embeddings": 4096}
    made = jobs.make_model(folder / size, shape, device, "bf16")
    torch.cuda.empty_cache()  # the ranks need that memory
    return made


def make_data(folder: Path, tokens: int = LONGER) -> Path:
    """Write texts long enough to fill every row, and pairs of answers as long as `tokens`; return their folder."""
    text = "why so? " * 5_000
    answer = longest_answer(tokens)
    turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": text}]
    files: dict[str, list[dict[str, Any]]] = {
        "pretrain": [{"text": f"{row} {text}"} for row in range(8)],
        "sft": [{"messages": turns}] * 32,
        # Of pairs that are too long nothing is left; one side shorter than the other makes padding.
        "pairs": [{"prompt": "So?", "chosen": answer, "rejected": answer[:-8]}] * 32,
    }
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def longest_answer(tokens: int) -> str:
    """Return an answer that together with the question and the chat template has at most so many tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets.asset("package:tiny"))

    def length(words: int) -> int:
        turns = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": "so " * words}]
        return len(tokenizer.apply_chat_template(turns, return_dict=False))

    return "so " * (bisect_right(range(tokens), tokens, key=length) - 1)


def planned(case: Case, model: Path, data: Path, run: Path, here: Hardware) -> ResolvedRun:
    """Return tuner's plan of the case with the bench's rank in the place of the worker."""
    sets = {
        "optim_wrapper.dtype": case.dtype,
        "accumulative_counts": 2,
        "train_dataloader.dataset.max_length": case.tokens or TOKENS[bool(here.gpus)],
        "max_steps": 2,
        "log.num_samples": 0,
    }
    if case.objective == "kto":
        sets["train_dataloader.batch_size"] = 2
    if case.objective != "pretrain":
        sets["gradient_checkpointing"] = True
    sets |= dict(case.sets)
    if case.method != "full" and not here.gpus:
        sets["lora_dropout"] = 0.0  # its masks take 2 bytes a number on a CPU, 1 on a GPU
    rows = data / f"{case.objective if case.objective in ('pretrain', 'sft') else 'pairs'}.jsonl"
    overrides = Overrides(str(model), str(rows), pairs=[("--set", f"{key}={value}") for key, value in sets.items()])
    flags = LaunchFlags(nproc_per_node=len(here.gpus) or CPU_RANKS)
    name = f"tiny_{case.objective}_{case.method}_custom_e1".replace("sft_", "")
    request = Request(identify(name), overrides, case.preset, flags, work_dir=run, ignore_fit=True)
    return resolve_run(request, os.environ, here, datetime.now(UTC))


def predict(made: ResolvedRun) -> Peak:
    config, topology = made.recipe.config, made.topology
    assert config.architecture is not None
    costs = Costs.of_config(made.final.config)
    weight_bytes = 4 if made.precision.dtype == "fp32" else 2
    return peak(config, config.architecture, costs, topology.world_size, topology.nproc_per_node, weight_bytes)


def train(made: ResolvedRun) -> list[dict[str, Any]]:
    """Run the plan's ranks until they have looked at themselves; return what each saw."""
    run = creation.create(made.run_path, render.files(made), resume=False)
    argv = [sys.executable, str(RANK), str(made.run_path)]  # in the place of tuner's own worker
    path = os.pathsep.join(filter(None, (str(RANK.parents[1]), os.environ.get("PYTHONPATH"))))
    env = os.environ | render.environment(made) | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    if supervise.run(argv, env, run, ranks=render.of_ranks(made.topology), grace_s=60, shows_rank_0=False):
        logs = "\n".join(path.read_text(errors="replace") for path in sorted(run.ranks.glob("*.log")))
        raise SystemExit(f"{made.run_path.name} failed:\n{logs}")
    return [json.loads(path.read_text()) for path in sorted(run.path.glob("memory-*.json"))]


def compare(made: ResolvedRun, seen: list[dict[str, Any]]) -> Found:
    """Return the prediction beside the rank and micro-batch that held most."""
    expected, ranks = predict(made), made.topology.nproc_per_node
    predicted = {kind: expected.gpu[kind] + expected.host.get(kind, 0.0) / ranks for kind in KINDS}
    measured = max((held for rank in seen for held in rank["held"]), key=lambda held: sum(held[kind] for kind in KINDS))
    without = sum(size for kind, size in expected.gpu.items() if kind not in ("context", "fragmentation"))
    if not made.hardware.gpus:
        without += sum(expected.host.get(kind, 0.0) for kind in KINDS) / ranks
    return Found(predicted, measured, without, max(rank["peak"] for rank in seen))


def measure(case: Case, model: Path, data: Path, run: Path, here: Hardware) -> Found | None:
    """Train one case, or return None where its GPUs are too small for it."""
    made = planned(case, model, data, run, here)
    if here.gpus and predict(made).gpu_bytes > here.smallest_gpu_bytes:
        return None
    return compare(made, train(made))


def row(case: Case, found: Found | None) -> str:
    sets = "".join(f", {key}={value}" for key, value in case.sets)
    cells = [case.size, f"{case.objective} {case.method}{sets}", case.preset.removeprefix("deepspeed_"), case.dtype]
    if found is None:
        return "| " + " | ".join((*cells, "too large for this GPU")) + " |"
    cells += [f"{found.predicted[kind] / 1e6:,.3f} / {found.measured[kind] / 1e6:,.3f}" for kind in KINDS]
    cells += [f"{found.off_by:+,.0f}", f"{found.measured['other'] / 1e6:,.1f}"]
    cells += [f"{found.predicted_peak / 1e6:,.1f} / {found.measured_peak / 1e6:,.1f}", f"{found.peak_off:+.1%}"]
    return "| " + " | ".join(cells) + " |"


def header(here: Hardware) -> str:
    """Return where this is measured, by its name, and the table's head."""
    import torch

    ranks = len(here.gpus) or CPU_RANKS
    where = (
        f"{here.describe()} ({processor()}), {ranks} ranks, {TOKENS[bool(here.gpus)]} tokens, torch {torch.__version__}"
    )
    return f"{where}; MB, predicted / measured\n\n| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS)


def cases(given: argparse.Namespace, here: Hardware) -> Iterator[Case]:
    """Yield what was asked for: by default the smallest size, with --all every one, and that in fp32 too."""
    known = ON_GPU if here.gpus else ON_CPU
    if given.long:
        yield from of_long_rows(given.size or known[0], given.method or "full", here)
        return
    if given.objectives:
        yield from of_objectives(given.size or known[0], here)
        return
    sizes = (given.size,) if given.size else known if given.all else known[:1]
    methods = (given.method,) if given.method else METHODS
    presets = (given.preset,) if given.preset else tuple(catalog.presets())
    for size, method, preset in product(sizes, methods, presets):
        yield Case(size, method, preset, given.dtype)
    if given.all:
        yield from (Case(sizes[0], "full", preset, "fp32") for preset in presets)


def of_objectives(size: str, here: Hardware) -> Iterator[Case]:
    """Yield each objective in full and with LoRA, and on a CPU one with a vocabulary that is large for its model."""
    tokens = None if here.gpus else LONGER
    for objective, method in product(OBJECTIVES, ("full", "lora")):
        yield Case(size, method, "deepspeed_zero2", "bf16", objective, tokens)
    if not here.gpus:
        for objective in ("sft", "orpo"):
            yield Case("36M", "lora", "deepspeed_zero2", "bf16", objective, LONGER)


def of_long_rows(size: str, method: str, here: Hardware) -> Iterator[Case]:
    """Yield what long rows need, without and with each key; of a reward model, whose peak no logits hide, in tiles."""
    each: list[tuple[str, tuple[tuple[str, object], ...]]] = [("sft", ()), ("sft", (("sequence_parallel_size", 2),))]
    each += [("reward", ()), ("reward", (("tiled_mlp", True),))]
    each += [("reward", (("activation_offloading", True),))] if here.gpus else []
    for objective, sets in each:
        yield Case(size, method, "deepspeed_zero2", "bf16", objective, LONGEST, sets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every size, and fp32 too")
    parser.add_argument("--objectives", action="store_true", help="each objective at ZeRO-2 instead")
    parser.add_argument("--long", action="store_true", help="long rows: shared by ranks, MLPs in tiles")
    parser.add_argument("--size", choices=SIZES)
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--preset", choices=catalog.presets())
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    given, here = parser.parse_args(), hardware.detect(os.environ)
    quiet_libraries()
    os.environ["DS_ACCELERATOR"] = "cuda" if here.gpus else "cpu"
    print(header(here))
    with tempfile.TemporaryDirectory() as scratch:
        longest = LONGEST if given.long else LONGER
        found = list(table(cases(given, here), Path(scratch), here, longest))
    errors = [abs(cell.peak_off) for cell in found if cell]
    if errors:
        print(f"\nlargest error {max(errors):.1%}, median {statistics.median(errors):.1%}")


def table(wanted: Iterator[Case], folder: Path, here: Hardware, tokens: int) -> Iterator[Found | None]:
    """Measure each case and print its row; a model is made when its first case comes."""
    models: dict[str, Path] = {}
    data = make_data(folder, max(tokens, TOKENS[True]) if here.gpus else tokens)
    for number, case in enumerate(wanted):
        if case.size not in models:
            models[case.size] = make_model(folder, case.size, "cuda" if here.gpus else "cpu")
        found = measure(case, models[case.size], data, folder / f"run-{number}", here)
        print(row(case, found), flush=True)
        yield found


if __name__ == "__main__":
    main()
