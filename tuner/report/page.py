"""The report as a page: one HTML file that asks no network, in light and dark, for a desk and for a phone.

What runs hold is text from outside: the template escapes all of it, and the page forbids itself to load anything.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tuner import __version__
from tuner.files import write_text
from tuner.report.curves import COLOURS, charts
from tuner.report.gathered import MAX_SAMPLES, Gathered, gather, hardware, listed, recipe_differences, table

MARK = '<meta name="generator" content="tuner">'
"""Near the beginning of every report: what says so may be written over."""
_GIB = 1024**3
_MAX_REASONS = 20
_LINES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "step": "more in the optimizer's step",
    "activations": "activations",
    "logits": "logits",
    "buckets": "buckets",
    "gathered_weights": "gathered weights",
    "context": "CUDA's context",
    "fragmentation": "fragmentation",
}
_OUTSIDE_TENSORS = ("context", "fragmentation")
"""Lines of the estimate that `torch.cuda.max_memory_allocated` does not count."""


def write(paths: Sequence[Path], file: Path) -> None:
    """Write the report of some runs.

    Raises:
        DiskError: the file cannot be written.
    """
    # Names of files need not be UTF-8.
    write_text(file, render(gather(paths)).encode(errors="backslashreplace").decode())


def render(runs: Sequence[Gathered]) -> str:
    """Return the page."""
    environment = Environment(
        loader=PackageLoader("tuner.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"size": _size, "number": _number, "value": _value}
    return environment.get_template("page.html").render(
        mark=Markup(MARK),  # noqa: S704 (a constant)
        version=__version__,
        made=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        title=_title(runs),
        runs=runs,
        colours=COLOURS,
        charts=charts(runs),
        plotly=Markup(get_plotlyjs()),  # noqa: S704 (the library's own script)
        differences=recipe_differences(runs),
        memory=[_memory(run) for run in runs],
        machines=[_machine(run.facts) for run in runs],
        ended_early=[_ended_early(run.status) for run in runs],
        best=[min(run.curves["eval_loss"].values, default=None) for run in runs],
        commands=[shlex.join(map(str, listed(run.facts, "command"))) for run in runs],
        resumes=[_resume(run.listed.path) for run in runs],
        max_samples=MAX_SAMPLES,
        max_reasons=_MAX_REASONS,
        next_commands=[table(run.status, "diagnosis").get("next_command") for run in runs],
    )


def _title(runs: Sequence[Gathered]) -> str:
    return str(runs[0].facts.get("name") or runs[0].name) if len(runs) == 1 else f"{len(runs)} runs"


def _resume(run: str) -> str:
    return shlex.join(("tuner", "train", f"{run}/recipe.py", "--resume", run))


def _ended_early(status: Mapping[str, Any]) -> bool:
    """Return whether a run is done with fewer steps than it was to take, which early stopping alone does."""
    step, planned = status.get("step"), status.get("max_steps")
    return isinstance(step, int) and isinstance(planned, int) and step < planned


def _memory(run: Gathered) -> dict[str, Any]:
    """Return the estimate of a GPU's memory line by line, and what of it is to be set beside the tensors measured."""
    parts = {
        name: size
        for name, size in table(table(run.facts, "fit"), "gpu_bytes").items()
        if name in _LINES and size and isinstance(size, int | float)
    }
    return {
        "lines": [(_LINES[name], size) for name, size in parts.items()],
        "total": sum(parts.values()),
        "tensors": sum(size for name, size in parts.items() if name not in _OUTSIDE_TENSORS),
        "measured": run.peak_bytes,
    }


def _machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        "hardware": hardware(facts),
        "ranks": f"{facts['world_size']} on {facts.get('num_nodes')} node(s)" if "world_size" in facts else None,
        "DeepSpeed": facts.get("deepspeed"),
        "compute type": table(facts, "precision").get("dtype"),
        "global batch": table(facts, "batch").get("global_batch"),
        "seed": facts.get("seed"),
        "platform": facts.get("platform"),
        **table(facts, "versions"),
    }
    return {key: value for key, value in found.items() if value is not None}


def _size(size: float) -> str:
    return f"{size / _GIB:,.2f} GiB" if size >= _GIB else f"{size * 1024 / _GIB:,.1f} MiB"


def _number(value: Any, digits: int = 4) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else ""


def _value(value: Any) -> str:
    return "" if value is None else str(value) if isinstance(value, str) else repr(value)
