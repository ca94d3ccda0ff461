"""What only a GPU can tell, in pieces of minutes that go on where they were left: `bash bench/gpu.sh` runs it.

    python -m bench.gpu --out DIR [--for SECONDS] [--only PREFIX ...] [--list]

Each piece leaves one JSON file in DIR and is not run again; `tables.md` there is made anew after each. With --for, no
piece begins that may take longer than what is left, and the exit code is 75 as long as some are left.

Tokens a second and their part of the matrix-product ceiling of the same GPU (MFU), of full, LoRA and QLoRA training of
the catalog's Llama 1B and 8B with random weights: rows of 2,048 tokens, bf16, recomputation, fused AdamW, the ZeRO
level that `tuner plan` chooses, and the same for the minimal loop, TRL and tuner. FLOPs are 6 a parameter and token,
4 where it is frozen, without recomputation. Peaks are the allocator's, beside the plan's.

Run on one H200 with torch 2.11: `ceiling`, and 1B full and LoRA (docs/performance.md). Never run on a GPU: QLoRA, 8B,
`resume`, several GPUs. On a CPU every piece was tried with `BENCH_DEVICE=cpu`, which takes the catalog's `tiny`, rows
of 64 tokens, two ranks and small matrices, and only collects the tests; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.jobs import ACCUMULATION, Setting, make_job, make_model, of_catalog, resolved
from bench.steps import intervals
from bench.table import Unmeasured, grid, machine_line
from bench.tools import NAMES, ROOT, train
from tuner.errors import TunerError
from tuner.machine import hardware

ON_CPU = os.environ.get("BENCH_DEVICE") == "cpu"
SIZES = {"1b": "tiny", "8b": "tiny"} if ON_CPU else {"1b": "llama3_2_1b", "8b": "llama3_8b"}
MICRO_BATCH = {"1b": 4, "8b": 1}
TOKENS = 64 if ON_CPU else 2048
STEPS, SAVED_STEP = 8, 4
METHODS = ("full", "lora", "qlora")
TOOLS = ("loop", "trl", "tuner")
LEFT = 75
"""Exit code while pieces are left: the same as a stopped run that can go on."""


@dataclass(frozen=True)
class Piece:
    """One thing to find out, in at most `allowed_s` seconds."""

    name: str
    allowed_s: int
    find: Callable[[], dict[str, Any]]


def ceiling() -> dict[str, Any]:
    """Return the FLOPs a second that the device reaches in products of large bf16 matrices."""
    import torch

    device, width = ("cpu", 512) if ON_CPU else ("cuda", 8192)
    left, right = (torch.randn(width, width, dtype=torch.bfloat16, device=device) for _ in range(2))

    def seconds(repeats: int) -> float:
        _wait()
        began = time.perf_counter()
        for _ in range(repeats):
            left @ right
        _wait()
        return (time.perf_counter() - began) / repeats

    seconds(5)  # clocks rise, and the library chooses its kernel
    found = statistics.median(seconds(10) for _ in range(5))
    return {"width": width, "flops_s": 2 * width**3 / found}


def _wait() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def speed(size: str, method: str, tool: str, folder: Path) -> dict[str, Any]:
    """Train a few steps with one tool; return tokens a second, FLOPs a token and the peak of rank 0."""
    ranks = 2 if ON_CPU else len(hardware.detect(os.environ).gpus)
    setting = Setting(ranks, "bf16", method, 2, MICRO_BATCH[size], TOKENS, recompute=True, preset="auto")
    with tempfile.TemporaryDirectory(prefix=f"{tool}-") as name:
        job = make_job(Path(name), setting, STEPS, model_at(folder, size))
        made = resolved(Path(job.recipe), setting, Path(name) / "never")
        job = replace(job, preset=made.level)
        found = train(tool, job, Path(name))
    step = statistics.median(one.wall for one in intervals(found))
    tokens = MICRO_BATCH[size] * ACCUMULATION * TOKENS * ranks
    return {
        "level": made.level,
        "ranks": ranks,
        "tokens_s_gpu": tokens / step / ranks,
        "flops_per_token": flops_per_token(made.recipe.config),
        "peak_bytes": max(one.gpu_peak_bytes for one in found),
        "planned_bytes": planned_bytes(made) if tool == "tuner" else None,
    }


def flops_per_token(config: Any) -> float:
    from tuner.fit.operations import model_flops

    return model_flops(config, config.architecture)


def planned_bytes(made: Any) -> float:
    """Return the plan's peak without what the allocator does not count."""
    from bench.memory import predict

    return sum(size for kind, size in predict(made).gpu.items() if kind not in ("context", "fragmentation"))


def model_at(folder: Path, size: str) -> Path:
    """Return the folder of a model, made when it is first asked for."""
    model = folder / size
    if not (model / "config.json").is_file():
        make_model(model, of_catalog(SIZES[size]), "cpu" if ON_CPU else "cuda", "bf16")
    return model


def resumes(folder: Path) -> dict[str, Any]:
    """Train with a checkpoint on the way, go on from it in a second run, and return both runs' losses from there."""
    ranks = 2 if ON_CPU else len(hardware.detect(os.environ).gpus)
    setting = Setting(ranks, "bf16", "full", 2, 1, TOKENS, recompute=True, preset="auto")
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        job = make_job(Path(name), setting, STEPS, model_at(folder, "1b"), save_every=SAVED_STEP)
        argv = [sys.executable, "-m", "tuner", "train", job.recipe, "--nproc-per-node", str(ranks), "--ignore-fit"]
        argv += ["--set", f"checkpoint.interval={SAVED_STEP}", "--set", "log.interval=1"]
        runs = [Path(name) / "whole", Path(name) / "on"]
        later = ["--resume", str(runs[0] / "checkpoints" / f"checkpoint-{SAVED_STEP}")]
        for run, more in zip(runs, ([], later), strict=True):
            done = subprocess.run([*argv, "--work-dir", str(run), *more], capture_output=True, text=True)
            if done.returncode:
                raise Unmeasured(f"exit code {done.returncode}: {done.stderr[-500:]}")
        whole, on = ([line["loss"] for line in metrics(run) if "loss" in line] for run in runs)
    apart = max(abs(one - other) for one, other in zip(whole[SAVED_STEP:], on, strict=True))
    return {"whole": whole[SAVED_STEP:], "resumed": on, "apart": apart}


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tests(*arguments: str) -> dict[str, Any]:
    """Run tests that need a GPU; without one they are only collected."""
    more = ["--collect-only"] if ON_CPU else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:randomly", *arguments, *more],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {"passed": done.returncode == 0, "said": lines[-1] if lines else done.stderr[-500:], "not passed": failures}


def pieces(folder: Path) -> Iterator[Piece]:
    """Yield all pieces, what is wanted most first. All that they may take are 67 minutes; about 40 are expected."""
    kernels, training = "tests/gpu/test_kernels.py", "tests/gpu/test_training.py"
    yield Piece("ceiling", 30, ceiling)
    yield from (speed_piece("1b", method, tool, 90, folder) for method, tool in itertools.product(METHODS, TOOLS))
    yield Piece("resume", 120, partial(resumes, folder))
    yield from (speed_piece("8b", method, tool, 180, folder) for method, tool in itertools.product(METHODS, TOOLS))
    yield Piece("tests-kernels", 300, partial(tests, kernels))
    yield Piece("tests-runs", 150, partial(tests, training, "-k", "not every_preset"))
    # The first of them compiles DeepSpeed's Adam for offloading, which the others find.
    for method in ("full", "qlora", "lora and not qlora", "freeze", "dora"):
        wanted, allowed_s = f"every_preset and {method}", 240 if method == "full" else 180
        yield Piece(f"tests-{method.split()[0]}", allowed_s, partial(tests, training, "-k", wanted))


def speed_piece(size: str, method: str, tool: str, allowed_s: int, folder: Path) -> Piece:
    return Piece(f"speed-{size}-{method}-{tool}", allowed_s, partial(speed, size, method, tool, folder))


def run(piece: Piece, out: Path) -> None:
    """Find one thing out and write it down; what fails is written down too, and not tried again."""
    print(f"{piece.name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    signal.signal(signal.SIGALRM, lambda *_: _too_long(piece))
    signal.alarm(piece.allowed_s * (4 if ON_CPU else 1))  # on CPUs peers compile a collective first
    try:
        found = piece.find()
    except (Unmeasured, TunerError) as error:
        found = {"failed": str(error)}
    finally:
        signal.alarm(0)
    found |= {"seconds": round(time.monotonic() - began, 1)}
    (out / f"{piece.name}.json").write_text(json.dumps(found, indent=2), encoding="utf-8")
    print(f"{piece.name}: {found}", file=sys.stderr, flush=True)


def _too_long(piece: Piece) -> None:
    raise Unmeasured(f"not done after {piece.allowed_s} s")


def tables(out: Path) -> str:
    """Return all that was found so far as Markdown."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(out.glob("*.json"))}
    top = found.get("ceiling", {}).get("flops_s")
    lines = [machine_line(), ""]
    lines += [f"Matrix products: {top / 1e12:,.1f} TFLOP/s in bf16." if top else "Matrix products: not measured.", ""]
    rows = []
    for size, method, tool in itertools.product(SIZES, METHODS, TOOLS):
        one = found.get(f"speed-{size}-{method}-{tool}")
        if one:
            loop = found.get(f"speed-{size}-{method}-loop", {}).get("tokens_s_gpu")
            rows.append({"model, method": f"{size} {method}", "tool": NAMES[tool], **speed_cells(one, top, loop)})
    lines.append(grid(rows))
    if "resume" in found:
        lines += ["", f"Resumed from a checkpoint: {found['resume']}"]
    told = [f"- {name}: {one.get('said', one)}" for name, one in found.items() if name.startswith("tests-")]
    told += [f"  - {line}" for name, one in found.items() for line in one.get("not passed", ())]
    return "\n".join((*lines, "", *told, ""))


def speed_cells(one: dict[str, Any], top: float | None, loop: float | None) -> dict[str, str]:
    if "failed" in one:
        return {"ZeRO": "", "tokens/s a GPU": one["failed"]}
    rate, planned = one["tokens_s_gpu"], one["planned_bytes"]
    return {
        "ZeRO": one["level"].removeprefix("deepspeed_"),
        "tokens/s a GPU": f"{rate:,.0f}",
        "MFU": f"{rate * one['flops_per_token'] / top:.1%}" if top else "",
        "/ loop": f"{rate / loop:.2f}" if loop else "",
        "peak, GB": f"{one['peak_bytes'] / 1e9:.1f}" if one["peak_bytes"] else "",
        "planned, GB": f"{planned / 1e9:.1f}" if planned else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-tables")
    parser.add_argument(
        "--for", type=float, dest="seconds", default=float("inf"), help="begin nothing that may end later"
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="pieces whose names begin so")
    parser.add_argument("--list", action="store_true", help="name the pieces, and what each may take")
    given = parser.parse_args()
    if not (ON_CPU or given.list or hardware.detect(os.environ).gpus):
        parser.error("no GPU is visible; BENCH_DEVICE=cpu tries the pieces with a tiny model")
    given.out.mkdir(parents=True, exist_ok=True)
    ends, left = time.monotonic() + given.seconds, []
    for piece in pieces(given.out / "models"):
        if not piece.name.startswith(tuple(given.only)):
            continue
        if given.list:
            print(f"{piece.name}: {piece.allowed_s} s")
        elif not (given.out / f"{piece.name}.json").is_file():
            if time.monotonic() + piece.allowed_s > ends:
                left.append(piece.name)
                continue
            run(piece, given.out)
            (given.out / "tables.md").write_text(tables(given.out), encoding="utf-8")
    if left:
        print(f"left, run it again: {', '.join(left)}", file=sys.stderr)
    return LEFT if left else 0


if __name__ == "__main__":
    sys.exit(main())
