"""Read everything in a run directory that the report shows; damaged files are left out.

It reads files and renders nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tuner.files import JsonObject, dump_json, lines, load_json, read_json_object, size_of, text_part
from tuner.recipes import catalog
from tuner.recipes.merging import Section, differences, leaves
from tuner.recipes.recipe_file import read_file
from tuner.runs import beats, checkpoints, ledger, listing, metrics
from tuner.runs.directory import RunDirectory
from tuner.runs.ledger import Ledger
from tuner.runs.listing import Listed
from tuner.runs.metrics import Curve
from tuner.runs.records import HardwareFacts, RanksPace, RunRecord, RunStatus, SplitData
from tuner.runs.verdict import REWARD

_NOT_COMPARED = "architecture"
MAX_SAMPLES = 50
"""Of a run, counted from the first sample."""
_MAX_CALLS = 20
"""Of a completion."""
_COMPLETIONS = 4
"""Completions shown of the first step and of the last: those with the highest and the lowest advantage."""
_MAX_WARNINGS = 200
_MAX_PROFILE = 100_000
"""Characters; the rest stays in the file."""


@dataclass(frozen=True)
class Quantity:
    """The quantity of one chart: `key` of metrics.jsonl, and its counterpart `validation`, which is drawn dotted.

    A noisy quantity gets a smoothed curve too.
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
    Quantity(REWARD, "Reward", f"eval_{REWARD}", is_noisy=True),
    Quantity("reward_std", "Spread of the rewards in a group", note="standard deviation", is_noisy=True),
    Quantity("frac_reward_zero_std", "Groups without a signal", note="share of groups with equal rewards"),
    Quantity("completion_length", "Length of a completion", note="tokens, mean", is_noisy=True),
    Quantity("completions/clipped_ratio", "Clipped completions", note="share that reach max_completion_length"),
    Quantity("kl", "KL divergence from the reference", is_noisy=True),
    Quantity("entropy", "Entropy", note="nats per token", is_noisy=True),
    Quantity("mean_token_accuracy", "Token accuracy", "eval_mean_token_accuracy", is_noisy=True),
    Quantity("eval_exact_match", "Exact match of validation answers"),
    Quantity("eval_rouge_l", "ROUGE-L of validation answers"),
    Quantity("eval_bleu", "BLEU of validation answers"),
    Quantity("aux_loss", "Router loss", note="before its weight; balanced experts: the number of experts per token"),
    Quantity("grad_norm", "Gradient norm", is_noisy=True),
    Quantity("learning_rate", "Learning rate", exponents="e", range="tozero"),  # the range of a constant is empty
    Quantity("tokens_per_second", "Tokens per second", note="all ranks", is_noisy=True),
    Quantity("mfu", "Model FLOPs utilisation", note="share of the GPU's peak", is_noisy=True),
    Quantity("memory_bytes", "Memory, GiB", unit=1024**3, note="peak so far, rank 0"),
)


KEYS = tuple(key for quantity in QUANTITIES for key in (quantity.key, quantity.validation) if key)
"""The keys of metrics.jsonl that the report draws."""


@dataclass(frozen=True)
class Gathered:
    """One run. `record` and `status` are run.json and status.json, None if they cannot be read.

    Args:
        name: Distinguishes it from the other runs.
        curves: The logged values of each key of QUANTITIES.
        completions: `step`, `prompt`, `completion`, `rewards` by name and `advantage` of some completions.
        checkpoints: `step`, `bytes`, `problem` of each, newest first.
        data: What became of the rows of each split; empty if data.json cannot be read.
        peak_of_ranks: The most memory that a rank of the last attempt has told, in bytes; 0: none is known.
        pace: How fast each rank is by itself; None if none were compared.
        recipe: The values in recipe.json; None if it cannot be read.
        times: Each part of a step that DeepSpeed has timed, its mean in milliseconds, and the number of times.
        communication: `operation`, `msg_size_str`, `count`, `avg_latency_ms`, `busbw_avg_gbps` of each message size.
    """

    name: str
    listed: Listed
    record: RunRecord | None
    status: RunStatus | None
    curves: Mapping[str, Curve]
    samples: Sequence[JsonObject]
    completions: Sequence[JsonObject]
    checkpoints: Sequence[JsonObject]
    ledger: Ledger
    peak_of_ranks: int
    pace: RanksPace | None
    warnings: Sequence[str]
    data: Mapping[str, SplitData]
    recipe: JsonObject | None
    times: Sequence[tuple[str, float, int]]
    communication: Sequence[JsonObject]
    profile: str

    @cached_property
    def peak_bytes(self) -> float | None:
        """The most memory that a rank held: tensors on its GPU, or its process on a CPU."""
        at_end = self.status and self.status.peak_bytes  # the result's saving and the samples may need the most
        peaks = [float(peak) for peak in (self.peak_of_ranks, at_end) if peak]
        return max([*self.curves[metrics.MEMORY].values, *peaks], default=None)

    @cached_property
    def seconds(self) -> float | None:
        """The time of all attempts, without the time between them; None if the last one does not say its own."""
        last_s = self.status.seconds if self.status else None
        return None if last_s is None else last_s + sum(attempt.wall_s for attempt in self.ledger.attempts[:-1])


def gather(paths: Sequence[Path]) -> list[Gathered]:
    """Read run directories."""
    named_runs = zip(map(RunDirectory, paths), names(paths), strict=True)
    return [look(run, name, metrics.curves(run, KEYS)) for run, name in named_runs]


def names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each run: the part of its path that differs from the others."""
    home = Path(os.path.commonpath([path.parent for path in paths]))
    return [str(path.relative_to(home)) for path in paths]


def recipe_differences(runs: Sequence[Gathered]) -> list[tuple[str, list[object]]]:
    """Return the keys with different values, and the value in each recipe; a single run is compared with the defaults.

    None stands for a recipe that cannot be read, or that has no such key.
    """
    readable = [Section(run.recipe, {}) for run in runs if run.recipe]
    if len(runs) == 1:
        readable.insert(0, Section(_defaults(), {}))
    keys = [difference.key for other in readable[1:] for difference in differences(readable[0], other)]
    shown = [dict(leaves(run.recipe)) if run.recipe else {} for run in runs]
    if len(runs) == 1:
        shown.insert(0, dict(leaves(readable[0].values)))
    by_key = {key: [values.get(key) for values in shown] for key in keys if key.split(".")[0] != _NOT_COMPARED}
    # A missing key and a key with the value None mean the same.
    return [(key, values) for key, values in by_key.items() if any(value is not None for value in values)]


def look(run_dir: RunDirectory, name: str, curves: Mapping[str, Curve]) -> Gathered:
    """Read one run directory, which may be incomplete; its curves are passed in."""
    return Gathered(
        name=name,
        listed=listing.look(run_dir.path, name),
        record=run_dir.run_or_none,
        status=run_dir.status_or_none,
        curves=curves,
        samples=list(itertools.islice(_objects(run_dir.samples), MAX_SAMPLES)),
        completions=_completions(run_dir),
        checkpoints=[
            {"step": saved.step, "bytes": size_of(saved.path), "problem": saved.problem}
            for saved in checkpoints.listed(run_dir.checkpoints)
        ],
        ledger=ledger.read_ledger(run_dir),
        peak_of_ranks=beats.peak_bytes(run_dir),
        pace=run_dir.pace_or_none,
        warnings=_warnings(run_dir),
        data=data.splits if (data := run_dir.data_or_none) else {},
        recipe=table(read_json_object(run_dir.resolved_recipe), "recipe") or None,
        times=_times(run_dir.measurements / "wall_clock.jsonl"),
        communication=_communication(run_dir),
        profile=text_part(run_dir.measurements / "flops_profiler.txt", max_bytes=_MAX_PROFILE),
    )


def _objects(file: Path) -> Iterator[JsonObject]:
    """Yield the lines of a JSONL file that can be read."""
    with contextlib.suppress(OSError):
        for line in lines(file):
            with contextlib.suppress(ValueError):
                value = load_json(line)
                if isinstance(value, dict):
                    yield value


def _completions(run_dir: RunDirectory) -> list[JsonObject]:
    """Return completions of the first and of the last step, for each step the best first."""
    steps = (
        list(group) for _, group in itertools.groupby(_objects(run_dir.completions), lambda line: line.get("step"))
    )
    shown = (next(steps, []), *deque(steps, maxlen=1))
    return [{**line, "calls": _calls(line.get("calls"))} for group in shown for line in _extremes(group)]


def _calls(calls: object) -> list[str]:
    """Return a line for each call of a tool, with its result."""
    valid_calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    return [
        f"{call.get('tool')}({json.dumps(call.get('arguments'), ensure_ascii=False)}) \N{RIGHTWARDS ARROW} "
        f"{'no result' if call.get('result') is None else call['result']}"
        for call in valid_calls[:_MAX_CALLS]
    ]


def _extremes(completions: Sequence[JsonObject]) -> list[JsonObject]:
    ordered = sorted(completions, key=_advantage, reverse=True)
    half = _COMPLETIONS // 2
    return [*ordered[:half], *ordered[half:][-half:]]


def _advantage(completion: JsonObject) -> float:
    value = completion.get("advantage")
    return value if isinstance(value, int | float) else 0.0


def _warnings(run_dir: RunDirectory) -> list[str]:
    of_ranks = (str(line.get("warning")) for line in _objects(run_dir.warnings))
    record = run_dir.run_or_none
    warnings = [*(record.warnings if record else ()), *of_ranks]
    return list(dict.fromkeys(warnings))[:_MAX_WARNINGS]


def _times(file: Path) -> list[tuple[str, float, int]]:
    milliseconds: dict[str, list[float]] = {}
    for line in _objects(file):
        for name, value in line.items():
            if isinstance(value, int | float):
                milliseconds.setdefault(name, []).append(value)
    return [(name, sum(values) / len(values), len(values)) for name, values in milliseconds.items()]


def _communication(run_dir: RunDirectory) -> list[JsonObject]:
    *_, summary = [{}, *_objects(run_dir.measurements / "communication.jsonl")]
    by_name = {name: table(summary, name) for name in summary}
    return [{"operation": name, **table(by_size, size)} for name, by_size in by_name.items() for size in by_size]


def _defaults() -> JsonObject:
    """Return the base recipe as recipe.json would hold it: tuples are lists there."""
    return dict(load_json(dump_json(read_file(catalog.BASE).values)))


def table(values: JsonObject, key: str) -> JsonObject:
    """Return a block of an object, or an empty one if it is missing."""
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def listed(values: JsonObject, key: str) -> list[object]:
    """Return a list of an object, or an empty one if it is missing."""
    value = values.get(key)
    return value if isinstance(value, list) else []


def describe(hardware: HardwareFacts) -> str | None:
    """Return the machine of a run in a line, or None if it is not known."""
    names = [gpu.name for gpu in hardware.gpus]
    if names:
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return f"CPU, {hardware.num_cpus} cores" if hardware.num_cpus else None
