"""The report as a page: one HTML file that asks no network, in light and dark, for a desk and for a phone.

Text in a run comes from outside: the templates escape all of it. The page's policy forbids it to load anything, and to
run any script but its own two. `live` serves the same page.
"""

from __future__ import annotations

import re
import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from hashlib import sha256
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from tuner import __version__
from tuner.files import JsonObject, read_text, sized, write_text
from tuner.report.gathered import (
    MAX_SAMPLES,
    QUANTITIES,
    Gathered,
    Quantity,
    describe,
    gather,
    listed,
    recipe_differences,
)
from tuner.runs import metrics, promises
from tuner.runs.metrics import Curve
from tuner.runs.records import OUTSIDE_TENSORS, RunRecord, RunStatus
from tuner.runs.resume_advice import resume_advice
from tuner.runs.verdict import short_number

MARK = '<meta name="generator" content="tuner">'
"""Near the beginning of every report; only a file with this mark may be overwritten."""
SECTIONS = (
    "warnings",
    "data",
    "memory",
    "deepspeed",
    "recipe",
    "samples",
    "checkpoints",
    "time",
    "machine",
)
_ABOVE = ("title", "headline", "columns", "runs_table", "outcomes")
_UPLOT, _PAGE = "uplot.min.js", "page.js"
"""The drawing library, uPlot 1.6.32 (MIT; uplot.LICENSE), as npm has it, and the page's own script."""
_LIVE = "; connect-src 'self'"
_PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,30000}")
_MAX_REASONS = 20
_MAX_RANKS = 16
_SYMBOLS = (
    {code: 0x2400 + code for code in range(32) if chr(code) not in "\t\n\r"}
    | {127: 0x2421}
    | dict.fromkeys((*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)), 0xFFFD)
)
"""Control characters, and marks that turn text around, become the symbols that Unicode has for them."""
_LINES = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "step": "more in the optimizer's step",
    "activations": "activations",
    "logits": "logits",
    "buckets": "buckets",
    "gathered_weights": "gathered weights",
    "loading": "experts while they load",
    "context": "CUDA's context",
    "fragmentation": "fragmentation",
    "vllm": "vLLM",
    "rewards": "reward models",
}
COLOURS = ("#3b7ddd", "#e0700f", "#1a9c55", "#cf3f80", "#8b62d4", "#0f9a9a", "#b08914", "#78808c")
"""Colours of the runs, distinct on white and on black; the ninth run gets the first colour again."""
_MAX_GROUPS = 1000
"""Groups of neighbouring points of a curve, as many as a screen can show."""
_LIBRARIES = ("tuner", "torch", "transformers", "trl", "peft", "deepspeed")


def write(paths: Sequence[Path], file: Path) -> None:
    """Write the report of some runs."""
    write_text(file, render(gather(paths)))


def render(runs: Sequence[Gathered]) -> str:
    """Return the page as a self-contained file."""
    return page(runs, parts(runs), {"version": 0, "charts": charts(runs)}, policy())


def page(runs: Sequence[Gathered], shown: Mapping[str, str], chart_data: JsonObject, allowed: str) -> str:
    """Return the page of some runs: their `parts`, `charts` with a `version` for its script, and its `policy`."""
    text = template("page.html").render(
        mark=Markup(MARK),  # noqa: S704 (a constant)
        version=__version__,
        made=f"{datetime.now().astimezone():%Y-%m-%d %H:%M %Z}",
        heading=_heading(runs),
        runs=runs,
        parts={name: Markup(html) for name, html in shown.items()},  # noqa: S704 (escaped when they were made)
        sections=SECTIONS,
        given=chart_data,
        policy=Markup(allowed),  # noqa: S704 (constants and hashes)
        is_live=_LIVE in allowed,
        uplot=Markup(_script(_UPLOT)),  # noqa: S704 (the library's own script)
        script=Markup(_script(_PAGE)),  # noqa: S704 (our own)
    )
    # Names of files need not be UTF-8.
    return text.encode(errors="backslashreplace").decode().translate(_SYMBOLS)


def parts(runs: Sequence[Gathered]) -> dict[str, str]:
    """Return the content of each element of the page that depends on the runs, by its id."""
    differences = recipe_differences(runs)
    module = template("parts.html").make_module(
        {
            "heading": _heading(runs),
            "runs": runs,
            "colours": COLOURS,
            "differences": differences,
            "recipe_columns": _columns([key for key, _ in differences]) if len(runs) > 1 else [],
            "estimates": [_memory(run) for run in runs],
            "machines": [_machine(run.record) if run.record else {} for run in runs],
            "ended_early": [run.status is not None and _ended_early(run.status) for run in runs],
            "headlines": [_headline(run) for run in runs],
            "advice": [run.status.verdict.advice if run.status and run.status.verdict else None for run in runs],
            "pushed": [run.status.pushed.address if run.status and run.status.pushed else None for run in runs],
            "facts": _facts(runs[0]) if len(runs) == 1 else {},
            "best": [
                lowest and lowest[1]
                for lowest in (metrics.lowest(zip(*run.curves["eval_loss"], strict=True)) for run in runs)
            ],
            "commands": [shlex.join(run.record.command if run.record else ()) for run in runs],
            "resumes": [resume_advice(Path(run.listed.path)) for run in runs],
            "time_parts": promises.PARTS,
            "slowest": [
                sorted(run.pace.ranks, key=lambda rank: rank.own_s, reverse=True)[:_MAX_RANKS] if run.pace else []
                for run in runs
            ],
            "max_samples": MAX_SAMPLES,
            "max_reasons": _MAX_REASONS,
            "next_commands": [
                run.status.diagnosis.next_command if run.status and run.status.diagnosis else None for run in runs
            ],
        }
    )
    return {name: str(getattr(module, name)()).strip().translate(_SYMBOLS) for name in (*_ABOVE, *SECTIONS)}


def policy(*, is_live: bool = False) -> str:
    """Return what the page may do: run its own two scripts, and if it is live, ask the server that it comes from."""
    scripts = " ".join(f"'sha256-{_hash(text)}'" for text in map(_script, (_UPLOT, _PAGE)))
    alone = "default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'unsafe-inline'; img-src data: blob:"
    return f"{alone}; script-src {scripts}{_LIVE * is_live}"


@cache
def _script(name: str) -> str:
    return read_text(Path(__file__).with_name(name))


@cache
def _hash(script: str) -> str:
    return b64encode(sha256(script.encode()).digest()).decode()


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tuner.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"size": sized, "number": _number, "value": _value, "duration": _duration}
    environment.filters["pictures"] = _pictures
    return environment


def template(name: str) -> Template:
    """Return a template of this folder; it is compiled once in a process."""
    return _environment().get_template(name)


def _pictures(sample: JsonObject) -> list[str]:
    """Return the small pictures of a sample; anything else that stands in their place is left out."""
    return [picture for picture in listed(sample, "images") if isinstance(picture, str) and _PICTURE.fullmatch(picture)]


def _columns(keys: Sequence[str]) -> list[tuple[str, str]]:
    """Return keys of a recipe, each with its column title: the last word, if no other key ends in it."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [(key, end if ends.count(end) == 1 else key) for key, end in zip(keys, ends, strict=True)]


def _heading(runs: Sequence[Gathered]) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs"
    return (runs[0].record and runs[0].record.name) or runs[0].name


def _headline(run: Gathered) -> str:
    """Return the result of a run in one line; empty without a verdict."""
    verdict, samples = run.status and run.status.verdict, [sample for sample in run.samples if "is_right" in sample]
    if not verdict:
        return ""
    loss = "training loss" if verdict.measure == "training" else "held-out loss"
    num_right = sum(bool(sample["is_right"]) for sample in samples)
    answers = f", {num_right} of {len(samples)} samples right" if samples else ""
    return f"{verdict.outcome}: {loss} {short_number(verdict.before)} -> {short_number(verdict.after)}{answers}"


def _facts(run: Gathered) -> dict[str, str]:
    """Return the model's and the machine's facts for the top of the page of one run."""
    record, weights = run.record, run.status and run.status.num_trained_weights
    lines = {"trained parameters": f"{weights:,}" if weights is not None else None}
    if record:
        versions = record.versions
        lines |= {
            "machine": describe(record.hardware),
            "DeepSpeed": ", ".join([record.deepspeed, *([record.precision.dtype] if record.precision else [])]),
            "batch size": str(record.batch.global_batch),
            "versions": ", ".join(f"{name} {versions[name]}" for name in _LIBRARIES if versions.get(name)),
        }
    return {key: value for key, value in lines.items() if value}


def _duration(seconds: object) -> str:
    """Return seconds as 45 s, 3 min 20 s or 1 h 06 min; empty if it is not a number."""
    if not isinstance(seconds, int | float) or isinstance(seconds, bool):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours:,} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _ended_early(status: RunStatus) -> bool:
    """Return whether a run ended with fewer steps than planned, which only early stopping does."""
    return status.step is not None and status.max_steps is not None and status.step < status.max_steps


def _memory(run: Gathered) -> JsonObject:
    """Return the estimate of a GPU's memory line by line, and the part to compare with the measured tensors."""
    record = run.record
    gpu_bytes = record.fit.gpu_bytes if record and record.fit else {}
    parts = {name: size for name, size in gpu_bytes.items() if name in _LINES and size}
    return {
        "lines": [(_LINES[name], size) for name, size in parts.items()],
        "total": sum(parts.values()),
        "tensors": sum(size for name, size in parts.items() if name not in OUTSIDE_TENSORS),
        "measured": run.peak_bytes,
        "why_none": "the model's size is not known" if record and record.hardware.gpus else "CPU run",
    }


def _machine(record: RunRecord) -> JsonObject:
    lines = {
        "hardware": describe(record.hardware),
        "ranks": f"{record.world_size} on {record.num_nodes} node(s)",
        "DeepSpeed": record.deepspeed,
        "compute type": record.precision.dtype if record.precision else None,
        "global batch": record.batch.global_batch,
        "seed": record.seed,
        "platform": record.platform,
        **record.versions,
    }
    return {key: value for key, value in lines.items() if value is not None}


def _number(value: object, digits: int = 4) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else ""


def _value(value: object) -> str:
    return "" if value is None else str(value) if isinstance(value, str) else repr(value)


# The charts, which the page's script draws with uPlot; the page itself colours text and grid, for light and dark


def charts(runs: Sequence[Gathered]) -> list[JsonObject]:
    """Return a chart for each quantity that any of the runs has logged."""
    every = (_chart(place, quantity, runs) for place, quantity in enumerate(QUANTITIES))
    return [chart for chart in every if chart["lines"]]


def drawn(curve: Curve) -> Curve:
    """Return the points of a curve that are drawn: its ends, and the lowest and the highest of each group."""
    num_points = len(curve.steps)
    size = max(1, -(-num_points // _MAX_GROUPS))
    places = {0, num_points - 1}
    for first in range(0, num_points, size):
        group = curve.values[first : first + size]
        places |= {first + group.index(min(group)), first + group.index(max(group))}
    shown = sorted(places)
    return Curve([curve.steps[place] for place in shown], [curve.values[place] for place in shown])


def _chart(place: int, quantity: Quantity, runs: Sequence[Gathered]) -> JsonObject:
    is_validated = any(quantity.validation and run.curves[quantity.validation].steps for run in runs)
    return {
        "id": f"chart-{quantity.key.replace('/', '-')}",
        "place": place,
        "title": quantity.title,
        "note": "; ".join([*(["dotted: validation"] if is_validated else []), *filter(None, [quantity.note])]),
        "exponents": quantity.exponents,
        "noisy": quantity.is_noisy,
        "range": quantity.range,
        "lines": [
            _line(quantity, number, run, is_validation=key == quantity.validation)
            for number, run in enumerate(runs)
            for key in filter(None, (quantity.key, quantity.validation))
            if run.curves[key].steps
        ],
    }


def _line(quantity: Quantity, number: int, run: Gathered, *, is_validation: bool) -> JsonObject:
    steps, values = drawn(run.curves[quantity.validation if is_validation else quantity.key])
    return {
        "run": number,
        "name": f"{run.name}{' (validation)' * is_validation}",
        "colour": COLOURS[number % len(COLOURS)],
        "dash": "dot" if is_validation else "solid",
        "x": steps,
        "y": [value / quantity.unit for value in values],
    }
