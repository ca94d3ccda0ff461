"""`tuner submit`: a recipe as a job of Slurm, checked here and now and not after hours in the queue."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner import remote_code
from tuner.cli.help import Command
from tuner.cli.options import (
    ONE_VALUE,
    Changes,
    OptionValue,
    json_option,
    overrides,
    plain_name,
    recipe_options,
    taken_out,
)
from tuner.cli.say import say, say_json
from tuner.cli.text import announce
from tuner.errors import UsageError
from tuner.files import disk_errors, write_text
from tuner.fit.sizes import parse_bytes
from tuner.machine import hardware, slurm
from tuner.machine.hardware import Hardware
from tuner.machine.launchers import without_variables
from tuner.machine.topology import Topology
from tuner.recipes import catalog, trust
from tuner.recipes.names import Name, identify
from tuner.runs.directory import RunDirectory

if TYPE_CHECKING:
    from tuner.launch.resolved_run import ResolvedRun
    from tuner.launch.sbatch import Job

AFTER = "tuner.launch.after_srun"
_UNKNOWN = "the job's GPUs are unknown, so GPU memory is not checked: set --gpu, such as --gpu a100-80g."
_UNKNOWN_HOSTS = "the memory of the job's hosts is unknown, so it is not checked: set --mem or --host-memory."
_PASSED = ("partition", "account", "qos", "mem", "constraint")


@click.command(
    cls=Command,
    examples=("tuner submit qwen3_8b_lora_alpaca_e1 --nodes 2 --gpus-per-node 8 --time 4:00:00",),
    json_keys={
        "tuner submit RECIPE --gpus-per-node 8 --json": (
            "`recipe`, `job` (its number; null with `--dry-run`), `run_directory`, `log`, `array`, `nodes`, `ranks`,"
            " `level`, `warnings`, `script`"
        ),
    },
    uses={
        "a Slurm job that resumes itself": "`tuner submit RECIPE --nodes 2`; `--dry-run` prints its script",
    },
)
@recipe_options("recipe")
@click.option("--nodes", type=click.IntRange(1), default=1, help="Number of nodes.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(0),
    required=True,
    help="GPUs per node, with one process for each; 0: train on CPUs.",
)
@click.option("--tasks-per-node", type=click.IntRange(1), help="Processes per node without GPUs. [default: 1]")
@click.option("--gpu", metavar="NAME", help="GPU model of the nodes, such as a100-80g: the memory is checked for it.")
@click.option("--cpus-per-task", type=click.IntRange(1), help="CPU cores per process.")
@click.option("--mem", metavar="SIZE", help="RAM per node, as sbatch takes it.")
@click.option(
    "--host-memory",
    metavar="SIZE",
    help="RAM per node, such as 512GB, that the memory is checked for. [default: --mem]",
)
@click.option("--partition", metavar="NAME", help="Slurm partition.")
@click.option("--account", metavar="NAME", help="Slurm account.")
@click.option("--qos", metavar="NAME", help="Slurm quality of service.")
@click.option("--constraint", metavar="FEATURES", help="Features that the nodes must have.")
@click.option("--time", metavar="LIMIT", help="Time limit: minutes, H:MM:SS or D-HH:MM:SS. [default: the partition's]")
@click.option(
    "--array", metavar="LIST", help="Submit several jobs, such as 0-3; {index} in a value becomes the job's number."
)
@click.option("--name", metavar="NAME", help="Name of the job. [default: the recipe's]")
@click.option(
    "--sbatch", "more_options", multiple=True, metavar="KEY[=VALUE]", help="Any other sbatch option, such as exclusive."
)
@click.option(
    "--max-requeues",
    type=click.IntRange(0),
    default=3,
    help="How often the job may be requeued without a newer checkpoint; preemptions do not count. 0: never.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    help="How often the job starts the run again after a crash, a hang or a lost node, without a newer checkpoint.",
)
@click.option(
    "--spare-nodes",
    type=click.IntRange(0),
    default=0,
    help="Further nodes of the job, which take the place of those that fail. Needs --max-restarts.",
)
@click.option(
    "--stop-before",
    "stop_before_s",
    type=click.IntRange(1, 65535),
    default=120,
    metavar="SECONDS",
    help="Save and requeue this long before the time limit; longer than a validation and a save take.",
)
@click.option("--work-dir", type=click.Path(path_type=Path), help="Folder of the run. [default: work_dirs/RECIPE/TIME]")
@click.option("--ignore-fit", is_flag=True, help="Submit even if the estimated memory does not fit.")
@click.option("--dry-run", is_flag=True, help="Print the job script without submitting it.")
@json_option
def command(
    recipe: Name | None,
    deepspeed: str | None,
    gpus_per_node: int,
    tasks_per_node: int | None,
    gpu: str | None,
    host_memory: str | None,
    name: str | None,
    more_options: tuple[str, ...],
    work_dir: Path | None,
    ignore_fit: bool,
    dry_run: bool,
    as_json: bool,
    allow_code: bool,
    **rest: OptionValue,
) -> None:
    """Train as a Slurm job that requeues itself before the time limit and resumes from its checkpoint."""
    from datetime import datetime

    from tuner.launch import preflight, sbatch
    from tuner.launch.resolve import resolve_run, resolve_start
    from tuner.launch.resolved_run import Request
    from tuner.launch.resuming import WORK_DIRS

    if gpus_per_node and tasks_per_node not in (None, gpus_per_node):
        fix = "Remove it: each GPU gets one rank."
        raise UsageError(f"{tasks_per_node} tasks for {gpus_per_node} GPUs", where="--tasks-per-node", fix=fix)
    if rest["spare_nodes"] and not rest["max_restarts"]:
        raise UsageError("spare nodes without restarts", where="--spare-nodes", fix="Add --max-restarts, such as 3.")
    typed = recipe.text if recipe else None  # it may hold the index of an array's job
    tasks = gpus_per_node or tasks_per_node or 1
    passed = taken_out(_PASSED, rest)
    options: list[tuple[str, str | None]] = [(key, value) for key, value in passed.items() if value is not None]
    options += [sbatch.parse_option(text) for text in more_options]
    named_recipe = Path(typed or rest["model"] or rest["adapter"] or "").name
    job = sbatch.Job(
        name=name or re.sub(r"[^A-Za-z0-9_.-]", "-", named_recipe.removesuffix(".py")),
        gpus_per_node=gpus_per_node,
        tasks_per_node=tasks,
        options=options,
        **taken_out([field.name for field in fields(sbatch.Job)], rest),
    )
    sbatch.check(job)
    now = datetime.now().astimezone()
    hardware, is_known = _hardware(gpus_per_node, gpu, _host_bytes(host_memory, passed["mem"]))
    folder = (work_dir or WORK_DIRS / job.name / f"{now:%Y%m%d_%H%M%S}").absolute()
    first = {key: _at_first(value, job) for key, value in rest.items()}
    request = Request(
        identify(_at_first(typed, job)) if typed else None,
        overrides(**first),
        _at_first(deepspeed, job),
        work_dir=folder / job.first_index if job.first_index else folder,
        resume="auto",
        allow_code=allow_code,
        ignore_fit=ignore_fit or not is_known,
    )
    topology = Topology("slurm", job.nodes, 0, tasks, job.nodes * tasks, tasks=(tasks,) * job.nodes)
    resolve = resolve_run if dry_run else resolve_start
    run = resolve(request, dict(os.environ), hardware, now, topology)
    unknown = (*(() if is_known else (_UNKNOWN,)), *(() if hardware.host_memory_bytes else (_UNKNOWN_HOSTS,)))
    warnings = (*preflight.check_elsewhere(run, quick=dry_run), *unknown)
    train = [*([typed] if typed else []), *_words(rest, deepspeed, allow_code=allow_code, ignore_fit=ignore_fit)]
    code = trust.check_bound(run.recipe.config)
    if code:  # the job runs the code of now, whatever is in the folder then
        train.append(f"--set=model.revision={code.hash}")
    # No torch.py of the working directory is imported in place of the real one.
    python = [sys.executable, "-P", "-m"]
    text = sbatch.script(job, folder, [*python, "tuner", "train", *train], Path.cwd(), [*python, AFTER])
    if not as_json:
        announce(run, warnings)
    number: str | None = None  # nothing is submitted
    if not dry_run:
        if code:
            remote_code.record(code)
        number = _submit(job, folder, text)
    if as_json:
        answer = {
            "recipe": run.recipe.name,
            "job": number,
            "run_directory": str(folder),
            "log": str(_log(job, folder, number)) if number else None,
            "array": job.array,
            "nodes": run.topology.num_nodes,
            "ranks": run.topology.world_size,
            "level": run.level,
            "warnings": [*run.warnings, *warnings],
            "script": text,
        }
        say_json(answer)
    elif number is None:
        click.echo(text, nl=False)
    else:
        _announce(run, job, folder, number)


def _host_bytes(size: str | None, mem: str | None) -> int:
    """Return the memory of each node in bytes, or 0 if it is not known; sbatch's default unit is MiB.

    Raises:
        UsageError: --host-memory is no size. sbatch itself checks --mem.
    """
    if size is not None:
        return parse_bytes(size, "--host-memory")
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", mem or "", re.IGNORECASE)
    return int(match[1]) * 1024 ** ("KMGT".index(match[2].upper() or "M") + 1) if match else 0


def _hardware(gpus_per_node: int, gpu: str | None, host_bytes: int) -> tuple[Hardware, bool]:
    """Return a node of the job, and whether its GPUs are known and not only assumed."""
    from tuner.launch.machines import ASSUMED_GPU, known_gpu
    from tuner.launch.machines import node as node_of

    this_machine = hardware.detect(os.environ)
    is_known = bool(gpu or this_machine.gpus or not gpus_per_node)
    kind = known_gpu(gpu or ASSUMED_GPU) if gpu or not this_machine.gpus else None
    node = node_of(this_machine, gpus_per_node, kind) if gpus_per_node else this_machine._replace(gpus=())
    # The memory of the job's hosts is not known here: without --host-memory or --mem it is not checked.
    return node._replace(host_memory_bytes=host_bytes), is_known


def _at_first(value: OptionValue, job: Job) -> OptionValue:
    """Return an option's value as the first task of an array has it."""
    from tuner.launch import sbatch

    if isinstance(value, tuple):
        return tuple(_at_first(text, job) for text in value)
    return sbatch.at_index(value, job.first_index) if isinstance(value, str) else value


def _words(changes: Changes, deepspeed: str | None, **flags: bool) -> list[str]:
    """Return the options of `tuner train` that mean the same."""
    pairs: list[tuple[str, str | None]] = [("--catalog", str(folder)) for folder in catalog.given_folders()]
    pairs += [("--deepspeed", deepspeed), ("--nvme", changes["nvme"]), *(("--data", text) for text in changes["data"])]
    pairs += [(plain_name(key), changes[key]) for key in ONE_VALUE]
    pairs += [("--reward", text) for text in changes["rewards"]]
    pairs += [("--ds", text) for text in changes["ds"]]
    pairs += [("--set", text) for text in changes["sets"]]
    pairs += [("--cfg-options", text) for text in changes["cfg_options"]]
    words = [f"{flag}={value}" for flag, value in pairs if value is not None]
    flags["trust_remote_code"] = changes["trust_remote_code"]
    return words + [plain_name(key) for key, is_on in flags.items() if is_on]


def _submit(job: Job, folder: Path, text: str) -> str:
    from tuner.launch import sbatch

    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)  # effect: Slurm does not make the folder of a job's log
    run_dir = RunDirectory(folder)
    write_text(run_dir.script, text)
    # Given here too, the options win over sbatch's own variables (SBATCH_PARTITION), which win over the script's.
    options = [*sbatch.options(job, folder), str(run_dir.script)]
    number = slurm.submit(options, without_variables(os.environ))
    write_text(run_dir.job, f"{number}\n")  # by which `tuner runs` finds it in the queue
    return number


def _log(job: Job, folder: Path, number: str) -> Path:
    return folder / (f"slurm-{number}_{job.first_index}.out" if job.array else f"slurm-{number}.out")


def _announce(run: ResolvedRun, job: Job, folder: Path, number: str) -> None:
    log = _log(job, folder, number)
    for line in (
        f"{run.recipe.name}: job {number}, {run.topology.describe()}; DeepSpeed: {run.level}",
        f"run directory: {folder}{'/INDEX' if job.array else ''}",
        f"Next: squeue --job={number}; tail -F {shlex.quote(str(log))}; scancel {number}",
    ):
        say(line)
