"""The curves of runs, each quantity in a chart of its own, drawn by Plotly in the browser.

It takes numbers and returns HTML; colours of text and grid are the page's, which knows light and dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import plotly.io

from tuner.report.gathered import Gathered

COLOURS = ("#3b7ddd", "#e0700f", "#1a9c55", "#cf3f80", "#8b62d4", "#0f9a9a", "#b08914", "#78808c")
"""Of the runs, told apart on white and on black; the ninth run begins again."""
_MAX_POINTS = 2000
_GIB = 1024**3


@dataclass(frozen=True)
class Quantity:
    """What one chart shows: `key` of metrics.jsonl, and `validation`, its counterpart there, dashed."""

    key: str
    title: str
    validation: str = ""
    unit: float = 1.0
    exponents: str = "none"
    range: str = "normal"
    note: str = ""


QUANTITIES = (
    Quantity("loss", "Loss", "eval_loss"),
    Quantity("rewards/margins", "Margin of chosen over rejected answers", "eval_rewards/margins"),
    Quantity("margin", "Margin of chosen over rejected answers", "eval_margin"),
    Quantity("mean_token_accuracy", "Tokens predicted right", "eval_mean_token_accuracy"),
    Quantity("grad_norm", "Gradient norm"),
    Quantity("learning_rate", "Learning rate", exponents="e", range="tozero"),  # a constant one has no range of its own
    Quantity("tokens_per_second", "Tokens per second", note="of all ranks together"),
    Quantity("mfu", "Model FLOPs utilisation", note="of the GPU's peak"),
    Quantity("memory_bytes", "Memory, GiB", unit=_GIB, note="the peak so far of rank 0"),
)


@dataclass(frozen=True)
class Chart:
    """One chart as HTML that needs Plotly's script in the page."""

    title: str
    note: str
    html: str


def charts(runs: Sequence[Gathered]) -> list[Chart]:
    """Return a chart for each quantity that any of the runs has logged."""
    return [chart for quantity in QUANTITIES if (chart := _chart(quantity, runs))]


def _chart(quantity: Quantity, runs: Sequence[Gathered]) -> Chart | None:
    traces = [trace for index, run in enumerate(runs) for trace in _traces(quantity, run, index)]
    if not traces:
        return None
    layout = {
        "height": 260,
        "margin": {"l": 56, "r": 12, "t": 8, "b": 36},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "x unified",
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero", "hoverformat": ",d"},
        "yaxis": {
            "exponentformat": quantity.exponents,
            "rangemode": quantity.range,
            "separatethousands": True,
            "automargin": True,
        },
        "font": {"family": "system-ui, sans-serif", "size": 12},
    }
    drawn: str = plotly.io.to_html(
        {"data": traces, "layout": layout},
        config={"responsive": True, "displayModeBar": False},
        include_plotlyjs=False,
        full_html=False,
        validate=False,
        div_id=f"chart-{quantity.key.replace('/', '-')}",
    )
    is_validated = any(trace["line"]["dash"] == "dot" for trace in traces)
    notes = ["dotted: validation"] if is_validated else []
    return Chart(quantity.title, "; ".join([*notes, *filter(None, [quantity.note])]), drawn)


def _traces(quantity: Quantity, run: Gathered, index: int) -> Iterator[dict[str, Any]]:
    for key, dash, suffix in ((quantity.key, "solid", ""), (quantity.validation, "dot", " (validation)")):
        points = _thinned(run.values(key)) if key else []
        if points:
            yield {
                "type": "scatter",
                # A lone point has no line to be seen by.
                "mode": "lines+markers" if len(points) < 30 else "lines",
                "x": [step for step, _ in points],
                "y": [value / quantity.unit for _, value in points],
                # Plotly reads tags in names, which come from folders.
                "name": html.escape(f"{run.name}{suffix}"),
                "line": {"color": COLOURS[index % len(COLOURS)], "width": 1.8, "dash": dash},
                "marker": {"size": 5},
                "hovertemplate": "%{y:.5~g}",
            }


def _thinned(points: Sequence[tuple[int, float]]) -> Sequence[tuple[int, float]]:
    """Return so many points as can be told apart: of neighbours the lowest and the highest, so that no peak is lost."""
    if len(points) <= _MAX_POINTS:
        return points
    size = -(-2 * len(points) // _MAX_POINTS)
    parts = [points[first : first + size] for first in range(0, len(points), size)]
    ends = [end(part, key=itemgetter(1)) for part in parts for end in (min, max)]
    return sorted({points[0], *ends, points[-1]})
