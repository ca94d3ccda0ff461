"""Rooms stand on their floors, heavy libraries stay in the worker, effects at the edge, and no value stands twice."""

from __future__ import annotations

import ast
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.each import each
from tuner.recipes import catalog
from tuner.recipes.merging import Layer, Merged, leaves
from tuner.recipes.overrides import schema_keys
from tuner.recipes.part import read_part
from tuner.recipes.recipe_file import read_file
from tuner.recipes.schema import RecipeConfig

ROOT = Path(tuner.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "configs")
FLOORS = {
    "__main__": 6,
    "cli": 5,
    "launch": 4,
    "results": 4,
    "worker": 3.8,  # the rank reads the run directory; a launcher imports nothing of it
    "data": 3.5,
    "models": 3.5,
    "zero": 3,
    "fit": 3,
    "report": 3,  # the rank that nobody supervises writes it too
    "recipes": 2,
    "machine": 2,
    "runs": 2,
    "files": 1,
    "errors": 0,
    "__init__": 0,
}
HEAVY = {"torch", "transformers", "trl", "peft", "bitsandbytes", "datasets", "deepspeed", "accelerate"}

# Every place with an effect on the world outside, and why it may have it.
SPAWNS = {
    "launch/supervise.py": "starts torchrun and watches it",
    "machine/hardware.py": "asks nvidia-smi where NVML is missing",
    "machine/slurm.py": "sbatch and scontrol",
    "worker/stall.py": "a process that ends a rank whose threads cannot run",
    "launch/probes.py": "a library that crashes or hangs must not end the doctor",
}
BECOMES = {"launch/start.py": "the only rank of --launcher none and slurm replaces the launcher; there is no child"}
READS_ENVIRONMENT = {
    "cli/__init__.py": "under srun one rank alone tells of a mistake that all of them made",
    "cli/plan.py": "which GPUs of this machine are visible",
    "cli/doctor.py": "copies it once; everything below gets the copy",
    "cli/submit.py": "which GPUs are visible, and what a job inherits",
    "cli/subjects.py": "the GPUs of this machine, for the model that is asked or judged here",
    "cli/smoke.py": "hides GPUs and the hub from this process, which makes the model, and from the ranks",
    "cli/targets.py": "the GPUs and the launch variables of this machine, for what is shown or checked here",
    "cli/train.py": "copies it once; everything below gets the copy",
    "worker/__main__.py": "torchrun tells a rank its number there",
    "worker/quiet.py": "libraries are hushed by variables alone",
    "worker/trackers.py": "libraries read from there where their files go",
    "models/load.py": "TUNER_CACHE says where a model that the package makes is kept",
}
TAKES_SIGNALS = {
    "machine/slurm.py": "a task that srun ends has a code that hides no other's",
    "launch/supervise.py": "forwards Ctrl-C, SIGTERM and USR signals to the ranks",
    "data/limits.py": "ends a chat template that takes too long",
    "worker/guard.py": "a rank saves and stops when it is told to",
    "worker/stall.py": "outlives the signals that Slurm sends to all processes of a rank",
}
EXITS = {
    "cli/__init__.py": "the exit code of a user's mistake",
    "cli/doctor.py": "3 where something failed",
    "cli/smoke.py": "the exit code of the stage that failed",
    "cli/train.py": "the exit code of the run",
    "machine/slurm.py": "the code of a task that srun ends before it is a rank",
    "worker/guard.py": "gloo aborts after success when Python tears it down",
    "worker/trackers.py": "leaves nothing: it catches a tracker that would",
}
PRINTS = {
    "launch/retry.py": "that there is a next attempt, or why not",
    "launch/supervise.py": "what a dead rank can no longer say",
    "report/end.py": "why a run has no report",
    "worker/progress.py": "progress, on rank 0",
    "worker/guard.py": "why a rank ends, into its log",
    "worker/probe.py": "its answer, to the doctor",
    "worker/resume.py": "that a checkpoint is converted, on rank 0",
    "worker/samples.py": "answers, on rank 0",
    "worker/trackers.py": "that a tracker is off, on rank 0",
    "worker/train.py": "what was trained, on rank 0",
}
WRITES = {
    "cli/submit.py": "makes the folder of a job's script and log, which Slurm does not make",
    "files.py": "the one writer of files",
    "launch/smoke.py": "removes its scratch folder",
    "launch/supervise.py": "torchrun writes its own log, into a file opened for it",
    "results/export.py": "makes what it exports beside its destination",
    "results/tensors.py": "writes files of weights a tensor at a time, which no library does",
    "runs/checkpoints.py": "moves checkpoints into their place, and removes them",
    "runs/directory.py": "makes the run's folders and copies the tokenizer's files",
    "runs/lock.py": "writes and removes the lock of a run directory",
    "data/prepare.py": "makes the folder of prepared data, which `datasets` writes",
    "models/tiny.py": "makes the package's own model, which transformers writes",
    "worker/output.py": "the folder of the logs that ranks print into",
    "worker/resume.py": "makes and removes the checkpoint that it converts, which DeepSpeed writes",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def dotted(path: Path) -> str:
    parts = ("tuner", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in it; `from x import y` is x.y where that is a module."""
    known = {dotted(module) for module in MODULES}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else str(node.module) for name in whole)


def uses(path: Path, *names: str) -> bool:
    """Say whether a file holds one of some dotted names; `os.exec*` is all that begin so."""
    for node in ast.walk(tree_of(path)):
        text = ast.unparse(node) if isinstance(node, ast.Attribute | ast.Name) else ""
        if any(text == name or (name.endswith("*") and text.startswith(name[:-1])) for name in names):
            return True
    return False


def imports_from(path: Path, *names: str) -> bool:
    return any(module.split(".")[0] in names for module in imports(path))


def holding(test: Any) -> set[str]:
    return {name_of(path) for path in MODULES if test(path)}


def test_every_room_has_a_floor() -> None:
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in MODULES}

    assert rooms <= FLOORS.keys()


@each(MODULES)
def test_a_room_imports_only_from_floors_below(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    above = [
        module
        for module in imports(path)
        if module.split(".")[0] == "tuner" and room_of(module) != room and FLOORS[room_of(module)] >= FLOORS[room]
    ]

    assert above == []


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {dotted(path): {module for module in imports(path) if module.startswith("tuner.")} for path in MODULES}

    TopologicalSorter(graph).prepare()


@each(MODULES)
def test_heavy_libraries_are_imported_where_models_and_rows_are_alone(path: Path) -> None:
    heavy = HEAVY & {module.split(".")[0] for module in imports(path)}

    assert not heavy or path.relative_to(ROOT).parts[0] in ("worker", "data", "models", "results")


def test_the_worker_knows_nothing_of_how_it_was_started() -> None:
    rooms = {
        room_of(module) for path in MODULES if "worker" in path.parts for module in imports(path) if "tuner." in module
    }

    assert not rooms & {"zero", "fit", "launch", "cli", "importers"}


WRAPPER = """
import json, sys
from tuner.cli import main
try:
    main()
finally:
    print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("command", "kept_out"),
    [
        ("--help", {"pydantic", "rich", "mmengine", "subprocess"}),
        ("list", {"pydantic", "rich", "mmengine", "subprocess"}),
        ("list tiny_*lora_alpaca*", {"pydantic", "rich", "mmengine", "subprocess"}),
        ("train --help", {"pydantic", "rich", "mmengine", "subprocess"}),
        ("chat --help", {"pydantic", "rich", "mmengine", "subprocess"}),
        ("eval --help", {"pydantic", "rich", "mmengine", "subprocess"}),
        ("export --help", {"pydantic", "rich", "mmengine", "subprocess"}),
        ("convert merge --help", {"pydantic", "rich", "mmengine", "subprocess"}),
        ("runs", {"pydantic", "rich", "mmengine", "plotly", "jinja2"}),
        ("show tiny_full_sample_e1", {"rich", "mmengine", "subprocess"}),
        ("copy tiny_full_sample_e1", {"rich", "mmengine", "subprocess"}),
        ("train tiny_qlora_sample_e1 --dry-run --deepspeed zero2", {"rich", "mmengine"}),
        ("submit tiny_qlora_sample_e1 --gpus-per-node 0 --dry-run", {"rich", "mmengine"}),
    ],
)
def test_a_command_that_trains_nothing_loads_nothing_heavy(command: str, kept_out: set[str], tmp_path: Path) -> None:
    argv, env = [sys.executable, "-c", WRAPPER, *command.split()], {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stderr.splitlines()[-1]))
    assert "click" in loaded
    assert loaded & (HEAVY | {"numpy"} | kept_out) == set()


def test_processes_are_started_in_known_places() -> None:
    spawns = ("os.system", "os.popen", "os.fork*", "os.spawn*", "os.posix_spawn*")
    modules = ("subprocess", "multiprocessing", "pty")

    assert holding(lambda path: imports_from(path, *modules) or uses(path, *spawns)) == SPAWNS.keys()
    assert holding(lambda path: uses(path, "os.exec*")) == BECOMES.keys()


def test_the_environment_is_read_in_known_places() -> None:
    assert holding(lambda path: uses(path, "os.environ*", "os.getenv", "os.putenv")) == READS_ENVIRONMENT.keys()


def test_signals_are_taken_in_known_places() -> None:
    assert holding(lambda path: uses(path, "signal.signal", "signal.sigaction")) == TAKES_SIGNALS.keys()


def test_python_is_left_in_known_places() -> None:
    assert holding(lambda path: uses(path, "sys.exit", "os._exit", "exit", "quit", "SystemExit")) == EXITS.keys()


def test_nothing_below_the_command_line_prints_but_a_rank_and_its_supervisor() -> None:
    below = {name for name in holding(lambda path: uses(path, "print")) if not name.startswith("cli/")}

    assert below == PRINTS.keys()


CHANGES = {
    "mkdir",
    "unlink",
    "rmdir",
    "rmtree",
    "rename",
    "touch",
    "copytree",
    "copy2",
    "copyfile",
    "symlink_to",
    "chmod",
}


def writes(path: Path) -> bool:
    for node in ast.walk(tree_of(path)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        modes = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        opens = node.func.attr == "open" and any(isinstance(mode, str) and set(mode) & set("wax+") for mode in modes)
        texts = node.func.attr in {"write_text", "write_bytes"} and ast.unparse(node.func.value) != "files"
        if opens or texts or node.func.attr in CHANGES:
            return True
    return False


def test_the_disk_is_changed_in_known_places() -> None:
    assert holding(writes) == WRITES.keys()


@each(MODULES)
def test_a_module_says_what_it_owns_and_is_no_longer_than_a_sitting(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 350


def repeated(values: Mapping[str, Any], below: Mapping[str, Any]) -> list[str]:
    known = dict(leaves(below))
    return [key for key, value in leaves(values) if key in known and repr(known[key]) == repr(value)]


PARTS = [(kind, name) for kind in catalog.KINDS if kind != "recipes" for name in catalog.names(kind)]


@each(PARTS)
def test_a_part_repeats_no_default(kind: str, name: str) -> None:
    assert repeated(read_part(kind, name).values, read_file(catalog.BASE).values) == []


@each(catalog.names("recipes"))
def test_a_recipe_repeats_no_value_of_what_it_builds_on(name: str) -> None:
    delta = read_part("recipes", name).values
    below = Merged()
    for source in (read_file(catalog.BASE), *itertools.starmap(read_part, catalog.parse(delta["_base_"]).kinds())):
        below.lay(Layer(source.values, source.place))

    assert repeated(delta, below.values) == []


def test_the_check_for_repeated_values_sees_one() -> None:
    assert repeated({"log": {"interval": 10, "trackers": ("wandb",)}}, read_file(catalog.BASE).values) == [
        "log.interval"
    ]


def test_the_defaults_hold_every_key_of_the_schema_and_no_other() -> None:
    base = {key for key, _ in leaves(read_file(catalog.BASE).values)}
    absent = {key for key, value in read_file(catalog.BASE).values.items() if value is None}
    inner = {".".join(keys[:-1]) for keys in schema_keys()}
    schema = {".".join(keys) for keys in schema_keys()} - {block for block in inner if block not in absent}
    # An objective's settings and a mixture's data sets are there only where something takes them.
    schema = {
        key for key in schema if ".mixture." not in key and (not key.startswith("objective.") or key.endswith(".type"))
    }
    schema.add("train_dataloader.dataset.mixture")

    assert base == {key for key in schema if key in absent or key.split(".")[0] not in absent}
    assert list(read_file(catalog.BASE).values) == list(RecipeConfig.model_fields)
