"""What only a GPU can tell, in pieces of minutes that go on where they were left: `bash bench/gpu.sh` runs it.

    python -m bench.gpu [--out FILE] [--for SECONDS] [--only PREFIX ...] [--list]

Each piece appends a line to FILE (bench/gpu.jsonl): what it found, or why it failed, with the card, the versions and
the commit. A piece that this card has at this commit is not run again, but for one that failed, with --only; FILE.md
has all as tables, made anew after each. A piece has a process of its own, which ends with all that it started.
With --for, no piece begins that may take longer than what is left; the exit code is 75 as long as some are left.

    kernels    bench.gpu_step: what each kernel is worth, in one process without a tool
    speed      the minimal loop, TRL and tuner at equal settings: rows of 2,048 tokens, bf16, no recomputation, fused
               AdamW; tokens a second, their part of the matrix products' ceiling (MFU), and what the GPU did in a step
    users      as people run it: packed chats, everything automatic, beside `trl sft --packing` with and without Liger
    resume     a run that goes on from a checkpoint has the losses of one that did not stop
    tests      those that are marked `gpu`

FLOPs are 6 a parameter and token, 4 where it is frozen, without recomputation. Run on one H200 with torch 2.11, before
this form of it: `ceiling`, and 1B full and LoRA (docs/performance.md). Never run on a GPU: all else. On a CPU all was
tried with `BENCH_DEVICE=cpu` (the catalog's `tiny`, short rows, small matrices; its figures mean nothing), but Liger
and what the profiler sees of a GPU; `tests` are collected alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.jobs import ACCUMULATION, Setting, make_job, make_model, of_catalog, resolved
from bench.steps import WARM_STEPS, intervals
from bench.table import Unmeasured, failed, grid, machine, machine_line, versions
from bench.tools import NAMES, ROOT, Command, Tick, environment, kill_tree, started, ticks, train
from tuner.errors import TunerError
from tuner.machine import hardware

ON_CPU = os.environ.get("BENCH_DEVICE") == "cpu"
SIZES = {"1b": "tiny", "8b": "tiny"} if ON_CPU else {"1b": "llama3_2_1b", "8b": "llama3_8b"}
KERNELS = (("1b", "full"), ("1b", "lora"), ("8b", "lora"), ("8b8", "full"))
USERS = (("1b", "full"), ("8b", "lora"), ("8b", "qlora"))
TOKENS = 64 if ON_CPU else 2048
MICRO_BATCH, STEPS, SAVED_STEP = 4, 8, 4
TOOLS = ("loop", "trl", "tuner")
BY_USERS = ("tuner", "trl", "trl with Liger")
MODELS = ROOT / "build" / "gpu-models"
SLOWER = 8 if ON_CPU else 1
"""On CPUs peers compile a collective first."""
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


def kernels(size: str, method: str, allowed_s: int) -> dict[str, Any]:
    """Return the variants of bench.gpu_step, also those around one that ended its process, and before a time limit."""
    ends, found = time.monotonic() + SLOWER * allowed_s - 5, list[dict[str, Any]]()
    with tempfile.TemporaryFile("w+") as lines:
        while True:
            command = [sys.executable, "-m", "bench.gpu_step", size, method, "--from", str(len(found))]
            place = lines.seek(0, os.SEEK_END)
            try:
                code = subprocess.run(command, cwd=ROOT, stdout=lines, timeout=ends - time.monotonic()).returncode
            except subprocess.TimeoutExpired:
                code = None
            lines.seek(place)
            new = [json.loads(line) for line in lines if line.startswith("{")]
            found += new
            if code == 0:
                return {"variants": found}
            if code is None or (code > 0 and not new):
                return {"variants": found, "failed": "not done in time" if code is None else f"exit code {code}"}
            if not new or "failed" not in new[-1]:
                found.append({"name": f"number {len(found)}", "failed": f"exit code {code}"})


def speed(method: str, tool: str) -> dict[str, Any]:
    """Train a few steps with one tool; return tokens a second, FLOPs a token, and what the GPU did in a later step."""
    ranks = num_ranks()
    setting = Setting(ranks, "bf16", method, 2, MICRO_BATCH, TOKENS, preset="auto")
    with tempfile.TemporaryDirectory(prefix=f"{tool}-") as name:
        job = make_job(Path(name), setting, STEPS, model_at("1b"))
        made = resolved(Path(job.recipe), setting, Path(name) / "never")
        job, profile = replace(job, preset=made.level), Path(name) / "profile.json"
        found = train(tool, job, Path(name), BENCH_PROFILE=str(profile))
        profiled = json.loads(profile.read_text())
    # The step after the profiled one writes the profile.
    step = statistics.median(interval.wall for interval in intervals(found)[2:])
    of_gpu = sorted(profiled["operations"], key=lambda operation: -operation[2])
    return {
        "level": made.level,
        "ranks": ranks,
        "tokens_s_gpu": MICRO_BATCH * ACCUMULATION * TOKENS / step,
        "flops_per_token": flops_per_token(made.recipe.config),
        "peak_bytes": max(interval.gpu_peak_bytes for interval in found),
        "planned_bytes": planned_bytes(made) if tool == "tuner" else None,
        "idle": 1 - sum(seconds for *_, seconds in of_gpu) / profiled["wall_s"] if of_gpu else None,
        "operations": of_gpu[:40],
    }


def num_ranks() -> int:
    return 1 if ON_CPU else len(hardware.detect(os.environ).gpus)


def users(size: str, method: str, tool: str) -> dict[str, Any]:
    """Train a few steps on packed chats with a tool's defaults, and return tokens a second."""
    with tempfile.TemporaryDirectory(prefix="users-") as name:
        folder = Path(name)
        model, chats = model_at(size), make_chats(folder / "chats" / "train.jsonl")
        command = user_of_tuner if tool == "tuner" else partial(user_of_trl, liger=tool == "trl with Liger")
        argv, clock = command(model, chats, method, folder / "run"), folder / "clock.jsonl"
        process = started(Command(argv, {}), folder, clock, num_ranks(), tool.split()[0])
        said = process.communicate()[0]
        if process.returncode or not clock.is_file():
            raise failed(tool, said)
        found = ticks(clock)
    return {"tokens_s_gpu": rate(found) / num_ranks(), "peak_bytes": max(interval.gpu_peak_bytes for interval in found)}


def rate(found: list[Tick]) -> float:
    """Return the tokens a second after the first steps. A step's end knows the tokens that were logged before it."""
    first, last = found[WARM_STEPS : WARM_STEPS + 2], found[-2:]
    return (last[1].num_tokens - first[1].num_tokens) / (last[0].wall - first[0].wall)


def make_chats(file: Path) -> Path:
    """Write chats of 20 to 500 words."""
    draw = random.Random(0)

    def words(most: int) -> str:
        return " ".join(str(draw.randrange(10)) for _ in range(draw.randrange(10, most)))

    file.parent.mkdir()
    with file.open("w", encoding="utf-8") as stream:
        for _ in range(200 if ON_CPU else 20_000):
            turns = [{"role": "user", "content": words(100)}, {"role": "assistant", "content": words(400)}]
            stream.write(json.dumps({"messages": turns}) + "\n")
    return file


def user_of_tuner(model: Path, chats: Path, method: str, run: Path) -> list[str]:
    argv = [sys.executable, "-m", "tuner", "train", "--model", str(model), "--data", str(chats), "--method", method]
    argv += ["--max-length", str(TOKENS), "--max-steps", str(STEPS), "--val-split", "0", "--set", "log.interval=1"]
    return [*argv, "--set", "log.num_samples=0", "--work-dir", str(run)]


def user_of_trl(model: Path, chats: Path, method: str, run: Path, *, liger: bool) -> list[str]:
    options: dict[str, Any] = {"model_name_or_path": model, "dataset_name": chats.parent, "output_dir": run}
    options |= {"packing": True, "max_length": TOKENS, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no"}
    options |= {"attn_implementation": "sdpa", "dtype": "bfloat16", "report_to": "none", "use_cpu": ON_CPU}
    options |= {"use_liger_kernel": True} if liger else {}
    if method != "full":
        options |= {"use_peft": True, "lora_r": 16, "lora_alpha": 32, "lora_target_modules": "all-linear"}
    if method == "qlora":
        options |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks()), "--standalone"]
    return [str(environment("trl") / "bin" / "python"), *launcher, "-m", "trl.scripts.sft", *flags]


def flops_per_token(config: Any) -> float:
    from tuner.fit.operations import model_flops

    return model_flops(config, config.architecture)


def planned_bytes(made: Any) -> float:
    """Return the plan's peak without what the allocator does not count."""
    from bench.memory import predict

    return sum(size for kind, size in predict(made).gpu.items() if kind not in ("context", "fragmentation"))


def model_at(size: str) -> Path:
    """Return the folder of a model, made when it is first asked for, in a process that leaves its GPU free."""
    model, unfinished = MODELS / SIZES[size], MODELS / "unfinished"

    def made() -> dict[str, Any]:
        make_model(unfinished, of_catalog(SIZES[size]), "cpu" if ON_CPU else "cuda", "bf16")
        unfinished.rename(model)
        return {}

    if not model.is_dir() and (found := in_a_process(Piece(f"model {size}", 120, made))):
        raise Unmeasured(f"no model: {found['failed']}")
    return model


def resumes() -> dict[str, Any]:
    """Train with a checkpoint on the way, go on from it in a second run, and return both runs' losses from there."""
    ranks = num_ranks()
    setting = Setting(ranks, "bf16", "full", 2, 1, TOKENS, recompute=True, preset="auto")
    with tempfile.TemporaryDirectory(prefix="resume-") as name:
        # A checkpoint of 1B has 17 GB, and the disk of a machine that is lent may have few.
        job = make_job(Path(name), setting, STEPS, save_every=SAVED_STEP)
        argv = [sys.executable, "-m", "tuner", "train", job.recipe, "--nproc-per-node", str(ranks), "--ignore-fit"]
        argv += ["--set", f"checkpoint.interval={SAVED_STEP}", "--set", "log.interval=1"]
        runs = [Path(name) / "whole", Path(name) / "on"]
        later = ["--resume", str(runs[0] / "checkpoints" / f"checkpoint-{SAVED_STEP}")]
        for run, more in zip(runs, ([], later), strict=True):
            done = subprocess.run([*argv, "--work-dir", str(run), *more], capture_output=True, text=True)
            if done.returncode:
                raise Unmeasured(f"exit code {done.returncode}: {done.stderr[-500:]}")
        whole, on = ([line["loss"] for line in metrics(run) if "loss" in line] for run in runs)
    apart = max(abs(loss - other) for loss, other in zip(whole[SAVED_STEP:], on, strict=True))
    return {"whole": whole[SAVED_STEP:], "resumed": on, "apart": apart}


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tests(*arguments: str) -> dict[str, Any]:
    """Run tests that need a GPU; without one they are only collected."""
    more = ["--collect-only"] if ON_CPU else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rsfE", "-m", "gpu", "-p", "no:randomly", *arguments, *more],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    lines = done.stdout.strip().splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {"passed": done.returncode == 0, "said": lines[-1] if lines else done.stderr[-500:], "not passed": failures}


def pieces() -> Iterator[Piece]:
    """Yield all pieces, what is wanted most first: two calls of ten minutes reach the end of `users`."""
    yield Piece("ceiling", 30, ceiling)
    for size, method in KERNELS:
        yield Piece(f"kernels-{size}-{method}", 140, partial(kernels, size, method, 140))
    for method, tool in itertools.product(("full", "lora"), TOOLS):
        yield Piece(f"speed-1b-{method}-{tool}", 120, partial(speed, method, tool))
    for (size, method), tool in itertools.product(USERS, BY_USERS):
        yield Piece(f"users-{size}-{method}-{tool}", 180, partial(users, size, method, tool))
    yield Piece("resume", 120, resumes)
    kernel_tests, training = "tests/gpu/test_kernels.py", "tests/gpu/test_training.py"
    yield Piece("tests-kernels", 300, partial(tests, kernel_tests))
    yield Piece("tests-runs", 150, partial(tests, training, "-k", "not every_preset"))
    # The first of them compiles DeepSpeed's Adam for offloading, which the others find.
    for method in ("full", "qlora", "lora and not qlora", "freeze", "dora"):
        wanted, allowed_s = f"every_preset and {method}", 240 if method == "full" else 180
        yield Piece(f"tests-{method.split()[0]}", allowed_s, partial(tests, training, "-k", wanted))


@cache
def surroundings() -> dict[str, Any]:
    """Return what a result depends on: the cards, the versions and the commit."""
    commit = ""
    with contextlib.suppress(OSError):  # there may be no git
        described = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        commit = described.stdout.strip()
    cards = machine()["gpus"] or ["no GPU"]
    commit = commit or os.environ.get("COMMIT", "unknown")
    return {"cards": cards, "commit": commit, "versions": dict(versions()), "machine": machine_line()}


def run(piece: Piece, out: Path) -> None:
    """Find one thing out and append it; what fails is written down too, and what is interrupted is tried again."""
    print(f"{piece.name} ...", file=sys.stderr, flush=True)
    began = time.monotonic()
    found = in_a_process(piece)
    facts = {"piece": piece.name, "at": datetime.now(UTC).isoformat(timespec="seconds"), **surroundings()}
    found |= {"seconds": round(time.monotonic() - began, 1)}
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(facts | found) + "\n")
    print(f"{piece.name}: {found}", file=sys.stderr, flush=True)


def in_a_process(piece: Piece) -> dict[str, Any]:
    """Return what a piece finds; its process, and all that it started, are gone then, and leave nothing on the GPU."""
    context = multiprocessing.get_context("fork")
    receiving, sending = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True) as scratch:
        child = context.Process(target=_find, args=(piece, sending, scratch))
        child.start()
        sending.close()
        try:
            if receiving.poll(SLOWER * piece.allowed_s):
                return dict(receiving.recv())
            return {"failed": f"not done after {piece.allowed_s} s"}
        except EOFError:
            child.join()
            return {"failed": f"its process ended with exit code {child.exitcode}"}
        finally:
            assert child.pid is not None
            kill_tree(child.pid)
            child.join()


def _find(piece: Piece, sending: Connection, scratch: str) -> None:
    os.setsid()
    tempfile.tempdir = os.environ["TMPDIR"] = scratch  # gone with the process
    try:
        found = piece.find()
    except (Unmeasured, TunerError) as error:
        found = {"failed": str(error)}
    except Exception as error:  # such as what CUDA raises: the pieces behind it are tried
        traceback.print_exc()
        found = {"failed": f"{type(error).__name__}: {str(error)[:200]}"}
    sending.send(found)


def results(out: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each piece of this card and commit."""
    here = surroundings()
    lines = map(json.loads, out.read_text(encoding="utf-8").splitlines()) if out.is_file() else ()
    return {line["piece"]: line for line in lines if all(line[key] == here[key] for key in ("cards", "commit"))}


def is_open(result: dict[str, Any] | None, *, again: bool) -> bool:
    """Return whether a piece is to be run: it was not yet, or it failed and its name is given."""
    return result is None or (again and "failed" in result)


def tables(found: dict[str, dict[str, Any]]) -> str:
    """Return results as Markdown, with the pieces that are not measured."""
    top = found.get("ceiling", {}).get("flops_s")
    lines = [next(iter(found.values()))["machine"] if found else machine_line(), ""]
    lines += [f"Matrix products: {top / 1e12:,.1f} TFLOP/s in bf16." if top else "Matrix products: not measured.", ""]
    rows = []
    for method, tool in itertools.product(("full", "lora"), TOOLS):
        measured = found.get(f"speed-1b-{method}-{tool}", {"failed": "not measured"})
        loop = found.get(f"speed-1b-{method}-loop", {}).get("tokens_s_gpu")
        rows.append({"model, method": f"1b {method}", "tool": NAMES[tool], **speed_cells(measured, top, loop)})
    lines += [grid(rows), ""]
    by_users = [
        {"as users run it": f"{size} {method}"}
        | {tool: _rate(found.get(f"users-{size}-{method}-{tool}")) for tool in BY_USERS}
        for size, method in USERS
    ]
    lines += [grid(by_users), ""]
    for size, method in KERNELS:
        variants = found.get(f"kernels-{size}-{method}", {}).get("variants")
        shown = ("name", "rows", "ms", "enqueued_ms", "tokens_s", "peak_gb", "failed")
        table = [{key: variant[key] for key in shown if key in variant} for variant in variants or ()]
        lines += [f"Kernels, {size} {method}:", "", grid(table) if table else "not measured", ""]
    lines += [f"Resumed from a checkpoint: {found.get('resume', 'not measured')}", ""]
    told = {name: result for name, result in found.items() if name.startswith("tests-")}
    lines += [f"- {name}: {result.get('said', result)}" for name, result in told.items()] or ["Tests: not measured."]
    lines += [f"  - {line}" for result in told.values() for line in result.get("not passed", ())]
    return "\n".join((*lines, ""))


def _rate(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not measured"
    return result["failed"] if "failed" in result else f"{result['tokens_s_gpu']:,.0f} tokens/s"


def speed_cells(result: dict[str, Any], top: float | None, loop: float | None) -> dict[str, str]:
    if "failed" in result:
        return {"ZeRO": "", "tokens/s a GPU": result["failed"]}
    speed, planned = result["tokens_s_gpu"], result["planned_bytes"]
    return {
        "ZeRO": result["level"].removeprefix("deepspeed_"),
        "tokens/s a GPU": f"{speed:,.0f}",
        "MFU": f"{speed * result['flops_per_token'] / top:.1%}" if top else "",
        "/ loop": f"{speed / loop:.2f}" if loop else "",
        "idle": "" if result["idle"] is None else f"{result['idle']:.0%}",
        "peak, GB": f"{result['peak_bytes'] / 1e9:.1f}" if result["peak_bytes"] else "",
        "planned, GB": f"{planned / 1e9:.1f}" if planned else "",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "gpu.jsonl", metavar="FILE")
    parser.add_argument(
        "--for", type=float, dest="seconds", default=float("inf"), help="begin nothing that may end later"
    )
    parser.add_argument("--only", nargs="+", default=[""], metavar="PREFIX", help="pieces whose names begin so")
    parser.add_argument("--list", action="store_true", help="name the pieces, and what each may take")
    given = parser.parse_args()
    if not (ON_CPU or given.list or hardware.detect(os.environ).gpus):
        parser.error("no GPU is visible; BENCH_DEVICE=cpu tries the pieces with a tiny model")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what runs on the GPU ends too
    ends, left = time.monotonic() + given.seconds, []
    for piece in pieces():
        if not piece.name.startswith(tuple(given.only)):
            continue
        if given.list:
            print(f"{piece.name}: {piece.allowed_s} s")
        elif is_open(results(given.out).get(piece.name), again=given.only != [""]):
            if time.monotonic() + piece.allowed_s > ends:
                left.append(piece.name)
                continue
            run(piece, given.out)
            given.out.with_suffix(".md").write_text(tables(results(given.out)), encoding="utf-8")
    if left:
        print(f"left, run it again: {', '.join(left)}", file=sys.stderr)
    return LEFT if left else 0


if __name__ == "__main__":
    sys.exit(main())
