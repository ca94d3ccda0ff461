"""How each tool is told to train the same thing: the suite's peers, where they are installed, and their commands.

`loop` and `trainer` (bench/by_hand.py) and `tuner` run in this environment; the others in those that bench/peers.sh
makes. What is equal for all is a `Job`; what a tool needs beside it stands in its function below, with the reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from bench.table import NOT_INSTALLED, Unmeasured, failed
from tuner.machine.launchers import without_variables

ROOT = Path(__file__).parents[1]
CLOCK = ROOT / "bench" / "clock"
PEERS = Path(os.environ.get("PEERS", ROOT / "build" / "peers")).absolute()
LONGEST_S = 1800


@dataclass(frozen=True)
class Job:
    """What is trained, in the same words for every tool."""

    model: str
    """A folder of random weights, with a tokenizer."""
    rows: str
    """A JSON Lines file of {"text": ...}, each at least `row_tokens` long."""
    recipe: str
    """tuner's recipe of the same."""
    preset: str
    zero: str
    """A file: the DeepSpeed config that tuner makes of recipe and preset, for the others."""
    adapter: Mapping[str, Any]
    """PEFT's r, lora_alpha and lora_dropout; empty in full."""
    ranks: int
    dtype: str
    method: str
    steps: int
    lr: float
    row_tokens: int
    micro_batch: int
    accumulation: int
    recompute: bool = False
    offloads: bool = False
    device: str = "cpu"
    save_every: int | None = None
    out: str = ""
    """Where checkpoints go; `start` fills it in."""


@dataclass(frozen=True)
class Command:
    argv: list[str]
    env: Mapping[str, str]


@dataclass(frozen=True)
class Tick:
    """The end of one optimizer step in rank 0."""

    wall: float
    cpu: float
    gpu_peak_bytes: int
    aside_wall: float = 0.0
    """Seconds after the step that the measurement took itself, of the wall and of the processor."""
    aside_cpu: float = 0.0
    max_steps: int = 0
    """The steps that the tool meant to take."""
    num_tokens: float = 0.0
    """What the tool has logged of the tokens of all steps before."""


def by_hand(which: str, job: Job, folder: Path) -> Command:
    file = folder / "job.json"
    file.write_text(json.dumps({**asdict(job), "arguments": _trainers(job)}))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks), "--standalone"]
    return Command([*launcher, str(ROOT / "bench" / "by_hand.py"), which, str(file)], {})


def tuner(job: Job, folder: Path) -> Command:
    wanted = {"checkpoint.interval": job.save_every or 100_000, "max_steps": job.steps}
    sets = [part for key, value in wanted.items() for part in ("--set", f"{key}={value}")]
    where = ["--work-dir", job.out, "--deepspeed", job.preset, "--nproc-per-node", str(job.ranks)]
    # Another bench or a test may use this machine's memory; what is measured is known to fit.
    argv = [sys.executable, "-m", "tuner", "train", job.recipe, *where, *sets, "--ignore-fit"]
    return Command(argv, {"PYTHONPATH": os.pathsep.join((str(CLOCK), str(ROOT)))})


def trl(job: Job, folder: Path) -> Command:
    arguments = {**_trainers(job), "model_name_or_path": job.model, "dataset_name": _only(job.rows, folder)}
    arguments |= {"max_length": job.row_tokens, "dtype": "bfloat16" if job.dtype == "bf16" else "float32"}
    if job.method != "full":
        arguments |= {"use_peft": True, "lora_target_modules": "all-linear"}
        arguments |= {f"lora_{name.removeprefix('lora_')}": value for name, value in job.adapter.items()}
    if job.method == "qlora":
        arguments |= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True}
    flags = [part for name, value in arguments.items() for part in (f"--{name}", str(value))]
    # Its own launcher, accelerate's, starts several CPU ranks only through MPI, and under DeepSpeed a single process
    # asks for mpi4py; so what `trl sft` starts is started by torchrun.
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(job.ranks), "--standalone"]
    return Command([str(environment("trl") / "bin" / "python"), *launcher, "-m", "trl.scripts.sft", *flags], {})


def llamafactory(job: Job, folder: Path) -> Command:
    data = folder / "data"
    data.mkdir()
    (data / "rows.jsonl").symlink_to(job.rows)
    (data / "dataset_info.json").write_text('{"rows": {"file_name": "rows.jsonl", "columns": {"prompt": "text"}}}')
    config = {**_trainers(job), "model_name_or_path": job.model, "stage": "pt", "do_train": True, "dataset": "rows"}
    config |= {"dataset_dir": str(data), "cutoff_len": job.row_tokens, "template": "default"}
    config |= {"disable_gradient_checkpointing": not job.recompute, "optim": "adamw_torch_fused"}
    del config["gradient_checkpointing"]
    config["finetuning_type"] = "full" if job.method == "full" else "lora"
    if job.method != "full":
        adapter = job.adapter
        config |= {"lora_rank": adapter["r"], "lora_alpha": adapter["lora_alpha"], "lora_target": "all"}
        config["lora_dropout"] = adapter["lora_dropout"]
    if job.method == "qlora":
        config |= {"quantization_bit": 4, "quantization_method": "bnb", "quantization_type": "nf4"}
    file = folder / "llamafactory.yaml"  # JSON is YAML, and its reader of JSON fails on any file
    file.write_text(json.dumps(config))
    # DeepSpeed is refused without torchrun; one process for each GPU, or as many as are asked for.
    env = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(job.ranks)}
    return Command([str(environment("llamafactory") / "bin" / "llamafactory-cli"), "train", str(file)], env)


def _trainers(job: Job) -> dict[str, Any]:
    """Return transformers' own arguments, which tools on the Trainer share."""
    saves = {"save_strategy": "steps", "save_steps": job.save_every} if job.save_every else {"save_strategy": "no"}
    return {
        "output_dir": job.out,
        "deepspeed": job.zero,
        "per_device_train_batch_size": job.micro_batch,
        "gradient_accumulation_steps": job.accumulation,
        "gradient_checkpointing": job.recompute,
        "learning_rate": job.lr,
        "lr_scheduler_type": "constant",
        "max_grad_norm": json.loads(Path(job.zero).read_text())["gradient_clipping"],
        "bf16": job.dtype == "bf16",
        "max_steps": job.steps,
        "logging_steps": 10,
        "use_cpu": job.device == "cpu",
        "report_to": "none",
        "disable_tqdm": True,
        **saves,
    }


def _only(rows: str, folder: Path) -> str:
    """Return a folder that holds this file alone: `datasets` reads all that is in one."""
    alone = folder / "rows"
    alone.mkdir()
    (alone / "train.jsonl").symlink_to(rows)
    return str(alone)


TOOLS: dict[str, Callable[[Job, Path], Command]] = {
    "loop": lambda job, folder: by_hand("loop", job, folder),
    "trainer": lambda job, folder: by_hand("trainer", job, folder),
    "tuner": tuner,
    "trl": trl,
    "llamafactory": llamafactory,
}
NAMES = {
    "loop": "minimal loop", "trainer": "plain Trainer", "tuner": "tuner", "trl": "TRL `trl sft`",
    "llamafactory": "LLaMA-Factory", "axolotl": "Axolotl",
}  # fmt: skip


def environment(peer: str) -> Path:
    """Return the environment of a peer.

    Raises:
        Unmeasured: bench/peers.sh has not installed it.
    """
    home = PEERS / peer
    if not (home / ".installed").is_file():
        raise Unmeasured(NOT_INSTALLED)
    return home


def surroundings(command: Command, ranks: int, peer: str) -> dict[str, str]:
    """Return the environment variables of a command: the clock, no hub, and for each rank its share of the cores.

    OMP_NUM_THREADS stands if it is set: on a machine that others use, threads that wait for each other take longer.
    """
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks))
    more = {
        "OMP_NUM_THREADS": threads,
        "PYTHONPATH": str(CLOCK),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    # The collective that DeepSpeed compiles for CPUs is built once for each of its versions, in the first round.
    more["TORCH_EXTENSIONS_DIR"] = str(PEERS / f"{peer}-extensions")
    env = without_variables(os.environ) | more | dict(command.env)
    home = Path(command.argv[0]).parent
    return env | {"PATH": f"{home}{os.pathsep}{env['PATH']}"}  # ninja, and what the tool starts by name


def train(tool: str, job: Job, folder: Path, **env: str) -> list[Tick]:
    """Train to the end, and return the steps' ends.

    Raises:
        Unmeasured: it is not installed, or failed; the message has the end of what it said.
    """
    clock = folder / "clock.jsonl"
    process = start(tool, job, folder, clock, **env)
    try:
        said = process.communicate(timeout=LONGEST_S)[0]
    except BaseException:
        end(process)
        raise
    if process.returncode or not clock.is_file():
        raise failed(tool, said)
    return ticks(clock)


def start(tool: str, job: Job, folder: Path, clock: Path, **env: str) -> subprocess.Popen[str]:
    """Start a tool in a session of its own, with its steps written to `clock`."""
    job = replace(job, out=str(folder / "run"))
    return started(TOOLS[tool](job, folder), folder, clock, job.ranks, tool, **env)


def started(command: Command, folder: Path, clock: Path, ranks: int, peer: str, **env: str) -> subprocess.Popen[str]:
    """Start a command of a peer in a session of its own."""
    whole = surroundings(command, ranks, peer) | {"BENCH_CLOCK": str(clock)} | env
    return subprocess.Popen(
        command.argv, env=whole, cwd=folder, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def end(process: subprocess.Popen[str]) -> str:
    """Kill a tool with its ranks; return what it has said."""
    kill_tree(process.pid)
    return process.communicate()[0]


def kill_tree(pid: int) -> None:
    """Kill a process with those that it started, which may be in sessions of their own."""
    below: list[psutil.Process] = []
    with suppress(psutil.Error):
        below = psutil.Process(pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for process in below:
        with suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(below, timeout=30)


def ticks(clock: Path) -> list[Tick]:
    return [Tick(**json.loads(line)) for line in clock.read_text().splitlines()]
