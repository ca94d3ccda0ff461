"""Folders and environments that are damaged, through the real commands: part of `bench/hostile.py`.

One real run of two steps on the tiny model gives what is damaged: the run, its model's folder and its adapter. Each
trial copies one, damages a file of it (or the environment) and calls a command in a child of its own.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.hostile import strategies, watch
from tests.hostile.doors import LEAKS, TINY
from tests.tiny_model import tiny

_SETS = ("max_steps=2", "checkpoint.interval=1", "log.num_samples=0", "train_dataloader.dataset.max_length=64")
_BAD = 99
"""The exit code of a trial with a traceback or an effect; no code of tuner's."""
_LIMIT_S = 120


@dataclass(frozen=True)
class Sources:
    """What a run of two steps left: its directory, the model under it, and its adapter."""

    run: Path
    model: Path

    @property
    def adapter(self) -> Path:
        return self.run / "final"

    @classmethod
    def train(cls, scratch: Path) -> Sources:
        """Train them, on one rank."""
        sets = [word for text in _SETS for word in ("--set", text)]
        work = ["tiny_lora_sample_e1", "--work-dir", str(scratch / "run"), "--deepspeed", "zero2", *sets]
        env = {**os.environ, "NPROC_PER_NODE": "1"}
        subprocess.run([sys.executable, "-m", "tuner", "train", *work], check=True, env=env, stdout=subprocess.DEVNULL)

        model = scratch / "model"
        shutil.copytree(tiny(), model)
        (model / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 0.5, "do_sample": true}')
        return cls(scratch / "run", model)


def run(
    arguments: list[str], folder: Path, stdin: str = "", environ: dict[str, str] | None = None, *, writes: bool = True
) -> tuple[int, str]:
    """Run one command line in a child in `folder`; return its exit code and what it printed.

    99: a traceback, or an effect: any, or with `writes` one elsewhere than below the folder.
    """
    reading, writing = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reading)
        code, text = _in_child(arguments, folder, stdin, environ, writes)
        os.write(writing, text.encode("utf-8", "surrogateescape")[-8_000:])
        os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        text = stream.read().decode("utf-8", "replace")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


def _in_child(
    arguments: list[str], folder: Path, stdin: str, environ: dict[str, str] | None, writes: bool
) -> tuple[int, str]:
    signal.alarm(_LIMIT_S)  # a command that waits for ever is ended by it, and counts as a bug
    os.chdir(folder)
    if environ is not None:
        os.environ.clear()
        os.environ.update(environ)
    sys.argv, sys.stdin = ["tuner", *arguments], io.TextIOWrapper(io.BytesIO(stdin.encode()))
    said, code = io.StringIO(), 0
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # libraries in C write there
        os.dup2(quiet, stream)
    from tuner.cli import main

    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), watch.effects() as seen:
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            code = _BAD
            traceback.print_exc(limit=-6)
    outside = [event for event in seen if not (writes and (str(folder) in event or _is_harmless(event)))]
    if outside or LEAKS.search(said.getvalue()):
        code = _BAD
        said.write("\n".join(outside))
    return code, said.getvalue()


_IN_OPEN_FOLDER = re.compile(r"os\.(?:remove|rmdir) \('[^/]+', [0-9]+\)")


def _is_harmless(effect: str) -> bool:
    """Return whether an effect is on a device or a cache: the package's own model and prepared rows are made there.

    A scratch folder in the cache is removed file by file, by names inside an open folder.
    """
    return "'/dev/" in effect or ".cache/" in effect or _IN_OPEN_FOLDER.match(effect) is not None


def _damage(text: str, chance: random.Random) -> str:
    """Return text with a part cut, doubled or replaced."""
    for _ in range(chance.randint(1, 3)):
        start = chance.randrange(len(text) + 1)
        end = min(len(text), start + chance.choice((0, 1, 2, 40)))
        text = text[:start] + chance.choice((*strategies.SEPARATORS, text[start:end] * 2)) + text[end:]
    return text


def _other_value(value: Any, chance: random.Random) -> Any:
    """Return JSON with one of its values, at any depth, replaced, renamed or left out."""
    block = value
    while isinstance(block, dict | list) and block:
        place = chance.choice(list(block) if isinstance(block, dict) else range(len(block)))
        if isinstance(block[place], dict | list) and block[place] and chance.random() < 0.7:
            block = block[place]
            continue
        if chance.random() < 0.25:
            del block[place]
        else:
            block[place] = chance.choice(_ODD)
        break
    return value


_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 1.5, 10**15, 10**40, "", "x", "../../etc/passwd", [], {}, [[]], {"a": 1}, [None], "auto"),
    *("llama", "LORA", "PROMPT_TUNING", "torch.float16", "mamba", "\ud800", "a\0b", "\x1b[2J", "all-linear", "inf"),
)


def damage_file(file: Path, chance: random.Random) -> str:
    """Damage one file and say how."""
    content = file.read_bytes()
    kind = chance.choice(("value", "value", "value", "text", "cut", "bytes", "empty", "gone", "folder", "link", "deep"))
    if kind == "value":
        try:
            lines = content.decode().splitlines()
            jsonl = len(lines) > 1 and file.suffix == ".jsonl"
            texts = lines if jsonl else [content.decode()]
            at = chance.randrange(len(texts))
            texts[at] = json.dumps(_other_value(json.loads(texts[at]), chance))
            file.write_text("\n".join(texts))
        except (ValueError, IndexError):
            kind = "text" if file.suffix in (".py", ".jinja", ".md", ".log", ".txt") else "bytes"
    match kind:
        case "text":
            file.write_text(_damage(content.decode("utf-8", "replace"), chance), errors="surrogatepass")
        case "cut":
            file.write_bytes(content[: chance.randrange(len(content) + 1)])
        case "bytes":
            changed = bytearray(content or b"x")
            for _ in range(chance.choice((1, 8))):
                changed[chance.randrange(min(len(changed), chance.choice((16, 4096, 10**9))))] = chance.randrange(256)
            file.write_bytes(bytes(changed))
        case "empty":
            file.write_bytes(b"")
        case "gone":
            file.unlink()
        case "folder":
            file.unlink()
            file.mkdir()
        case "link":
            file.unlink()
            file.symlink_to(chance.choice(("nowhere", file.name, "/dev/null", "/")))
        case "deep":
            file.write_text("[" * 20_000 + "]" * 20_000)
    return f"{file.name}: {kind}"


def _damaged(source: Path, to: Path, chance: random.Random) -> str:
    """Copy a folder and damage a file of it; small files that say what the rest is are damaged most."""
    shutil.copytree(source, to, symlinks=True)
    files = sorted(file for file in to.rglob("*") if file.is_file() and not file.is_symlink())
    told = [file for file in files if file.suffix in (".json", ".jsonl", ".py")]
    return damage_file(chance.choice(told if told and chance.random() < 0.8 else files), chance)


FOLDERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "model folder": (
        "model",
        (
            *("chat {it} --max-new-tokens=2", "chat {it} --max-new-tokens=2"),
            *("check {TINY} --model={it}", "show {TINY} --model={it}", "train {TINY} --dry-run --model={it}"),
            "plan {TINY} --model={it} --gpu=h100 --gpus=1",
            "data {TINY} --model={it} --set train_dataloader.dataset.max_rows=4",
            "export {run} {it}-out --merge --base={it}",
        ),
    ),
    "adapter": (
        "adapter",
        (
            *("chat {it} --max-new-tokens=2", "chat {model} --adapter={it} --max-new-tokens=2"),
            *("export {it} {it}-out --merge --base={model}", "export {it} {it}-out"),
        ),
    ),
    "tampered run": (
        "run",
        (
            *("check {it}", "show {it}", "runs {it.parent}", "runs {it.parent} --json", "report {it}"),
            *("report {it} {run} -o {it}.html", "export {it} {it}-out", "chat {it} --max-new-tokens=2"),
            "train {it}/recipe.py --dry-run --resume={it}",
            "train {it}/recipe.py --dry-run --resume=auto --work-dir={it}",
        ),
    ),
}
"""Of each kind what is damaged, and the commands that are tried on `it`."""

_VARIABLES = (
    *("HOME", "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ENDPOINT", "HF_HUB_OFFLINE", "XDG_CACHE_HOME"),
    *("TMPDIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "PET_NNODES", "PET_RDZV_ENDPOINT", "PET_NPROC_PER_NODE"),
    *("ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DEEPSPEED_CONFIG_FILE", "FSDP_VERSION"),
    *("DEEPSPEED_TIMEOUT", "DS_ACCELERATOR", "DS_SKIP_CUDA_CHECK", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"),
    *("CUDA_HOME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NNODES"),
    *("NPROC_PER_NODE", "NODE_RANK", "TORCHELASTIC_RUN_ID", "NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "COLUMNS", "LINES"),
    *("TERM", "NO_COLOR", "LANG", "LC_ALL", "PYTORCH_CUDA_ALLOC_CONF", "WANDB_MODE", "WANDB_DIR", "PATH", "USER"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "LD_LIBRARY_PATH"),
    *("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "TOKENIZERS_PARALLELISM", "PYTHONPATH", "PWD"),
)
_PLACES = ("", "nowhere/at/all", "/dev/null", "/proc/self", "a file", "dangling", "~", "relative", "/root/x:/y")


def _environment(folder: Path, chance: random.Random) -> dict[str, str]:
    """Return this environment with some variables odd and some gone."""
    made = dict(os.environ)
    (folder / "a file").touch()
    (folder / "dangling").symlink_to("nowhere")
    for name in chance.sample(_VARIABLES, chance.randint(1, 5)):
        place = chance.choice(_PLACES)
        value = chance.choice(
            (place, str(folder / place), chance.choice(strategies.ODD_NUMBERS), chance.choice(strategies.ODD_TEXTS))
        )
        value = value.replace("\0", "").encode("utf-8", "replace").decode()
        if chance.random() < 0.15:
            made.pop(name, None)
        else:
            made[name] = value
    return made


_UNDER_ODD_VARIABLES = (
    *(f"train {TINY} --dry-run", "train tiny_qlora_sample_e1 --dry-run --deepspeed=zero3_offload", f"check {TINY}"),
    *(f"show {TINY}", f"plan {TINY} --gpu=h100 --gpus=1", "runs", "list", "--help"),
    f"submit {TINY} --dry-run --gpus-per-node=0",
)


def environments(count: int, seed: int, scratch: Path) -> Counter[str]:
    """Try `count` commands under odd variables; to be called before anything heavy is imported here."""
    chance, counts = random.Random(seed), Counter[str]()
    for number in range(count):
        folder = scratch / f"environment-{number}"
        folder.mkdir()
        made, arguments = _environment(folder, chance), chance.choice(_UNDER_ODD_VARIABLES).split()
        odd = {name: made.get(name) for name in _VARIABLES if made.get(name) != os.environ.get(name)}
        count_one(counts, f"{arguments} under {odd}", *run(arguments, folder, environ=made))
        shutil.rmtree(folder)
    return counts


def folders(kind: str, count: int, seed: int, scratch: Path, sources: Sources) -> Counter[str]:
    """Try `count` damaged folders of one kind."""
    which, commands = FOLDERS[kind]
    chance, counts = random.Random(f"{kind} {seed}"), Counter[str]()
    import_module("tuner.results.export")  # once, so that each child has what is heavy
    import_module("tuner.results.saved")
    for number in range(count):
        folder = scratch / f"trial-{number}"
        folder.mkdir()
        it = folder / "it"
        how = _damaged(getattr(sources, which), it, chance)
        names = {"it": it, "run": sources.run, "model": sources.model, "TINY": TINY}
        arguments = [word.format(**names) for word in chance.choice(commands).split()]
        stdin = "Hi" if arguments[0] == "chat" else ""
        count_one(counts, f"{how}; {arguments}", *run(arguments, folder, stdin))
        shutil.rmtree(folder)
    return counts


def count_one(counts: Counter[str], told: str, code: int, text: str) -> None:
    """Count how one command ended; show what is a bug."""
    kind = "taken" if code == 0 else "refused" if code in (2, 3, 74) else "bugs"
    counts[kind] += 1
    if kind == "bugs":
        print(f"{told:.600} -> {code}\n{text[-1_800:]}\n", file=sys.stderr, flush=True)


def rows(count: int, seed: int, scratch: Path, asked: str | None) -> list[tuple[str, Callable[[], Counter[str]]]]:
    """Return each kind with the function that tries it; `count` inputs are shared among them."""
    each = max(1, count // 4)
    made: list[Sources] = []

    def tries(kind: str) -> Counter[str]:
        if not made:
            made.append(Sources.train(scratch))
        return folders(kind, each, seed, scratch, made[0])

    kinds: list[tuple[str, Callable[[], Counter[str]]]] = [
        ("environment", lambda: environments(each, seed, scratch)),
        *((kind, lambda kind=kind: tries(kind)) for kind in FOLDERS),  # type: ignore[misc]
    ]
    return [(kind, act) for kind, act in kinds if asked in (None, kind)]
