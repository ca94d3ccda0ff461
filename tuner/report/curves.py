"""The curves of runs, each quantity in a chart of its own, drawn by Plotly in the browser.

It takes numbers and returns HTML; colours of text and grid are the page's, which knows light and dark.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.io

from tuner.report.gathered import QUANTITIES, Gathered, Quantity
from tuner.runs.metrics import Curve

COLOURS = ("#3b7ddd", "#e0700f", "#1a9c55", "#cf3f80", "#8b62d4", "#0f9a9a", "#b08914", "#78808c")
"""Of the runs, told apart on white and on black; the ninth run begins again."""
_MAX_POINTS = 2000


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
        curve = thinned(run.curves[key]) if key else Curve([], [])
        if curve.steps:
            yield {
                "type": "scatter",
                # A lone point has no line to be seen by.
                "mode": "lines+markers" if len(curve.steps) < 30 else "lines",
                "x": curve.steps,
                "y": [value / quantity.unit for value in curve.values],
                # Plotly reads tags in names, which come from folders.
                "name": html.escape(f"{run.name}{suffix}"),
                "line": {"color": COLOURS[index % len(COLOURS)], "width": 1.8, "dash": dash},
                "marker": {"size": 5},
                "hovertemplate": "%{y:.5~g}",
            }


def thinned(curve: Curve) -> Curve:
    """Return so many points as can be told apart: of neighbours the lowest and the highest, so that no peak is lost."""
    steps, values = curve
    if len(steps) <= _MAX_POINTS:
        return curve
    size = -(-2 * len(steps) // _MAX_POINTS)
    kept = {0, len(steps) - 1}
    for first in range(0, len(steps), size):
        part = values[first : first + size]
        kept |= {first + part.index(min(part)), first + part.index(max(part))}
    places = sorted(kept)
    return Curve([steps[place] for place in places], [values[place] for place in places])
