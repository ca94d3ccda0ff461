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
from tuner.files import JsonObject, read_text, write_text
from tuner.report.curves import COLOURS, Charts
from tuner.report.gathered import MAX_SAMPLES, Gathered, gather, hardware, listed, recipe_differences, table
from tuner.runs.directory import resume_command
from tuner.runs.metrics import Curve
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
    "restarts",
    "machine",
)
_ABOVE = ("title", "headline", "columns", "runs_table", "outcomes")
_UPLOT, _PAGE = "uplot.min.js", "page.js"
"""The drawing library, uPlot 1.6.32 (MIT; uplot.LICENSE), as npm has it, and the page's own script."""
_LIVE = "; connect-src 'self'"
_GIB = 1024**3
_PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/=]{1,30000}")
_MAX_REASONS = 20
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
    "context": "CUDA's context",
    "fragmentation": "fragmentation",
    "vllm": "vLLM",
    "rewards": "reward models",
}
_LIBRARIES = ("tuner", "torch", "transformers", "trl", "peft", "deepspeed")
_OUTSIDE_TENSORS = ("context", "fragmentation", "vllm", "rewards")
"""Lines of the estimate that `torch.cuda.max_memory_allocated` does not count."""


def write(paths: Sequence[Path], file: Path) -> None:
    """Write the report of some runs.

    Raises:
        DiskError: the file cannot be written.
    """
    write_text(file, render(gather(paths)))


def render(runs: Sequence[Gathered]) -> str:
    """Return the page as a self-contained file."""
    charts = Charts()
    charts.follow(runs, 0)
    return page(runs, parts(runs), {"version": 0, "charts": charts.since(runs)}, policy())


def page(runs: Sequence[Gathered], shown: Mapping[str, str], chart_data: JsonObject, allowed: str) -> str:
    """Return the page.

    Args:
        runs: The runs it shows.
        shown: Its `parts`.
        chart_data: The data that its script draws: `charts`, and their `version`.
        allowed: Its `policy`.
    """
    text = _template("page.html").render(
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
    module = _template("parts.html").make_module(
        {
            "heading": _heading(runs),
            "runs": runs,
            "colours": COLOURS,
            "differences": differences,
            "recipe_columns": _columns([key for key, _ in differences]) if len(runs) > 1 else [],
            "estimates": [_memory(run) for run in runs],
            "machines": [_machine(run.facts) for run in runs],
            "ended_early": [_ended_early(run.status) for run in runs],
            "headlines": [_headline(run) for run in runs],
            "advice": [table(run.status, "verdict").get("advice") for run in runs],
            "pushed": [table(run.status, "pushed").get("address") for run in runs],
            "facts": _facts(runs[0]) if len(runs) == 1 else {},
            "best": [_best(run.curves["eval_loss"]) for run in runs],
            "commands": [shlex.join(map(str, listed(run.facts, "command"))) for run in runs],
            "resumes": [resume_command(Path(run.listed.path)) for run in runs],
            "max_samples": MAX_SAMPLES,
            "max_reasons": _MAX_REASONS,
            "next_commands": [table(run.status, "diagnosis").get("next_command") for run in runs],
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
    environment.filters |= {"size": _size, "number": _number, "value": _value, "duration": _duration}
    environment.filters["pictures"] = _pictures
    return environment


def _template(name: str) -> Template:
    return _environment().get_template(name)


def _pictures(sample: JsonObject) -> list[str]:
    """Return the small pictures of a sample; anything else that stands in their place is left out."""
    return [one for one in listed(sample, "images") if isinstance(one, str) and _PICTURE.fullmatch(one)]


def _columns(keys: Sequence[str]) -> list[tuple[str, str]]:
    """Return keys of a recipe, each with its column title: the last word, if no other key ends in it."""
    ends = [key.rpartition(".")[2] for key in keys]
    return [(key, end if ends.count(end) == 1 else key) for key, end in zip(keys, ends, strict=True)]


def _heading(runs: Sequence[Gathered]) -> str:
    return str(runs[0].facts.get("name") or runs[0].name) if len(runs) == 1 else f"{len(runs)} runs"


def _headline(run: Gathered) -> str:
    """Return the result of a run in one line; empty without a verdict."""
    verdict, samples = table(run.status, "verdict"), [one for one in run.samples if "is_right" in one]
    outcome, before, after = (verdict.get(key) for key in ("outcome", "before", "after"))
    if not (isinstance(before, int | float) and isinstance(after, int | float)):
        return ""
    loss = "training loss" if verdict.get("measure") == "training" else "held-out loss"
    num_right = sum(bool(one["is_right"]) for one in samples)
    answers = f", {num_right} of {len(samples)} samples right" if samples else ""
    return f"{outcome}: {loss} {short_number(before)} -> {short_number(after)}{answers}"


def _facts(run: Gathered) -> dict[str, str]:
    """Return the model's and the machine's facts for the top of the page of one run."""
    facts = run.facts
    weights, versions = run.status.get("num_trained_weights"), table(facts, "versions")
    libraries = [f"{name} {versions[name]}" for name in _LIBRARIES if versions.get(name)]
    precision, batch = table(facts, "precision").get("dtype"), table(facts, "batch").get("global_batch")
    lines = {
        "trained parameters": f"{weights:,}" if isinstance(weights, int) else None,
        "machine": hardware(facts),
        "DeepSpeed": ", ".join(str(one) for one in (facts.get("deepspeed"), precision) if one),
        "batch size": str(batch) if batch else None,
        "versions": ", ".join(libraries),
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


def _best(curve: Curve) -> float | None:
    """Return the lowest validation loss after the first step: the loss before it is the base model's."""
    return min((value for step, value in zip(*curve, strict=True) if step), default=None)


def _ended_early(status: JsonObject) -> bool:
    """Return whether a run ended with fewer steps than planned, which only early stopping does."""
    step, planned = status.get("step"), status.get("max_steps")
    return isinstance(step, int) and isinstance(planned, int) and step < planned


def _memory(run: Gathered) -> JsonObject:
    """Return the estimate of a GPU's memory line by line, and the part to compare with the measured tensors."""
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
        "why_none": "the model's size is not known" if listed(table(run.facts, "hardware"), "gpus") else "CPU run",
    }


def _machine(facts: JsonObject) -> JsonObject:
    lines = {
        "hardware": hardware(facts),
        "ranks": f"{facts['world_size']} on {facts.get('num_nodes')} node(s)" if "world_size" in facts else None,
        "DeepSpeed": facts.get("deepspeed"),
        "compute type": table(facts, "precision").get("dtype"),
        "global batch": table(facts, "batch").get("global_batch"),
        "seed": facts.get("seed"),
        "platform": facts.get("platform"),
        **table(facts, "versions"),
    }
    return {key: value for key, value in lines.items() if value is not None}


def _size(size: float) -> str:
    return f"{size / _GIB:,.2f} GiB" if size >= _GIB else f"{size * 1024 / _GIB:,.1f} MiB"


def _number(value: object, digits: int = 4) -> str:
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else ""


def _value(value: object) -> str:
    return "" if value is None else str(value) if isinstance(value, str) else repr(value)
