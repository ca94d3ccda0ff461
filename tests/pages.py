"""The README and the pages of docs/: their commands, and a folder in which they can be run."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
from click.testing import CliRunner

from tests.launch.plans import TINY, ended_run
from tuner.cli import tuner
from tuner.recipes.recipe_file import read_part

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs/llms.txt", *sorted((ROOT / "docs").rglob("*.md"))]
_COMMAND = re.compile(r"(?P<before>(?:[A-Z_]+=\S+ |(?:srun|mpirun|torchrun) .*?)*)tuner (?P<words>[a-z-].*)")
_FENCE = re.compile(
    r"^```(?P<language>\w*)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_STAND_INS = {"RECIPE": TINY, "NAME": TINY, "X": TINY}
_SIDE_ROOM = re.compile(r'from tuner\.(lab|results|report)\b|get_command\(context, "export"\)')
_LAUNCHED = {
    "slurm": {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "n1",
    },
    "mpi": {
        "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    },
    "env": {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
}  # fmt: skip


def code_lines(text: str) -> Iterator[str]:
    """Yield the lines of a page's indented code and shell blocks, whole and without the comments after them."""
    shell = [found["text"] for found in _FENCE.finditer(text) if found["language"] in ("sh", "bash")]
    indented = re.findall(r"^    (.*)$", _FENCE.sub("", text), re.MULTILINE)
    for line in "\n".join((*indented, *shell)).replace("\\\n", " ").splitlines():
        yield re.split("  #| [<>] ", line)[0].rstrip()


def commands(text: str) -> list[tuple[str, str]]:
    """Return what stands before `tuner` and after it, of each command that a page shows."""
    found = (_COMMAND.fullmatch(line) for line in code_lines(text))
    return [(match["before"], match["words"]) for match in found if match]


def lay_out(folder: Path, text: str) -> None:
    """Write the files that a page's commands name: those that it shows under their titles, and the usual others."""
    (folder / "my_ds.json").write_text('{"zero_optimization": {"stage": 2}} // mine')
    (folder / "hosts").write_text("worker-1 slots=8\nworker-2 slots=8\n")
    for name in ("my.jsonl", "val.jsonl", "more.jsonl", "books.jsonl", "other.jsonl"):
        row = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]}
        (folder / name).write_text(f"{json.dumps(row)}\n")
    (folder / "photos.jsonl").write_text((folder / "my.jsonl").read_text())
    (folder / "sums.jsonl").write_text('{"prompt": "12 + 30 =", "answer": "42"}\n')
    (folder / "prefs.jsonl").write_text('{"prompt": "Why?", "chosen": "So.", "rejected": "No."}\n')
    models = "my-model my-llm my-llama my-qwen acme-7b BASE internlm2-chat-7b runs/sft-merged"
    for name in models.split():
        (folder / name).mkdir(parents=True)
        facts = read_part("models", "qwen3_8b").values["architecture"]
        (folder / name / "config.json").write_text(json.dumps(facts))
    (folder / "my-clip").mkdir()
    (folder / "my-clip/config.json").write_text(json.dumps({"model_type": "clip", "vision_config": {}}))
    for name in ("RUN", "RUN_A", "RUN_B", "first", "runs/first", "work_dirs/RECIPE/TIME", "work_dirs/NAME/TIME"):
        if name in text:
            ended_run(folder / name)
    _result_of_a_run(folder / "runs" / "sft" / "final")
    for name in ("mine.py", "my_recipe.py"):
        CliRunner().invoke(tuner, ["copy", TINY, name])
    for name in ("llama3_lora_sft.yaml", "llamafactory.yaml"):
        (folder / name).write_text(
            "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\nfinetuning_type: lora\ndataset: my.jsonl\n"
        )
    for name in ("curl", "tell.sh"):
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    for found in _FENCE.finditer(text):
        if found["title"]:
            path = folder / found["title"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(found["text"], encoding="utf-8")


def _result_of_a_run(folder: Path) -> None:
    folder.mkdir(parents=True)
    told = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 64, "lora_alpha": 16, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps({**told, "base_model_name_or_path": "Qwen/Qwen3-8B"}))
    (folder / "adapter_model.safetensors").write_bytes(b"")


@cache
def _is_parsed_alone(command: str) -> bool:
    """Return whether a command starts processes, needs weights or serves; tests/e2e and tests/cli run those."""
    loaded = tuner.get_command(click.Context(tuner), command)
    assert loaded
    callback = next(iter(loaded.commands.values())).callback if isinstance(loaded, click.Group) else loaded.callback
    return bool(_SIDE_ROOM.search(Path(str(inspect.getsourcefile(callback))).read_text(encoding="utf-8")))


def failure(before: str, words: str) -> str | None:
    """Run a command, or plan or parse it where it would start something; return what went wrong."""
    arguments = [_STAND_INS.get(word, word) for word in shlex.split(words)]
    is_of_the_hub = arguments[0] == "data" and "tiny" not in words  # its tokenizer is not here
    if is_of_the_hub or "--watch" in arguments or _is_parsed_alone(arguments[0]):
        return _refusal(arguments)
    if arguments[0] in ("train", "submit") and "--dry-run" not in arguments:
        arguments.append("--dry-run")
    _make_way(arguments)
    launcher = arguments[arguments.index("--launcher") + 1] if "--launcher" in arguments else ""
    pairs = (pair.partition("=") for pair in before.split() if re.match(r"[A-Z_]+=", pair))
    path = {"PATH": os.pathsep.join((str(Path.cwd()), os.environ["PATH"]))}  # the programs that `lay_out` wrote
    env = path | _LAUNCHED.get(launcher, {}) | {name: value for name, _, value in pairs}
    result = CliRunner().invoke(tuner, arguments, env=env)
    return None if result.exit_code == 0 else f"{result.exit_code}: {result.exception} {result.output[-400:]}"


def _make_way(arguments: list[str]) -> None:
    """Remove the file that a command would write, and name a new run directory: neither is ever written over."""
    if arguments[0] == "copy":
        Path(arguments[-1]).unlink(missing_ok=True)
    if "-o" in arguments:
        Path(arguments[arguments.index("-o") + 1]).unlink(missing_ok=True)
    for flag in ("--work-dir", "--output-dir"):
        if flag in arguments and "--resume" not in arguments:
            arguments[arguments.index(flag) + 1] += "-new"


def _refusal(arguments: list[str]) -> str | None:
    """Return why click does not take the arguments of a command."""
    command: click.Command = tuner
    context = click.Context(tuner, info_name="tuner", **tuner.context_settings)
    try:
        while isinstance(command, click.Group):
            _, found, arguments = command.resolve_command(context, arguments)
            assert found
            command, context = found, click.Context(found, parent=context)
        command.make_context(command.name, arguments, parent=context)
    except click.exceptions.Exit as end:  # --help
        return None if end.exit_code == 0 else str(end)
    except Exception as error:
        return repr(error)
    return None
