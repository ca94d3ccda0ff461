"""What a run directory holds, gathered for a person to look at; what is damaged is left out and said.

It reads files and renders nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tuner.errors import RunDirectoryError, TunerError
from tuner.files import load_json
from tuner.recipes import catalog, loading
from tuner.recipes.merging import Section, differences, leaves
from tuner.recipes.recipe_file import read_file
from tuner.runs import checkpoints, listing, metrics
from tuner.runs.directory import RunDirectory
from tuner.runs.listing import Listed
from tuner.runs.metrics import Curve

Facts = dict[str, Any]
_NOT_COMPARED = "architecture"
MAX_SAMPLES = 50
"""Of a run, from the first on."""
_MAX_WARNINGS = 200
_MAX_PROFILE = 100_000
"""Characters; what is beyond them stays in the file."""


@dataclass(frozen=True)
class Quantity:
    """What one chart shows: `key` of metrics.jsonl, and `validation`, its counterpart there, dotted.

    A noisy one gets a smoothed curve too.
    """

    key: str
    title: str
    validation: str = ""
    unit: float = 1.0
    exponents: str = "none"
    range: str = "normal"
    note: str = ""
    is_noisy: bool = False


QUANTITIES = (
    Quantity("loss", "Loss", "eval_loss", is_noisy=True),
    Quantity("rewards/margins", "Margin of chosen over rejected answers", "eval_rewards/margins", is_noisy=True),
    Quantity("margin", "Margin of chosen over rejected answers", "eval_margin", is_noisy=True),
    Quantity("mean_token_accuracy", "Token accuracy", "eval_mean_token_accuracy", is_noisy=True),
    Quantity("eval_exact_match", "Exact match of validation answers"),
    Quantity("eval_rouge_l", "ROUGE-L of validation answers"),
    Quantity("eval_bleu", "BLEU of validation answers"),
    Quantity("aux_loss", "Router loss", note="before its weight; balanced experts: the number of experts per token"),
    Quantity("grad_norm", "Gradient norm", is_noisy=True),
    Quantity("learning_rate", "Learning rate", exponents="e", range="tozero"),  # a constant one has no range of its own
    Quantity("tokens_per_second", "Tokens per second", note="all ranks", is_noisy=True),
    Quantity("mfu", "Model FLOPs utilisation", note="share of the GPU's peak", is_noisy=True),
    Quantity("memory_bytes", "Memory, GiB", unit=1024**3, note="peak so far, rank 0"),
)


KEYS = tuple(key for one in QUANTITIES for key in (one.key, one.validation) if key)
"""The keys of metrics.jsonl that the report draws."""


@dataclass(frozen=True)
class Gathered:
    """One run. `facts` and `status` are run.json and status.json, empty where they cannot be read.

    Args:
        name: What tells it from the others.
        curves: Of each key of QUANTITIES what was logged.
        checkpoints: `step`, `bytes`, `problem` of each, newest first.
        data: Of each split name, counts, and `what`, `reason`, `samples`, `tokens` of what is not trained whole.
        attempts: `started`, `resume_step`, `state`, `why` of each earlier one, the first first.
        recipe: None where recipe.py cannot be read any more.
        times: Of each part of a step that DeepSpeed has timed, its mean in milliseconds and how often that was.
        communication: `operation`, `msg_size_str`, `count`, `avg_latency_ms`, `busbw_avg_gbps` of what was sent.
        profile: What DeepSpeed's flops profiler wrote.
    """

    name: str
    listed: Listed
    facts: Facts
    status: Facts
    curves: Mapping[str, Curve]
    samples: Sequence[Facts]
    checkpoints: Sequence[Facts]
    attempts: Sequence[Facts]
    warnings: Sequence[str]
    data: Sequence[tuple[str, Facts, Sequence[Facts]]]
    recipe: Section | None
    times: Sequence[tuple[str, float, int]]
    communication: Sequence[Facts]
    profile: str

    @cached_property
    def peak_bytes(self) -> float | None:
        """The most memory that rank 0 held: tensors on its GPU, or its process on a CPU."""
        return max(self.curves["memory_bytes"].values, default=None)


def gather(paths: Sequence[Path]) -> list[Gathered]:
    """Read run directories."""
    found = zip(map(RunDirectory, paths), names(paths), strict=True)
    return [look(run, name, metrics.curves(run, KEYS)) for run, name in found]


def names(paths: Sequence[Path]) -> list[str]:
    """Return how runs are called: by where the path of each differs from the others'."""
    home = Path(os.path.commonpath([path.parent for path in paths]))
    return [str(path.relative_to(home)) for path in paths]


def recipe_differences(runs: Sequence[Gathered]) -> list[tuple[str, list[Any]]]:
    """Return the keys that the recipes hold differently, with each one's value; one run is set against the defaults.

    None stands for a recipe that cannot be read, or has no such key.
    """
    readable = [run.recipe for run in runs if run.recipe]
    if len(runs) == 1:
        readable.insert(0, Section(read_file(catalog.BASE).values, {}))
    keys = [one.key for other in readable[1:] for one in differences(readable[0], other)]
    shown = [dict(leaves(run.recipe.values)) if run.recipe else {} for run in runs]
    if len(runs) == 1:
        shown.insert(0, dict(leaves(readable[0].values)))
    found = {key: [values.get(key) for values in shown] for key in keys if key.split(".")[0] != _NOT_COMPARED}
    # A key that one side has not and the other holds as None means the same on both.
    return [(key, values) for key, values in found.items() if any(value is not None for value in values)]


def look(run: RunDirectory, name: str, curves: Mapping[str, Curve]) -> Gathered:
    """Read one run directory, or what there is of it; its curves have been read."""
    return Gathered(
        name=name,
        listed=listing.look(run.path, name),
        facts=_object(run, run.run),
        status=_object(run, run.status),
        curves=curves,
        samples=list(itertools.islice(_objects(run.samples), MAX_SAMPLES)),
        checkpoints=[_checkpoint(saved) for saved in checkpoints.listed(run.checkpoints)],
        attempts=[_attempt(folder) for folder in _earlier(run)],
        warnings=_warnings(run),
        data=_data(run),
        recipe=_recipe(run),
        times=_times(run.measurements / "wall_clock.jsonl"),
        communication=_communication(run),
        profile=_beginning(run.measurements / "flops_profiler.txt"),
    )


def _object(run: RunDirectory, file: Path) -> Facts:
    try:
        return run.read_json(file)
    except RunDirectoryError:
        return {}


def _objects(file: Path) -> Iterator[Facts]:
    """Yield the lines of a JSONL file that can be read."""
    with contextlib.suppress(OSError), file.open(encoding="utf-8", errors="replace") as stream:
        for line in stream:
            with contextlib.suppress(ValueError):
                value = load_json(line)
                if isinstance(value, dict):
                    yield value


def _checkpoint(saved: checkpoints.Checkpoint) -> Facts:
    num_bytes = 0
    with contextlib.suppress(OSError):  # it may be removed while it is looked at
        num_bytes = sum(path.stat().st_size for path in saved.path.rglob("*") if path.is_file())
    return {"step": saved.step, "bytes": num_bytes, "problem": saved.problem}


def _earlier(run: RunDirectory) -> list[Path]:
    return sorted((run.path / "attempts").glob("[0-9]*"), key=lambda path: (len(path.name), path.name))


def _attempt(folder: Path) -> Facts:
    run = RunDirectory(folder)
    facts, found = _object(run, run.run), listing.look(folder, folder.name)
    return {
        "started": facts.get("started"),
        "resume_step": facts.get("resume_step"),
        "state": found.state,
        "why": found.why,
    }


def _warnings(run: RunDirectory) -> list[str]:
    of_ranks = (str(line.get("warning")) for line in _objects(run.warnings))
    found = [*map(str, listed(_object(run, run.run), "warnings")), *of_ranks]
    return list(dict.fromkeys(found))[:_MAX_WARNINGS]


def _data(run: RunDirectory) -> list[tuple[str, Facts, list[Facts]]]:
    found = _object(run, run.data)
    splits = [(name, table(found, name)) for name in found]
    return [
        (name, table(facts, "counts"), [one for one in listed(facts, "changes") if isinstance(one, dict)])
        for name, facts in splits
    ]


def _times(file: Path) -> list[tuple[str, float, int]]:
    found: dict[str, list[float]] = {}
    for line in _objects(file):
        for name, value in line.items():
            if isinstance(value, int | float):
                found.setdefault(name, []).append(value)
    return [(name, sum(values) / len(values), len(values)) for name, values in found.items()]


def _communication(run: RunDirectory) -> list[Facts]:
    *_, found = [{}, *_objects(run.measurements / "communication.jsonl")]
    sent = [(name, table(table(found, name), size)) for name in found for size in table(found, name)]
    return [{"operation": name, **facts} for name, facts in sent]


def _beginning(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            return stream.read(_MAX_PROFILE)
    except OSError:
        return ""


def _recipe(run: RunDirectory) -> Section | None:
    try:
        found = loading.load(str(run.recipe))
    except TunerError:  # written by another version, or changed since
        return None
    return Section(found.values, found.origins)


def table(facts: Mapping[str, Any], key: str) -> Facts:
    """Return a block of run.json or status.json, empty where there is none."""
    value = facts.get(key)
    return value if isinstance(value, dict) else {}


def listed(facts: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list of run.json, empty where there is none."""
    value = facts.get(key)
    return value if isinstance(value, list) else []


def hardware(facts: Mapping[str, Any]) -> str | None:
    """Return the machine of a run in a line, as run.json has it, or None."""
    found = table(facts, "hardware")
    if not found:
        return None
    names = [str(gpu.get("name")) for gpu in listed(found, "gpus") if isinstance(gpu, dict)]
    kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return kinds or f"CPU, {found.get('num_cpus')} cores"
